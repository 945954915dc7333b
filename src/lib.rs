//! x
mod accept;
mod backoff;
mod error;
mod events;
mod handler;
mod inbox;
mod limits;
mod message;
mod outcome;
mod process;
mod record;
mod sanitize;
mod store;
pub use accept::Receipt;
pub use error::{Error, Result};
pub use handler::{
    Failure, Handler, HandlerKey, Registration, RetryPolicy, Topics, TxHandler, TxHandlerFn, handler, tx_handler,
};
pub use inbox::{Inbox, InboxBuilder, Running};
pub use limits::Limits;
pub use message::{Message, Payload, Raw};
pub use record::{Headers, Position, Record};
pub use store::{Backend, Store};
#[cfg(feature = "postgres")]
pub use store::{Postgres, PostgresOptions};
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
