//! The transaction of a transactional handler, as a store is given it and as it answers.

// Public in a private module: part of a public trait's bound, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use futures_util::future::BoxFuture;

use crate::types::Error;

/// The handler's part of a transaction: answers whether it may be committed.
pub type TxWork<C> = Box<dyn for<'c> FnOnce(&'c mut C) -> BoxFuture<'c, WorkEnd> + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkEnd {
    /// Settle and commit.
    Commit,
    /// The handler said no and nothing is under way on the connection: roll back.
    RollBack,
    /// The handler was stopped midway: the connection cannot be used again.
    Abandon,
}

/// What became of a transaction.
#[derive(Debug)]
pub enum Transacted {
    Committed,
    RolledBack,
    /// The claim was no longer current; everything was rolled back.
    ClaimLost,
    /// COMMIT was sent and its answer never came.
    InDoubt,
    /// The database refused at COMMIT (a deferred constraint, a serialization conflict): rolled back.
    Refused(String),
    /// The database was in the way before anything could be committed: rolled back.
    Failed(Error),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadBack {
    Committed,
    NotCommitted,
    ClaimLost,
    /// The old transaction still holds the row.
    Undecided,
}
