//! Fuzzes `parsers::install_status`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::install_status(bytes));
