//! Fuzzes `parsers::http_infer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::http_infer(bytes));
