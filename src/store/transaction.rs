//! The transaction of a transactional handler: its operations and its possible results.

// Public in a private module: part of a public trait's bound, but it cannot be named outside the crate.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;

use super::seam::ClaimId;
use crate::types::{Error, Result};

/// An open transaction on a connection that is not shared. Dropping it rolls it back.
pub trait Transaction: Send + Sized + 'static {
    /// The connection that the handler receives.
    type Connection: Send + 'static;

    /// Whether a transaction is open. It is not after a commit with [`Then::End`].
    fn is_open(&self) -> bool;

    /// Fails only after the transaction has ended.
    fn conn(&mut self) -> Result<&mut Self::Connection>;

    /// Sets a savepoint: later work can be undone without the work before it. The previous savepoint, if any, is
    /// released: its work can then be undone only with the whole transaction. An error means that the transaction is
    /// lost. It may be lost without an error as well: then nothing more is written, and the next step fails.
    fn savepoint(&mut self) -> impl Future<Output = Result<()>> + Send;

    /// Fails if the transaction is lost: a statement has aborted it, or it has ended.
    fn check(&mut self) -> impl Future<Output = Result<()>> + Send;

    /// Undoes the work since the last savepoint, even after a failed statement. An error means that the transaction is
    /// lost.
    fn roll_back_to_savepoint(&mut self, undo: Undo) -> impl Future<Output = Result<()>> + Send;

    /// Settles the claims as done and commits, all or nothing. With [`Then::Begin`], the next transaction is opened
    /// only if this one has committed.
    fn commit(&mut self, claims: &[ClaimId], then: Then) -> impl Future<Output = Transacted> + Send;

    /// Undoes everything. No statement may be running on the connection.
    fn roll_back(self) -> impl Future<Output = Result<()>> + Send;

    /// Undoes everything after a handler was stopped while it ran.
    fn abandon(self) -> impl Future<Output = ()> + Send;
}

/// How the handler ended whose work is undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// It returned: no statement is running on the connection.
    Answered,
    /// It was stopped while it ran: one of its statements may be running.
    Midway,
}

/// What follows a COMMIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The connection is returned.
    End,
    /// The next transaction begins in the same round trip.
    Begin,
}

/// The result of a commit.
#[derive(Debug)]
pub enum Transacted {
    Committed,
    /// A claim was no longer current; everything was rolled back.
    ClaimLost,
    /// COMMIT was sent and no reply arrived.
    InDoubt,
    /// The transaction could not be committed because of the handler (a deferred constraint, an ignored error, a COMMIT
    /// of its own). It was rolled back.
    Refused(String),
    /// The database failed before the commit. The transaction was rolled back.
    Failed(Error),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadBack {
    Committed,
    NotCommitted,
    ClaimLost,
    /// The old transaction still locks the row.
    Undecided,
}
