//! `hatchback image` as its users run it: the same bytes each time, a model in the image that
//! serves, and a manifest that lists every file.

use crate::cli::{coupon, printed, refused};
use hatchback_tools::workload::synthetic::pack_criteo;
use std::path::{Path, PathBuf};
use std::process::Command;

fn e2fs(program: &str, args: &[&str]) -> String {
    let output = Command::new(Path::new("/usr/sbin").join(program)).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_image_is_reproducible_and_serves() {
    if !Path::new("/usr/sbin/mke2fs").exists() {
        println!("SKIPPED: the image: e2fsprogs is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let bundle = path("bundle");
    printed(&["pack", &coupon("model.toml"), "--out", &bundle]);
    let said = printed(&["image", &bundle, "--out", &path("a"), "--name", "coupon"]);
    assert!(said.contains("read back, every file is the same"), "{said}");
    // The second image is made at a later time, which must not change its bytes.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    printed(&["image", &bundle, "--out", &path("b"), "--name", "coupon"]);
    for file in ["hatchback.img", "hatchback.yaml"] {
        let read = |side: &str| std::fs::read(folder.path().join(side).join(file)).unwrap();
        assert!(read("a") == read("b"), "{file} differs");
    }

    let image = path("a/hatchback.img");
    let back = path("back");
    std::fs::create_dir(&back).unwrap();
    e2fs("debugfs", &["-R", &format!("rdump / {back}"), &image]);
    let score = |model: &str| printed(&["run", model, "--samples", &coupon("probe.jsonl")]);
    assert_eq!(score(&format!("{back}/models/coupon")), score(&bundle));
    let room = std::fs::read_dir(format!("{back}/updates")).unwrap();
    assert_eq!(room.count(), 0, "updates have a folder of their own");
    assert!(e2fs("dumpe2fs", &["-h", &image]).contains("hatchback"));

    // The manifest lists every file of the tree once, with a source that exists.
    let manifest = std::fs::read_to_string(path("a/hatchback.yaml")).unwrap();
    let mut listed: Vec<PathBuf> = Vec::new();
    for line in manifest.lines() {
        if let Some(source) = line.trim().strip_prefix("pdk_sdk_installed_path: ") {
            listed.push(folder.path().join("a").join(source.trim_matches('\'')));
        }
    }
    let mut existing = Vec::new();
    let mut folders = vec![folder.path().join("a/hatchback")];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { existing.push(path) }
        }
    }
    listed.sort();
    existing.sort();
    assert!(!existing.is_empty());
    assert_eq!(listed, existing);
    assert!(
        manifest.starts_with("version: '1.4'\nfileList:\n  - destination: '/var/lib/hatchback/'\n")
    );
}

#[test]
fn what_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let bundle = path("bundle");
    printed(&["pack", &coupon("model.toml"), "--out", &bundle]);
    let said_of = |args: &[&str]| refused(&[&["image", &bundle, "--out"], args].concat());
    assert!(said_of(&[&path("."), "--name", "x"]).contains("exists"));
    for name in ["../x", "a b", "a\"b", "\u{7}"] {
        let said = said_of(&[&path("a"), "--name", name]);
        assert!(
            said.contains("--name") && said.contains(&name.escape_debug().to_string()),
            "{said}"
        );
    }
    assert!(!Path::new(&path("a")).exists());
    if !Path::new("/usr/sbin/mke2fs").exists() {
        println!("SKIPPED: an image that is too small: e2fsprogs is not installed");
        return;
    }
    let large = path("large");
    pack_criteo(20_000, Path::new(&large), &mut |_, _| {}).unwrap();
    let said = refused(&["image", &large, "--out", &path("b"), "--mib", "1"]);
    assert!(said.contains("mke2fs") && !said.contains("is e2fsprogs installed?"), "{said}");
}
