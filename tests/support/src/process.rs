//! The processes that tests start.
//!
//! No process outlives the test process, however that ends (also by SIGKILL): the kernel signals every process started
//! here when the test process ends, and a small janitor process then removes the folders. Servers that refuse to run as
//! root run under an unprivileged account.
//!
//! Linux only: it uses the parent death signal, and `setpriv` of util-linux.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, mpsc};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User, geteuid};

/// How long a process may take to react before the test fails. Far above what a loaded machine needs.
pub const PROCESS_DEADLINE: Duration = Duration::from_secs(180);

/// The interval between two checks of a process or file that cannot notify us.
pub const PROCESS_POLL: Duration = Duration::from_millis(5);

/// The account a server runs under when the tests run as root.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
}

/// The unprivileged account to use; `None` when the tests are not run as root and no change is needed.
pub fn service_account() -> Option<Account> {
    static ACCOUNT: LazyLock<Option<Account>> = LazyLock::new(|| {
        if !geteuid().is_root() {
            return None;
        }
        let user = ["postgres", "nobody"]
            .into_iter()
            .find_map(|name| User::from_name(name).ok().flatten())
            .expect("running as root, but there is neither a user `postgres` nor `nobody` to start servers as");
        Some(Account { uid: user.uid.as_raw(), gid: user.gid.as_raw() })
    });
    *ACCOUNT
}

/// A short-lived tool, run under [`service_account`] in `folder`.
pub fn service_tool(program: &Path, folder: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some(account) = service_account() {
        command.uid(account.uid).gid(account.gid);
    }
    settle(&mut command, folder);
    command
}

/// A server, run under [`service_account`] in `folder`, for [`spawn_bound`].
pub fn service_server(program: &Path, folder: &Path, death_signal: Signal) -> Command {
    let mut command = bound_command(program, service_account(), death_signal);
    settle(&mut command, folder);
    command
}

/// A command that receives `death_signal` as soon as this process ends, if started by [`spawn_bound`].
///
/// It runs through `setpriv`, which then executes the program: it changes the account first, because that change would
/// clear the death signal.
pub fn bound_command(program: &Path, account: Option<Account>, death_signal: Signal) -> Command {
    let mut command = Command::new("setpriv");
    if let Some(account) = account {
        command.arg(format!("--reuid={}", account.uid)).arg(format!("--regid={}", account.gid)).arg("--clear-groups");
    }
    // `setpriv` expects the signal names without `SIG`.
    command.args(["--pdeathsig", death_signal.as_str().trim_start_matches("SIG"), "--"]).arg(program);
    command
}

/// Isolates the command. It inherits none of our streams: a server that kept our stdout open would block the caller of
/// the tests. It also inherits no `PGDATA`, `PGPORT` and the like, which may point to a real server.
fn settle(command: &mut Command, folder: &Path) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("PG") {
            command.env_remove(name);
        }
    }
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
}

/// Runs `command` and panics with its output if it fails.
pub fn run_to_end(mut command: Command) {
    let output = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?} failed with {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
}

/// Starts a [`bound_command`], from a thread that lives as long as the process.
///
/// The kernel sends the death signal when the *thread* that forked ends, and a test's threads end with the test.
pub fn spawn_bound(command: Command) -> io::Result<Child> {
    let (reply, answer) = mpsc::channel();
    let request = Request { command, reply };
    SPAWNER.lock().expect("a send never panics").send(request).expect("the spawner never ends");
    answer.recv().expect("the spawner answers every request")
}

struct Request {
    command: Command,
    reply: mpsc::Sender<io::Result<Child>>,
}

static SPAWNER: LazyLock<Mutex<mpsc::Sender<Request>>> = LazyLock::new(|| {
    let (sender, requests) = mpsc::channel::<Request>();
    std::thread::Builder::new()
        .name("spawner".to_owned())
        .spawn(move || {
            for mut request in requests {
                let _ = request.reply.send(request.command.spawn());
            }
        })
        .expect("cannot start the spawner thread");
    Mutex::new(sender)
});

/// Sends `signal` to a child that has not been waited for, so its id cannot belong to another process yet.
pub fn send_signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().cast_signed());
    kill(pid, signal).unwrap_or_else(|error| panic!("cannot send {signal} to process {pid}: {error}"));
}

/// Waits for the end of `child`; panics after [`PROCESS_DEADLINE`]. Blocks its thread.
pub fn wait_for_end(child: &mut Child, what: &str) -> std::process::ExitStatus {
    let deadline = Instant::now() + PROCESS_DEADLINE;
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return status;
        }
        assert!(Instant::now() < deadline, "{what} (process {}) did not end in time", child.id());
        std::thread::sleep(PROCESS_POLL);
    }
}

/// Registers `folder` for removal when this process ends without dropping it.
pub fn remove_when_we_are_gone(folder: &Path) {
    let mut janitor = JANITOR.lock().expect("a write never panics");
    let orders = janitor.stdin.as_mut().expect("its stdin is piped");
    writeln!(orders, "{}", folder.display()).expect("the janitor lives longer than we do");
}

/// A shell that reads folder names until its stdin is closed, when this process ends, and then removes them. It
/// retries, because a server may still be shutting down.
const JANITOR_SCRIPT: &str = r#"
folders=
while IFS= read -r folder; do folders="$folders$folder
"; done
IFS='
'
for folder in $folders; do
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        rm -rf -- "$folder" 2>/dev/null
        [ -e "$folder" ] || break
        sleep 0.2
    done
done
"#;

static JANITOR: LazyLock<Mutex<Child>> = LazyLock::new(|| {
    let shell = Command::new("sh")
        .args(["-c", JANITOR_SCRIPT])
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // In its own process group, so that a signal to our group does not end the janitor.
        .process_group(0)
        .spawn()
        .expect("cannot start sh");
    Mutex::new(shell)
});
