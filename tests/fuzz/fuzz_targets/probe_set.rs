//! Fuzzes `parsers::probe_set`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hatchback_tests::parsers::probe_set(bytes));
