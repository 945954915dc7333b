//! One-shot faults that hit a statement on its way through the proxy, and handles by which a test waits for them.

use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::watch;

/// How long a test waits for its fault before it fails.
const FIRED_DEADLINE: Duration = Duration::from_secs(180);

/// The effect on the statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server never receives it; both sides see their connection reset.
    LoseRequest,
    /// The server executes it and replies; the client sees its connection reset instead of the reply.
    LoseReply,
    /// The server never receives it, and the client receives nothing more on this connection until it closes it. Other
    /// connections continue.
    Hang,
}

/// The statement that is hit.
#[derive(Clone, Debug)]
pub enum Target {
    Commit,
    /// Its SQL contains this text.
    Containing(String),
}

/// The test's handle of an armed fault.
#[derive(Clone, Debug)]
pub struct FaultHandle {
    what: String,
    fired: watch::Receiver<bool>,
}

impl FaultHandle {
    /// Waits until the fault was applied and, except for [`Fault::Hang`], the connection is reset. Panics after three
    /// minutes.
    pub async fn fired(&self) {
        let mut fired = self.fired.clone();
        let outcome = tokio::time::timeout(FIRED_DEADLINE, fired.wait_for(|fired| *fired)).await;
        match outcome {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => panic!("the proxy was dropped and {} was not applied", self.what),
            Err(_) => panic!("{} was not applied in {FIRED_DEADLINE:?}", self.what),
        }
    }

    pub fn has_fired(&self) -> bool {
        *self.fired.borrow()
    }
}

/// The proxy's side of an armed fault.
#[derive(Debug)]
pub struct Armed {
    target: Target,
    fault: Fault,
    fired: watch::Sender<bool>,
    /// Armed when this one is applied.
    next: Option<Box<Armed>>,
}

impl Armed {
    pub fn fault(&self) -> Fault {
        self.fault
    }

    /// Takes `self`: a fault is applied once.
    pub fn fire(self) {
        // The test may have dropped its handle.
        let _ = self.fired.send(true);
    }
}

/// The armed faults.
#[derive(Debug, Default)]
pub struct Faults {
    /// A std mutex: nothing awaits while holding it.
    armed: Mutex<Vec<Armed>>,
}

impl Faults {
    pub fn arm(&self, target: Target, fault: Fault) -> FaultHandle {
        let (armed, handle) = armed(target, fault);
        self.armed.lock().expect("nothing panics while holding it").push(armed);
        handle
    }

    /// Arms `fault` for `target` after the reply to `first` was lost.
    pub fn arm_after(&self, first: Target, target: Target, fault: Fault) -> FaultHandle {
        let (next, handle) = armed(target, fault);
        let (first, _) = armed(first, Fault::LoseReply);
        let first = Armed { next: Some(Box::new(next)), ..first };
        self.armed.lock().expect("nothing panics while holding it").push(first);
        handle
    }

    /// Removes and returns the first armed fault for this statement.
    pub fn take_matching(&self, sql: &str) -> Option<Armed> {
        let mut armed = self.armed.lock().expect("nothing panics while holding it");
        let index = armed.iter().position(|armed| matches(&armed.target, sql))?;
        let mut taken = armed.remove(index);
        armed.extend(taken.next.take().map(|next| *next));
        Some(taken)
    }
}

fn armed(target: Target, fault: Fault) -> (Armed, FaultHandle) {
    let what = format!("{fault:?} on {target:?}");
    let (fired, receiver) = watch::channel(false);
    (Armed { target, fault, fired, next: None }, FaultHandle { what, fired: receiver })
}

fn matches(target: &Target, sql: &str) -> bool {
    match target {
        Target::Commit => sql.split(';').any(is_commit),
        Target::Containing(text) => sql.contains(text),
    }
}

fn is_commit(statement: &str) -> bool {
    let word = statement.split_whitespace().next().unwrap_or_default();
    // Not `COMMIT PREPARED`: that is another statement.
    let is_prepared = statement.split_whitespace().nth(1).is_some_and(|word| word.eq_ignore_ascii_case("prepared"));
    (word.eq_ignore_ascii_case("commit") || word.eq_ignore_ascii_case("end")) && !is_prepared
}
