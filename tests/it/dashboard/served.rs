//! Runs `wharf dashboard` as a child process, on a free port.

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use crate::cli::program::Program;
use crate::scene::{Database, Stage, within};
use support::browser::Browser;
use support::http::{Answer, request};

pub struct Served {
    /// `host:port`.
    pub address: String,
    /// Killed when dropped.
    process: Child,
}

impl Served {
    pub async fn on<D: Database>(scene: &Stage<D>) -> Served {
        Self::with(scene, &["--listen", "127.0.0.1:0", "--actor", "alice"], &[]).await
    }

    pub async fn with<D: Database>(scene: &Stage<D>, arguments: &[&str], variables: &[(&str, &str)]) -> Served {
        let mut command = Program::on(scene).command();
        command.arg("dashboard").args(arguments).envs(variables.iter().copied());
        let mut process = command.spawn().expect("the binary starts");
        let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        let line = within(lines.next_line()).await.expect("it prints").expect("a line with its URL");
        let url = line.split(' ').find(|word| word.starts_with("http://")).expect("its URL");
        let address = url.trim_start_matches("http://").trim_end_matches('/').to_owned();
        Served { address, process }
    }

    /// Kills the process and waits for its end, after which its port is free.
    pub async fn ends(mut self) {
        self.process.kill().await.expect("it runs");
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub async fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        request(&self.address, "GET", path, headers, "").await
    }

    /// Posts a form.
    pub async fn post(&self, path: &str, headers: &[(&str, &str)], form: &str) -> Answer {
        let kind = ("Content-Type", "application/x-www-form-urlencoded");
        request(&self.address, "POST", path, &[&[kind], headers].concat(), form).await
    }

    /// Asserts that no page has logged a warning or an error, or sent a request to another server.
    pub async fn assert_quiet(&self, browser: &Browser) {
        assert_eq!(browser.complaints().await, [""; 0]);
        let own = self.url("/");
        let is_foreign =
            |url: &String| !url.starts_with(&own) && !url.starts_with("data:") && !url.starts_with("chrome");
        let foreign: Vec<String> = browser.requested().await.into_iter().filter(is_foreign).collect();
        assert_eq!(foreign, [""; 0]);
    }
}
