//! The C interface: programs in C and C++, and those of the page.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod c;
#[path = "../../../tests/tests/update/changing.rs"]
mod changing;
mod pages;
mod programs;
