//! Topics by name or by pattern: `orders`, or `^orders\..*` for every topic whose name matches.
//!
//! A pattern is a regular expression of the `regex` crate that begins with `^`, which no topic name does. This process
//! matches the names that brokers return, so brokers and librdkafka never get a pattern. For SQL functions, the pattern
//! is translated into the syntax of PostgreSQL; both match the same names.

use std::fmt;

use regex::bytes::{Regex, RegexBuilder};
use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, Hir, HirKind, Look, Repetition};

/// The longest topic name that Kafka allows.
const NAME_CHARS_MAX: usize = 249;
/// The longest pattern. Longer ones could be slow to compile.
const PATTERN_CHARS_MAX: usize = 249;
/// The largest repetition count that PostgreSQL allows.
const REPEATS_MAX: u32 = 255;
/// The largest compiled pattern. It bounds the memory of nested repetitions.
const COMPILED_BYTES_MAX: usize = 1 << 20;
/// The prefix of Kafka's internal topics, which no pattern matches.
const INTERNAL: &str = "__";

/// A topic, or all topics that match a pattern.
#[derive(Debug, Clone)]
pub(crate) enum TopicFilter {
    Name(String),
    Pattern(TopicPattern),
}

impl TopicFilter {
    /// Parses a pattern if the text begins with `^`, otherwise a name.
    ///
    /// # Errors
    /// The reason why it is neither.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.starts_with('^') {
            true => TopicPattern::parse(text).map(Self::Pattern),
            false if is_topic_name(text) => Ok(Self::Name(text.to_owned())),
            false => {
                Err("a topic name has 1 to 249 characters of A-Z a-z 0-9 . _ -, and a pattern begins with ^".to_owned())
            }
        }
    }

    /// The name; `None` for a pattern.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            Self::Name(name) => Some(name),
            Self::Pattern(_) => None,
        }
    }

    /// The original text.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Name(name) => name,
            Self::Pattern(pattern) => pattern.text(),
        }
    }

    pub(crate) fn matches(&self, topic: &str) -> bool {
        match self {
            Self::Name(name) => name == topic,
            Self::Pattern(pattern) => pattern.matches(topic),
        }
    }
}

/// A regular expression for topic names.
#[derive(Clone)]
pub(crate) struct TopicPattern {
    text: String,
    regex: Regex,
    /// The same pattern for PostgreSQL's operator `~`.
    sql: String,
}

