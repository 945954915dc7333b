//! What every store must do the same way: the core of the suite, also run on the oldest and the newest PostgreSQL and through PgBouncer.

mod claims;
mod extremes;
mod flow;
mod outcomes;
mod replay;
mod accept;
mod flow;
mod handler_errors;
mod hostile;
mod refused;
mod registration;
mod rename;
