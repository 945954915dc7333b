//! Connections: options, opening, the pool.
//!
//! Passwords and client certificates from outside the URL are fetched for each connection. No password appears in an
//! error or a `Debug` output. Settings are sent in the start-up packet, never as session state; for a pooler that
//! rejects them, the connection is opened without them. Behind a pooler the settings of the role apply, so connecting
//! verifies the settings that the engine depends on.

use std::error::Error as StdError;
use std::time::{Duration, Instant};

use deadpool::Runtime;
use deadpool::managed::{PoolError, QueueMode, TimeoutType};
use diesel::{ConnectionError, ConnectionResult};
use diesel_async::pooled_connection::deadpool::{Object, Pool};
use diesel_async::pooled_connection::{AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod};
use diesel_async::{AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::errors::database;
use super::hosts;
use super::password::{Password, places};
use super::statement::{only_row, rows, statements};
use super::tls::{self, Trust};
use super::transact::Session;
use super::url;
use crate::types::{Error, Kind, Result, setters};

/// Settings of all sessions, also of those for handlers. JIT would compile a claim for longer than it runs. The isolation
/// level is the one that the statements are written for. A transaction left open by a fault must not hold its locks
/// forever. The time zone is the one that the driver sets: `RESET ALL` keeps it. `wharf.session` shows whether these
/// settings reach the server.
const STARTUP_SETTINGS: &str = "-c wharf.session=own -c jit=off -c default_transaction_isolation=read\\ committed \
                                -c standard_conforming_strings=on -c idle_in_transaction_session_timeout=5min \
                                -c timezone=UTC";

/// Settings for the engine's own statements; the sessions of handlers do not have them. The statements have one good plan
/// for all array lengths, but to the planner a plan for arrays of unknown length looks expensive: by default it would
/// plan each statement on each call, which takes longer than a small batch. A session keeps the plans that it makes on
/// its first calls, and on a new inbox the tables are empty then: without `enable_seqscan=off` each later claim would
/// read the whole table, until the first ANALYZE.
const PLAN_SETTINGS: &str = "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off";

/// For the sessions of handlers, whose transactions begin as READ WRITE. A statement that runs after a handler has ended
/// its transaction would commit on its own, so it must not write.
const WRITE_GUARD: &str = "-c default_transaction_read_only=on";

rows! {
    SessionRow { isolation: String, standard_strings: String, is_own: bool }
}

statements! {
    /// `is_own`: the start-up settings reach the server, and `RESET ALL` leaves what the driver sets when it connects.
    ReadSession("
        SELECT current_setting('default_transaction_isolation'), current_setting('standard_conforming_strings'),
               coalesce(current_setting('wharf.session', true), '') = 'own'
               AND (SELECT count(*) = 2 FROM pg_settings
                    WHERE (name, reset_val) IN (('TimeZone', 'UTC'), ('client_encoding', 'UTF8')))")
    -> SessionRow {}
}

/// Refuses a session with settings that the engine cannot work with. Other settings do not matter: every transaction of
/// several statements sets its isolation level, acknowledged data is committed with `synchronous_commit`, and a
/// read-only database rejects writes but can still be queried. Returns whose the sessions are.
pub(super) async fn verify(conn: &mut AsyncPgConnection) -> Result<Session> {
    let session = ReadSession {}.load::<SessionRow>(conn).await.and_then(only_row);
    let SessionRow { isolation, standard_strings, is_own } =
        session.map_err(database("cannot read the session's settings"))?;
    let wanted = [
        ("default_transaction_isolation", isolation, "read committed"),
        ("standard_conforming_strings", standard_strings, "on"),
    ];
    match wanted.into_iter().find(|(_, found, wanted)| found != wanted) {
        None if is_own => Ok(Session::Own),
        None => Ok(Session::Pooled),
        Some((name, found, wanted)) => Err(Error::configuration(format!(
            "cannot work in sessions with {name} = '{found}': behind a pooler, run ALTER ROLE ... SET {name} = '{wanted}' for the role \
             that connects; otherwise take it out of the URL's options"
        ))),
    }
}

/// Connection options of the store that are not part of the URL. [`Store::connect_with`](crate::Store::connect_with)
/// takes them.
///
/// ```
/// use std::time::Duration;
/// use wharf::store::PostgresOptions;
///
/// let options = PostgresOptions::default().pool_size(20).connect_timeout(Duration::from_secs(5));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PostgresOptions {
    /// Connections of the engine, of accepting and of operators' calls. Default: 10. One is enough to work. One more is
    /// opened to renew claims. Raise it with [`Limits::accept_batches`](crate::Limits::accept_batches).
    pub pool_size: usize,
    /// Connections for transactional handlers: each holds one while it runs, so no more of them run at a time, whatever
    /// their concurrency is. They are opened when they are needed, on the runtime on which the handlers run. Default: 8.
    /// Raise it for transactional handlers that wait.
    pub handler_connections: usize,
    /// How long to wait for a new connection or for a busy one of the pool. Default: 10 s. Several hosts share it.
    pub connect_timeout: Duration,
    /// How long a statement may run, including those of transactional handlers. Through a pooler, set it on the role
    /// instead. Default: 60 s. Raise it for transactional handlers with longer statements.
    pub statement_timeout: Duration,
    pub(super) password: Option<Password>,
}

setters!(PostgresOptions {
    pool_size: usize,
    handler_connections: usize,
    connect_timeout: Duration,
    statement_timeout: Duration,
});

impl PostgresOptions {
    pub(super) fn validate(&self) -> Result<()> {
        for (name, count) in [("pool_size", self.pool_size), ("handler_connections", self.handler_connections)] {
            if count == 0 {
                return Err(Error::configuration(format!("{name} must be at least 1")));
            }
        }
        Ok(())
    }
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self {
            pool_size: 10,
            handler_connections: 8,
            connect_timeout: Duration::from_secs(10),
            statement_timeout: Duration::from_secs(60),
            password: None,
        }
    }
}

