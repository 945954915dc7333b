//! A real Apache Kafka: one broker (KRaft, no ZooKeeper) that a test starts, stops, kills, freezes and starts again.
//!
//! It listens on free ports of 127.0.0.1. It keeps its ports and its data over restarts. Topics are never created
//! automatically. Its process and folder are removed when it is dropped, or when this process ends.
//!
//! Most tests use [`Kafka::shared`] with their own topics and groups. A separate broker takes three seconds and 300 MB
//! and is for tests that stop, kill or configure it. `kafka_admin`, `kafka_acls`, `kafka_records`, `kafka_reading` and
//! `kafka_transactions` have the operations.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use tokio::sync::OnceCell;

use crate::folder::ServiceFolder;
use crate::kafka_binaries::{
    broker_command, cluster_id, make_data_folder, mark_data_folder, random_id, set_cluster_id,
};
use crate::kafka_settings::{KafkaPorts, joining_settings, server_properties};
use crate::postgres::ServerTls;
use crate::process::{PROCESS_DEADLINE, PROCESS_POLL, send_signal, spawn_bound, wait_for_end};

/// The user of the SCRAM listener, and its password.
pub const SCRAM_USER: &str = "wharf";
pub const SCRAM_PASSWORD: &str = "a password of the tests";

/// The address of a running broker to use as the shared one. Tests create and delete topics on it.
const BROKERS_VARIABLE: &str = "KAFKA_BROKERS";

/// How many times ports are chosen, because another process may take one first.
const PORT_ATTEMPTS: usize = 10;

/// Time limit for one metadata request to a broker that may not be ready.
const METADATA_PATIENCE: Duration = Duration::from_secs(2);

/// How a broker differs from the default.
#[derive(Clone, Debug, Default)]
pub struct KafkaOptions {
    /// Settings as in `server.properties`. They override those of the tests.
    pub settings: Vec<(String, String)>,
    /// Opens a TLS listener, see [`Kafka::tls_brokers`]. Default: none.
    pub tls: Option<KafkaTls>,
    /// Opens a listener with TLS and SCRAM-SHA-256 (`SASL_SSL`), see [`Kafka::scram_brokers`]. Its only user is
    /// [`SCRAM_USER`] with [`SCRAM_PASSWORD`]. Default: none.
    pub scram: Option<KafkaTls>,
    /// Opens a listener with SASL/OAUTHBEARER and without TLS, see [`Kafka::token_brokers`], where a connection must
    /// authenticate again after this time or when its token expires. It accepts any unsigned JWT that has not expired;
    /// `sub` is the user. Default: none.
    pub tokens: Option<Duration>,
    /// Joins the cluster of another broker under this node id. Default: a separate cluster.
    pub joins: Option<(u16, Kafka)>,
    /// Uses its own cluster id. Default: that of all brokers of this process.
    pub is_another_cluster: bool,
}

impl KafkaOptions {
    /// For a broker that is never killed: it keeps its registration if the machine stalls for a moment.
    pub fn steady() -> KafkaOptions {
        let settings = vec![("broker.session.timeout.ms".to_owned(), "30000".to_owned())];
        KafkaOptions { settings, ..KafkaOptions::default() }
    }
}

/// The TLS settings of a listener.
#[derive(Clone, Debug)]
pub struct KafkaTls {
    pub server: ServerTls,
    /// Clients must present a certificate of this authority. Default: none is required.
    pub client_authority_pem: Option<String>,
}

impl From<ServerTls> for KafkaTls {
    fn from(server: ServerTls) -> KafkaTls {
        KafkaTls { server, client_authority_pem: None }
    }
}

/// A broker, running or stopped by a test.
#[derive(Clone, Debug)]
pub struct Kafka {
    brokers: String,
    /// `None` if another process started the broker.
    inner: Option<Arc<Inner>>,
}

#[derive(Debug)]
struct Inner {
    ports: KafkaPorts,
    cluster_id: String,
    /// `None` while stopped. A std mutex: only the blocking functions below hold it.
    process: Mutex<Option<Child>>,
    /// Declared last: removed after the broker has ended.
    folder: ServiceFolder,
}

