//! The tree's own rules, checked on its files, so that no review has to repeat them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const LINES_MAX: usize = 400;
const FUNCTION_LINES_MAX: usize = 70;

/// A source file; its path is relative to the root of the tree.
struct Source {
    path: String,
    text: String,
}

impl Source {
    /// The text before the unit tests, which come last, or are in a separate file or folder.
    fn code(&self) -> &str {
        if self.path.ends_with("/tests.rs") || self.path.contains("/tests/") {
            return "";
        }
        self.text.split("#[cfg(test)]").next().unwrap_or_default()
    }

    fn is_in(&self, folder: &str) -> bool {
        self.path.starts_with(folder)
    }
}

fn sources(folders: &[&str]) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<PathBuf> =
        folders.iter().map(|folder| root.join(folder)).filter(|path| path.exists()).collect();
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                sources.push(Source { path: path.strip_prefix(root).unwrap().display().to_string(), text });
            }
        }
    }
    assert!(!sources.is_empty());
    sources
}

/// Fails with every place where a line of the sources is `wrong`.
fn refuse_lines<'a>(sources: impl IntoIterator<Item = (&'a str, &'a str)>, wrong: impl Fn(&str) -> bool) {
    let mut found = Vec::new();
    for (path, text) in sources {
        let lines = text.lines().enumerate().filter(|(_, line)| wrong(line));
        found.extend(lines.map(|(number, line)| format!("{path}:{}: {}", number + 1, line.trim())));
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

fn without_comment(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

#[test]
fn every_file_begins_with_its_purpose() {
    let silent: Vec<String> = sources(&["src", "tests", "benches", "examples"])
        .into_iter()
        .filter(|source| {
            !source.text.starts_with("//! ") || source.text.lines().next().is_some_and(|line| line.len() < 20)
        })
        .map(|source| source.path)
        .collect();
    assert!(silent.is_empty(), "{silent:?}");
}

#[test]
fn files_have_at_most_400_lines() {
    let long: Vec<(String, usize)> = sources(&["src", "tests", "benches", "examples"])
        .into_iter()
        .map(|source| (source.path, source.text.lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .collect();
    assert!(long.is_empty(), "{long:?}");
}

// Behind a pooler the default of the role applies, which may be another level.
#[test]
fn every_transaction_on_postgresql_sets_its_isolation_level() {
    let sources = sources(&["src/store/postgres"]);
    refuse_lines(sources.iter().map(|source| (source.path.as_str(), source.code())), |line| {
        [".transaction(", ".transaction::<", "begin_transaction("]
            .iter()
            .any(|call| without_comment(line).contains(call))
    });
}

/// A function begins at the line of its `fn` and ends at the brace in the same column, as rustfmt writes it.
#[test]
fn functions_have_at_most_70_lines() {
    let mut long = Vec::new();
    for source in sources(&["src"]) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (start, line) in lines.iter().enumerate() {
            let code = line.trim_start();
            let is_function = ["fn ", "pub fn ", "async fn ", "const fn "].iter().any(|start| code.starts_with(start))
                || (code.starts_with("pub") && code.contains(" fn "));
            // A signature may take several lines, and a trait's methods have no body.
            let opening = lines[start..].iter().find(|line| line.ends_with([';', '{', '}']));
            if !is_function || opening.is_none_or(|line| !line.ends_with('{')) {
                continue;
            }
            let end = format!("{}}}", &line[..line.len() - code.len()]);
            let length = lines[start..].iter().position(|line| **line == end).map_or(0, |length| length + 1);
            if length > FUNCTION_LINES_MAX {
                long.push(format!("{}:{}: {length} lines", source.path, start + 1));
            }
        }
    }
    assert!(long.is_empty(), "{long:?}");
}

/// The folders of `src` and the folders that each may import, from ARCHITECTURE.md: one line each, `folder -> folder,
/// folder`.
fn allowed_edges() -> Vec<(String, BTreeSet<String>)> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md")).unwrap();
    let section = page.split("\n## Folders import one way\n").nth(1).expect("the section on folders");
    let block = section.split("```").nth(1).expect("a block with the edges");
    let lines = block.lines().skip(1).filter(|line| !line.trim().is_empty());
    let names =
        |text: &str| text.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
    lines
        .map(|line| {
            let (folder, below) = line.split_once("->").unwrap_or((line, ""));
            (folder.trim().to_owned(), names(below))
        })
        .collect()
}

/// The modules of the crate that a file imports: the names after `crate::`.
fn imports(source: &Source) -> BTreeSet<String> {
    let code: String = source.code().lines().map(|line| format!("{}\n", without_comment(line))).collect();
    let name = |rest: &str| rest.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
    code.split("crate::").skip(1).map(name).collect()
}

#[test]
fn folders_import_only_what_the_architecture_allows() {
    let allowed = allowed_edges();
    let folder_of = |path: &str| path["src/".len()..].split('/').next().unwrap().trim_end_matches(".rs").to_owned();
    let mut used: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources(&["src"]) {
        let folder = folder_of(&source.path);
        if folder == "lib" || folder == "bin" {
            continue;
        }
        let mut imported = imports(&source);
        imported.remove(&folder);
        imported.remove("VERSION");
        used.entry(folder).or_default().append(&mut imported);
    }
    let listed: BTreeMap<String, BTreeSet<String>> = allowed.iter().cloned().collect();
    assert_eq!(used, listed, "left: what the code imports; right: what ARCHITECTURE.md lists");
    let mut above = BTreeSet::new();
    for (folder, below) in &allowed {
        assert!(
            below.is_subset(&above),
            "{folder} imports a folder that is listed after it: that is how a cycle begins"
        );
        above.insert(folder.clone());
    }
}

#[test]
fn src_has_no_unwrap_and_no_todo() {
    let sources = sources(&["src"]);
    let code = sources.iter().map(|source| (source.path.as_str(), source.code()));
    let forbidden = [".unwrap()", ".unwrap_err()", "todo!(", "unimplemented!(", "dbg!(", "println!(", "eprintln!("];
    refuse_lines(code, |line| forbidden.iter().any(|word| without_comment(line).contains(word)));
}

#[test]
fn sql_is_only_in_the_store() {
    let sources = sources(&["src"]);
    let outside = sources.iter().filter(|source| !source.is_in("src/store/"));
    let code = outside.map(|source| (source.path.as_str(), source.code()));
    let keywords = ["SELECT ", "INSERT INTO ", "UPDATE ", "DELETE FROM ", "ON CONFLICT"];
    refuse_lines(code, |line| keywords.iter().any(|word| without_comment(line).contains(word)));
}

#[test]
fn diesel_is_only_used_in_the_store() {
    let sources = sources(&["src"]);
    let outside = sources.iter().filter(|source| !source.is_in("src/store/"));
    let code = outside.map(|source| (source.path.as_str(), source.code()));
    refuse_lines(code, |line| without_comment(line).contains("diesel"));
}

#[test]
fn rdkafka_is_only_used_in_kafka() {
    let sources = sources(&["src"]);
    let outside = sources.iter().filter(|source| !source.is_in("src/kafka/"));
    let code = outside.map(|source| (source.path.as_str(), source.code()));
    refuse_lines(code, |line| without_comment(line).contains("rdkafka::"));
}

// The API of opentelemetry breaks with every release.
#[test]
fn opentelemetry_is_only_used_in_its_bridge() {
    let sources = sources(&["src"]);
    let outside = sources.iter().filter(|source| source.path != "src/telemetry/otel.rs");
    let code = outside.map(|source| (source.path.as_str(), source.code()));
    let uses = ["opentelemetry::", "opentelemetry_", "use opentelemetry"];
    refuse_lines(code, |line| uses.iter().any(|name| without_comment(line).contains(name)));
}

// `sql_query` is prepared again at every call.
#[test]
fn statements_are_not_prepared_at_every_call() {
    let sources = sources(&["src"]);
    let code = sources.iter().map(|source| (source.path.as_str(), source.code()));
    refuse_lines(code, |line| without_comment(line).contains("sql_query("));
}

// Code that several programs share is a crate, `tests/support`: included by path it would be compiled once for each of
// them. Only the tests that run on every store are included by path, because they must be compiled once per store.
#[test]
fn no_file_is_included_by_its_path() {
    let sources = sources(&["src", "tests/support", "benches", "examples"]);
    let texts = sources.iter().map(|source| (source.path.as_str(), source.text.as_str()));
    refuse_lines(texts, |line| line.trim_start().starts_with("#[path"));
}

#[test]
fn no_comment_defers_work() {
    let sources = sources(&["src", "tests", "benches", "examples"]);
    let others = sources.iter().filter(|source| source.path != "tests/it/tidy.rs");
    let marks = ["TODO", "FIXME", "XXX", "HACK"];
    refuse_lines(others.map(|source| (source.path.as_str(), source.text.as_str())), |line| {
        marks.iter().any(|mark| line.contains(mark))
    });
}

#[test]
fn no_file_contains_a_path_of_one_machine() {
    let sources = sources(&["src", "tests", "benches", "examples"]);
    let others = sources.iter().filter(|source| source.path != "tests/it/tidy.rs");
    let places = ["/home/", "/root/", "/Users/", "/work/", "C:\\"];
    refuse_lines(others.map(|source| (source.path.as_str(), source.text.as_str())), |line| {
        places.iter().any(|place| line.contains(place))
    });
}
