//! What `Containerfile` does, in a plain directory: the workspace has the packages that it builds,
//! the files that its last stage copies are there, and the programs need no library that the base
//! image lacks. The commands of docs/board.md run. Never builds an image.

use crate::cli::{copy_files, root};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Libraries of Debian's smallest image, and the kernel's.
const LIBRARIES: [&str; 7] = [
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "linux-vdso.so.1",
    "ld-linux",
];

fn recipe() -> String {
    std::fs::read_to_string(root().join("Containerfile")).unwrap()
}

/// Cargo knows every package that the recipe builds.
fn check_packages() {
    let recipe = recipe();
    let build = recipe.lines().find(|line| line.starts_with("RUN cargo build")).unwrap();
    let packages: Vec<&str> = build.split(" -p ").skip(1).collect();
    assert!(packages.len() >= 3, "{build}");
    for package in packages {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap());
        let output = command.args(["pkgid", "--offline", "--package", package]).current_dir(root());
        let output = output.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The instructions of the last stage.
fn last_stage() -> Vec<String> {
    let text = recipe();
    let (_, last) = text.rsplit_once("\nFROM ").unwrap();
    last.lines().map(str::to_owned).collect()
}

/// Copies what the last stage copies into `image`. Returns the programs.
fn copy_into(image: &Path) -> Vec<PathBuf> {
    let built = Path::new(env!("CARGO_BIN_EXE_hatchback")).parent().unwrap().to_path_buf();
    let mut programs = Vec::new();
    for line in last_stage() {
        let Some(copied) = line.strip_prefix("COPY --from=build /src/") else { continue };
        let (from, to) = copied.split_once(' ').unwrap();
        let (source, is_program) = match from.strip_prefix("target/release/") {
            Some(program) => (built.join(program), true),
            None => (root().join(from), false),
        };
        let folder = image.join(to.trim_start_matches('/'));
        std::fs::create_dir_all(&folder).unwrap();
        let place = folder.join(source.file_name().unwrap());
        if is_program && !source.exists() {
            println!("SKIPPED: {from}: `cargo test --workspace` builds it");
            continue;
        }
        std::fs::copy(&source, &place).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
        if is_program {
            programs.push(place);
        }
    }
    programs
}

/// Every program needs libraries of the base image only.
fn check_libraries(programs: &[PathBuf]) {
    for program in programs {
        let Ok(needed) = Command::new("ldd").arg(program).output() else {
            return println!("SKIPPED: ldd is not installed");
        };
        let needed = String::from_utf8(needed.stdout).unwrap();
        for line in needed.lines().map(str::trim) {
            let is_known = LIBRARIES.iter().any(|name| line.contains(name));
            assert!(is_known, "{}: {line}", program.display());
        }
    }
}

/// The commands that a page runs in a container, by its aliases: program and arguments.
fn commands_of(page: &str) -> Vec<(&'static str, Vec<String>)> {
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    let command = |line: &str| {
        let (alias, arguments) = line.split_once(' ')?;
        let program = match alias {
            "desk" => "hatchback",
            "car" => "hatchbackd",
            _ => return None,
        };
        Some((program, arguments.split(' ').map(str::to_owned).collect()))
    };
    text.lines().filter_map(command).collect()
}

#[test]
fn the_container_recipe_works_in_a_plain_directory() {
    check_packages();
    let folder = tempfile::tempdir().unwrap();
    let (image, work) = (folder.path().join("image"), folder.path().join("work"));
    let programs = copy_into(&image);
    assert!(programs.iter().any(|program| program.ends_with("usr/local/bin/hatchback")));
    assert!(last_stage().contains(&r#"ENTRYPOINT ["hatchback"]"#.to_owned()));
    check_libraries(&programs);

    copy_files(&root().join("tools/demo/coupon"), &work);
    let commands = commands_of("docs/board.md");
    assert_eq!(commands.len(), 4);
    let etc = format!("{}/etc/", image.display());
    for (entry, arguments) in commands {
        let program = image.join("usr/local/bin").join(entry);
        if !program.exists() {
            println!("SKIPPED: {entry}: `cargo test --workspace` builds it");
            continue;
        }
        let arguments = arguments.iter().map(|argument| argument.replace("/etc/", &etc));
        let mut command = Command::new(program);
        let output = command.args(arguments).current_dir(&work).env_clear().output().unwrap();
        assert!(output.status.success(), "{command:?}: {output:?}");
    }
}
