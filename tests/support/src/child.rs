//! Real processes of our own code that a test can kill, stop and continue.
//!
//! A child is this test binary, started again for the single test `child_entry`, which calls [`run_role`]. It reports
//! to the parent with [`say`]; everything else on its output is noise of the test harness. No child outlives its parent
//! or its [`Child`], however they end.

use std::fmt::Display;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::sync::watch;

use crate::process::{PROCESS_DEADLINE, PROCESS_POLL, bound_command, send_signal, spawn_bound};

/// Names the role, and distinguishes a child from a normal run of the tests.
const ROLE_VARIABLE: &str = "WHARF_CHILD";

/// The test that calls [`run_role`], in the root of the test binary.
const ENTRY_TEST: &str = "child_entry";

/// The prefix of each line for the parent.
const PREFIX: &str = "CHILD ";

/// How long a test waits for a line.
const LINE_DEADLINE: Duration = Duration::from_secs(180);

/// What a child does, from start to end.
pub type Role = fn();

/// In a child, runs its role; in a normal run of the tests, does nothing.
pub fn run_role(roles: &[(&str, Role)]) {
    let Ok(wanted) = std::env::var(ROLE_VARIABLE) else { return };
    let role = roles.iter().find(|(name, _)| *name == wanted);
    let (_, role) = role.unwrap_or_else(|| panic!("no role named {wanted}"));
    role();
}

/// In a child, sends one line to the parent.
pub fn say(message: impl Display) {
    // Starts on a new line: the harness has printed the name of the test without a line break.
    let text = format!("\n{PREFIX}{message}\n");
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).expect("the parent listens");
}

/// In a child, a parameter given to [`Child::spawn`].
pub fn parameter(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("the parent did not set {name}"))
}

/// The program of an example, which cargo builds beside the tests.
pub fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().expect("this test binary");
    tests.parent().and_then(Path::parent).expect("two folders above it").join("examples").join(name)
}

/// A running child.
#[derive(Debug)]
pub struct Child {
    role: String,
    process: Mutex<std::process::Child>,
    /// The output so far. Threads read it, so nothing is lost while no test waits for it.
    output: watch::Receiver<Output>,
}

/// The output of a child.
#[derive(Clone, Debug, Default)]
struct Output {
    /// The lines sent by [`say`], without the prefix.
    said: Vec<String>,
    /// Everything on stdout and stderr, shown by a failing test.
    raw: Vec<String>,
    streams_ended: usize,
}

impl Child {
    /// Starts a child in `role`, with these environment variables.
    pub fn spawn(role: &str, variables: &[(&str, &str)]) -> Child {
        let program = std::env::current_exe().expect("this test binary");
        let mut command = bound_command(&program, None, Signal::SIGKILL);
        command.args([ENTRY_TEST, "--exact", "--nocapture", "--test-threads=1"]).env(ROLE_VARIABLE, role);
        Child::run(role, command, variables)
    }

    /// Starts an [`example`]. Read its output with [`Child::await_printed`].
    pub fn spawn_example(name: &str, variables: &[(&str, &str)]) -> Child {
        Child::run(name, bound_command(&example(name), None, Signal::SIGKILL), variables)
    }

    fn run(role: &str, mut command: Command, variables: &[(&str, &str)]) -> Child {
        command.envs(variables.iter().copied()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = spawn_bound(command).expect("cannot start a child");
        let (sender, output) = watch::channel(Output::default());
        let sender = Arc::new(sender);
        read_lines(process.stdout.take().expect("piped"), Arc::clone(&sender));
        read_lines(process.stderr.take().expect("piped"), sender);
        Child { role: role.to_owned(), process: Mutex::new(process), output }
    }

    pub fn id(&self) -> u32 {
        self.process().id()
    }

    /// The lines sent by [`say`] so far.
    pub fn lines(&self) -> Vec<String> {
        self.output.borrow().said.clone()
    }

    /// Waits for a line, which may already have arrived, and returns it. Panics with the child's output if the child
    /// ends without that line or `LINE_DEADLINE` passes.
    pub async fn await_line(&self, is_wanted: impl Fn(&str) -> bool) -> String {
        self.await_in(|output| &output.said, is_wanted).await
    }

    /// Like [`Child::await_line`], for any output line that contains the text.
    pub async fn await_printed(&self, text: &str) -> String {
        self.await_in(|output| &output.raw, |line| line.contains(text)).await
    }

    async fn await_in(&self, lines: fn(&Output) -> &Vec<String>, is_wanted: impl Fn(&str) -> bool) -> String {
        let mut output = self.output.clone();
        let find = |output: &Output| lines(output).iter().find(|line| is_wanted(line)).cloned();
        let arrived = output.wait_for(|output| find(output).is_some() || output.streams_ended == STREAMS);
        let reason = match tokio::time::timeout(LINE_DEADLINE, arrived).await {
            Ok(_) => "ended",
            Err(_) => "is late",
        };
        let found = find(&self.output.borrow());
        found.unwrap_or_else(|| {
            panic!("the child {} {reason} without the line the test waits for:\n{}", self.role, self.raw_output())
        })
    }

    /// Waits for exactly this line.
    pub async fn await_said(&self, line: &str) {
        self.await_line(|said| said == line).await;
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub async fn kill9(&self) {
        // Not through `signal`: killing a process that has already ended is not an error.
        let _ = self.process().kill();
        self.wait().await;
    }

    /// Sends SIGSTOP: the process freezes.
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Sends SIGCONT: the process continues.
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Sends SIGTERM.
    pub fn term(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Waits for its end; panics after `PROCESS_DEADLINE`. May be called again.
    pub async fn wait(&self) -> ExitStatus {
        let deadline = Instant::now() + PROCESS_DEADLINE;
        loop {
            // Locked only for each check, so that the process can be signalled while a test waits.
            if let Some(status) = self.process().try_wait().expect("a child can be waited for") {
                return status;
            }
            assert!(Instant::now() < deadline, "the child {} does not end:\n{}", self.role, self.raw_output());
            tokio::time::sleep(PROCESS_POLL).await;
        }
    }

    /// Panics if it has ended: its process id may belong to another process by now.
    fn signal(&self, signal: Signal) {
        let mut process = self.process();
        let ended = process.try_wait().expect("a child can be waited for");
        assert!(ended.is_none(), "the child {} has ended already:\n{}", self.role, self.raw_output());
        send_signal(&process, signal);
    }

    /// The last lines of everything it has printed.
    pub fn last_printed(&self, lines_max: usize) -> String {
        let output = self.output.borrow();
        output.raw[output.raw.len().saturating_sub(lines_max)..].join("\n")
    }

    fn raw_output(&self) -> String {
        self.output.borrow().raw.join("\n")
    }

    fn process(&self) -> MutexGuard<'_, std::process::Child> {
        self.process.lock().expect("nothing panics while holding it")
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // This also runs while a failing test unwinds, so it must not panic.
        if let Ok(mut process) = self.process.lock() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Standard output and standard error.
const STREAMS: usize = 2;

/// A thread and not a task: the output must be read while the test's runtime is busy or has ended.
fn read_lines(stream: impl Read + Send + 'static, output: Arc<watch::Sender<Output>>) {
    let read = move || {
        for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            output.send_modify(|output| {
                output.said.extend(line.strip_prefix(PREFIX).map(str::to_owned));
                output.raw.push(line);
            });
        }
        output.send_modify(|output| output.streams_ended += 1);
    };
    std::thread::Builder::new().name("child output".to_owned()).spawn(read).expect("cannot start a thread");
}
