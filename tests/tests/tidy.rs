//! The house rules that a program can check: line width, sentence length, import circles, layers,
//! limits, parameters and type names. Reads the sources as text; builds and runs nothing of the
//! product. `CONTRIBUTING.md` has the rules.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use syn::visit::{self, Visit};

/// Columns of a line of prose or code.
const COLUMNS_MAX: usize = 100;
/// Words of a sentence in README and ARCHITECTURE: median, 90th percentile, and longest.
const SENTENCE_WORDS: [usize; 3] = [15, 25, 30];

/// What the tree may have at most. A feature pays with what it removes; only a record in
/// `docs/decisions.md` raises a cap. `tools/tests/tools/reference.rs` caps the options.
const LINES_MAX: [(&str, usize); 12] = [
    ("kernels/src", 20_839),
    ("kernels/cuda", 2_800),
    ("runtime/src", 20_360),
    ("link/src", 720),
    ("server/src", 4_900),
    ("board/src", 1_930),
    ("capi/src", 950),
    ("python/src", 520),
    ("tools/src", 16_385),
    ("tools/trainer/hatchback_trainer", 6_760),
    ("bench/src", 11_240),
    ("tests/src", 6_265),
];
const WORDS_MAX: usize = 46_000;
const TARGET_KEYS_MAX: usize = 42;
const TEST_PROGRAMS_MAX: usize = 14;
const CRATES_MAX: usize = 437;

/// A crate of the product and the order of its parts: an import goes to the same group or to a
/// later one.
struct Layers {
    folder: &'static str,
    library: &'static str,
    groups: &'static [&'static [&'static str]],
}

const CRATES: [Layers; 9] = [
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

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// All files below `folder` with one of these endings, sorted; build outputs, virtual environments
/// of Python and hidden folders are left out.
fn files_below(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_left_out = name.starts_with('.') || name == "target" || name == "venv";
            if path.is_dir() && !is_left_out {
                folders.push(path);
            } else if endings.iter().any(|e| name.ends_with(e)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// One source file of a crate.
struct Source {
    path: PathBuf,
    /// Its module path below the crate's root; `["main"]` for a program beside the library.
    module: Vec<String>,
    syntax: syn::File,
}

fn sources_of(layers: &Layers) -> Vec<Source> {
    let folder = root().join(layers.folder).join("src");
    let parse = |path: PathBuf| {
        let inner = path.strip_prefix(&folder).unwrap().with_extension("");
        let mut module: Vec<String> =
            inner.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if module.last().is_some_and(|last| last == "mod" || last == "lib") {
            module.pop();
        }
        let syntax = syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap();
        Source { path, module, syntax }
    };
    files_below(&folder, &[".rs"]).into_iter().map(parse).collect()
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|a| match &a.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            condition.contains("test") && !condition.contains("not")
        }
        meta => meta.path().is_ident("test"),
    })
}

/// What the checks need of a file, test code left out.
#[derive(Default)]
struct Facts {
    /// The module that is being visited, within the file.
    module: Vec<String>,
    /// Every path that starts at the crate or at a module, with the module that contains it.
    imports: Vec<(Vec<String>, Vec<String>)>,
    /// `pub use`: name, and the path that it stands for.
    exports: Vec<(String, Vec<String>)>,
    /// Macros that the crate's root exports, wherever they are defined.
    macros: Vec<String>,
    types: Vec<String>,
    limits: Vec<String>,
    parameters: Vec<String>,
}

impl Facts {
    fn of(source: &Source) -> Self {
        let mut facts = Self { module: source.module.clone(), ..Self::default() };
        facts.visit_file(&source.syntax);
        facts
    }

    fn add_use(&mut self, tree: &syn::UseTree, mut path: Vec<String>, public: bool) {
        match tree {
            syn::UseTree::Path(inner) => {
                path.push(inner.ident.to_string());
                self.add_use(&inner.tree, path, public);
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|item| self.add_use(item, path.clone(), public));
            }
            syn::UseTree::Name(name) => self.end_use(name.ident.to_string(), None, path, public),
            syn::UseTree::Rename(name) => {
                let alias = Some(name.rename.to_string());
                self.end_use(name.ident.to_string(), alias, path, public);
            }
            syn::UseTree::Glob(_) => self.imports.push((path, self.module.clone())),
        }
    }

