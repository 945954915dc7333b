//! The transaction that a transactional handler works in: what the stages may ask of it, and what it may come to.

// Public in a private module: part of a public trait's bound, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;

use super::seam::ClaimId;
use crate::types::{Error, Result};

/// An open transaction on a connection that nobody else uses. One that is dropped before its end is rolled back.
pub trait Transaction: Send + Sized + 'static {
    /// What the handler works with.
    type Connection: Send + 'static;

    /// Whether there is a transaction to work in: not after a commit that was to be the end.
    fn is_open(&self) -> bool;

    /// Fails only after the transaction has ended.
    fn conn(&mut self) -> Result<&mut Self::Connection>;

    /// What follows can be undone without what came before. The savepoint before it, if there is one, is released: its work is kept, and
    /// it can be undone only with the whole transaction. An error means that the transaction is lost.
    fn savepoint(&mut self) -> impl Future<Output = Result<()>> + Send;

    /// Undoes what was done since the last savepoint, also after a statement has failed. An error means that the transaction is lost.
    fn roll_back_to_savepoint(&mut self, undo: Undo) -> impl Future<Output = Result<()>> + Send;

    /// Settles the claims as done and commits, all or nothing. With [`Then::Begin`] the next transaction is open when this one has committed,
    /// and only then.
    fn commit(&mut self, claims: &[ClaimId], then: Then) -> impl Future<Output = Transacted> + Send;

    /// Undoes everything. Nothing is under way on the connection.
    fn roll_back(self) -> impl Future<Output = Result<()>> + Send;

    /// Undoes everything after a handler was stopped midway.
    fn abandon(self) -> impl Future<Output = ()> + Send;
}

/// How the handler ended whose work is undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// It has answered: nothing is under way on the connection.
    Answered,
    /// It was stopped midway: a statement of it may be under way.
    Midway,
}

/// What follows a COMMIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The connection is given back.
    End,
    /// The next transaction, in the same round trip.
    Begin,
}

/// What became of a transaction that was to be committed.
#[derive(Debug)]
pub enum Transacted {
    Committed,
    /// A claim was no longer current; everything was rolled back.
    ClaimLost,
    /// COMMIT was sent and its answer never came.
    InDoubt,
    /// The transaction could not be committed for what the handler did in it (a deferred constraint, an error that it swallowed, a COMMIT of its
    /// own): rolled back.
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
