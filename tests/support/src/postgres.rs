//! An ephemeral PostgreSQL cluster of the local binaries, which a test starts, stops, kills and starts again.
//!
//! It listens on a free port of 127.0.0.1 and on a socket in its own folder, and keeps the port over restarts. `fsync`
//! is on, so that a killed server is as durable as in production. Its process and folder are removed when it is
//! dropped.
//!
//! Most tests use a [`crate::database::TestDatabase`] on the shared cluster instead; a separate cluster is for tests
//! that stop, kill or configure the server.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio_postgres::NoTls;

use crate::folder::ServiceFolder;
use crate::ports::free_port;
use crate::postgres_binaries::{SUPERUSER, make_data_folder, program};
use crate::process::{
    PROCESS_DEADLINE, PROCESS_POLL, run_to_end, send_signal, service_server, service_tool, spawn_bound, wait_for_end,
};

/// How many ports are tried, because another process may take one first.
const PORT_ATTEMPTS: usize = 10;

/// After SIGKILL the kernel takes a moment to free the shared memory; this is the time between two attempts to start.
const START_RETRY: Duration = Duration::from_millis(50);

/// How a cluster differs from the default.
#[derive(Clone, Debug, Default)]
pub struct ClusterOptions {
    /// Settings as in `postgresql.conf`. They override those of the tests.
    pub settings: Vec<(String, String)>,
    /// Serves TLS with this certificate. Default: no TLS.
    pub tls: Option<ServerTls>,
    /// The whole `pg_hba.conf`. Default: every local user is trusted.
    pub hba: Option<String>,
}

/// A certificate and its key, as PEM. They are copied into the cluster's folder with the required owner.
#[derive(Clone, Debug)]
pub struct ServerTls {
    pub certificate_pem: String,
    pub key_pem: String,
}

/// A PostgreSQL server, running or stopped by a test.
#[derive(Clone, Debug)]
pub struct Cluster {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    port: u16,
    settings: Vec<(String, String)>,
    /// `None` while stopped. A std mutex: only the blocking functions below hold it.
    postmaster: Mutex<Option<Child>>,
    /// Declared last: removed after the postmaster has ended.
    folder: ServiceFolder,
}

impl Cluster {
    pub async fn start(options: ClusterOptions) -> Cluster {
        tokio::task::spawn_blocking(move || Cluster::start_blocking(&options)).await.expect("the cluster starts")
    }

    /// Starts a cluster with these settings of `postgresql.conf`.
    pub async fn start_with(settings: &[(&str, &str)]) -> Cluster {
        Cluster::start(ClusterOptions { settings: owned(settings), ..ClusterOptions::default() }).await
    }

    pub fn port(&self) -> u16 {
        self.inner.port
    }

