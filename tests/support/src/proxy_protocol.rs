//! PostgreSQL's wire protocol, as far as the proxy needs it: where messages end, which SQL they contain, which reply
//! belongs to which statement.
//!
//! It does no I/O: it takes bytes and returns decisions. Encrypted sessions are not parsed, so no statement fault can
//! hit them.

use std::collections::HashMap;

use crate::proxy_fault::{Armed, Fault, Faults};

const SSL_REQUEST: u32 = 80_877_103;
const GSS_ENCRYPTION_REQUEST: u32 = 80_877_104;
const CANCEL_REQUEST: u32 = 80_877_102;

/// The state of one session, built from both directions.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    phase: Phase,
    /// The SQL of each prepared statement, by name.
    prepared: HashMap<String, String>,
    /// The number of messages that the server answers with "ready for query", including the start of the session.
    requests: u64,
    /// How many of these were answered.
    answers: u64,
    /// Set when the reply to a request must be lost.
    losing: Option<LostReply>,
    /// Whether the open transaction is read only. Losing its commit has no effect, so no fault is used for it.
    is_read_only: bool,
}

#[derive(Debug, Default, PartialEq)]
enum Phase {
    #[default]
    Startup,
    /// The client asked for encryption; the server answers with a single byte.
    EncryptionAsked,
    Messages,
    /// Encrypted, or a cancel request: pass everything.
    Opaque,
}

#[derive(Debug)]
struct LostReply {
    /// The number of the reply to lose.
    answer: u64,
    fault: Armed,
}

/// What to do with received bytes.
#[derive(Debug)]
pub(crate) enum Step {
    /// Forward these complete messages.
    Forward(Vec<u8>),
    /// Forward these, then reset both sides: the fault was applied.
    Reset(Vec<u8>, Armed),
    /// Forward these, then nothing until this side closes.
    Hang(Vec<u8>, Armed),
}

impl Conversation {
    /// Takes the complete messages out of what the client sent.
    pub(crate) fn client_sent(&mut self, buffer: &mut Vec<u8>, faults: &Faults) -> Step {
        let mut forward = Vec::new();
        while let Some(message) = self.next_client_message(buffer) {
            if self.phase == Phase::Messages
                && let Some(sql) = self.statement_executed(&message)
                && !self.is_end_of_looking(&sql)
                && let Some(armed) = faults.take_matching(&sql)
            {
                match armed.fault() {
                    Fault::LoseRequest => return Step::Reset(forward, armed),
                    Fault::Hang => return Step::Hang(forward, armed),
                    Fault::LoseReply => self.losing = Some(LostReply { answer: self.requests + 1, fault: armed }),
                }
            }
            self.note_client_message(&message);
            forward.extend_from_slice(&message);
        }
        Step::Forward(forward)
    }

    /// Takes the complete messages out of what the server sent.
    pub(crate) fn server_sent(&mut self, buffer: &mut Vec<u8>) -> Step {
        let mut forward = Vec::new();
        while let Some(message) = self.next_server_message(buffer) {
            let is_lost = self.losing.as_ref().is_some_and(|losing| self.answers + 1 >= losing.answer);
            if self.phase == Phase::Messages && message[0] == b'Z' {
                self.answers += 1;
                if let Some(losing) = self.losing.take_if(|losing| self.answers == losing.answer) {
                    return Step::Reset(forward, losing.fault);
                }
            }
            if !is_lost {
                forward.extend_from_slice(&message);
            }
        }
        Step::Forward(forward)
    }

    /// Called at the end of the session. A fault whose reply never came counts as applied.
    pub(crate) fn into_pending_fault(self) -> Option<Armed> {
        self.losing.map(|losing| losing.fault)
    }

    fn next_client_message(&mut self, buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
        match self.phase {
            Phase::Startup => take(buffer, 0),
            Phase::Messages => take(buffer, 1),
            Phase::EncryptionAsked | Phase::Opaque => take_all(buffer),
        }
    }

    fn next_server_message(&mut self, buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
        match self.phase {
            Phase::Messages => take(buffer, 1),
            Phase::EncryptionAsked if !buffer.is_empty() => {
                let answer = buffer.remove(0);
                self.phase = if answer == b'N' { Phase::Startup } else { Phase::Opaque };
                Some(vec![answer])
            }
            // A server that sends first has an error to report: forward it.
            Phase::EncryptionAsked | Phase::Startup | Phase::Opaque => take_all(buffer),
        }
    }

    /// The SQL that the server executes for this message.
    fn statement_executed(&self, message: &[u8]) -> Option<String> {
        let mut fields = Fields(&message[5..]);
        match message[0] {
            b'Q' => Some(fields.text()),
            b'B' => {
                let _portal = fields.text();
                self.prepared.get(&fields.text()).cloned()
            }
            _ => None,
        }
    }

    /// Whether the statement ends a transaction that was begun as read only.
    fn is_end_of_looking(&mut self, sql: &str) -> bool {
        if sql.starts_with("BEGIN") {
            self.is_read_only = sql.ends_with("READ ONLY");
        }
        self.is_read_only && sql == "COMMIT"
    }

    fn note_client_message(&mut self, message: &[u8]) {
        match self.phase {
            Phase::Startup => self.note_startup(message),
            Phase::Messages => match message[0] {
                b'P' => {
                    let mut fields = Fields(&message[5..]);
                    self.prepared.insert(fields.text(), fields.text());
                }
                // Query, Sync and FunctionCall.
                b'Q' | b'S' | b'F' => self.requests += 1,
                _ => {}
            },
            Phase::EncryptionAsked | Phase::Opaque => {}
        }
    }

    fn note_startup(&mut self, message: &[u8]) {
        let code = message.get(4..8).map(|code| u32::from_be_bytes(code.try_into().expect("four bytes")));
        match code {
            Some(SSL_REQUEST | GSS_ENCRYPTION_REQUEST) => self.phase = Phase::EncryptionAsked,
            Some(CANCEL_REQUEST) | None => self.phase = Phase::Opaque,
            Some(_protocol_version) => {
                self.phase = Phase::Messages;
                self.requests = 1;
            }
        }
    }
}

/// Takes one message whose length is after `kind_bytes`; `None` until it is complete.
fn take(buffer: &mut Vec<u8>, kind_bytes: usize) -> Option<Vec<u8>> {
    let length = buffer.get(kind_bytes..kind_bytes + 4)?;
    let length = u32::from_be_bytes(length.try_into().expect("four bytes")) as usize;
    // The length includes itself; a smaller value would cause an endless loop.
    let total = kind_bytes + length.max(4);
    (buffer.len() >= total).then(|| buffer.drain(..total).collect())
}

fn take_all(buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    (!buffer.is_empty()).then(|| std::mem::take(buffer))
}

/// The zero-terminated texts of a message, one after another.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn text(&mut self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        let text = String::from_utf8_lossy(&self.0[..end]).into_owned();
        self.0 = self.0.get(end + 1..).unwrap_or_default();
        text
    }
}