    fn end_use(
        &mut self,
        name: String,
        alias: Option<String>,
        mut path: Vec<String>,
        public: bool,
    ) {
        if name != "self" {
            path.push(name.clone());
        }
        if public {
            self.exports.push((alias.unwrap_or(name), path));
        } else {
            self.imports.push((path, self.module.clone()));
        }
    }

    fn add_type(&mut self, visibility: &syn::Visibility, name: &syn::Ident) {
        if matches!(visibility, syn::Visibility::Public(_)) {
            self.types.push(name.to_string());
        }
    }
}

impl<'a> Visit<'a> for Facts {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !is_test(&item.attrs) {
            self.module.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if !is_test(&item.attrs) {
            let parameters = self.parameters.len();
            visit::visit_item_impl(self, item);
            if item.trait_.is_some() {
                self.parameters.truncate(parameters);
            }
        }
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        if !is_test(&item.attrs) {
            let public = !matches!(item.vis, syn::Visibility::Inherited);
            self.add_use(&item.tree, Vec::new(), public);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let parts: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if parts.len() > 1 {
            self.imports.push((parts, self.module.clone()));
        }
        visit::visit_path(self, path);
    }

    fn visit_item_macro(&mut self, item: &'a syn::ItemMacro) {
        let exported = item.attrs.iter().any(|a| a.path().is_ident("macro_export"));
        if let Some(name) = item.ident.as_ref().filter(|_| exported) {
            self.macros.push(name.to_string());
        }
    }

    fn visit_item_const(&mut self, item: &'a syn::ItemConst) {
        if item.ident.to_string().ends_with("_MAX") && !is_test(&item.attrs) {
            self.limits.push(item.ident.to_string());
        }
        visit::visit_item_const(self, item);
    }

