//! The folder in which `scripts/setup` installs programs that Debian does not have. `scripts/environment.sh` computes
//! the same path: change both together.

use std::env::var_os;
use std::path::PathBuf;

use nix::unistd::geteuid;

/// The folder that the set-up script fills.
pub fn folder() -> PathBuf {
    if let Some(folder) = var_os("WHARF_TEST_CACHE") {
        return PathBuf::from(folder);
    }
    if geteuid().is_root() {
        // Not in root's home: the servers run under an unprivileged account, which cannot enter it.
        return PathBuf::from("/var/cache/wharf-test");
    }
    let caches = var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = caches.or_else(|| Some(PathBuf::from(var_os("HOME")?).join(".cache")));
    caches.expect("neither WHARF_TEST_CACHE nor HOME is set").join("wharf-test")
}
