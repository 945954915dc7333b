//! Formats numbers, times and bytes, and makes text from outside harmless. Pure.
//!
//! The templates escape HTML. In addition, characters that hide or reorder text are shown as escapes: [`visible`] is
//! called on every finished page, at the one place where pages are made.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

use crate::types::HandlerStatus;

/// Formats a count with commas; a count that stopped at `COUNT_MAX` gets a `+`.
pub(super) fn count(count: u64) -> String {
    if count == HandlerStatus::COUNT_MAX {
        return "10,000+".to_owned();
    }
    number(count)
}

/// Formats a sum of counts, each of which may have stopped at `COUNT_MAX`.
pub(super) fn at_least(sum: u64) -> String {
    format!("{}{}", number(sum), if sum >= HandlerStatus::COUNT_MAX { "+" } else { "" })
}

pub(super) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.char_indices() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub(super) fn signed(number: i64) -> String {
    let sign = if number < 0 { "-" } else { "" };
    format!("{sign}{}", self::number(number.unsigned_abs()))
}

/// Formats a rate per second.
pub(super) fn rate(per_sec: f64) -> String {
    match per_sec {
        rate if rate >= 10.0 => format!("{}/s", number(rate.round() as u64)),
        rate if rate >= 0.05 => format!("{rate:.1}/s"),
        rate if rate > 0.0 => "<0.1/s".to_owned(),
        _ => "0/s".to_owned(),
    }
}

/// Formats a rate limit in the shortest unit that allows one start, so that a low one is not shown as zero.
pub(super) fn limit(per_sec: f64) -> String {
    match per_sec {
        often if often >= 1.0 => rate(often),
        sometimes if sometimes * 60.0 >= 1.0 => format!("{}/min", tenth(sometimes * 60.0)),
        rarely => format!("{}/h", tenth(rarely * 3_600.0)),
    }
}

/// Formats a duration in its largest unit.
pub(super) fn span(secs: f64) -> String {
    match secs.max(0.0) {
        secs if secs < 0.001 => "0 s".to_owned(),
        secs if secs < 1.0 => format!("{:.0} ms", secs * 1_000.0),
        secs if secs < 10.0 => format!("{} s", tenth(secs)),
        secs if secs < 120.0 => format!("{secs:.0} s"),
        secs if secs < 7_200.0 => format!("{:.0} min", secs / 60.0),
        secs if secs < 172_800.0 => format!("{} h", tenth(secs / 3_600.0)),
        secs => format!("{} d", tenth(secs / 86_400.0)),
    }
}

fn tenth(value: f64) -> String {
    format!("{value:.1}").trim_end_matches(".0").to_owned()
}

pub(super) fn bytes(bytes: u64) -> String {
    match bytes {
        0..=1_023 => format!("{bytes} bytes"),
        1_024..=1_048_575 => format!("{} KiB", tenth(bytes as f64 / 1_024.0)),
        _ => format!("{} MiB", tenth(bytes as f64 / 1_048_576.0)),
    }
}

/// A point in time, for a `time` element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct When {
    /// Relative to now: `3 min ago`, `in 20 s`.
    pub(super) said: String,
    /// For programs, in RFC 3339.
    pub(super) iso: String,
    /// For people, exact to the second.
    pub(super) exact: String,
}

impl When {
    pub(super) fn new(at: SystemTime, now: SystemTime) -> Self {
        let said = match now.duration_since(at) {
            Ok(age) if age < Duration::from_secs(1) => "now".to_owned(),
            Ok(age) => format!("{} ago", span(age.as_secs_f64().floor())),
            Err(ahead) => format!("in {}", span(ahead.duration().as_secs_f64().ceil())),
        };
        let iso = humantime::format_rfc3339_millis(at).to_string();
        let exact =
            format!("{} UTC", humantime::format_rfc3339_seconds(at).to_string().replace('T', " ").replace('Z', ""));
        Self { said, iso, exact }
    }
}

/// Formats at most `bytes_max` bytes: as text if they are UTF-8, otherwise in hexadecimal.
pub(super) fn shown(bytes: &[u8], bytes_max: usize) -> String {
    let (start, is_cut) = (&bytes[..bytes.len().min(bytes_max)], bytes.len() > bytes_max);
    // The cut may split a character.
    let text = match std::str::from_utf8(start) {
        Ok(text) => Some(text),
        Err(error) if is_cut && error.error_len().is_none() => std::str::from_utf8(&start[..error.valid_up_to()]).ok(),
        Err(_) => None,
    };
    let mut shown = text.map_or_else(|| hex(start), str::to_owned);
    if is_cut {
        shown.push('…');
    }
    shown
}

