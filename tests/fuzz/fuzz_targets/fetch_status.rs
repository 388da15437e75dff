//! Fuzzes `parsers::fetch_status`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::fetch_status(bytes));
