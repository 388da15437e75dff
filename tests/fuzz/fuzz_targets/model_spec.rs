//! Fuzzes `parsers::model_spec`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::model_spec(bytes));
