//! A PgBouncer in transaction mode in front of a cluster: each transaction of a client may run on another server
//! session.
//!
//! It supports prepared statements (`max_prepared_statements`), as the store requires, and so needs version 1.21. It
//! listens on a free port of 127.0.0.1, accepts every user, and is removed when dropped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::LazyLock;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio_postgres::Config;
use tokio_postgres::config::Host;

use crate::cache;
use crate::folder::ServiceFolder;
use crate::ports::free_port;
use crate::postgres_binaries::SUPERUSER;
use crate::process::{PROCESS_DEADLINE, PROCESS_POLL, service_server, spawn_bound};
use crate::url::{with_database, with_port};

/// Overrides the program that the set-up script builds.
const PROGRAM_VARIABLE: &str = "WHARF_TEST_PGBOUNCER";

/// The first version that supports prepared statements in transaction mode.
const VERSION_MIN: (u32, u32) = (1, 21);

/// Fewer than most of our pools have, so that sessions are really shared.
const POOL_SIZE_DEFAULT: usize = 3;

const PORT_ATTEMPTS: usize = 10;

/// A running PgBouncer.
#[derive(Debug)]
pub struct PgBouncer {
    port: u16,
    server_url: String,
    process: Child,
    /// Declared last: removed after the process has ended.
    _folder: ServiceFolder,
}

impl PgBouncer {
    /// Starts one in front of the server of `server_url`, for all its databases, with three server sessions for each.
    pub async fn start(server_url: &str) -> PgBouncer {
        PgBouncer::start_with_pool(server_url, POOL_SIZE_DEFAULT).await
    }

    /// Like [`PgBouncer::start`], with `pool_size` server sessions for each database and user.
    pub async fn start_with_pool(server_url: &str, pool_size: usize) -> PgBouncer {
        let server_url = server_url.to_owned();
        tokio::task::spawn_blocking(move || start_blocking(&server_url, pool_size)).await.expect("PgBouncer starts")
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a database of the server, through this PgBouncer.
    pub fn url(&self, database: &str) -> String {
        with_database(&with_port(&self.server_url, self.port), database)
    }

    /// The URL of PgBouncer's console, for `SHOW POOLS` and the like (simple queries only).
    pub fn console_url(&self) -> String {
        self.url("pgbouncer")
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        // Since 1.23, SIGTERM waits for the clients; SIGQUIT never does.
        let _ = kill(Pid::from_raw(self.process.id().cast_signed()), Signal::SIGQUIT);
        let _ = self.process.wait();
    }
}

fn start_blocking(server_url: &str, pool_size: usize) -> PgBouncer {
    let server: Config = server_url.parse().expect("a database URL");
    let folder = ServiceFolder::create("pgbouncer");
    folder.write("users", &users(&server));
    for _ in 0..PORT_ATTEMPTS {
        let port = free_port();
        let settings = folder.write("pgbouncer.ini", &configuration(&server, port, pool_size));
        if let Some(process) = launch(&folder, &settings) {
            return PgBouncer { port, server_url: server_url.to_owned(), process, _folder: folder };
        }
    }
    let log = fs::read_to_string(folder.path().join("log")).unwrap_or_default();
    panic!("PgBouncer did not start in {PORT_ATTEMPTS} attempts:\n{log}");
}

fn configuration(server: &Config, port: u16, pool_size: usize) -> String {
    let [Host::Tcp(server_host)] = server.get_hosts() else { panic!("not one TCP host in {server:?}") };
    let server_port = server.get_ports().first().copied().unwrap_or(5432);
    let user = server.get_user().unwrap_or(SUPERUSER);
    format!(
        "[databases]\n\
         * = host={server_host} port={server_port}\n\
         [pgbouncer]\n\
         listen_addr = 127.0.0.1\n\
         listen_port = {port}\n\
         unix_socket_dir =\n\
         auth_type = trust\n\
         auth_file = users\n\
         admin_users = {user}\n\
         pool_mode = transaction\n\
         max_prepared_statements = 200\n\
         default_pool_size = {pool_size}\n\
         max_client_conn = 500\n\
         server_tls_sslmode = disable\n\
         ignore_startup_parameters = extra_float_digits\n"
    )
}

/// Users must be listed even without authentication; PgBouncer uses the password for the server.
fn users(server: &Config) -> String {
    let user = server.get_user().unwrap_or(SUPERUSER);
    let password = String::from_utf8_lossy(server.get_password().unwrap_or_default()).replace('"', "\"\"");
    format!("\"{user}\" \"{password}\"\n")
}

/// Starts the program and waits until it serves; `None` if it ended, most likely because its port was taken.
fn launch(folder: &ServiceFolder, settings: &Path) -> Option<Child> {
    let log_path = folder.path().join("log");
    // Truncated, so that the output of an earlier attempt does not count.
    let log = File::create(&log_path).expect("our own folder");
    let mut command = service_server(program(), folder.path(), Signal::SIGKILL);
    command.arg(settings).stderr(log);
    let mut process = spawn_bound(command).expect("cannot start PgBouncer");
    let deadline = Instant::now() + PROCESS_DEADLINE;
    while !fs::read_to_string(&log_path).is_ok_and(|log| log.contains("process up")) {
        if process.try_wait().expect("a child can be waited for").is_some() {
            return None;
        }
        assert!(Instant::now() < deadline, "PgBouncer does not serve in time");
        std::thread::sleep(PROCESS_POLL);
    }
    Some(process)
}

fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let named = std::env::var_os(PROGRAM_VARIABLE).map(PathBuf::from);
        let program = named.unwrap_or_else(|| cache::folder().join("pgbouncer/pgbouncer"));
        match version(&program) {
            Some(version) if version >= VERSION_MIN => program,
            found => panic!(
                "PgBouncer {VERSION_MIN:?} or newer is needed, {} is {found:?}. Run scripts/setup, or set \
                 {PROGRAM_VARIABLE} to the program",
                program.display(),
            ),
        }
    });
    &PROGRAM
}

/// Parses the first line of `--version`, such as `PgBouncer 1.24.1`.
fn version(program: &Path) -> Option<(u32, u32)> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut numbers = text.lines().next()?.strip_prefix("PgBouncer ")?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
