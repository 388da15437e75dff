//! Code that the tests of the library share: the compiler, the library as programs load it, a
//! model.

use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::serve::install;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns a path of this crate.
pub fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The sanitizer that the library of `HATCHBACK_LIBRARY` is built with. Programs need the same.
pub fn library_sanitizer() -> Option<String> {
    std::env::var("HATCHBACK_SANITIZER").ok()
}

/// Runs `cc` or `c++`.
pub fn compile(compiler: &str, arguments: &[&str]) {
    let mut command = Command::new(compiler);
    command
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(here("."))
        .args(library_sanitizer().map(|name| format!("-fsanitize={name}")))
        .args(arguments);
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// Makes a link in `folder` to the library, with the library's own name. `HATCHBACK_LIBRARY` is
/// another build of it, as `capi/sanitize` makes one.
pub fn library(folder: &Path) -> PathBuf {
    let built = std::env::current_exe().unwrap().with_file_name("libhatchback_capi.so");
    let built = std::env::var_os("HATCHBACK_LIBRARY").map_or(built, PathBuf::from);
    let link = folder.join("libhatchback.so.1");
    std::os::unix::fs::symlink(built, &link).unwrap();
    link
}

/// Packs the model whose files are in the folder `model` of the tree, and installs it in `folder`.
/// Returns the flash directory, and the name of the first sparse feature.
pub fn pack_and_install(model: &str, folder: &Path) -> (PathBuf, String) {
    let (bundle, flash) = (folder.join("bundle"), folder.join("flash"));
    let spec = here(model).join("model.toml");
    let job = PackJob::read(&spec, Overrides::default()).unwrap();
    let packed = job.pack(None, &bundle, &mut |_, _| {}).unwrap();
    install(&bundle, &flash).unwrap();
    (flash, packed.schema.features[0].name.clone())
}
