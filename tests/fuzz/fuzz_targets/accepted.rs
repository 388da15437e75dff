//! Fuzzes `parsers::accepted`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::accepted(bytes));