impl TopicPattern {
    fn parse(text: &str) -> Result<Self, String> {
        if text.len() > PATTERN_CHARS_MAX {
            return Err(format!("a pattern must have at most {PATTERN_CHARS_MAX} characters"));
        }
        // Names are ASCII. Without Unicode, the regex needs no tables, and the syntax tree has bytes only.
        let parsed = ParserBuilder::new().unicode(false).utf8(false).build().parse(text);
        let hir = parsed.map_err(|error| match error {
            regex_syntax::Error::Parse(error) => error.kind().to_string(),
            regex_syntax::Error::Translate(error) => error.kind().to_string(),
            _ => "it is not a regular expression".to_owned(),
        })?;
        let mut sql = String::new();
        translate(&hir, &mut sql)?;
        let compiled = RegexBuilder::new(text).unicode(false).size_limit(COMPILED_BYTES_MAX).build();
        let regex = compiled.map_err(|_| "the compiled pattern is too large".to_owned())?;
        Ok(Self { text: text.to_owned(), regex, sql })
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn sql(&self) -> &str {
        &self.sql
    }

    /// Whether the topic matches. Invalid names and Kafka's internal topics never match.
    pub(crate) fn matches(&self, topic: &str) -> bool {
        is_topic_name(topic) && !topic.starts_with(INTERNAL) && self.regex.is_match(topic.as_bytes())
    }
}

impl fmt::Debug for TopicPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Whether Kafka allows this topic name.
pub(crate) fn is_topic_name(text: &str) -> bool {
    (1..=NAME_CHARS_MAX).contains(&text.len()) && text.bytes().all(is_name_byte)
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')
}

/// Writes the expression in the syntax of PostgreSQL. Characters that no topic name contains become a slash, which no
/// topic name contains either.
fn translate(hir: &Hir, sql: &mut String) -> Result<(), String> {
    match hir.kind() {
        HirKind::Empty => {}
        HirKind::Literal(literal) => literal.0.iter().for_each(|byte| match *byte {
            b'.' => sql.push_str("[.]"),
            byte if is_name_byte(byte) => sql.push(char::from(byte)),
            _ => sql.push('/'),
        }),
        HirKind::Class(class) => sql.push_str(&characters(class)),
        HirKind::Look(Look::Start) => sql.push('^'),
        HirKind::Look(Look::End) => sql.push('$'),
        HirKind::Look(_) => return Err("the only anchors that a pattern may contain are ^ and $".to_owned()),
        HirKind::Repetition(repetition) => {
            in_group(sql, |sql| translate(&repetition.sub, sql))?;
            sql.push_str(&repeats(repetition)?);
        }
        HirKind::Capture(capture) => in_group(sql, |sql| translate(&capture.sub, sql))?,
        HirKind::Concat(parts) => parts.iter().try_for_each(|part| translate(part, sql))?,
        HirKind::Alternation(parts) => in_group(sql, |sql| {
            parts.iter().enumerate().try_for_each(|(at, part)| {
                sql.push_str(if at == 0 { "" } else { "|" });
                translate(part, sql)
            })
        })?,
    }
    Ok(())
}

/// Writes a group that captures nothing.
fn in_group(sql: &mut String, inner: impl FnOnce(&mut String) -> Result<(), String>) -> Result<(), String> {
    sql.push_str("(?:");
    inner(sql)?;
    sql.push(')');
    Ok(())
}

/// The class with those of its characters that topic names can contain. The dash is last, where it has no special
/// meaning.
fn characters(class: &Class) -> String {
    let holds = |byte: u8| match class {
        Class::Bytes(bytes) => bytes.iter().any(|range| (range.start()..=range.end()).contains(&byte)),
        Class::Unicode(chars) => chars.iter().any(|range| (range.start()..=range.end()).contains(&char::from(byte))),
    };
    let alphanumeric = (b'0'..=b'z').filter(u8::is_ascii_alphanumeric);
    let held: String = alphanumeric.chain([b'_', b'.', b'-']).filter(|byte| holds(*byte)).map(char::from).collect();
    if held.is_empty() { "/".to_owned() } else { format!("[{held}]") }
}

/// The repetition in the syntax of PostgreSQL. Whether it is greedy does not matter for a match.
fn repeats(repetition: &Repetition) -> Result<String, String> {
    let Repetition { min, max, .. } = *repetition;
    if max.unwrap_or(min).max(min) > REPEATS_MAX {
        return Err(format!("a repetition count must be at most {REPEATS_MAX}"));
    }
    Ok(match (min, max) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> TopicPattern {
        match TopicFilter::parse(text) {
            Ok(TopicFilter::Pattern(pattern)) => pattern,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn a_pattern_begins_with_a_caret_and_matches_anywhere_behind_it() {
        assert!(pattern(r"^orders\..*").matches("orders.eu"));
        assert!(!pattern(r"^orders\..*").matches("ordersXeu"));
        assert!(!pattern(r"^orders\..*").matches("old.orders.eu"));
        assert!(pattern("^orders").matches("orders-dead"));
        assert!(!pattern("^orders$").matches("orders-dead"));
        assert!(TopicFilter::parse("orders").unwrap().matches("orders"));
        assert!(!TopicFilter::parse("orders").unwrap().matches("orders.eu"));
    }

    #[test]
    fn no_pattern_matches_an_internal_topic_or_an_invalid_name() {
        for topic in ["__consumer_offsets", "", "a b", "ordérs", "a/b", "a\nb"] {
            assert!(!pattern("^.*").matches(topic) && !pattern("^").matches(topic), "{topic:?}");
        }
        assert!(!pattern("^.*").matches(&"a".repeat(250)));
    }

    #[test]
    fn patterns_that_would_match_differently_elsewhere_are_refused_with_the_reason() {
        let problem = |text: &str| TopicFilter::parse(text).map(|_| ()).unwrap_err();
        assert!(problem("^(").contains("unclosed group"), "{}", problem("^("));
        assert!(problem(r"^a\b").contains("are ^ and $"));
        assert!(problem(r"^\pL").contains("nicode"), "{}", problem(r"^\pL"));
        assert!(problem("^a{256}").contains("at most 255"));
        assert!(problem("^((a{200}){200}){200}").contains("too large"));
        assert!(problem(&format!("^{}", "a".repeat(300))).contains("at most 249"));
        assert!(problem("a b").contains("1 to 249"));
        assert!(problem("").contains("1 to 249"));
    }

    #[test]
    fn the_postgresql_translation_matches_the_same_names() {
        for (text, sql) in [
            (r"^orders\..*", "^orders[.](?:[0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_.-])*"),
            ("^(eu|us)-[a-c]+$", "^(?:(?:eu|us))-(?:[abc])+$"),
            ("(?i)^", "^"),
            ("^é?a{2,3}", "^(?://){0,1}(?:a){2,3}"),
        ] {
            let translated = TopicPattern::parse(text).unwrap().sql;
            assert_eq!(translated, sql, "{text}");
        }
    }
}
