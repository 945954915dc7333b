//! Finds the PostgreSQL programs to test against, and creates the data folder that every cluster starts from.
//!
//! `initdb` runs once per test process: its result is copied for each cluster, which is ten times faster.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use crate::folder::ServiceFolder;
use crate::process::{run_to_end, service_tool};

/// A folder with `initdb` and `postgres`, to test another version than the newest installed one.
const FOLDER_VARIABLE: &str = "WHARF_TEST_PG_BIN";

/// The role that `initdb` creates.
pub const SUPERUSER: &str = "postgres";

/// The program `name` of the PostgreSQL under test. Panics with instructions if there is none.
pub fn program(name: &str) -> PathBuf {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        folder().unwrap_or_else(|| {
            panic!(
                "no PostgreSQL programs found. Run scripts/setup, or set {FOLDER_VARIABLE} to the folder that holds \
                 `initdb` and `postgres`, or DATABASE_URL to a running server"
            )
        })
    });
    FOLDER.join(name)
}

/// Fills `target` with a fresh, never started data folder.
pub fn make_data_folder(target: &Path, within: &Path) {
    static TEMPLATE: LazyLock<ServiceFolder> = LazyLock::new(initialise);
    let mut copy = service_tool(Path::new("cp"), within);
    copy.args(["-a", "--reflink=auto"]).arg(TEMPLATE.path().join("data")).arg(target);
    run_to_end(copy);
}

fn initialise() -> ServiceFolder {
    let folder = ServiceFolder::create("initdb");
    let mut initdb = service_tool(&program("initdb"), folder.path());
    initdb
        .args(["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--username", SUPERUSER])
        .arg("--pgdata")
        .arg(folder.path().join("data"));
    run_to_end(initdb);
    folder
}

fn folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
        let folder = PathBuf::from(folder);
        // A mistyped folder must not silently test another version.
        assert!(has_server(&folder), "{FOLDER_VARIABLE} is {}, which has no PostgreSQL", folder.display());
        return Some(folder);
    }
    newest_of_debian().or_else(of_pg_config)
}

fn has_server(folder: &Path) -> bool {
    folder.join("initdb").is_file() && folder.join("postgres").is_file()
}

/// Debian installs the versions in separate folders, none of them in `PATH`.
fn newest_of_debian() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?;
    versions
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version: u32 = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
        .filter(|(_, folder)| has_server(folder))
        .max()
        .map(|(_, folder)| folder)
}

fn of_pg_config() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok()?;
    let folder = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    has_server(&folder).then_some(folder)
}