/// Everything needed to open a connection.
#[derive(Clone)]
pub(super) struct Connector {
    config: tokio_postgres::Config,
    /// Built once; `fresh_tls` replaces it when there is a client certificate.
    tls: MakeRustlsConnect,
    /// Set if TLS uses a client certificate, which is read again for each connection.
    trust: Option<Trust>,
    password: Option<Password>,
    /// Start-up settings. If a pooler rejects a connection because of them, it is opened again without them.
    settings: String,
    /// More of them, only for the engine's own connections.
    plan_settings: &'static str,
    /// More of them, only for connections of handlers. The URL cannot override these.
    write_guard: &'static str,
    /// For opening one connection, including the password and all hosts.
    open_timeout: Duration,
}

impl Connector {
    pub(super) fn new(url: &str, options: &PostgresOptions) -> Result<Self> {
        let (url, parameters) = url::split(url)?;
        let mut config: tokio_postgres::Config = url.parse().map_err(|_| {
            // The parser's own error can quote parts of the URL, including the password.
            Error::configuration("cannot parse the database URL; expected postgres://user:password@host:5432/database")
        })?;
        // For one address of a host. Each host has its own timeout, see `open`.
        let hosts = u32::try_from(config.get_hosts().len()).unwrap_or(u32::MAX).max(1);
        config.connect_timeout(options.connect_timeout / hosts);
        // A dead peer without a FIN is detected in seconds, not in the two hours of the defaults.
        config.tcp_user_timeout(Duration::from_secs(30));
        config.keepalives_idle(Duration::from_secs(10));
        config.keepalives_interval(Duration::from_secs(5));
        config.keepalives_retries(3);
        if config.get_application_name().is_none() {
            config.application_name("wharf");
        }
        if let Some(mode) = parameters.mode {
            config.ssl_mode(mode);
        }
        let tls = MakeRustlsConnect::new(tls::client_config(&parameters.trust)?);
        let trust = Some(parameters.trust).filter(|trust| trust.client.is_some());
        let password = options.password.clone().or(parameters.passfile.map(Password::Passfile));
        let settings = format!("{STARTUP_SETTINGS} -c statement_timeout={}", options.statement_timeout.as_millis());
        let (plan_settings, write_guard, open_timeout) = (PLAN_SETTINGS, "", options.connect_timeout);
        Ok(Self { config, tls, trust, password, settings, plan_settings, write_guard, open_timeout })
    }

