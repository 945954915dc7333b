//! A TCP proxy in front of PostgreSQL, in this process, whose faults a test switches while it runs.
//!
//! Network faults (refuse, reset, black hole) are in effect when the call that switches them returns. Statement faults
//! (see [`Fault`]) apply once, to the first matching statement on any connection.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_postgres::Config;
use tokio_postgres::config::Host;

use crate::ports::free_port;
use crate::proxy_connection;
use crate::proxy_fault::{Faults, Target};
use crate::url::with_port;

pub use crate::proxy_fault::{Fault, FaultHandle};

/// The time between two attempts to listen on our port again. No other process gets it, but the kernel may need a
/// moment.
const LISTEN_RETRY: Duration = Duration::from_millis(10);

const PORT_ATTEMPTS: usize = 10;

/// A running proxy. Dropping it closes its connections and stops listening.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    acceptor: JoinHandle<()>,
}

/// The state of the network for all connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Pass,
    /// The proxy does not listen: new connections are refused, existing ones continue.
    Refuse,
    /// Connections are accepted and stay open, but no byte moves.
    BlackHole,
}

/// The state that connections read.
#[derive(Debug)]
pub struct Shared {
    mode: watch::Sender<Mode>,
    /// Whether the acceptor listens; only the acceptor sets it.
    listening: watch::Sender<bool>,
    upstream: watch::Sender<Upstream>,
    /// The connections since the last reset. A std mutex: nothing awaits while holding it.
    generation: Mutex<Arc<Generation>>,
    faults: Faults,
    /// The delay of each byte, in both directions; `None` for a proxy that reads statements.
    delay: Option<Duration>,
}

/// Connections that are reset together.
#[derive(Debug)]
struct Generation {
    reset: watch::Sender<bool>,
    alive: watch::Sender<usize>,
}

/// Counts one connection in its generation until it is dropped.
#[derive(Debug)]
pub struct Place(Arc<Generation>);

#[derive(Clone, Debug)]
pub struct Upstream {
    pub host: String,
    pub port: u16,
}

impl Proxy {
    /// Starts a proxy in front of the server on this port of 127.0.0.1.
    pub async fn start(upstream_port: u16) -> Proxy {
        Proxy::start_before(Upstream { host: Ipv4Addr::LOCALHOST.to_string(), port: upstream_port }).await
    }

    /// Starts a proxy in front of the server of this URL.
    pub async fn start_for(server_url: &str) -> Proxy {
        Proxy::start_before(Upstream::of(server_url)).await
    }

    /// Starts a proxy in front of the server of this URL with this latency: every byte is delayed by it, in both
    /// directions, without a limit on the bandwidth. It does not support statement faults.
    pub async fn start_far_from(server_url: &str, delay: Duration) -> Proxy {
        Proxy::start_with(Upstream::of(server_url), Some(delay)).await
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// `database_url` through this proxy.
    pub fn url(&self, database_url: &str) -> String {
        with_port(database_url, self.port)
    }

    /// Lifts [`Proxy::refuse`] and [`Proxy::black_hole`]; bytes that a black hole held back are delivered.
    pub async fn pass(&self) {
        self.switch(Mode::Pass).await;
    }

    /// Refuses new connections from now on. Existing ones continue; see [`Proxy::reset_all`].
    pub async fn refuse(&self) {
        self.switch(Mode::Refuse).await;
    }

    /// Keeps all connections open, old and new, and moves no byte in either direction.
    pub async fn black_hole(&self) {
        self.switch(Mode::BlackHole).await;
    }

    /// Resets all existing connections; returns when they are closed. New ones are accepted, unless refused.
    pub async fn reset_all(&self) {
        let ended = std::mem::replace(&mut *self.shared.generation(), Generation::start());
        ended.reset.send_replace(true);
        ended.wait_for_alive(|count| count == 0).await;
    }

    /// Sends new connections to another port of 127.0.0.1. Existing ones do not change.
    pub fn repoint(&self, port: u16) {
        self.shared.upstream.send_replace(Upstream { host: Ipv4Addr::LOCALHOST.to_string(), port });
    }

    /// The number of connections.
    pub fn connections(&self) -> usize {
        *self.shared.generation().alive.borrow()
    }

    /// Waits until the number of connections satisfies the condition. Must not be used while another task resets them.
    pub async fn wait_for_connections(&self, is_wished: impl Fn(usize) -> bool) {
        let generation = Arc::clone(&self.shared.generation());
        generation.wait_for_alive(is_wished).await;
    }

    /// Arms a fault for the next `COMMIT`.
    pub fn on_next_commit(&self, fault: Fault) -> FaultHandle {
        self.shared.faults.arm(Target::Commit, fault)
    }

    /// Arms a fault for the next execution of a statement whose SQL contains `text`.
    pub fn on_next_statement(&self, text: &str, fault: Fault) -> FaultHandle {
        self.shared.faults.arm(Target::Containing(text.to_owned()), fault)
    }

    /// Loses the reply to the next execution of a statement whose SQL contains `text`, and arms the fault for the next
    /// `COMMIT`. The statement is retried, so that `COMMIT` belongs to the same work.
    pub fn on_commit_after(&self, text: &str, fault: Fault) -> FaultHandle {
        self.shared.faults.arm_after(Target::Containing(text.to_owned()), Target::Commit, fault)
    }

    async fn start_before(upstream: Upstream) -> Proxy {
        Proxy::start_with(upstream, None).await
    }

    async fn start_with(upstream: Upstream, delay: Option<Duration>) -> Proxy {
        let (port, listener) = listen().await;
        let shared = Arc::new(Shared {
            mode: watch::Sender::new(Mode::Pass),
            listening: watch::Sender::new(true),
            upstream: watch::Sender::new(upstream),
            generation: Mutex::new(Generation::start()),
            faults: Faults::default(),
            delay,
        });
        let acceptor = tokio::spawn(accept(Arc::clone(&shared), port, listener));
        Proxy { port, shared, acceptor }
    }

    async fn switch(&self, mode: Mode) {
        self.shared.mode.send_replace(mode);
        let mut listening = self.shared.listening.subscribe();
        listening.wait_for(|listening| *listening == (mode != Mode::Refuse)).await.expect("we hold the sender");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The acceptor owns its connections, so they end with it.
        self.acceptor.abort();
    }
}

impl Upstream {
    /// The server of a database URL.
    fn of(server_url: &str) -> Upstream {
        let server: Config = server_url.parse().expect("a database URL");
        let [Host::Tcp(host)] = server.get_hosts() else { panic!("not one TCP host in the database URL") };
        Upstream { host: host.clone(), port: server.get_ports().first().copied().unwrap_or(5432) }
    }
}

impl Shared {
    pub fn delay(&self) -> Option<Duration> {
        self.delay
    }

