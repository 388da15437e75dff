//! `hatchback` as its user meets it: commands, documents, packing, importing.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cli;
mod container;
mod documents;
mod explain;
mod hugectr_dense;
mod image;
mod keys;
mod pack;
mod plan;
mod preload;
mod reference;
mod trainer_models;
mod users;
