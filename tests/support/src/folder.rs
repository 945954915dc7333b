//! Temporary folders for servers: owned by the server's account, and in memory if there is enough of it.
//!
//! A database has 300 files and a cluster 1,000; creating them in memory is ten times faster than on some disks. A
//! killed server loses no data because of this: its writes are in the kernel either way. `TMPDIR` overrides the
//! choice.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use tempfile::TempDir;

use crate::process::{remove_when_we_are_gone, service_account};

const IN_MEMORY: &str = "/dev/shm";

/// Memory is used only if the folders, at most about 2 GB, leave enough of it.
const SPARE_BYTES_MIN: u64 = 4 << 30;

/// A temporary folder that belongs to the service account; removed when dropped, or by the janitor.
#[derive(Debug)]
pub struct ServiceFolder {
    folder: TempDir,
}

impl ServiceFolder {
    pub fn create(purpose: &str) -> ServiceFolder {
        let folder = tempfile::Builder::new()
            .prefix(&format!("wharf-{purpose}-"))
            .tempdir_in(&*BASE)
            .unwrap_or_else(|error| panic!("cannot make a folder in {}: {error}", BASE.display()));
        remove_when_we_are_gone(folder.path());
        give_to_service(folder.path());
        ServiceFolder { folder }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a file that only the service can read, as servers require for their keys. Returns its path.
    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, content).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("our own file");
        give_to_service(&path);
        path
    }
}

fn give_to_service(path: &Path) {
    if let Some(account) = service_account() {
        chown(path, Some(account.uid), Some(account.gid))
            .unwrap_or_else(|error| panic!("cannot give {} to the service: {error}", path.display()));
    }
}

/// Whether the folders are in memory, where copying a database is cheaper than logging it.
pub fn are_in_memory() -> bool {
    BASE.starts_with(IN_MEMORY)
}

static BASE: LazyLock<PathBuf> = LazyLock::new(|| {
    let has_room = free_bytes(IN_MEMORY) >= SPARE_BYTES_MIN && free_memory_bytes() >= SPARE_BYTES_MIN;
    if std::env::var_os("TMPDIR").is_none() && has_room { PathBuf::from(IN_MEMORY) } else { std::env::temp_dir() }
});

/// Free space of the file system at `path`; 0 if there is none.
fn free_bytes(path: &str) -> u64 {
    let Ok(output) = Command::new("stat").args(["--file-system", "--format=%a %S", path]).output() else { return 0 };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    let [blocks, block_bytes] = numbers[..] else { return 0 };
    blocks * block_bytes
}

fn free_memory_bytes() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