    /// The URL of a database, as superuser.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://{SUPERUSER}@127.0.0.1:{}/{database}", self.port())
    }

    /// The postmaster; all other processes of the server are its children. Panics while stopped.
    pub fn postmaster_pid(&self) -> u32 {
        let postmaster = self.inner.postmaster.lock().expect("no cluster action panicked");
        postmaster.as_ref().expect("the cluster is stopped").id()
    }

    /// Runs SQL as superuser in the database `postgres`.
    pub async fn execute(&self, sql: &str) {
        let client = connect(&self.url("postgres")).await;
        client.batch_execute(sql).await.unwrap_or_else(|error| panic!("cannot execute {sql}: {error:?}"));
    }

    /// Ends all sessions, then the server, gracefully.
    pub async fn stop_fast(&self) {
        self.blocking(|inner| inner.stop(Signal::SIGINT)).await;
    }

    /// Ends the server without a checkpoint: the next start recovers from the WAL.
    pub async fn stop_immediate(&self) {
        self.blocking(|inner| inner.stop(Signal::SIGQUIT)).await;
    }

    /// Kills the postmaster and all its processes with SIGKILL, like a power failure. (If only the postmaster were
    /// killed, a busy backend could still commit.)
    pub async fn kill(&self) {
        self.blocking(Inner::kill).await;
    }

    /// Starts the stopped or killed server again, on the same port and data.
    pub async fn start_again(&self) {
        self.blocking(Inner::start_again).await;
    }

    /// A graceful stop and a start.
    pub async fn restart(&self) {
        self.stop_fast().await;
        self.start_again().await;
    }

    /// Reloads the server's configuration, for example after `ALTER SYSTEM`.
    pub async fn reload(&self) {
        self.blocking(|inner| inner.signal(Signal::SIGHUP)).await;
    }

    /// The server's own log, printed by a failing test.
    pub fn log(&self) -> String {
        self.inner.log()
    }

    /// Another server with the current data and nothing later: like a disconnected standby that is promoted.
    pub async fn fall_behind(&self) -> Cluster {
        self.copy(&[]).await
    }

    /// A readable standby that follows this server until it is promoted.
    pub async fn standby(&self) -> Cluster {
        self.copy(&["--write-recovery-conf"]).await
    }

    /// Promotes a standby. It polls for the end of recovery: a statement that waits for the promotion would hold a
    /// snapshot, and the server cancels it if the snapshot conflicts with WAL that the standby still has to replay.
    pub async fn promote(&self) {
        self.execute("SELECT pg_promote(wait => false)").await;
        let client = connect(&self.url("postgres")).await;
        let deadline = Instant::now() + PROCESS_DEADLINE;
        loop {
            let answer = client.query_one("SELECT pg_is_in_recovery()", &[]).await;
            if answer.is_ok_and(|row| !row.get::<_, bool>(0)) {
                return;
            }
            assert!(Instant::now() < deadline, "the standby is not promoted in time:\n{}", self.log());
            tokio::time::sleep(PROCESS_POLL).await;
        }
    }

    async fn copy(&self, more: &'static [&'static str]) -> Cluster {
        let port = self.port().to_string();
        let copy = move || {
            let folder = ServiceFolder::create("pg");
            let mut backup = service_tool(&program("pg_basebackup"), folder.path());
            backup.args(["--host", "127.0.0.1", "--port", &port, "--username", SUPERUSER]);
            backup.args(["--checkpoint", "fast", "--wal-method", "stream", "--no-sync"]).args(more);
            backup.arg("--pgdata").arg(folder.path().join("data"));
            run_to_end(backup);
            Cluster::start_in(folder, &ClusterOptions::default())
        };
        tokio::task::spawn_blocking(copy).await.expect("the copy starts")
    }

    /// For callers outside a runtime.
    pub fn start_blocking(options: &ClusterOptions) -> Cluster {
        let folder = ServiceFolder::create("pg");
        make_data_folder(&folder.path().join("data"), folder.path());
        if let Some(hba) = &options.hba {
            folder.write("data/pg_hba.conf", hba);
        }
        Cluster::start_in(folder, options)
    }

    fn start_in(folder: ServiceFolder, options: &ClusterOptions) -> Cluster {
        let mut inner = Inner { port: 0, settings: Vec::new(), postmaster: Mutex::new(None), folder };
        inner.settings = inner.all_settings(options);
        for _ in 0..PORT_ATTEMPTS {
            inner.port = free_port();
            match inner.launch() {
                Ok(child) => {
                    *inner.postmaster.lock().expect("nothing panicked yet") = Some(child);
                    return Cluster { inner: Arc::new(inner) };
                }
                Err(log) if log.contains("Address already in use") => {}
                Err(log) => panic!("PostgreSQL did not start:\n{log}"),
            }
        }
        panic!("PostgreSQL found no free port in {PORT_ATTEMPTS} attempts");
    }

    async fn blocking(&self, work: impl FnOnce(&Inner) + Send + 'static) {
        let inner = Arc::clone(&self.inner);
        tokio::task::spawn_blocking(move || work(&inner)).await.expect("the action on the cluster succeeds");
    }
}

/// Connects; the connection's task runs on the current runtime. Panics if it fails.
pub async fn connect(url: &str) -> tokio_postgres::Client {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.unwrap_or_else(|error| panic!("cannot connect to {url}: {error:?}"));
    // The client also returns its error, if any.
    tokio::spawn(connection);
    client
}