    pub fn upstream(&self) -> Upstream {
        self.upstream.borrow().clone()
    }

    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Returns when no black hole holds bytes back.
    pub async fn until_passing(&self) {
        let mut mode = self.mode.subscribe();
        mode.wait_for(|mode| *mode != Mode::BlackHole).await.expect("we hold the sender");
    }

    fn generation(&self) -> MutexGuard<'_, Arc<Generation>> {
        self.generation.lock().expect("nothing panics while holding it")
    }

    /// Counts a new connection, so that a later reset reaches it.
    fn take_place(&self) -> Place {
        let generation = self.generation();
        generation.alive.send_modify(|count| *count += 1);
        Place(Arc::clone(&generation))
    }
}

impl Generation {
    fn start() -> Arc<Generation> {
        Arc::new(Generation { reset: watch::Sender::new(false), alive: watch::Sender::new(0) })
    }

    async fn wait_for_alive(&self, is_wished: impl Fn(usize) -> bool) {
        let mut alive = self.alive.subscribe();
        alive.wait_for(|count| is_wished(*count)).await.expect("we hold the sender");
    }
}

impl Place {
    /// Returns when the generation must be reset.
    pub async fn until_reset(&self) {
        let mut reset = self.0.reset.subscribe();
        reset.wait_for(|reset| *reset).await.expect("we hold the sender");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.alive.send_modify(|count| *count -= 1);
    }
}

async fn listen() -> (u16, TcpListener) {
    for _ in 0..PORT_ATTEMPTS {
        let port = free_port();
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            return (port, listener);
        }
    }
    panic!("the proxy found no free port in {PORT_ATTEMPTS} attempts");
}

/// Accepts until aborted. To refuse connections it does not listen at all, like a crashed server.
async fn accept(shared: Arc<Shared>, port: u16, first: TcpListener) {
    let mut listener = Some(first);
    let mut mode = shared.mode.subscribe();
    let mut connections = JoinSet::new();
    loop {
        let wished = *mode.borrow_and_update();
        listener = match (wished, listener) {
            (Mode::Refuse, _) => None,
            (Mode::Pass | Mode::BlackHole, Some(listener)) => Some(listener),
            (Mode::Pass | Mode::BlackHole, None) => Some(listen_again(port).await),
        };
        shared.listening.send_replace(listener.is_some());
        tokio::select! {
            _ = mode.changed() => {}
            client = accept_one(listener.as_ref()) => {
                let place = shared.take_place();
                connections.spawn(proxy_connection::serve(Arc::clone(&shared), place, client));
            }
            // Removed as they end, so that the set does not grow during the test.
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn accept_one(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        // It fails if the client has already disconnected; the next client is accepted.
        if let Ok((client, _)) = listener.accept().await {
            return client;
        }
    }
}

async fn listen_again(port: u16) -> TcpListener {
    loop {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            Ok(listener) => return listener,
            Err(_) => tokio::time::sleep(LISTEN_RETRY).await,
        }
    }
}
