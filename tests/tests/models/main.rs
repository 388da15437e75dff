//! Whole models against their trainer's scores and against a plain reference.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod coupon;
mod families;
mod select;
mod trainer_inputs;
mod window;