impl Kafka {
    /// The broker of this process, started on the first call, or the one that `KAFKA_BROKERS` names. Not for a test
    /// that stops it.
    pub async fn shared() -> &'static Kafka {
        // A static is never dropped: our broker ends with the process.
        static SHARED: OnceCell<Kafka> = OnceCell::const_new();
        let start = || async {
            match std::env::var(BROKERS_VARIABLE) {
                Ok(brokers) => Kafka::at(&brokers),
                Err(_) => Kafka::start_with(KafkaOptions::steady()).await,
            }
        };
        SHARED.get_or_init(start).await
    }

    pub async fn start() -> Kafka {
        Kafka::start_with(KafkaOptions::default()).await
    }

    pub async fn start_with(options: KafkaOptions) -> Kafka {
        tokio::task::spawn_blocking(move || start_blocking(&options)).await.expect("Kafka starts")
    }

    /// A broker that another process started, such as the parent of a child process. It cannot be stopped from here.
    pub fn at(brokers: &str) -> Kafka {
        Kafka { brokers: brokers.to_owned(), inner: None }
    }

    /// The plain listener, for `bootstrap.servers`.
    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// The TLS listener.
    pub fn tls_brokers(&self) -> String {
        address(self.ours().ports.tls.expect("started with KafkaOptions::tls"))
    }

    /// The listener with TLS and SCRAM.
    pub fn scram_brokers(&self) -> String {
        address(self.ours().ports.scram.expect("started with KafkaOptions::scram"))
    }

    /// The listener with tokens.
    pub fn token_brokers(&self) -> String {
        address(self.ours().ports.tokens.expect("started with KafkaOptions::tokens"))
    }

    /// The broker's process. Panics while stopped.
    pub fn pid(&self) -> u32 {
        let process = self.ours().process.lock().expect("no broker action panicked");
        process.as_ref().expect("the broker is stopped").id()
    }

    /// Stops the broker gracefully: it hands over its partitions and closes its files.
    pub async fn stop(&self) {
        self.blocking(|inner| inner.end(Signal::SIGTERM)).await;
    }

    /// Kills the broker, like a power failure.
    pub async fn kill(&self) {
        self.blocking(|inner| inner.end(Signal::SIGKILL)).await;
    }

    /// Starts the stopped or killed broker again, on the same ports and data.
    pub async fn start_again(&self) {
        self.blocking(Inner::start_again).await;
    }

    /// Freezes the broker: its connections stay open, but no byte moves.
    pub async fn freeze(&self) {
        self.blocking(|inner| inner.signal(Signal::SIGSTOP)).await;
    }

    /// Corrupts the log of the stopped broker: flips one bit of the first `content` in a partition's log.
    pub async fn corrupt(&self, topic: &str, partition: i32, content: &str) {
        let (log, content) = (format!("data/{topic}-{partition}/00000000000000000000.log"), content.to_owned());
        self.blocking(move |inner| {
            let log = inner.folder.path().join(log);
            let mut bytes = fs::read(&log).expect("the partition's log");
            let at = bytes.windows(content.len()).position(|window| window == content.as_bytes());
            bytes[at.expect("the content is in the log")] ^= 1;
            fs::write(&log, bytes).expect("our own broker's log");
        })
        .await;
    }

    /// Truncates the partition's log of the stopped broker: removes the first batch at or after `offset`, and all that
    /// follow.
    pub async fn cut_log(&self, topic: &str, partition: i32, offset: i64) {
        let folder = format!("data/{topic}-{partition}");
        self.blocking(move |inner| {
            // Without this file and the index, the broker reads the log itself.
            let _ = fs::remove_file(inner.folder.path().join("data/.kafka_cleanshutdown"));
            let folder = inner.folder.path().join(folder);
            for index in ["index", "timeindex"] {
                let _ = fs::remove_file(folder.join(format!("00000000000000000000.{index}")));
            }
            let log = folder.join("00000000000000000000.log");
            let bytes = fs::read(&log).expect("the partition's log");
            let mut at = 0;
            // A batch begins with its first offset and the length of the rest.
            while let Some(head) = bytes.get(at..at + 12) {
                let first = i64::from_be_bytes(head[..8].try_into().expect("eight bytes"));
                let length = i32::from_be_bytes(head[8..].try_into().expect("four bytes"));
                if first >= offset {
                    break;
                }
                at += 12 + usize::try_from(length).expect("a length");
            }
            fs::write(&log, &bytes[..at]).expect("our own broker's log");
        })
        .await;
    }

    /// Continues the frozen broker. Because it missed its own heartbeats, it may have no leaders for a second.
    pub async fn thaw(&self) {
        self.blocking(|inner| inner.signal(Signal::SIGCONT)).await;
    }

    /// The broker's own log (warnings and errors), printed by a failing test.
    pub fn log(&self) -> String {
        self.ours().log()
    }

    /// The client settings of the tests, with a fast reconnect.
    pub fn client_config(&self) -> ClientConfig {
        client_config(&self.brokers)
    }

    fn ours(&self) -> &Arc<Inner> {
        self.inner
            .as_ref()
            .unwrap_or_else(|| panic!("the broker is not ours: a test that stops it needs one of its own"))
    }

    async fn blocking(&self, work: impl FnOnce(&Inner) + Send + 'static) {
        let inner = Arc::clone(self.ours());
        tokio::task::spawn_blocking(move || work(&inner)).await.expect("the action on the broker succeeds");
    }
}

