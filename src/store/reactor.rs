//! The store's own thread: a small tokio runtime that drives database connections and the engine's loops.
//!
//! A handler that blocks every thread of the user's runtime does not delay the renewal of claims or the replies of the
//! database. No handler runs here. Of the user's code, only functions run here that must not block: for passwords and
//! tokens, for ordering keys and tenants, and for the identities of records that wait for a decoder or are replayed.

use std::fmt;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::types::{Error, Result};

/// The thread ends when this is dropped.
pub(super) struct Reactor {
    handle: Handle,
    /// Dropping it ends the thread's `block_on`. Nothing is ever sent.
    _stop: oneshot::Sender<()>,
}

impl Reactor {
    /// Starts the thread. One thread is enough: its tasks only wait for the database and for timers.
    pub(super) fn start() -> Result<Self> {
        let cannot = |error: std::io::Error| Error::configuration("cannot start the store's thread").with_source(error);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(cannot)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new()
            .name("wharf-store".to_owned())
            .spawn(move || {
                let _ = runtime.block_on(stopped);
            })
            .map_err(cannot)?;
        Ok(Self { handle, _stop: stop })
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl fmt::Debug for Reactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reactor")
    }
}