    fn visit_signature(&mut self, signature: &'a syn::Signature) {
        let types: Vec<&syn::Type> = signature
            .inputs
            .iter()
            .filter_map(|input| match input {
                syn::FnArg::Typed(typed) => Some(&*typed.ty),
                _ => None,
            })
            .collect();
        let tuples = types.iter().filter(|t| is_tuple(t)).count();
        let bools = types.iter().filter(|t| is_bool(t)).count();
        if tuples > 0 {
            self.parameters.push(format!("{}: a tuple as a parameter", signature.ident));
        }
        if bools > 1 {
            self.parameters.push(format!("{}: {bools} parameters of type bool", signature.ident));
        }
        visit::visit_signature(self, signature);
    }

    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.add_type(&item.vis, &item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.add_type(&item.vis, &item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.add_type(&item.vis, &item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.add_type(&item.vis, &item.ident);
        visit::visit_item_type(self, item);
    }
}

fn is_tuple(ty: &syn::Type) -> bool {
    match ty {
        syn::Type::Tuple(tuple) => !tuple.elems.is_empty(),
        syn::Type::Reference(reference) => is_tuple(&reference.elem),
        _ => false,
    }
}

fn is_bool(ty: &syn::Type) -> bool {
    matches!(ty, syn::Type::Path(path) if path.path.is_ident("bool"))
}

/// The imports between the files of one crate.
struct Graph {
    /// Module path and file of each source.
    modules: BTreeMap<Vec<String>, PathBuf>,
    exports: BTreeMap<(Vec<String>, String), Vec<String>>,
    edges: BTreeSet<(Vec<String>, Vec<String>)>,
}

impl Graph {
    fn of(layers: &Layers) -> Self {
        let sources = sources_of(layers);
        let facts: Vec<Facts> = sources.iter().map(Facts::of).collect();
        let mut graph = Self {
            modules: sources.iter().map(|s| (s.module.clone(), s.path.clone())).collect(),
            exports: BTreeMap::new(),
            edges: BTreeSet::new(),
        };

        for (source, facts) in sources.iter().zip(&facts) {
            for (name, path) in &facts.exports {
                if let Some(path) = graph.absolute(path, &source.module, layers.library) {
                    graph.exports.insert((source.module.clone(), name.clone()), path);
                }
            }
        }

        for (source, facts) in sources.iter().zip(&facts) {
            for name in &facts.macros {
                graph.exports.insert((Vec::new(), name.clone()), source.module.clone());
            }
        }

        for (source, facts) in sources.iter().zip(&facts) {
            for (path, module) in &facts.imports {
                let target = graph
                    .absolute(path, module, layers.library)
                    .and_then(|path| graph.module_of(path));
                if let Some(target) = target.filter(|target| *target != source.module) {
                    graph.edges.insert((source.module.clone(), target));
                }
            }
        }
        graph
    }

    /// The path from the crate's root, if it leads into this crate.
    fn absolute(&self, path: &[String], module: &[String], library: &str) -> Option<Vec<String>> {
        let mut base = module.to_vec();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => (base, rest) = (Vec::new(), &rest[1..]),
            "self" => rest = &rest[1..],
            "super" => {}
            first if first == library => (base, rest) = (Vec::new(), &rest[1..]),
            first => {
                let child = [module, &[first.to_string()]].concat();
                if !self.modules.contains_key(&child) {
                    return None;
                }
            }
        }
        while rest.first().is_some_and(|part| part == "super") {
            base.pop();
            rest = &rest[1..];
        }
        Some([&base, rest].concat())
    }

    /// The module whose file defines what `path` names; re-exports are followed.
    fn module_of(&self, mut path: Vec<String>) -> Option<Vec<String>> {
        for _ in 0..8 {
            let known = |len: &usize| self.modules.contains_key(&path[..*len]);
            let len = (0..=path.len()).rev().find(known)?;
            let Some(name) = path.get(len) else { return Some(path) };
            let Some(origin) = self.exports.get(&(path[..len].to_vec(), name.clone())) else {
                return Some(path[..len].to_vec());
            };
            path = [origin.as_slice(), &path[len + 1..]].concat();
        }
        None
    }

    fn file(&self, module: &[String]) -> String {
        shown(&self.modules[module])
    }

    /// Circles between files, and between the folders and files of each folder.
    fn circles(&self) -> Vec<String> {
        let named = |m: &Vec<String>| self.file(m);
        let mut found = circles_in(self.edges.iter().map(|(a, b)| (named(a), named(b))));
        let folders: BTreeSet<String> = self
            .modules
            .keys()
            .flat_map(|m| {
                let file = self.file(m);
                let parts: Vec<&str> = file.split('/').collect();
                (2..parts.len()).map(|n| parts[..n].join("/")).collect::<Vec<_>>()
            })
            .collect();
        for folder in folders {
            let unit = |m: &Vec<String>| {
                let file = self.file(m);
                let inner = file.strip_prefix(&format!("{folder}/"))?;
                Some(format!("{folder}/{}", inner.split('/').next()?))
            };
            let edges = self.edges.iter().filter_map(|(a, b)| Some((unit(a)?, unit(b)?)));
            found.extend(circles_in(edges.filter(|(a, b)| a != b)));
        }
        found.sort();
        found.dedup();
        found
    }

    /// Imports against the order of the layers.
    fn upward(&self, layers: &Layers) -> Vec<String> {
        let rank = |module: &[String]| {
            let file = self.file(module);
            let inner = file.strip_prefix(&format!("{}/src/", layers.folder)).unwrap();
            let part = inner.split('/').next().unwrap().trim_end_matches(".rs").to_string();
            let group = layers.groups.iter().position(|group| group.contains(&part.as_str()));
            group.ok_or(format!("{inner}: is in no layer of tests/tests/tidy.rs"))
        };
        let mut found = BTreeSet::new();
        for (from, to) in &self.edges {
            match (rank(from), rank(to)) {
                (Ok(a), Ok(b)) if a > b => {
                    found.insert(format!("{} -> {}", self.file(from), self.file(to)));
                }
                (Ok(_), Ok(_)) => {}
                (Err(problem), _) | (_, Err(problem)) => {
                    found.insert(problem);
                }
            }
        }
        found.into_iter().collect()
    }
}

/// The edges that are part of a circle: those whose end leads back to their start.
fn circles_in(edges: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let edges: BTreeSet<(String, String)> = edges.collect();
    let leads_back = |(from, to): &&(String, String)| {
        let mut seen = BTreeSet::from([to]);
        let mut open = vec![to];
        while let Some(at) = open.pop() {
            let next = edges.iter().filter(|(a, _)| a == at).map(|(_, b)| b);
            open.extend(next.filter(|b| seen.insert(b)));
        }
        seen.contains(from)
    };
    edges.iter().filter(leads_back).map(|(a, b)| format!("{a} -> {b}")).collect()
}

fn assert_none(what: &str, found: &[String]) {
    println!("{what}: {}", found.len());
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

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
fn the_graph_sees_a_circle_that_runs_through_a_re_export() {
    let edges = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "a")];
    let found = circles_in(edges.iter().map(|(a, b)| (a.to_string(), b.to_string())));
    assert_eq!(found, ["a -> b", "b -> c", "c -> a"]);