fn owned(settings: &[(&str, &str)]) -> Vec<(String, String)> {
    settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

impl Inner {
    fn all_settings(&self, options: &ClusterOptions) -> Vec<(String, String)> {
        let socket_folder = self.folder.path().display().to_string();
        let mut settings = owned(&[
            ("listen_addresses", "127.0.0.1"),
            ("unix_socket_directories", &socket_folder),
            ("fsync", "on"),
            // One server serves hundreds of tests, each with its own pools.
            ("max_connections", "400"),
            ("timezone", "UTC"),
            ("log_line_prefix", "%m [%p] %a "),
        ]);
        if let Some(tls) = &options.tls {
            let certificate = self.folder.write("server.crt", &tls.certificate_pem).display().to_string();
            let key = self.folder.write("server.key", &tls.key_pem).display().to_string();
            settings.extend(owned(&[("ssl", "on"), ("ssl_cert_file", &certificate), ("ssl_key_file", &key)]));
        }
        // The server uses the last of two values.
        settings.extend(options.settings.iter().cloned());
        settings
    }

    fn start_again(&self) {
        let mut postmaster = self.postmaster.lock().expect("no cluster action panicked");
        assert!(postmaster.is_none(), "the cluster is running already");
        let deadline = Instant::now() + PROCESS_DEADLINE;
        *postmaster = loop {
            match self.launch() {
                Ok(child) => break Some(child),
                Err(log) => assert!(Instant::now() < deadline, "PostgreSQL did not start again:\n{log}"),
            }
            std::thread::sleep(START_RETRY);
        };
    }

    /// Starts the server and waits until it accepts connections. The error is its log.
    fn launch(&self) -> Result<Child, String> {
        let log_from = self.log().len();
        let log = self.open_log();
        // SIGQUIT and not SIGKILL: it frees its shared memory.
        let mut command = service_server(&program("postgres"), self.folder.path(), Signal::SIGQUIT);
        command.arg("-D").arg(self.data()).args(["-p", &self.port.to_string()]);
        for (name, value) in &self.settings {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        command.stdout(log.try_clone().expect("a file can be cloned")).stderr(log);
        let mut child = spawn_bound(command).map_err(|error| error.to_string())?;
        let deadline = Instant::now() + PROCESS_DEADLINE;
        while !self.is_ready(&child) {
            if child.try_wait().expect("a child can be waited for").is_some() {
                return Err(self.log().split_off(log_from));
            }
            assert!(Instant::now() < deadline, "PostgreSQL is not ready in time:\n{}", self.log());
            std::thread::sleep(PROCESS_POLL);
        }
        Ok(child)
    }

    /// The server writes its state to the eighth line of its pid file; the file of a killed server has another pid.
    fn is_ready(&self, child: &Child) -> bool {
        let Ok(content) = fs::read_to_string(self.data().join("postmaster.pid")) else {
            return false;
        };
        let lines: Vec<&str> = content.lines().map(str::trim).collect();
        lines.first() == Some(&child.id().to_string().as_str()) && matches!(lines.get(7), Some(&"ready" | &"standby"))
    }

    fn stop(&self, signal: Signal) {
        let mut postmaster = self.postmaster.lock().expect("no cluster action panicked");
        let mut child = postmaster.take().expect("the cluster is stopped already");
        send_signal(&child, signal);
        wait_for_end(&mut child, "PostgreSQL");
    }

    fn kill(&self) {
        let mut postmaster = self.postmaster.lock().expect("no cluster action panicked");
        let mut child = postmaster.take().expect("the cluster is stopped already");
        // Stopped first, so that it starts no backend while they are listed.
        send_signal(&child, Signal::SIGSTOP);
        let backends = children_of(child.id());
        send_signal(&child, Signal::SIGKILL);
        for backend in backends {
            // It may have ended in the meantime; its pid cannot have been reused in these microseconds.
            let _ = kill(backend, Signal::SIGKILL);
        }
        wait_for_end(&mut child, "PostgreSQL");
    }

    fn signal(&self, signal: Signal) {
        let postmaster = self.postmaster.lock().expect("no cluster action panicked");
        send_signal(postmaster.as_ref().expect("the cluster is stopped"), signal);
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn log(&self) -> String {
        let content = fs::read(self.folder.path().join("server.log")).unwrap_or_default();
        String::from_utf8_lossy(&content).into_owned()
    }

    fn open_log(&self) -> File {
        let path = self.folder.path().join("server.log");
        File::options().create(true).append(true).open(&path).expect("our own folder")
    }
}

fn children_of(pid: u32) -> Vec<Pid> {
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_whitespace().filter_map(|child| child.parse().ok()).map(Pid::from_raw).collect()
}

impl Drop for Inner {
    fn drop(&mut self) {
        // This also runs while a failing test unwinds, so it must not panic. The data is no longer needed.
        let Ok(postmaster) = self.postmaster.get_mut() else {
            return;
        };
        if let Some(mut child) = postmaster.take() {
            let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGQUIT);
            let _ = child.wait();
        }
    }
}
