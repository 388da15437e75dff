//! The program with a library of the test between it and the system: what it syncs, and what it
//! says of a directory that changes while it reads.

use crate::cli::{Desk, printed};
use std::path::Path;
use std::process::Command;

/// Compiles a library in C for `LD_PRELOAD` and returns its path.
fn compiled(desk: &Desk, code: &str) -> String {
    let (source, library) = (desk.path("preload.c"), desk.path("preload.so"));
    std::fs::write(&source, code).unwrap();
    let cc = ["-shared", "-fPIC", "-O1", &source, "-o", &library, "-ldl"];
    assert!(Command::new("cc").args(cc).status().unwrap().success());
    library
}

/// A library that writes the path of each file and directory that a program syncs to `$SYNCED`.
const SYNC_LOG: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int fsync(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = readlink(link, path, sizeof path - 1);
    int log = open(getenv("SYNCED"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (n < 0 || log < 0) abort();
    path[n] = '\n';
    if (write(log, path, n + 1) != n + 1) abort();
    close(log);
    int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return next(file);
}
"#;

/// A power cut after a command ended must lose no directory.
#[test]
fn new_directories_are_durable_in_their_parents() {
    let desk = Desk::new();
    let bundle = desk.pack(&[]);
    let (keys, repository) = (desk.path("d/keys"), desk.path("e/repository"));
    let log = desk.path("synced");
    let library = compiled(&desk, SYNC_LOG);
    let root = format!("{keys}/1.root.json");
    let (state, flash) = (desk.path("a/b/car.sync"), desk.path("c/car.flash"));
    for args in [
        &["keys", "new", &keys, "--plain"][..],
        &["publish", &bundle, "--keys", &keys, "--to", &repository],
        &["sync", "--from", &repository, "--root", &root, "--state", &state, "--flash", &flash],
    ] {
        let ran = Command::new(env!("CARGO_BIN_EXE_hatchback"))
            .args(args)
            .envs([("LD_PRELOAD", &library), ("SYNCED", &log)])
            .output()
            .unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    }
    let synced = std::fs::read_to_string(&log).unwrap();
    for path in ["", "a", "a/b", "a/b/car.sync", "c", "c/car.flash", "d", "d/keys", "e"] {
        let path = desk.folder.path().join(path);
        let path = std::fs::canonicalize(path).unwrap();
        assert!(synced.lines().any(|line| Path::new(line) == path), "{path:?}: {synced}");
    }
    // A new name in a directory is durable with the directory.
    let generation = std::fs::canonicalize(format!("{flash}/g000000000001")).unwrap();
    assert!(synced.lines().any(|line| Path::new(line) == generation), "{synced}");
    for part in ["dense.onnx", "live", "manifest", "staged", "timestamp.json"] {
        assert!(synced.contains(part), "{part}: {synced}");
    }
}

/// A library that puts the directory `$NEXT` in the place of `$FLASH`, and the other way round,
/// before each of the first `$TIMES` opens of a dense network.
const EXCHANGE: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int open64(const char *path, int flags, ...) {
    static int times;
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    if (strstr(path, "dense.onnx") && times++ < atoi(getenv("TIMES"))) {
        const char *flash = getenv("FLASH"), *next = getenv("NEXT"), *aside = getenv("ASIDE");
        if (rename(flash, aside) || rename(next, flash) || rename(aside, next)) abort();
    }
    typedef int function(const char *, int, ...);
    return ((function *)dlsym(RTLD_NEXT, "open64"))(path, flags, mode);
}
"#;

/// Installs the demo's model as `sequence` and returns the flash directory.
fn installed(desk: &Desk, sequence: u64) -> String {
    let bundle = desk.path(&format!("bundle{sequence}"));
    printed(&["pack", &desk.model(sequence), "--out", &bundle]);
    printed(&["eval", &bundle]);
    format!("{bundle}.flash")
}

#[test]
fn a_directory_that_changes_while_inspect_reads_it_is_not_damaged() {
    let desk = Desk::new();
    let library = compiled(&desk, EXCHANGE);
    let (flash, next) = (installed(&desk, 1), installed(&desk, 2));
    let inspect = |times: &str, verify: &[&str]| {
        let ran = Command::new(env!("CARGO_BIN_EXE_hatchback"))
            .args(["inspect", &flash])
            .args(verify)
            .envs([("LD_PRELOAD", &library), ("FLASH", &flash), ("NEXT", &next)])
            .envs([("TIMES", times), ("ASIDE", &desk.path("aside"))])
            .output()
            .unwrap();
        let said = [&ran.stdout[..], &ran.stderr].concat();
        (ran.status.success(), String::from_utf8(said).unwrap())
    };

    // Each read begins with the other generation.
    for (live, verify) in [(2, &["--verify"][..]), (1, &[])] {
        let (is_ok, said) = inspect("1", verify);
        assert!(is_ok && said.contains(&format!("coupon-dlrm@{live}")), "{said}");
        assert!(!said.contains("DAMAGED") && !said.contains("dense network: none"), "{said}");
    }
    // Without --verify each read opens the network once, so each ends with another generation.
    let (is_ok, said) = inspect("1000", &[]);
    assert!(!is_ok && said.contains("changed each time while it was read"), "{said}");

    // What is damaged stays so.
    for (directory, sequence) in [(&flash, 1), (&flash, 2), (&next, 1), (&next, 2)] {
        let dense = Path::new(directory).join(format!("g{sequence:012}/dense.onnx"));
        let _ = std::fs::remove_file(dense);
    }
    let (is_ok, said) = inspect("0", &["--verify"]);
    assert!(!is_ok && said.contains("1 parts are damaged"), "{said}");
}
