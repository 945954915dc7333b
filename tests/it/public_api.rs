//! The public API as a checked-in list: `docs/public-api.txt`. A change of the API is a change of that file, which a
//! reviewer sees. `WHARF_BLESS=1 cargo test --test it public_api` writes it again.
//!
//! The list is made from the sources, not by the compiler, so it needs no particular toolchain: every re-export of the
//! crate root and its public folders is followed to its definition.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::{Attribute, Fields, FnArg, ImplItem, Item, Signature, TraitItem, Type, UseTree, Visibility};

/// A module of the crate: its path (`types::record`, empty for the root) and its items.
struct Module {
    path: String,
    items: Vec<Item>,
}

struct Crate(Vec<Module>);

impl Crate {
    fn read() -> Self {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let (mut folders, mut modules) = (vec![src.clone()], Vec::new());
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true if path.ends_with("bin") => {}
                    true => folders.push(path),
                    // Templates and other files are beside the code that uses them.
                    false if path.extension().is_none_or(|extension| extension != "rs") => {}
                    false => modules.push(Module { path: module_path(&src, &path), items: items_of(&path) }),
                }
            }
        }
        Self(modules)
    }

    fn module(&self, path: &str) -> Option<&Module> {
        self.0.iter().find(|module| module.path == path)
    }

    /// Follows a name to the module that defines it.
    fn definition(&self, module: &str, name: &str) -> Option<(String, &Item)> {
        let items = &self.module(module)?.items;
        if let Some(item) = items.iter().find(|item| name_of(item).is_some_and(|found| found == name)) {
            return Some((module.to_owned(), item));
        }
        let reexports =
            items.iter().filter_map(|item| if let Item::Use(used) = item { Some(&used.tree) } else { None });
        let mut paths = Vec::new();
        reexports.for_each(|tree| paths_of(tree, &mut Vec::new(), &mut paths));
        let path = paths.into_iter().find(|path| path.last().is_some_and(|last| last == name))?;
        self.definition(&joined(module, &path[..path.len() - 1]), name)
    }

    /// The re-exports of the public modules that the crate root contains: module, name and definition.
    fn small_modules(&self) -> Vec<(String, String, &Item)> {
        let mut found = Vec::new();
        for item in &self.module("").expect("the crate root").items {
            let Item::Mod(module) = item else { continue };
            let (true, Some((_, items))) = (is_public(&module.vis), &module.content) else { continue };
            let mut paths = Vec::new();
            for item in items {
                match item {
                    Item::Use(used) if is_public(&used.vis) => paths_of(&used.tree, &mut Vec::new(), &mut paths),
                    other => assert_eq!(public_name(other), None, "{} only re-exports", module.ident),
                }
            }
            for path in paths {
                let (name, above) = path.split_last().expect("a path is not empty");
                let (_, item) = self.definition(&joined("", above), name).expect("the definition of a re-export");
                found.push((module.ident.to_string(), name.clone(), item));
            }
        }
        found
    }

    /// The exports of a public module: names with the place of their definition.
    fn exports(&self, module: &str) -> BTreeMap<String, (String, &Item)> {
        let Some(found) = self.module(module) else { return BTreeMap::new() };
        let mut names = BTreeSet::new();
        for item in &found.items {
            match item {
                Item::Use(used) if is_public(&used.vis) => {
                    let mut paths = Vec::new();
                    paths_of(&used.tree, &mut Vec::new(), &mut paths);
                    names.extend(paths.into_iter().filter_map(|path| path.last().cloned()));
                }
                other => names.extend(public_name(other)),
            }
        }
        names.into_iter().filter_map(|name| Some((name.clone(), self.definition(module, &name)?))).collect()
    }
}

fn module_path(src: &Path, file: &Path) -> String {
    let path = file.strip_prefix(src).unwrap().with_extension("");
    let parts: Vec<&str> = path.iter().map(|part| part.to_str().unwrap()).collect();
    parts.into_iter().filter(|part| !["lib", "mod"].contains(part)).collect::<Vec<_>>().join("::")
}

fn items_of(file: &PathBuf) -> Vec<Item> {
    syn::parse_file(&fs::read_to_string(file).unwrap()).unwrap().items
}

