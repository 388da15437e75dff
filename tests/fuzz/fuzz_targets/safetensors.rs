//! Fuzzes `parsers::safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::safetensors(bytes));
