//! The imports between the files of a crate, read from its syntax.

use crate::imports::Layers;
use crate::{Source, shown, sources_of};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use syn::visit::{self, Visit};

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
pub struct Facts {
    /// The module that is being visited, within the file.
    module: Vec<String>,
    /// Every path that starts at the crate or at a module, with the module that contains it.
    imports: Vec<(Vec<String>, Vec<String>)>,
    /// `pub use`: name, and the path that it stands for.
    exports: Vec<(String, Vec<String>)>,
    /// Macros that the crate's root exports, wherever they are defined.
    macros: Vec<String>,
    pub types: Vec<String>,
    pub limits: Vec<String>,
    pub parameters: Vec<String>,
}

impl Facts {
    pub fn of(source: &Source) -> Self {
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
pub struct Graph {
    /// Module path and file of each source.
    modules: BTreeMap<Vec<String>, PathBuf>,
    exports: BTreeMap<(Vec<String>, String), Vec<String>>,
    edges: BTreeSet<(Vec<String>, Vec<String>)>,
}

impl Graph {
    pub fn of(layers: &Layers) -> Self {
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
    pub fn circles(&self) -> Vec<String> {
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
    pub fn upward(&self, layers: &Layers) -> Vec<String> {
        let rank = |module: &[String]| {
            let file = self.file(module);
            let inner = file.strip_prefix(&format!("{}/src/", layers.folder)).unwrap();
            let part = inner.split('/').next().unwrap().trim_end_matches(".rs").to_string();
            let group = layers.groups.iter().position(|group| group.contains(&part.as_str()));
            group.ok_or(format!("{inner}: is in no layer of tests/tests/tidy/imports.rs"))
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