    /// Opens connections for handlers: their statements are planned as the server is configured.
    pub(super) fn for_handlers(&self) -> Self {
        Self { plan_settings: "", write_guard: WRITE_GUARD, ..self.clone() }
    }

    /// Adds a start-up setting.
    #[cfg(feature = "testing")]
    pub(super) fn add_setting(&mut self, setting: &str) {
        let options = [self.config.get_options().unwrap_or(""), setting].join(" ");
        self.config.options(options.trim());
    }

    /// The server's address, without any secret.
    pub(super) fn target(&self) -> String {
        let places: Vec<String> = places(&self.config).map(|(host, port)| format!("{host}:{port}")).collect();
        let database = self.config.get_dbname().or(self.config.get_user()).unwrap_or("postgres");
        format!("{database} at {}", places.join(","))
    }

    /// For cancelling a statement, which needs its own connection.
    pub(super) fn tls(&self) -> MakeRustlsConnect {
        self.fresh_tls().unwrap_or_else(|_| self.tls.clone())
    }

    /// TLS with the current client certificate.
    fn fresh_tls(&self) -> Result<MakeRustlsConnect> {
        match &self.trust {
            None => Ok(self.tls.clone()),
            Some(trust) => tls::client_config(trust).map(MakeRustlsConnect::new),
        }
    }

    /// Opens a connection to the first host that answers as wanted. The hosts share the timeout: one that does not
    /// answer leaves time for those behind it. The driver task is spawned on the current runtime.
    async fn open(&self) -> ConnectionResult<AsyncPgConnection> {
        let deadline = Instant::now() + self.open_timeout;
        let bad = ConnectionError::BadConnection;
        let mut hosts = hosts::each(&self.config);
        if let Some(password) = &self.password {
            password.give_to(&mut hosts).await.map_err(bad)?;
        }
        let tls = self.fresh_tls().map_err(|error| bad(format!("{error:#}")))?;
        let mut behind = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
        let mut errors = Vec::new();
        for host in hosts {
            let share = deadline.saturating_duration_since(Instant::now()) / behind.max(1);
            behind -= 1;
            // The driver's own timeout covers the socket only, not a server that never answers.
            let opened = tokio::time::timeout(share, self.open_one(&host, &tls)).await;
            match opened.unwrap_or_else(|_| Err(bad("the server does not answer".to_owned()))) {
                Ok(opened) => return Ok(opened),
                Err(error) => errors.push((host, error)),
            }
        }
        Err(bad(hosts::joined(errors)))
    }

    /// Opens a connection to the only host of `plain`.
    async fn open_one(
        &self,
        plain: &tokio_postgres::Config,
        tls: &MakeRustlsConnect,
    ) -> ConnectionResult<AsyncPgConnection> {
        let mut config = plain.clone();
        // The user's options come last, so that they override ours; search_path is one of them.
        let users = self.config.get_options().unwrap_or("");
        let options = [&self.settings, self.plan_settings, users, self.write_guard].join(" ");
        config.options(options.trim());
        // The driver's check would take the guard for a server that is read-only.
        let checks_writes =
            !self.write_guard.is_empty() && config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite;
        if checks_writes {
            config.target_session_attrs(TargetSessionAttrs::Any);
        }
        let connected = match config.connect(tls.clone()).await {
            Err(error) if is_refused_setting(&error) => plain.connect(tls.clone()).await,
            connected => connected,
        };
        let (client, connection) = connected.map_err(|error| ConnectionError::BadConnection(describe(&error)))?;
        let mut conn = AsyncPgConnection::try_from_client_and_connection(client, connection).await?;
        if checks_writes {
            let refused = |error| ConnectionError::BadConnection(format!("the server does not allow writes: {error}"));
            conn.batch_execute("BEGIN READ WRITE; ROLLBACK").await.map_err(refused)?;
        }
        Ok(conn)
    }

