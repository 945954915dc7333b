//! The one place where text from outside is made safe to store and to log.
//!
//! The result has no NUL (PostgreSQL text cannot hold one), no other control character except newline and tab, and at
//! most the given number of characters and an ellipsis. It never fails: recording a failure must not fail because of
//! the failure's text.

/// Makes text from a handler or a record fit for a text column and a log line.
pub(crate) fn text(text: &str, chars_max: usize) -> String {
    let mut clean = String::with_capacity(text.len().min(chars_max));
    for (count, character) in text.chars().enumerate() {
        if count == chars_max {
            clean.push('…');
            break;
        }
        match character {
            '\n' | '\t' => clean.push(character),
            // Bidirectional overrides can make a line display as a different text.
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => clean.push('\u{fffd}'),
            _ if character.is_control() => clean.push('\u{fffd}'),
            _ => clean.push(character),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn control_characters_are_replaced_and_length_is_bounded() {
        assert_eq!(text("a\0b\x1b[31m\u{202e}\nc", 100), "a\u{fffd}b\u{fffd}[31m\u{fffd}\nc");
        assert_eq!(text("abcdef", 3), "abc…");
        assert_eq!(text("abc", 3), "abc");
    }

    proptest! {
        #[test]
        fn anything_becomes_storable_text(raw in any::<String>(), max in 0usize..50) {
            let clean = text(&raw, max);
            prop_assert!(clean.chars().count() <= max + 1);
            prop_assert!(!clean.contains('\0'));
            prop_assert!(clean.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'));
        }
    }
}
