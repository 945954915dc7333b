//! Shows a record: its origin and size; its key, header values and payload only on request.

use std::fmt::Write;
use std::io;

use serde_json::{Value, json};
use wharf::Record;
use wharf::operate::Correction;

use crate::output::{Cell, Output, cell, maybe, verbatim};
use crate::when;

/// Whether the content of a record is shown.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct PayloadOption {
    /// Show the payload, the key and the values of headers too
    #[arg(long = "show-payload")]
    pub is_shown: bool,
}

impl PayloadOption {
    pub fn is_shown(self) -> bool {
        self.is_shown
    }
}

pub fn fields(record: &Record, payload: PayloadOption) -> Vec<(&'static str, Cell)> {
    let position = record.position();
    let mut fields = vec![
        ("topic", cell(record.topic())),
        ("partition, offset", maybe(position.map(|at| format!("{}, {}", at.partition, at.offset)))),
        ("recorded", maybe(record.recorded_at().map(when::at))),
        ("key", maybe(record.key().map(|key| if payload.is_shown { shown(key) } else { hidden(key) }))),
    ];
    for (name, value) in record.headers().iter() {
        let value =
            value.map_or_else(|| "-".to_owned(), |value| if payload.is_shown { shown(value) } else { hidden(value) });
        fields.push(("header", cell(format!("{}: {value}", shown(name)))));
    }
    fields.push(("payload", maybe(record.payload().map(hidden))));
    fields
}

/// Prints the payload below the fields, if requested.
pub fn payload(record: &Record, payload: PayloadOption, output: Output) -> io::Result<()> {
    let Some(bytes) = record.payload().filter(|_| payload.is_shown) else { return Ok(()) };
    output.line("")?;
    lines(bytes)
}

fn lines(bytes: &[u8]) -> io::Result<()> {
    let pretty = serde_json::from_slice::<Value>(bytes).and_then(|value| serde_json::to_string_pretty(&value));
    for line in pretty.unwrap_or_else(|_| shown_lines(bytes)).lines() {
        verbatim(line)?;
    }
    Ok(())
}

/// Prints a corrected payload below the original, if requested.
pub fn corrected(correction: &Correction, payload: PayloadOption, output: Output) -> io::Result<()> {
    if !payload.is_shown {
        return Ok(());
    }
    output.line("")?;
    output.line("corrected payload:")?;
    lines(&correction.payload)
}

pub fn corrected_field(correction: &Correction) -> Cell {
    let at = correction.corrected_at.map_or_else(|| "-".to_owned(), when::at);
    cell(format!("{}, {at}", hidden(&correction.payload)))
}

pub fn corrected_document(correction: &Correction, payload: PayloadOption) -> Value {
    json!({
        "corrected_at": correction.corrected_at.map(when::at),
        "payload": content(Some(&correction.payload), payload),
    })
}

fn content(bytes: Option<&[u8]>, payload: PayloadOption) -> Value {
    match bytes {
        None => Value::Null,
        Some(bytes) if !payload.is_shown => json!({ "bytes": bytes.len() }),
        Some(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => json!({ "bytes": bytes.len(), "text": text }),
            Err(_) => json!({ "bytes": bytes.len(), "hex": hex(bytes) }),
        },
    }
}

pub fn document(record: &Record, payload: PayloadOption) -> Value {
    let position = record.position();
    let bytes = |bytes| content(bytes, payload);
    let headers: Vec<Value> =
        record.headers().iter().map(|(name, value)| json!({ "name": shown(name), "value": bytes(value) })).collect();
    json!({
        "topic": record.topic(),
        "partition": position.map(|at| at.partition),
        "offset": position.map(|at| at.offset),
        "recorded_at": record.recorded_at().map(when::at),
        "key": bytes(record.key()),
        "headers": headers,
        "payload": bytes(record.payload()),
    })
}

fn hidden(bytes: &[u8]) -> String {
    format!("{} bytes", bytes.len())
}

/// UTF-8 as text, other bytes in hexadecimal.
fn shown(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| hex(bytes), str::to_owned)
}

fn shown_lines(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.chunks(32).map(hex).collect::<Vec<_>>().join("\n"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut hex, byte| {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
