//! Gives the shared library the name that programs linked against it ask for.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libhatchback.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
