//! Compares a build's handler keys with what is stored: what the build keeps, renames, adds, and what it would leave behind.
//!
//! Pure. For a pipeline: write the new build's manifest to a file, compare it with production before the deploy.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::HandlerStatus;

/// The handler keys of a build. See [`Inbox::manifest`](crate::Inbox::manifest).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// Its handlers, in the order of registration.
    pub handlers: Vec<ManifestHandler>,
}

/// A handler of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ManifestHandler {
    /// Its key.
    pub key: String,
    /// Keys it had.
    #[serde(default)]
    pub formerly: Vec<String>,
}

/// What a build means for one handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlannedHandler {
    /// The stored handler's current key; for a new handler, its key.
    pub handler_key: String,
    /// What becomes of it.
    pub change: KeyChange,
    /// Deliveries that are pending or running.
    pub open: u64,
    /// Deliveries that were given up.
    pub poisoned: u64,
}

/// What a build does to a handler key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum KeyChange {
    /// The build has it.
    Kept,
    /// The build has it under this key.
    Renamed {
        /// The key of the build.
        to: String,
    },
    /// Nothing is stored for it yet.
    New,
    /// The build does not know it.
    Removed,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept => f.write_str("kept"),
            Self::Renamed { to } => write!(f, "renamed to {to}"),
            Self::New => f.write_str("new"),
            Self::Removed => f.write_str("removed"),
        }
    }
}

impl PlannedHandler {
    /// Whether nothing would be left behind: deliveries of a key that no process knows are poisoned after a grace, and poisoned ones
    /// cannot be replayed.
    pub fn is_safe(&self) -> bool {
        self.change != KeyChange::Removed || self.open + self.poisoned == 0
    }
}

impl Manifest {
    /// What this build would mean for the handlers that are stored: those first, then the new ones.
    pub fn plan(&self, stored: &[HandlerStatus]) -> Vec<PlannedHandler> {
        let is_of = |entry: &ManifestHandler, handler: &HandlerStatus| {
            let keys = || std::iter::once(&handler.handler_key).chain(&handler.former_keys);
            keys().any(|key| *key == entry.key || entry.formerly.contains(key))
        };
        let old = stored.iter().map(|handler| {
            let change = match self.handlers.iter().find(|entry| is_of(entry, handler)) {
                Some(entry) if entry.key == handler.handler_key => KeyChange::Kept,
                Some(entry) => KeyChange::Renamed { to: entry.key.clone() },
                None => KeyChange::Removed,
            };
            PlannedHandler {
                handler_key: handler.handler_key.clone(),
                change,
                open: handler.due + handler.later + handler.running,
                poisoned: handler.poisoned,
            }
        });
        let is_new = |entry: &&ManifestHandler| !stored.iter().any(|handler| is_of(entry, handler));
        let new = self.handlers.iter().filter(is_new).map(|entry| PlannedHandler {
            handler_key: entry.key.clone(),
            change: KeyChange::New,
            open: 0,
            poisoned: 0,
        });
        old.chain(new).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(key: &str, former: &[&str], open: u64, poisoned: u64) -> HandlerStatus {
        let former: Vec<String> = former.iter().map(|key| (*key).to_owned()).collect();
        serde_json::from_value(serde_json::json!({
            "handler_key": key, "former_keys": former, "due": open, "later": 0, "running": 0, "poisoned": poisoned,
            "oldest_due_secs": null, "next_due_at": null, "paused_at": null, "unknown_since": null, "processors": 1,
        }))
        .unwrap()
    }

    fn build(handlers: &[(&str, &[&str])]) -> Manifest {
        let entry = |(key, formerly): &(&str, &[&str])| ManifestHandler {
            key: (*key).to_owned(),
            formerly: formerly.iter().map(|key| (*key).to_owned()).collect(),
        };
        Manifest { handlers: handlers.iter().map(entry).collect() }
    }

    fn told(plan: &[PlannedHandler]) -> Vec<String> {
        plan.iter().map(|one| format!("{} {:?} {}", one.handler_key, one.change, one.is_safe())).collect()
    }

    #[test]
    fn kept_renamed_new_and_removed_handlers_are_told_apart() {
        let stored = [stored("a", &[], 5, 0), stored("b", &[], 5, 0), stored("c", &[], 0, 0), stored("d", &[], 1, 0)];
        let plan = build(&[("a", &[]), ("b2", &["b"]), ("e", &[])]).plan(&stored);
        let expected =
            ["a Kept true", "b Renamed { to: \"b2\" } true", "c Removed true", "d Removed false", "e New true"];
        assert_eq!(told(&plan), expected);
    }

    #[test]
    fn a_rename_back_is_a_rename_and_poisoned_ones_are_not_left_behind() {
        let stored = [stored("new", &["old"], 5, 0), stored("gone", &[], 0, 2)];
        let plan = build(&[("old", &[])]).plan(&stored);
        assert_eq!(told(&plan), ["new Renamed { to: \"old\" } true", "gone Removed false"]);
    }
}
