//! The crates that others may use are ready for a registry: their packages have the metadata that a
//! registry requires and all files that their code includes. Never publishes.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Folder and name of each crate that can be published, in the order of publication.
const CRATES: [(&str, &str); 7] = [
    ("kernels", "hatchback-kernels"),
    ("runtime", "hatchback"),
    ("link", "hatchback-link"),
    ("server", "hatchback-server"),
    ("board", "hatchbackd"),
    ("capi", "hatchback-capi"),
    ("tools", "hatchback-tools"),
];

/// The largest package that a registry accepts, bytes.
const PACKAGE_BYTES_MAX: u64 = 10 << 20;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn cargo(arguments: &[&str]) -> String {
    let cargo = std::env::var("CARGO").unwrap_or("cargo".to_owned());
    let output = Command::new(cargo).args(arguments).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_crate_has_what_a_registry_asks_for() {
    let metadata = cargo(&["metadata", "--no-deps", "--offline", "--format-version", "1"]);
    let metadata: serde_json::Value = serde_json::from_str(&metadata).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let mut published: Vec<&str> = Vec::new();
    for package in packages.iter().filter(|package| package["publish"].is_null()) {
        let name = package["name"].as_str().unwrap();
        published.push(name);
        for key in ["description", "license", "readme", "rust_version"] {
            assert!(package[key].as_str().is_some_and(|text| !text.is_empty()), "{name}: {key}");
        }
        for key in ["keywords", "categories"] {
            let count = package[key].as_array().unwrap().len();
            assert!((1..=5).contains(&count), "{name}: {count} {key}");
        }
        assert!(package["metadata"]["docs"]["rs"]["targets"].is_array(), "{name}: docs.rs");

        // A registry refuses a dependency that has a path and no version.
        for dependency in package["dependencies"].as_array().unwrap() {
            let is_free = dependency["kind"] == "dev" || dependency["req"] != "*";
            assert!(is_free, "{name}: {} has no version", dependency["name"]);
        }
    }
    let mut expected = CRATES.map(|(_, name)| name);
    expected.sort_unstable();
    published.sort_unstable();
    assert_eq!(published, expected);
}

#[test]
fn every_package_has_the_files_that_its_code_includes() {
    for (folder, name) in CRATES {
        let listed = cargo(&["package", "--list", "--allow-dirty", "--offline", "-p", name]);
        let folder = root().join(folder);
        let files: Vec<&str> = listed.lines().collect();
        let bytes = |file: &&str| folder.join(file).metadata().map_or(0, |found| found.len());
        assert!(files.iter().map(bytes).sum::<u64>() < PACKAGE_BYTES_MAX, "{name} is too large");

        for file in files.iter().filter(|file| file.starts_with("src/") && file.ends_with(".rs")) {
            let text = std::fs::read_to_string(folder.join(file)).unwrap();
            let (code, _tests) = text.split_once("#[cfg(test)]").unwrap_or((&text, ""));
            for (at, _) in code.match_indices("include_") {
                let Some((_, rest)) = code[at..].split_once("!(\"") else { continue };
                let mut texts = rest.split('"').step_by(2);
                let included = texts.next().unwrap();
                if included == "CARGO_MANIFEST_DIR" {
                    // The rest of the path is put together, so the package needs its whole folder.
                    let inside = texts.next().unwrap().trim_matches('/');
                    for entry in std::fs::read_dir(folder.join(inside)).unwrap() {
                        let name = entry.unwrap().file_name();
                        let path = format!("{inside}/{}", name.to_string_lossy());
                        assert!(files.contains(&path.as_str()), "lacks {path}");
                    }
                    continue;
                }
                let path = folder.join(file).parent().unwrap().join(included);
                let path =
                    path.canonicalize().unwrap_or_else(|e| panic!("{file}: {included}: {e}"));
                let inside = path.strip_prefix(folder.canonicalize().unwrap());
                let inside =
                    inside.unwrap_or_else(|_| panic!("{name}: {file} includes {included}"));
                assert!(files.contains(&inside.to_str().unwrap()), "{name} lacks {included}");
            }
        }
    }
}
