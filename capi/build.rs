//! Sets the soname of the shared library, by which the loader finds it.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libhatchback.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
