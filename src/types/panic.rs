//! The message of a panic, for errors and events.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns the message of a panic. Drops the payload inside `catch_unwind`, because its destructor may panic again.
pub(crate) fn panic_text(panic: Box<dyn Any + Send>) -> String {
    let text = match panic.downcast_ref::<&str>() {
        Some(text) => (*text).to_owned(),
        None => panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "(no message)".to_owned()),
    };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(panic)));
    text
}
