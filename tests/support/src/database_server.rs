//! The server shared by all tests of a process, and the thread that creates and removes databases on it.
//!
//! It has its own thread and runtime because a test's runtime ends with the test. Removal takes two steps: the database
//! is closed at once, which is cheap, and dropped in a batch with others, because each drop forces a checkpoint for all
//! databases. On an external server the test waits for the drop instead, so that nothing is left behind.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc as std_mpsc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{OnceCell, mpsc, oneshot};
use tokio_postgres::Client;

use crate::folder;
use crate::postgres::{Cluster, ClusterOptions, connect};

/// How many databases are created at the same time. More are not faster on the machines that run the tests.
const CREATORS: usize = 2;

/// The maximum number of closed databases (8 MB each) on our own server before they are dropped.
const CLOSED_MAX: usize = 100;

/// How long a test may wait at its end for the removal of its database from an external server.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(20);

/// The server of the test databases.
#[derive(Debug)]
pub struct Server {
    url: String,
    /// A queue per creator, used in turn.
    creations: Vec<mpsc::UnboundedSender<Creation>>,
    creation_turn: AtomicUsize,
    removals: mpsc::UnboundedSender<Removal>,
    /// `None` if `DATABASE_URL` names the server. A static is never dropped: our server ends with the process.
    cluster: Option<Cluster>,
}

// The queues are unbounded: `Drop` can neither wait nor fail, and there are no more entries than tests.

#[derive(Debug)]
struct Creation {
    name: String,
    done: oneshot::Sender<()>,
}

#[derive(Debug)]
struct Removal {
    name: String,
    done: std_mpsc::Sender<()>,
}

#[derive(Clone, Copy, Debug)]
enum Ownership {
    Ours,
    /// `DATABASE_URL` names the server.
    Foreign,
}

impl Server {
    /// The server of this process, started on the first call.
    pub async fn shared() -> &'static Server {
        static SHARED: OnceCell<Server> = OnceCell::const_new();
        SHARED.get_or_init(Server::start).await
    }

    /// A URL of the server; the caller replaces its database.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The cluster behind it; `None` for an external server.
    pub fn cluster(&self) -> Option<&Cluster> {
        self.cluster.as_ref()
    }

    pub async fn create_database(&self, name: &str) {
        let (done, created) = oneshot::channel();
        let turn = self.creation_turn.fetch_add(1, Ordering::Relaxed) % CREATORS;
        let creation = Creation { name: name.to_owned(), done };
        self.creations[turn].send(creation).expect("the databases thread is alive");
        created.await.unwrap_or_else(|_| panic!("cannot make the database {name}; the reason is printed above"));
    }

    /// May be called from a `Drop` inside a runtime: it waits, if at all, for a thread and not for a task.
    pub fn remove_database(&self, name: String) {
        let (done, removed) = std_mpsc::channel();
        // Without the thread the database cannot be removed, and a `Drop` cannot report it.
        let _ = self.removals.send(Removal { name, done });
        match self.ownership() {
            Ownership::Ours => {}
            Ownership::Foreign => drop(removed.recv_timeout(REMOVAL_DEADLINE)),
        }
    }

    fn ownership(&self) -> Ownership {
        if self.cluster.is_some() { Ownership::Ours } else { Ownership::Foreign }
    }

    async fn start() -> Server {
        let (url, cluster) = match std::env::var("DATABASE_URL") {
            Ok(url) => (url, None),
            Err(_) => {
                let cluster = Cluster::start(ClusterOptions::default()).await;
                (cluster.url("postgres"), Some(cluster))
            }
        };
        let (creations, creation_queues) = (0..CREATORS).map(|_| mpsc::unbounded_channel()).unzip();
        let (removals, removal_queue) = mpsc::unbounded_channel();
        let server = Server { url, creations, creation_turn: AtomicUsize::new(0), removals, cluster };
        let (url, ownership) = (server.url.clone(), server.ownership());
        std::thread::Builder::new()
            .name("databases".to_owned())
            .spawn(move || serve(&url, creation_queues, removal_queue, ownership))
            .expect("cannot start the databases thread");
        server
    }
}

/// The databases thread: the creators and one remover, each with its own connection.
fn serve(
    url: &str,
    creations: Vec<mpsc::UnboundedReceiver<Creation>>,
    removals: mpsc::UnboundedReceiver<Removal>,
    ownership: Ownership,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("cannot make a runtime");
    runtime.block_on(async {
        let creators = creations.into_iter().map(|queue| create(url, queue, ownership));
        tokio::join!(join_all(creators), remove(url, removals, ownership));
    });
}

async fn create(url: &str, mut queue: mpsc::UnboundedReceiver<Creation>, ownership: Ownership) {
    let client = connect(url).await;
    let strategy = creation_strategy(&client, ownership).await;
    while let Some(Creation { name, done }) = queue.recv().await {
        match client.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE template0 {strategy}")).await {
            // The test that waits for it may have been cancelled.
            Ok(()) => drop(done.send(())),
            Err(error) => eprintln!("cannot make the database {name}: {error:?}"),
        }
    }
}

/// `file_copy`, the only strategy before version 15, copies files between two checkpoints. It is the fastest in memory
/// (10 ms instead of 25), and the slowest on a disk with other writers (90 ms).
async fn creation_strategy(client: &Client, ownership: Ownership) -> &'static str {
    let sql = "SELECT current_setting('server_version_num')::int";
    let version: i32 = client.query_one(sql, &[]).await.expect("every server knows its version").get(0);
    match ownership {
        _ if version < 150_000 => "",
        Ownership::Ours if folder::are_in_memory() => "STRATEGY file_copy",
        Ownership::Ours | Ownership::Foreign => "STRATEGY wal_log",
    }
}

async fn remove(url: &str, mut queue: mpsc::UnboundedReceiver<Removal>, ownership: Ownership) {
    let client = connect(url).await;
    let closed_max = match ownership {
        Ownership::Ours => CLOSED_MAX,
        Ownership::Foreign => 0,
    };
    let mut closed = Vec::new();
    while let Some(Removal { name, done }) = queue.recv().await {
        close_database(&client, &name).await;
        closed.push(name);
        if closed.len() > closed_max {
            drop_databases(&client, &mut closed).await;
        }
        // On our own server no test waits for it.
        let _ = done.send(());
    }
}

/// Ends its sessions and rejects new ones: a leaked pool must not use up the connections of the other tests.
async fn close_database(client: &Client, name: &str) {
    let sql = format!(
        "ALTER DATABASE {name} ALLOW_CONNECTIONS false;
         SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    );
    report(name, client.batch_execute(&sql).await);
}

async fn drop_databases(client: &Client, closed: &mut Vec<String>) {
    for name in closed.drain(..) {
        report(&name, client.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await);
    }
}

/// Removal is best effort: leftovers do not affect any test.
fn report(name: &str, result: Result<(), tokio_postgres::Error>) {
    if let Err(error) = result {
        eprintln!("cannot remove the database {name}: {error:?}");
    }
}
