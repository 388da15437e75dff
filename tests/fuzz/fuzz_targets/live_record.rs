//! Fuzzes `parsers::live_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::live_record(bytes));
