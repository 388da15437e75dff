//! The crates of the product and their layers: imports and dependencies lead downwards.

use crate::graph::Graph;
use crate::{assert_none, root};
use std::fs;

/// A crate of the product and the order of its parts: an import goes to the same group or to a
/// later one.
pub struct Layers {
    pub folder: &'static str,
    pub library: &'static str,
    pub groups: &'static [&'static [&'static str]],
}

pub const CRATES: [Layers; 9] = [
    Layers {
        folder: "kernels",
        library: "hatchback_kernels",
        groups: &[&["lib"], &["gpu"], &["dense", "lookup"], &["cache"], &["cuda"], &["simd"]],
    },
    Layers {
        folder: "runtime",
        library: "hatchback",
        groups: &[
            &["lib"],
            &["targets"],
            &["car"],
            &["update"],
            &["request"],
            &["model", "maintenance"],
            &["flash"],
            &["bundle"],
            &["io", "schema"],
            &["limits", "clock", "locks"],
        ],
    },
    Layers {
        folder: "link",
        library: "hatchback_link",
        groups: &[&["main"], &["daemon"], &["args", "generate", "program"], &["lib"]],
    },
    Layers {
        folder: "server",
        library: "hatchback_server",
        groups: &[
            &["lib"],
            &["listen"],
            &["route"],
            &["grpc"],
            &["http"],
            &["infer"],
            &["models"],
            &["front"],
            &["metrics", "tensors"],
            &["connections", "proto"],
            &["problem"],
            &["limits", "locks"],
        ],
    },
    Layers { folder: "board", library: "hatchbackd", groups: &[] },
    Layers { folder: "capi", library: "hatchback_capi", groups: &[] },
    Layers { folder: "python", library: "_native", groups: &[] },
    Layers {
        folder: "tools",
        library: "hatchback_tools",
        groups: &[
            &["main", "lib"],
            &["cli"],
            &["demo"],
            &["live"],
            &[
                "consume", "eval", "explain", "gate", "image", "inspect", "install", "plan", "run",
                "select", "sync",
            ],
            &["repository", "serve", "workload"],
            &["pack"],
            &["hps_kafka", "import", "window"],
            &["report"],
            &["limits"],
        ],
    },
    Layers { folder: "bench", library: "hatchback_bench", groups: &[] },
];

/// Which crates of the tree each crate may depend on.
const DEPENDENCIES: [(&str, &[&str]); 9] = [
    ("kernels", &[]),
    ("runtime", &["hatchback-kernels"]),
    ("link", &["hatchback"]),
    ("server", &["hatchback"]),
    ("board", &["hatchback", "hatchback-link", "hatchback-server"]),
    ("capi", &["hatchback"]),
    ("python", &["hatchback", "hatchback-capi", "hatchback-tools"]),
    ("tools", &["hatchback", "hatchback-kernels", "hatchback-link", "hatchback-server"]),
    (
        "bench",
        &[
            "hatchback",
            "hatchback-kernels",
            "hatchback-link",
            "hatchback-server",
            "hatchback-tools",
        ],
    ),
];

#[test]
fn no_imports_run_in_circles() {
    let found: Vec<String> = CRATES.iter().flat_map(|c| Graph::of(c).circles()).collect();
    assert_none("imports in circles", &found);
}

#[test]
fn no_import_runs_upward() {
    let layered = CRATES.iter().filter(|c| !c.groups.is_empty());
    let found: Vec<String> = layered.flat_map(|c| Graph::of(c).upward(c)).collect();
    assert_none("upward imports", &found);
}

#[test]
fn crates_depend_downward_only() {
    let mut found = Vec::new();
    for (folder, allowed) in DEPENDENCIES {
        let text = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let lines = text.lines().skip_while(|l| *l != "[dependencies]").skip(1);
        for line in lines.take_while(|l| !l.starts_with('[')) {
            let name = line.split(['.', ' ', '=']).next().unwrap();
            if name.starts_with("hatchback") && !allowed.contains(&name) {
                found.push(format!("{folder}/Cargo.toml: {name}"));
            }
        }
    }
    assert_none("dependencies that run upward", &found);
}
