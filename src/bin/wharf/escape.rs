//! Makes text from records and rows safe to show: it cannot move the cursor, change colours, or hide or reorder text.
//!
//! Control characters, escape sequences, bidirectional and invisible characters are shown as escapes such as `\u{1b}`.
//! The one module that prints passes everything through here.

use std::fmt::Write;

/// Escapes the text for a terminal, on one line.
pub fn text(raw: &str) -> String {
    let mut clean = String::with_capacity(raw.len());
    for character in raw.chars() {
        match character {
            '\n' => clean.push_str("\\n"),
            '\r' => clean.push_str("\\r"),
            '\t' => clean.push_str("\\t"),
            _ if is_hostile(character) => {
                // Writing to a String cannot fail.
                let _ = write!(clean, "\\u{{{:x}}}", u32::from(character));
            }
            _ => clean.push(character),
        }
    }
    clean
}

/// Escapes the hostile characters that serde leaves in a JSON text, in JSON's own form.
pub fn json(document: &str) -> String {
    let mut clean = String::with_capacity(document.len());
    for character in document.chars() {
        // Line feeds separate values. Those within strings are escaped already.
        if character == '\n' || !is_hostile(character) {
            clean.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(clean, "\\u{unit:04x}");
        }
    }
    clean
}

/// Cuts a text that has been escaped, and marks the cut.
pub fn cut(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// Whether a character can control a terminal or mislead the reader: C0, DEL and C1; bidirectional marks, embeddings
/// and isolates; zero-width characters; line separators; annotations and tags.
pub fn is_hostile(character: char) -> bool {
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
    fn escape_sequences_and_reordering_characters_are_shown_as_escapes() {
        assert_eq!(
            text("a\x1b[31mb\x07\u{9b}2J\u{202e}c\nd\u{200d}"),
            r"a\u{1b}[31mb\u{7}\u{9b}2J\u{202e}c\nd\u{200d}"
        );
        assert_eq!(text("größe 数 😀 \\"), "größe 数 😀 \\");
    }

    #[test]
    fn json_stays_the_same_document() {
        let value = serde_json::json!({ "a\u{7f}": "x\x1b\u{9b}\u{202e}\u{e0041}\n" });
        let safe = json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(safe.chars().all(|c| c == '\n' || !is_hostile(c)), "{safe}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap(), value);
    }

    #[test]
    fn text_is_cut_by_characters_with_a_mark() {
        assert_eq!(cut("größe", 3), "grö…");
        assert_eq!(cut("grö", 3), "grö");
    }

    proptest! {
        #[test]
        fn nothing_hostile_comes_through(raw in any::<String>(), hostile in any::<char>()) {
            let raw = format!("{raw}{hostile}\u{1b}]0;x\u{7}\u{2066}");
            prop_assert!(!text(&raw).chars().any(is_hostile));
            let document = serde_json::to_string(&raw).unwrap();
            let safe = json(&document);
            prop_assert!(!safe.chars().any(is_hostile));
            prop_assert_eq!(serde_json::from_str::<String>(&safe).unwrap(), raw);
        }
    }
}
