//! What every store must do the same way: the core of the suite, also run on the oldest and the newest PostgreSQL and through PgBouncer.

mod accept;
mod claims;
mod extremes;
mod flow;
mod handler_errors;
mod hostile;
mod identity;
mod outcomes;
mod refused;
mod registration;
mod rename;
mod replay;
mod transactional;
