//! Connections: options, opening, the pool.
//!
//! Passwords and client certificates that come from outside of the URL are asked for each connection. Nothing here puts a password into an error or a `Debug`. Settings travel in the start-up packet,
//! never as session state; a pooler that refuses them gets a plain connection. Behind a pooler the settings of the role apply, so
//! connecting verifies those that the engine rests on.

use std::error::Error as StdError;
use std::time::Duration;

use deadpool::Runtime;
use deadpool::managed::{PoolError, QueueMode, TimeoutType};
use diesel::{ConnectionError, ConnectionResult};
use diesel_async::pooled_connection::deadpool::{Object, Pool};
use diesel_async::pooled_connection::{AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod};
use diesel_async::{AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::errors::database;
use super::password::{Password, places};
use super::statement::{only_row, rows, statements};
use super::tls::{self, Trust};
use super::url;
use crate::types::{Error, Kind, Result, setters};

/// Engine settings that are not session state. JIT would compile a claim for longer than it runs; the isolation level is the one
/// the statements are written for; a transaction left open by a fault must not hold its locks for ever. The engine's statements have one good
/// plan whatever their arrays hold, but to the planner a plan for arrays of unknown length looks expensive: left to itself it plans each
/// statement anew, which takes longer than a small batch. Handlers are given the default back (`transact.rs`).
const STARTUP_SETTINGS: &str = "-c jit=off -c plan_cache_mode=force_generic_plan -c default_transaction_isolation=read\\ committed \
                                -c standard_conforming_strings=on -c idle_in_transaction_session_timeout=5min";

rows! {
    SessionRow { isolation: String, standard_strings: String }
}

statements! {
    Session("SELECT current_setting('default_transaction_isolation'), current_setting('standard_conforming_strings')")
    -> SessionRow {}
}

/// Refuses a session whose settings the engine cannot work with. What is not looked at here does not matter: every transaction of
/// several statements names its level itself, what is acknowledged is committed with `synchronous_commit`, and a database that is
/// read-only refuses writes by itself and can still be looked at.
pub(super) async fn verify(conn: &mut AsyncPgConnection) -> Result<()> {
    let session = Session {}.load::<SessionRow>(conn).await.and_then(only_row);
    let SessionRow { isolation, standard_strings } = session.map_err(database("cannot read the session's settings"))?;
    let wanted = [
        ("default_transaction_isolation", isolation, "read committed"),
        ("standard_conforming_strings", standard_strings, "on"),
    ];
    match wanted.into_iter().find(|(_, found, wanted)| found != wanted) {
        None => Ok(()),
        Some((name, found, wanted)) => Err(Error::configuration(format!(
            "cannot work in sessions with {name} = '{found}': behind a pooler, run ALTER ROLE ... SET {name} = '{wanted}' for the role \
             that connects; otherwise take it out of the URL's options"
        ))),
    }
}

/// How the store connects, beyond what the URL says.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PostgresOptions {
    /// Connections in the pool. Default: 10. One is enough to work; transactional handlers hold one each while they run, and two
    /// are kept free of them where there are three or more. One more connection is opened for renewing claims.
    pub pool_size: usize,
    /// How long to wait for a connection, be it a new one or one of the pool that is in use. Default: 10 s.
    pub connect_timeout: Duration,
    /// How long any statement may run, transactional handlers' included; through a pooler, set it on the role instead.
    /// Default: 60 s.
    pub statement_timeout: Duration,
    pub(super) password: Option<Password>,
}

setters!(PostgresOptions { pool_size: usize, connect_timeout: Duration, statement_timeout: Duration });