    /// A pool whose connections are driven by `runtime`; without one, by the runtime of the task that opens them.
    pub(super) fn pool(&self, size: usize, runtime: Option<&Handle>) -> Result<Pool<AsyncPgConnection>> {
        let connector = self.clone();
        let runtime = runtime.cloned();
        let mut manager = ManagerConfig::default();
        // The default sends a SELECT 1 before each use. A broken connection is detected soon enough, and every caller
        // retries.
        manager.recycling_method = RecyclingMethod::Fast;
        manager.custom_setup = Box::new(move |_| {
            let connector = connector.clone();
            let runtime = runtime.clone().unwrap_or_else(Handle::current);
            // Includes the time that the password takes.
            let opening = runtime.spawn(async move {
                let opened = tokio::time::timeout(connector.open_timeout, connector.open()).await;
                opened.unwrap_or_else(|_| Err(ConnectionError::BadConnection("the server does not answer".to_owned())))
            });
            async move {
                let ended = |error: tokio::task::JoinError| match error.is_panic() {
                    true => "the function that gives the password panicked",
                    false => "the store was closed",
                };
                opening.await.unwrap_or_else(|error| Err(ConnectionError::BadConnection(ended(error).to_owned())))
            }
            .boxed()
        });
        let manager = AsyncDieselConnectionManager::new_with_config(String::new(), manager);
        Pool::builder(manager)
            .max_size(size)
            .runtime(Runtime::Tokio1)
            // Prefers the connection that was used last: its server process has warm caches.
            .queue_mode(QueueMode::Lifo)
            .wait_timeout(Some(self.open_timeout))
            .build()
            .map_err(|error| Error::configuration("cannot create the connection pool").with_source(error))
    }
}

/// Takes a connection out of the pool.
pub(super) async fn get(pool: &Pool<AsyncPgConnection>, target: &str) -> Result<Object<AsyncPgConnection>> {
    pool.get().await.map_err(|error| match error {
        PoolError::Timeout(TimeoutType::Wait) => {
            let size = pool.status().max_size;
            let context =
                format!("no connection to {target} became free in time: all {size} are in use; raise pool_size");
            Error::new(Kind::Connection, context)
        }
        error => Error::new(Kind::Connection, format!("cannot connect to {target}")).with_source(cause(&error)),
    })
}

/// The root cause: the pool and the drivers each repeat the error below them.
fn cause(error: &dyn StdError) -> Cause {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    Cause(error.to_string())
}

/// The text of the root cause, as the source of an error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Cause(String);

/// If the session ended with the error, it is a connection error: whether the statement took effect is unknown. Diesel
/// reports neither FATAL nor SQLSTATEs, so the session is probed.
pub(super) async fn judge(conn: &mut AsyncPgConnection, error: Error) -> Error {
    if error.kind() == Kind::Server && !is_alive(conn).await {
        return Error::new(Kind::Connection, error.to_string());
    }
    error
}

/// Whether the session still answers, even with the error of a failed transaction.
pub(super) async fn is_alive(conn: &mut AsyncPgConnection) -> bool {
    match conn.batch_execute("").await {
        Ok(()) => true,
        Err(error) => super::errors::kind(&error) != Kind::Connection,
    }
}

/// A pooler that does not forward start-up settings reports a protocol violation.
fn is_refused_setting(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| *code == tokio_postgres::error::SqlState::PROTOCOL_VIOLATION)
}

/// The driver's error with its cause, which has the reason.
fn describe(error: &tokio_postgres::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_error_and_no_target_shows_the_password() {
        for url in ["postgres://u:hunter2@h:notaport/d", "hunter2", "postgres://u:hunter2@h/d?nonsense=1"] {
            match Connector::new(url, &PostgresOptions::default()) {
                Ok(connector) => assert!(!connector.target().contains("hunter2")),
                Err(error) => assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}"),
            }
        }
    }
}
