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

/// Copies the demo's model to `folder`, with the specification that `change` makes of its own.
pub fn changed_coupon(folder: &Path, change: impl FnOnce(String) -> String) -> PathBuf {
    let model = folder.join("coupon");
    std::fs::create_dir(&model).unwrap();
    for file in std::fs::read_dir(here("../tools/demo/coupon")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let spec = model.join("model.toml");
    std::fs::write(&spec, change(std::fs::read_to_string(&spec).unwrap())).unwrap();
    model
}

/// Copies the demo's model to `folder`, with two dense features that all samples share. A program
/// that forgets them sends too few values.
pub fn shared_coupon(folder: &Path) -> PathBuf {
    changed_coupon(folder, |spec| {
        ["temperature", "age_years"].into_iter().fold(spec, |spec, name| {
            let plain = format!("\"{name}\"");
            spec.replacen(&plain, &format!("{{ name = {plain}, shared = true }}"), 1)
        })
    })
}