impl Default for PostgresOptions {
    fn default() -> Self {
        Self {
            pool_size: 10,
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
    tls: MakeRustlsConnect,
    /// Set where TLS has a client certificate, which is read anew for each connection.
    trust: Option<Trust>,
    password: Option<Password>,
    /// Start-up settings, left out after a pooler has refused them.
    settings: String,
    open_timeout: Duration,
}

impl Connector {
    pub(super) fn new(url: &str, options: &PostgresOptions) -> Result<Self> {
        let (url, parameters) = url::split(url)?;
        let mut config: tokio_postgres::Config = url.parse().map_err(|_| {
            // The parser's own error can quote parts of the URL, and with them the password.
            Error::configuration(
                "cannot read the database URL, it is written like postgres://user:password@host:5432/database",
            )
        })?;
        // A host that does not answer leaves time for the others.
        let hosts = u32::try_from(config.get_hosts().len()).unwrap_or(u32::MAX).max(1);
        config.connect_timeout(options.connect_timeout / hosts);
        // A dead peer without a FIN is noticed in seconds, not in the two hours of the defaults.
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
        Ok(Self { config, tls, trust, password, settings, open_timeout: options.connect_timeout })
    }

    /// One more start-up setting.
    #[cfg(feature = "testing")]
    pub(super) fn add_setting(&mut self, setting: &str) {
        let options = [self.config.get_options().unwrap_or(""), setting].join(" ");
        self.config.options(options.trim());
    }

    /// Who is connected to, without any secret.
    pub(super) fn target(&self) -> String {
        let places: Vec<String> = places(&self.config).map(|(host, port)| format!("{host}:{port}")).collect();
        let database = self.config.get_dbname().or(self.config.get_user()).unwrap_or("postgres");
        format!("{database} at {}", places.join(","))
    }

    /// For cancelling a statement, which is a connection of its own.
    pub(super) fn tls(&self) -> MakeRustlsConnect {
        self.fresh_tls().unwrap_or_else(|_| self.tls.clone())
    }

    /// With the client certificate of now.
    fn fresh_tls(&self) -> Result<MakeRustlsConnect> {
        match &self.trust {
            None => Ok(self.tls.clone()),
            Some(trust) => tls::client_config(trust).map(MakeRustlsConnect::new),
        }
    }

    /// Opens a connection. Must be called on the store's reactor, because the driver task is spawned where this runs.
    async fn open(&self) -> ConnectionResult<AsyncPgConnection> {
        let bad = ConnectionError::BadConnection;
        let mut plain = self.config.clone();
        if let Some(password) = &self.password {
            plain.password(password.get(&self.config).await.map_err(bad)?);
        }
        let tls = self.fresh_tls().map_err(|error| bad(format!("{error:#}")))?;
        let mut config = plain.clone();
        // The user's options come last: search_path and whatever they override.
        let options = [self.settings.as_str(), self.config.get_options().unwrap_or("")].join(" ");
        config.options(options.trim());
        let connected = match config.connect(tls.clone()).await {
            Err(error) if is_refused_setting(&error) => plain.connect(tls).await,
            connected => connected,
        };
        let (client, connection) = connected.map_err(|error| bad(describe(&error)))?;
        AsyncPgConnection::try_from_client_and_connection(client, connection).await
    }

    /// A pool whose connections are driven by `reactor`.
    pub(super) fn pool(&self, size: usize, reactor: &Handle) -> Result<Pool<AsyncPgConnection>> {
        let connector = self.clone();
        let reactor = reactor.clone();
        let mut manager = ManagerConfig::default();
        // The default sends a SELECT 1 before each use. A broken connection shows itself soon enough, and every caller retries.
        manager.recycling_method = RecyclingMethod::Fast;
        manager.custom_setup = Box::new(move |_| {
            let connector = connector.clone();
            // The driver's own timeout covers the socket only, not a server that never says anything.
            let opening = reactor.spawn(async move {
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
            // The one that was used last: its server process has everything at hand.
            .queue_mode(QueueMode::Lifo)
            .wait_timeout(Some(self.open_timeout))
            .build()
            .map_err(|error| Error::configuration("cannot make the connection pool").with_source(error))
    }
}

/// Takes a connection out of the pool.
pub(super) async fn get(pool: &Pool<AsyncPgConnection>, target: &str) -> Result<Object<AsyncPgConnection>> {
    pool.get().await.map_err(|error| match error {
        PoolError::Timeout(TimeoutType::Wait) => {
            let size = pool.status().max_size;
            let context = format!(
                "no connection to {target} became free in time: all {size} are in use, one by each transactional handler that runs; \
                 raise pool_size"
            );
            Error::new(Kind::Connection, context)
        }
        error => Error::new(Kind::Connection, format!("cannot connect to {target}")).with_source(cause(&error)),
    })
}

/// What is at the bottom of it: the pool and the drivers each repeat what is below them.
fn cause(error: &dyn StdError) -> Cause {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    Cause(error.to_string())
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Cause(String);

/// A refusal by a session that has ended with it is trouble of the connection: whether the statement took effect is not known.
/// Diesel tells a FATAL error from any other as little as it tells SQLSTATEs, so the session is asked.
pub(super) async fn judge(conn: &mut AsyncPgConnection, error: Error) -> Error {
    if error.kind() == Kind::Server && !is_alive(conn).await {
        return Error::new(Kind::Connection, error.to_string());
    }
    error
}

/// Whether the session still answers, be it with an error inside a failed transaction.
pub(super) async fn is_alive(conn: &mut AsyncPgConnection) -> bool {
    match conn.batch_execute("").await {
        Ok(()) => true,
        Err(error) => super::errors::kind(&error) != Kind::Connection,
    }
}

/// A pooler that does not forward start-up settings says so with a protocol violation.
fn is_refused_setting(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| *code == tokio_postgres::error::SqlState::PROTOCOL_VIOLATION)
}

/// The driver's error with its cause, which is where the reason stands.
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
