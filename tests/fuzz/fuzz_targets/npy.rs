//! Fuzzes `parsers::npy`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::npy(bytes));
