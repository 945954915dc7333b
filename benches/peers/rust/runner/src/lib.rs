//! The code that all runners in Rust share: arguments, the protocol with the driver, the count of handled jobs.
//!
//! The driver (`benches/peers/run`) starts a runner with the URL of an empty database, the number of jobs, and
//! `defaults` or `tuned`. The runner installs the schema, fills the queue and prints one line of JSON. It starts to
//! work when it reads a line, and prints `handled` once its handler was called for every job. The driver measures the
//! time and then kills the runner. If the driver crashes, the standard input ends, and the runner exits.

use std::io::{self, BufRead, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

/// Bytes of a payload. Queues that store JSON wrap it in an object with one field.
pub const PAYLOAD_BYTES: usize = 512;
/// Jobs in one call that fills the queue.
pub const FILL_ROWS: usize = 500;
/// How often a runner checks whether all jobs were handled.
const LOOK: Duration = Duration::from_millis(1);

static HANDLED: AtomicUsize = AtomicUsize::new(0);

/// The arguments of a runner.
pub struct Run {
    pub url: String,
    pub jobs: usize,
    pub is_tuned: bool,
}

impl Run {
    /// Reads the arguments.
    pub fn from_arguments() -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let [url, jobs, mode] = arguments.as_slice() else {
            panic!("usage: <runner> URL JOBS defaults|tuned");
        };
        let jobs = jobs.parse().expect("JOBS is a number");
        Self { url: url.clone(), jobs, is_tuned: mode == "tuned" }
    }

    /// The numbers of the jobs, in batches of the size in which they are inserted.
    pub fn batches(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let jobs = self.jobs;
        (0..jobs).step_by(FILL_ROWS).map(move |start| start..jobs.min(start + FILL_ROWS))
    }

    /// Reports that the queue is filled, and waits until the driver has vacuumed the database and starts the clock.
    pub fn filled(&self, settings: Value) {
        say(&json!({ "settings": settings }).to_string());
        assert!(line(), "the driver has ended");
    }

    /// Waits until the handler was called for every job, reports it, and waits for the driver to kill this process.
    pub async fn finish(&self) -> ! {
        while HANDLED.load(Ordering::Relaxed) < self.jobs {
            tokio::time::sleep(LOOK).await;
        }
        say("handled");
        tokio::task::spawn_blocking(line).await.expect("reading does not panic");
        std::process::exit(0)
    }
}

/// Called by the handler of every runner, which does nothing else.
pub fn handled(jobs: usize) {
    HANDLED.fetch_add(jobs, Ordering::Relaxed);
}

/// The payload for queues that store text or JSON.
pub fn payload() -> String {
    "x".repeat(PAYLOAD_BYTES)
}

fn say(text: &str) {
    let mut output = io::stdout().lock();
    writeln!(output, "{text}").and_then(|()| output.flush()).expect("the driver reads");
}

/// Reads a line; false at the end of the input.
fn line() -> bool {
    let mut text = String::new();
    io::stdin().lock().read_line(&mut text).expect("the driver writes") > 0
}
