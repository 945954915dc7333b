//! What every store must do the same way: the core of the suite, also run on the oldest and the newest PostgreSQL and through PgBouncer.

mod claims;
mod extremes;
mod flow;
mod outcomes;
mod replay;