fn joined(module: &str, path: &[String]) -> String {
    let mut parts: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
    for part in path {
        match part.as_str() {
            "crate" => parts.clear(),
            "super" => drop(parts.pop()),
            "self" => {}
            name => parts.push(name),
        }
    }
    parts.join("::")
}

fn paths_of(tree: &UseTree, above: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    match tree {
        UseTree::Path(path) => {
            above.push(path.ident.to_string());
            paths_of(&path.tree, above, found);
            above.pop();
        }
        UseTree::Name(name) => found.push([above.as_slice(), &[name.ident.to_string()]].concat()),
        UseTree::Group(group) => group.items.iter().for_each(|tree| paths_of(tree, above, found)),
        UseTree::Rename(_) | UseTree::Glob(_) => {
            panic!("a re-export is neither renamed nor a glob: {}", tokens(tree))
        }
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn name_of(item: &Item) -> Option<String> {
    Some(match item {
        Item::Struct(item) => item.ident.to_string(),
        Item::Enum(item) => item.ident.to_string(),
        Item::Trait(item) => item.ident.to_string(),
        Item::Type(item) => item.ident.to_string(),
        Item::Fn(item) => item.sig.ident.to_string(),
        _ => return None,
    })
}

fn public_name(item: &Item) -> Option<String> {
    let visibility = match item {
        Item::Struct(item) => &item.vis,
        Item::Enum(item) => &item.vis,
        Item::Trait(item) => &item.vis,
        Item::Type(item) => &item.vis,
        Item::Fn(item) => &item.vis,
        _ => return None,
    };
    if is_public(visibility) { name_of(item) } else { None }
}

/// Source text in one line, without the spaces that the tokenizer adds.
fn tokens(of: &impl ToTokens) -> String {
    let mut text = of.to_token_stream().to_string();
    for (spaced, tight) in [
        (" :: ", "::"),
        (" < ", "<"),
        ("< ", "<"),
        (" >", ">"),
        ("& ", "&"),
        (" ,", ","),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        (" :", ":"),
        ("' ", "'"),
        (":: ", "::"),
        (" [", "["),
        ("[ ", "["),
        (" ]", "]"),
    ] {
        text = text.replace(spaced, tight);
    }
    text
}

fn signature(signature: &Signature) -> String {
    let arguments: Vec<String> = signature
        .inputs
        .iter()
        .map(|argument| match argument {
            FnArg::Receiver(receiver) => tokens(receiver),
            FnArg::Typed(argument) => tokens(&argument.ty),
        })
        .collect();
    let is_async = if signature.asyncness.is_some() { "async " } else { "" };
    let generics = tokens(&signature.generics);
    format!("{is_async}fn {}{generics}({}){}", signature.ident, arguments.join(", "), tokens(&signature.output))
}

fn marks(attributes: &[Attribute]) -> &'static str {
    let is_open = attributes.iter().any(|attribute| attribute.path().is_ident("non_exhaustive"));
    if is_open { " (may grow)" } else { "" }
}

/// A line for each trait that an item derives.
fn derives(path: &str, attributes: &[Attribute], lines: &mut BTreeSet<String>) {
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        let derived = attribute.parse_nested_meta(|derived| {
            let name = derived.path.segments.last().map(|segment| segment.ident.to_string());
            lines.insert(format!("{path}: impl {}", name.unwrap_or_default()));
            Ok(())
        });
        derived.unwrap();
    }
}

/// The lines of the item itself.
fn lines_of(path: &str, item: &Item, lines: &mut BTreeSet<String>) {
    match item {
        Item::Struct(item) => {
            lines.insert(format!("{path}: struct{}{}", tokens(&item.generics), marks(&item.attrs)));
            derives(path, &item.attrs, lines);
            if let Fields::Named(fields) = &item.fields {
                for field in fields.named.iter().filter(|field| is_public(&field.vis)) {
                    lines.insert(format!("{path}.{}: {}", tokens(&field.ident), tokens(&field.ty)));
                }
            }
        }
        Item::Enum(item) => {
            lines.insert(format!("{path}: enum{}{}", tokens(&item.generics), marks(&item.attrs)));
            derives(path, &item.attrs, lines);
            for variant in &item.variants {
                lines.insert(format!(
                    "{path}::{}{}",
                    variant.ident,
                    tokens(&without_attributes(variant.fields.clone()))
                ));
            }
        }
        Item::Trait(item) => {
            lines.insert(format!("{path}: trait{}: {}", tokens(&item.generics), tokens(&item.supertraits)));
            for method in &item.items {
                if let TraitItem::Fn(method) = method {
                    lines.insert(format!("{path}::{}", signature(&method.sig)));
                }
            }
        }
        Item::Type(item) => drop(lines.insert(format!("{path}: type = {}", tokens(&item.ty)))),
        Item::Fn(item) => drop(lines.insert(format!("{path}: {}", signature(&item.sig)))),
        _ => {}
    }
}

