//! PostgreSQL's wire protocol, as far as the proxy must understand it: where messages end, what SQL they carry, which
//! reply belongs to which statement.
//!
//! Pure: bytes in, decisions out. Encrypted sessions pass unread, so no statement fault can strike them.

use std::collections::HashMap;

use crate::proxy_fault::{Armed, Fault, Faults};

const SSL_REQUEST: u32 = 80_877_103;
const GSS_ENCRYPTION_REQUEST: u32 = 80_877_104;
const CANCEL_REQUEST: u32 = 80_877_102;

/// What is known of one session. Fed with both directions.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    phase: Phase,
    /// The SQL of each prepared statement, by its name.
    prepared: HashMap<String, String>,
    /// Messages sent to the server that it answers with "ready for query", the start of the session included.
    requests: u64,
    /// How many of these it has answered.
    answers: u64,
    /// Set when the reply to one request is to be lost.
    losing: Option<LostReply>,
}

#[derive(Debug, Default, PartialEq)]
enum Phase {
    #[default]
    Startup,
    /// The client asked for encryption, the server answers with a single byte.
    EncryptionAsked,
    Messages,
    /// Encrypted, or a cancel request: pass everything.
    Opaque,
}

#[derive(Debug)]
struct LostReply {
    /// The number of the answer to lose.
    answer: u64,
    fault: Armed,
}

/// What to do with bytes that came in.
#[derive(Debug)]
pub(crate) enum Step {
    /// Pass these on; they are whole messages.
    Forward(Vec<u8>),
    /// Pass these on, then reset both sides: the fault has done its work.
    Reset(Vec<u8>, Armed),
    /// Pass these on, then nothing until this side closes.
    Hang(Vec<u8>, Armed),
}

impl Conversation {
    /// Takes the whole messages out of what the client sent.
    pub(crate) fn client_sent(&mut self, buffer: &mut Vec<u8>, faults: &Faults) -> Step {
        let mut forward = Vec::new();
        while let Some(message) = self.next_client_message(buffer) {
            if self.phase == Phase::Messages
                && let Some(sql) = self.statement_executed(&message)
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

    /// Takes the whole messages out of what the server sent.
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

    /// The session is over: the fault of a reply that never came has done its work as well.
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
            // A server that speaks first has an error to report: pass it.
            Phase::EncryptionAsked | Phase::Startup | Phase::Opaque => take_all(buffer),
        }
    }

    /// The SQL that this message has the server execute.
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

/// Takes one message whose length stands after `kind_bytes`; `None` until it is complete.
fn take(buffer: &mut Vec<u8>, kind_bytes: usize) -> Option<Vec<u8>> {
    let length = buffer.get(kind_bytes..kind_bytes + 4)?;
    let length = u32::from_be_bytes(length.try_into().expect("four bytes")) as usize;
    // The length counts itself; less would never end.
    let total = kind_bytes + length.max(4);
    (buffer.len() >= total).then(|| buffer.drain(..total).collect())
}

fn take_all(buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    (!buffer.is_empty()).then(|| std::mem::take(buffer))
}

/// The zero-ended texts of a message, one after the other.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn text(&mut self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        let text = String::from_utf8_lossy(&self.0[..end]).into_owned();
        self.0 = self.0.get(end + 1..).unwrap_or_default();
        text
    }
}