fn start_blocking(options: &KafkaOptions) -> Kafka {
    for _ in 0..PORT_ATTEMPTS {
        let mut inner = Inner::prepare(options);
        match inner.launch() {
            Ok(child) => {
                inner.process = Mutex::new(Some(child));
                return Kafka { brokers: address(inner.ports.plain), inner: Some(Arc::new(inner)) };
            }
            Err(log) if log.contains("Address already in use") => {}
            Err(log) => panic!("Kafka did not start:\n{log}"),
        }
    }
    panic!("Kafka found no free ports in {PORT_ATTEMPTS} attempts");
}

const SETTINGS_FILE: &str = "server.properties";

fn address(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

fn client_config(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("reconnect.backoff.ms", "20")
        .set("reconnect.backoff.max.ms", "200")
        .set("retry.backoff.ms", "20");
    config
}

impl Inner {
    fn prepare(options: &KafkaOptions) -> Inner {
        let folder = ServiceFolder::create("kafka");
        let data = folder.path().join("data");
        make_data_folder(&data, folder.path());
        let ports = KafkaPorts::choose(options);
        let mut settings = server_properties(options, ports, &data, &folder);
        let cluster_id = if options.is_another_cluster { random_id() } else { cluster_id().to_owned() };
        set_cluster_id(&data, &cluster_id);
        if let Some((node_id, first)) = &options.joins {
            mark_data_folder(&data, *node_id);
            settings += &joining_settings(*node_id, ports, first.ours().ports.controller);
        }
        folder.write(SETTINGS_FILE, &settings);
        Inner { ports, cluster_id, process: Mutex::new(None), folder }
    }

    fn start_again(&self) {
        let mut process = self.process.lock().expect("no Kafka action panicked");
        assert!(process.is_none(), "Kafka is running already");
        *process = Some(self.launch().unwrap_or_else(|log| panic!("Kafka did not start again:\n{log}")));
    }

    /// Starts the broker and waits until it leads all its partitions. The error is its log.
    fn launch(&self) -> Result<Child, String> {
        let log_from = self.log().len();
        let log = File::options().create(true).append(true).open(self.log_path()).expect("our own folder");
        let mut command = broker_command(self.folder.path(), &self.folder.path().join(SETTINGS_FILE));
        command.stdout(log.try_clone().expect("a file can be cloned")).stderr(log);
        let mut child = spawn_bound(command).map_err(|error| error.to_string())?;
        let deadline = Instant::now() + PROCESS_DEADLINE;
        while !is_ready(self.ports.plain, &self.cluster_id) {
            if child.try_wait().expect("a child can be waited for").is_some() {
                return Err(self.log().split_off(log_from));
            }
            if Instant::now() >= deadline {
                // No other code refers to it yet.
                let _ = child.kill();
                let _ = child.wait();
                panic!("Kafka is not ready in time:\n{}", self.log());
            }
            std::thread::sleep(PROCESS_POLL);
        }
        Ok(child)
    }

    fn end(&self, signal: Signal) {
        let mut process = self.process.lock().expect("no Kafka action panicked");
        let mut child = process.take().expect("Kafka is stopped already");
        send_signal(&child, signal);
        wait_for_end(&mut child, "Kafka");
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.lock().expect("no Kafka action panicked");
        send_signal(process.as_ref().expect("Kafka is stopped"), signal);
    }

    fn log(&self) -> String {
        let content = fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&content).into_owned()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }
}

/// Whether our broker answers, and every partition that it knows has a leader.
fn is_ready(port: u16, cluster_id: &str) -> bool {
    // Creating a client is slow, and it logs each refused connection.
    if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        return false;
    }
    let client: BaseConsumer = client_config(&address(port)).create().expect("a client");
    let Ok(metadata) = client.fetch_metadata(None, METADATA_PATIENCE) else { return false };
    // Another process may have taken the port first.
    if client.client().fetch_cluster_id(METADATA_PATIENCE).as_deref() != Some(cluster_id) {
        return false;
    }
    let mut leaders = metadata.topics().iter().flat_map(|topic| topic.partitions()).map(|partition| partition.leader());
    !metadata.brokers().is_empty() && leaders.all(|leader| leader >= 0)
}

impl Drop for Inner {
    fn drop(&mut self) {
        // This also runs while a failing test unwinds, so it must not panic. The data is no longer needed.
        let Ok(process) = self.process.get_mut() else {
            return;
        };
        if let Some(mut child) = process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