/// Formats 32 bytes on a line.
fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2 + bytes.len() / 32);
    for (place, byte) in bytes.iter().enumerate() {
        if place > 0 && place.is_multiple_of(32) {
            text.push('\n');
        }
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Puts each value of a JSON text on a line of its own. Values are copied as text and not parsed, so a large number
/// keeps its digits.
pub(super) fn indented(json: &str) -> String {
    let (mut text, mut depth, mut is_in_string, mut is_escaped) =
        (String::with_capacity(json.len() * 2), 0usize, false, false);
    let mut rest = json.chars().peekable();
    let line = |text: &mut String, depth: usize| {
        text.push('\n');
        text.extend(std::iter::repeat_n("  ", depth.min(64)));
    };
    while let Some(character) = rest.next() {
        if is_in_string {
            text.push(character);
            is_in_string = is_escaped || character != '"';
            is_escaped = !is_escaped && character == '\\';
            continue;
        }
        match character {
            ' ' | '\n' | '\r' | '\t' => {}
            '{' | '[' => {
                while rest.next_if(|next| next.is_ascii_whitespace()).is_some() {}
                text.push(character);
                if let Some(end) = rest.next_if(|next| matches!(next, '}' | ']')) {
                    text.push(end);
                } else {
                    depth += 1;
                    line(&mut text, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut text, depth);
                text.push(character);
            }
            ',' => {
                text.push(',');
                line(&mut text, depth);
            }
            ':' => text.push_str(": "),
            _ => {
                is_in_string = character == '"';
                text.push(character);
            }
        }
    }
    text
}

/// Percent-encodes a value for the query of a URL.
pub(super) fn encode(value: &str) -> String {
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => encoded.push(char::from(byte)),
            _ => {
                let _ = write!(encoded, "%{byte:02X}");
            }
        }
    }
    encoded
}

/// Escapes characters that hide or reorder text in a finished page. They can only come from outside, because no
/// template contains them.
pub(super) fn visible(page: String) -> String {
    let is_hostile = |character: char| character != '\n' && is_hostile(character);
    if !page.contains(is_hostile) {
        return page;
    }
    let mut clean = String::with_capacity(page.len() + 64);
    for character in page.chars() {
        match character {
            _ if !is_hostile(character) => clean.push(character),
            '\t' => clean.push_str("\\t"),
            '\r' => clean.push_str("\\r"),
            _ => {
                let _ = write!(clean, "\\u{{{:x}}}", u32::from(character));
            }
        }
    }
    clean
}

/// C0, DEL and C1; bidirectional marks, embeddings and isolates; zero-width characters; line separators; annotations
/// and tags.
fn is_hostile(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_and_times_are_written_for_people() {
        assert_eq!([number(0), number(999), number(12_345_678)], ["0", "999", "12,345,678"]);
        assert_eq!([count(9_999), count(10_000)], ["9,999", "10,000+"]);
        assert_eq!([at_least(9_999), at_least(10_017)], ["9,999", "10,017+"]);
        assert_eq!([limit(32.0), limit(0.5), limit(1.0 / 3_600.0)], ["32/s", "30/min", "1/h"]);
        assert_eq!([rate(0.0), rate(0.01), rate(0.5), rate(1_234.0)], ["0/s", "<0.1/s", "0.5/s", "1,234/s"]);
        assert_eq!([span(0.25), span(3.0), span(90.0), span(3_600.0)], ["250 ms", "3 s", "90 s", "60 min"]);
        assert_eq!([bytes(5), bytes(1_536), bytes(3 << 20)], ["5 bytes", "1.5 KiB", "3 MiB"]);
        let now = SystemTime::now();
        assert_eq!(When::new(now - Duration::from_secs(200), now).said, "3 min ago");
        assert_eq!(When::new(now + Duration::from_secs(5), now).said, "in 5 s");
    }

    #[test]
    fn bytes_are_text_where_they_are_text() {
        assert_eq!(shown("größe".as_bytes(), 100), "größe");
        assert_eq!(shown("größe".as_bytes(), 3), "gr…");
        assert_eq!(shown(&[0xff, 0], 100), "ff00");
    }

    #[test]
    fn json_is_indented_and_otherwise_as_it_came() {
        let json = r#"{"b": 12345678901234567890.10, "a": [1,{ }, "x,\"{\\"], "c":[ ]}"#;
        let text = "{\n  \"b\": 12345678901234567890.10,\n  \"a\": [\n    1,\n    {},\n    \"x,\\\"{\\\\\"\n  ],\n  \"c\": []\n}";
        assert_eq!(indented(json), text);
        assert_eq!(indented(" 7 "), "7");
    }

    proptest! {
        #[test]
        fn nothing_hostile_comes_through(text in any::<String>(), hostile in any::<char>()) {
            let page = visible(format!("{text}{hostile}\u{202e}"));
            prop_assert!(!page.contains(|character: char| character != '\n' && is_hostile(character)));
        }

        #[test]
        fn what_is_encoded_is_plain_ascii(text in any::<String>()) {
            prop_assert!(encode(&text).bytes().all(|byte| byte.is_ascii_graphic() && !b"&=+#\"'<>".contains(&byte)));
        }
    }
}