fn without_attributes(mut fields: Fields) -> Fields {
    fields.iter_mut().for_each(|field| field.attrs.clear());
    fields
}

/// The methods of public types, wherever they are defined, and the traits that these types implement.
fn impls(whole: &Crate, public: &BTreeMap<String, String>, lines: &mut BTreeSet<String>) {
    for item in whole.0.iter().flat_map(|module| &module.items) {
        match item {
            Item::Impl(block) => {
                let Some(path) = type_name(&block.self_ty).and_then(|name| public.get(&name)) else { continue };
                match &block.trait_ {
                    Some((_, of, _)) => drop(lines.insert(format!("{path}: impl {}", tokens(of)))),
                    None => block.items.iter().for_each(|item| match item {
                        ImplItem::Fn(method) if is_public(&method.vis) => {
                            lines.insert(format!("{path}::{}", signature(&method.sig)));
                        }
                        ImplItem::Const(item) if is_public(&item.vis) => {
                            lines.insert(format!("{path}::{}: {}", item.ident, tokens(&item.ty)));
                        }
                        _ => {}
                    }),
                }
            }
            Item::Macro(call) if call.mac.path.is_ident("setters") => {
                let text = tokens(&call.mac.tokens);
                let name = text.split([' ', '{']).next().unwrap_or_default();
                if let Some(path) = public.get(name) {
                    lines.insert(format!("{path}: setters {}", &text[name.len()..]));
                }
            }
            _ => {}
        }
    }
}

fn type_name(of: &Type) -> Option<String> {
    let Type::Path(path) = of else { return None };
    path.path.segments.last().map(|segment| segment.ident.to_string())
}

fn listed() -> String {
    let whole = Crate::read();
    let mut lines = BTreeSet::new();
    let mut public: BTreeMap<String, String> = BTreeMap::new();
    for (module, shown) in [
        ("", "wharf"),
        ("dashboard", "wharf::dashboard"),
        ("formats", "wharf::formats"),
        ("kafka", "wharf::kafka"),
        ("operate", "wharf::operate"),
        ("store", "wharf::store"),
        ("testing", "wharf::testing"),
    ] {
        for (name, (_, item)) in whole.exports(module) {
            // The root comes first: its items are listed there, and nowhere else.
            let path = public.entry(name.clone()).or_insert_with(|| format!("{shown}::{name}")).clone();
            lines_of(&path, item, &mut lines);
        }
    }
    for (module, name, item) in whole.small_modules() {
        let path = format!("wharf::{module}::{name}");
        lines_of(&path, item, &mut lines);
        public.insert(name, path);
    }
    impls(&whole, &public, &mut lines);
    lines.into_iter().map(|line| line + "\n").collect()
}

#[test]
fn the_public_api_matches_the_checked_in_list() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/public-api.txt");
    let listed = listed();
    if std::env::var_os("WHARF_BLESS").is_some() {
        fs::write(&file, &listed).unwrap();
    }
    let checked_in = fs::read_to_string(&file).unwrap_or_default();
    let of = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<String>>();
    let (now, before) = (of(&listed), of(&checked_in));
    let gone: Vec<&String> = before.difference(&now).collect();
    let new: Vec<&String> = now.difference(&before).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "the public API has changed. If that is meant: WHARF_BLESS=1 cargo test --test it public_api\ngone: {gone:#?}\nnew: {new:#?}"
    );
}

// The root has the names that an embedding service needs in its first week.
#[test]
fn the_root_has_at_most_thirty_names() {
    let names: Vec<String> = Crate::read().exports("").into_keys().collect();
    assert!((20..=30).contains(&names.len()), "{}: {names:?}", names.len());
}
