//! Sets the soname of the shared library, by which the loader finds it. Its number is HATCHBACK_ABI
//! of the header.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libhatchback.so.1");
    println!("cargo::rerun-if-changed=build.rs");
}