    let path = |text: &str| text.split("::").map(String::from).collect::<Vec<_>>();
    let graph = Graph {
        modules: ["a", "a::b"].iter().map(|m| (path(m), PathBuf::from(m))).collect(),
        exports: [((path("a"), "Name".to_string()), path("a::b::Name"))].into(),
        edges: BTreeSet::new(),
    };
    let full = graph.absolute(&path("super::Name"), &path("a::b"), "x").unwrap();
    assert_eq!(graph.module_of(full), Some(path("a::b")));
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

#[test]
fn every_limit_is_in_limits_rs() {
    let mut found = Vec::new();
    for layers in
        CRATES.iter().filter(|c| ["runtime", "link", "server", "board"].contains(&c.folder))
    {
        for source in sources_of(layers).iter().filter(|s| !s.path.ends_with("limits.rs")) {
            let limits = Facts::of(source).limits;
            found.extend(limits.iter().map(|name| format!("{}: {name}", shown(&source.path))));
        }
    }
    assert_none("limits outside limits.rs", &found);
}

#[test]
fn no_function_takes_a_tuple_or_two_bools() {
    let mut found = Vec::new();
    for source in CRATES.iter().flat_map(sources_of) {
        let parameters = Facts::of(&source).parameters;
        found.extend(parameters.iter().map(|p| format!("{}: {p}", shown(&source.path))));
    }
    assert_none("tuple and second bool parameters", &found);
}

#[test]
fn a_public_type_has_a_name_of_its_own_in_its_crate() {
    let mut found = Vec::new();
    for layers in &CRATES {
        let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for source in sources_of(layers) {
            for name in Facts::of(&source).types {
                files.entry(name).or_default().push(shown(&source.path));
            }
        }
        let twice = files.into_iter().filter(|(_, files)| files.len() > 1);
        found.extend(twice.map(|(name, files)| format!("{name}: {}", files.join(", "))));
    }
    assert_none("public types of one name", &found);
}

#[test]
fn unsafe_code_is_only_in_the_files_that_contributing_lists() {
    let page = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let listed: BTreeSet<String> =
        references(&page).into_iter().filter(|path| path.ends_with(".rs")).collect();
    let starts = ["{", "fn", "impl", "trait", "extern"].map(|next| format!("unsafe {next}"));

    let mut found = BTreeSet::new();
    for path in
        CRATES.iter().flat_map(|c| files_below(&root().join(c.folder).join("src"), &[".rs"]))
    {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        if code.into_iter().any(|line| starts.iter().any(|start| line.contains(start.as_str()))) {
            found.insert(shown(&path));
        }
    }
    println!("files with unsafe code: {}", found.len());
    let listed: BTreeSet<String> =
        listed.into_iter().filter(|path| path.contains("/src/")).collect();
    assert_eq!(found, listed);
}

#[test]
fn no_line_is_wider_than_a_hundred_columns() {
    let mut found = Vec::new();
    for path in files_below(&root(), &[".md", ".rs", ".cu", ".cuh", ".py"]) {
        let prose = path.extension().is_some_and(|e| e == "md");
        let mut printed = false;
        for (number, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            if line.starts_with("```") {
                printed = prose && line == "```text";
            }
            let table = printed || prose && line.trim_start().starts_with('|');
            let excepted = table || line.contains("://");
            if line.chars().count() > COLUMNS_MAX && !excepted {
                found.push(format!("{}:{}", shown(&path), number + 1));
            }
        }
    }
    assert_none("lines over 100 columns", &found);
}

/// Returns whether a line is a comment of Python. `#[` and `#define` are code.
fn is_note(line: &str) -> bool {
    line == "#" || line.starts_with("# ")
}

/// Returns the lines of code: without empty lines and comments, which no cap should make scarce.
fn lines(path: &Path) -> usize {
    let text = fs::read_to_string(path).unwrap();
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//") && !is_note(line);
    text.lines().map(str::trim).filter(is_code).count()
}

/// Returns the test programs of the crates: files and folders of their `tests`.
fn test_programs() -> Vec<String> {
    let folders = CRATES.iter().map(|layers| layers.folder).chain(["tests"]);
    let entries = folders.filter_map(|folder| fs::read_dir(root().join(folder).join("tests")).ok());
    let paths = entries.flatten().map(|entry| entry.unwrap().path());
    let programs = paths.filter(|path| {
        path.extension().is_some_and(|e| e == "rs") || path.join("main.rs").is_file()
    });
    programs.map(|path| shown(&path)).collect()
}

#[test]
fn the_tree_stays_within_its_caps() {
    let mut counts: Vec<(String, usize, usize)> = Vec::new();
    for (folder, most) in LINES_MAX {
        let files = files_below(&root().join(folder), &[".rs", ".cu", ".cuh", ".py"]);
        let count = files.iter().map(|path| lines(path)).sum();
        counts.push((format!("lines of code of {folder}"), count, most));
    }
    let pages = files_below(&root(), &[".md"]);
    let words = |page: &PathBuf| fs::read_to_string(page).unwrap().split_whitespace().count();
    counts.push(("words of the pages".into(), pages.iter().map(words).sum(), WORDS_MAX));
    let target = fs::read_to_string(root().join("targets/base.toml")).unwrap();
    let keys = target.lines().filter(|line| !line.starts_with('#') && line.contains(" = ")).count();
    counts.push(("keys of a target".into(), keys, TARGET_KEYS_MAX));
    let programs = test_programs();
    counts.push((format!("test programs {programs:?}"), programs.len(), TEST_PROGRAMS_MAX));
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let crates = lock.lines().filter(|line| *line == "[[package]]").count();
    counts.push(("crates in the lock".into(), crates, CRATES_MAX));

    for (what, count, most) in &counts {
        println!("{what}: {count}, at most {most}");
    }
    let over = counts.iter().filter(|(_, count, most)| count > most);
    let over: Vec<String> =
        over.map(|(what, count, most)| format!("{what}: {count}, over {most}")).collect();
    assert_none("counts over their caps", &over);
}

/// `python/test` and a newcomer's `cargo run` build one package. A crate that has other features
/// there than in the tests is built a second time, with all that depend on it.
#[test]
fn the_tool_and_the_python_package_share_the_builds_of_the_tests() {
    let features_of = |arguments: &[&str]| -> BTreeSet<String> {
        let mut tree = Command::new(env!("CARGO"));
        tree.args(["tree", "--locked", "--prefix=none", "--format={p} {f}"]).args(arguments);
        let tree = tree.current_dir(root()).output().unwrap();
        let text = String::from_utf8(tree.stdout).unwrap();
        text.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
    };
    let shared = features_of(&["--workspace", "--edges=normal,build,dev"]);
    for package in ["hatchback-tools", "hatchback-python", "hatchback-bench", "hatchback-tests"] {
        let alone = features_of(&["--edges=normal,build", "--package", package]);
        assert!(!alone.is_empty(), "cargo tree knows no {package}");
        let others: Vec<String> = alone.difference(&shared).cloned().collect();
        assert_none(&format!("features of {package} alone, which the tests lack"), &others);
    }
}

/// The sentences of a Markdown page: code, tables, drawings and headings are left out.
fn sentences(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut paragraph = String::new();
    let mut fenced = false;

    for line in text.lines().chain([""]) {
        let line = line.trim();
        let fence = line.starts_with("```");
        fenced ^= fence;
        let skip = fence || fenced || line.starts_with(['|', '#', '!', '<']);
        let item = line.starts_with("* ")
            || line.starts_with("- ")
            || line.split_once(". ").is_some_and(|(n, _)| n.parse::<u32>().is_ok());
        if line.is_empty() || skip || item {
            let ends = |part: &str| part.ends_with(['.', '!', '?']);
            let mut sentence: Vec<&str> = Vec::new();

            for word in paragraph.split_whitespace() {
                sentence.push(word);
                if ends(word.trim_end_matches(['*', '_', ')', '`', '"'])) {
                    found.push(sentence.join(" "));
                    sentence.clear();
                }
            }

            if !sentence.is_empty() {
                found.push(sentence.join(" "));
            }

            paragraph.clear();
        }

        if !skip {
            let text = line.trim_start_matches("* ").trim_start_matches("- ");
            paragraph.push_str(text);
            paragraph.push(' ');
        }
    }

    found.retain(|s| s.split_whitespace().count() > 2);
    found
}

#[test]
fn readme_and_architecture_speak_in_short_sentences() {
    for page in ["README.md", "ARCHITECTURE.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let sentences = sentences(&text);
        let mut words: Vec<usize> =
            sentences.iter().map(|s| s.split_whitespace().count()).collect();
        words.sort_unstable();
        let quantile = |percent: usize| words[words.len() * percent / 100];
        let measured = [quantile(50), quantile(90), *words.last().unwrap()];
        println!("{page}: {} sentences, words p50/p90/longest {measured:?}", words.len());

        let longest = sentences.iter().max_by_key(|s| s.split_whitespace().count()).unwrap();
        let within = measured.iter().zip(SENTENCE_WORDS).all(|(m, max)| *m <= max);
        assert!(within, "{page}: {measured:?}, at most {SENTENCE_WORDS:?}; longest: {longest}");
    }
}

/// What a page refers to: targets of links, and code spans that look like paths of this tree.
fn references(text: &str) -> Vec<String> {
    let links = text.split("](").skip(1).filter_map(|part| part.split(')').next());
    let spans = text.split('`').skip(1).step_by(2).filter(|span| {
        let path = span.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
        let folder = span.split('/').next().is_some_and(|first| root().join(first).is_dir());
        path && folder && span.contains('/') && span.contains('.') && !span.starts_with('/')
    });
    let local = |target: &&str| !target.contains("://") && !target.starts_with('#');
    links.chain(spans).filter(local).map(String::from).collect()
}

#[test]
fn every_file_that_a_page_refers_to_exists() {
    let mut found = Vec::new();
    for page in files_below(&root(), &[".md"]) {
        let text = fs::read_to_string(&page).unwrap();
        for target in references(&text) {
            let path = target.split('#').next().unwrap();
            let places = [page.parent().unwrap().join(path), root().join(path)];
            if !places.iter().any(|place| place.exists()) {
                found.push(format!("{}: {target}", shown(&page)));
            }
        }
    }
    assert_none("references to files that do not exist", &found);
}

#[test]
fn architecture_fits_on_two_hundred_lines() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    assert!(text.lines().count() <= 200, "{} lines", text.lines().count());
}

#[test]
fn every_mutant_has_its_place_and_every_promise_its_line() {
    let checked = Command::new(root().join("tests/mutants")).arg("--check").output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
