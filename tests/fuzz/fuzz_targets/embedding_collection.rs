//! Fuzzes `parsers::embedding_collection`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::embedding_collection(bytes));
