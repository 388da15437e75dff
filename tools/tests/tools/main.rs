//! `hatchback` as its user meets it: commands, documents, packing, importing.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cli;
mod container;
mod documents;
mod hugectr_dense;
mod image;
mod pack;
mod plan;
mod reference;
mod trainer_models;
