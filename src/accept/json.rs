//! Finds single values in a JSON text without building the rest of it.
//!
//! Values are returned as the text in which they are written, so a number of thirty digits is not rounded. A member
//! that occurs twice is reported as such: parsers disagree on which of the two counts, so neither may be an identity.
//! Nothing recurses, so deep nesting cannot overflow the stack.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// What was found under a name or a pointer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Found<'j> {
    Nothing,
    Value(&'j RawValue),
    /// The name occurs twice in one object.
    Twice,
}

/// A value that can be an identity, an ordering key or a tenant.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Scalar<'j> {
    Null,
    Text(String),
    /// The digits as they are written.
    Number(&'j str),
    /// An object, an array, a boolean, or a string that is not valid Unicode.
    Other,
}

/// The bytes are not JSON, or the value has another type than was expected.
#[derive(Debug)]
pub(super) struct NotJson;

/// Finds the members of an object with these names. `json` is the whole text, and is checked to its end.
pub(super) fn members<'j, const N: usize>(json: &'j [u8], names: [&str; N]) -> Result<[Found<'j>; N], NotJson> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    let found = reader.deserialize_map(Members { names }).map_err(|_| NotJson)?;
    reader.end().map_err(|_| NotJson)?;
    Ok(found)
}

/// Finds the value at an RFC 6901 pointer. The pointer must be well-formed: see [`pointer_problem`].
pub(super) fn pointed_to<'j>(json: &'j [u8], pointer: &str) -> Result<Found<'j>, NotJson> {
    let mut value: &RawValue = serde_json::from_slice(json).map_err(|_| NotJson)?;
    // The part before the first slash is empty.
    for token in pointer.split('/').skip(1) {
        let text = value.get();
        let found = match text.as_bytes().first() {
            Some(b'{') => {
                let [found] = members(text.as_bytes(), [&unescaped(token)])?;
                found
            }
            Some(b'[') => element(text, token)?,
            _ => Found::Nothing,
        };
        match found {
            Found::Value(found) => value = found,
            Found::Nothing | Found::Twice => return Ok(found),
        }
    }
    Ok(Found::Value(value))
}

/// Why this is not an RFC 6901 pointer; `None` if it is one.
pub(super) fn pointer_problem(pointer: &str) -> Option<&'static str> {
    if !pointer.is_empty() && !pointer.starts_with('/') {
        return Some("a JSON pointer begins with a slash");
    }
    let mut escapes = pointer.split('~').skip(1);
    let is_escaped = escapes.all(|rest| rest.starts_with(['0', '1']));
    (!is_escaped).then_some("in a JSON pointer ~ is written ~0, and / within a name ~1")
}

/// Classifies a value by its first byte: the text is valid JSON already.
pub(super) fn scalar(value: &RawValue) -> Scalar<'_> {
    let text = value.get();
    match text.as_bytes().first() {
        Some(b'n') => Scalar::Null,
        Some(b'"') => serde_json::from_str(text).map_or(Scalar::Other, Scalar::Text),
        Some(b'-' | b'0'..=b'9') => Scalar::Number(text),
        _ => Scalar::Other,
    }
}

/// Undoes the escaping of a pointer's token. `~01` stands for `~1`, so `~1` must be replaced before `~0`.
fn unescaped(token: &str) -> Cow<'_, str> {
    if token.contains('~') { token.replace("~1", "/").replace("~0", "~").into() } else { token.into() }
}

/// The element of an array at an index without leading zeros, as RFC 6901 requires.
fn element<'j>(array: &'j str, token: &str) -> Result<Found<'j>, NotJson> {
    let is_index = token == "0" || (!token.starts_with('0') && token.bytes().all(|byte| byte.is_ascii_digit()));
    // An index that does not fit into `usize` finds nothing either.
    let Some(index) = token.parse().ok().filter(|_| is_index) else { return Ok(Found::Nothing) };
    let mut reader = serde_json::Deserializer::from_str(array);
    reader.deserialize_seq(ArrayElement { index }).map_err(|_| NotJson)
}

/// Collects the members with these names, and skips the others without storing them.
struct Members<'n, const N: usize> {
    names: [&'n str; N],
}

impl<'j, const N: usize> Visitor<'j> for Members<'_, N> {
    type Value = [Found<'j>; N];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'j>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = [Found::Nothing; N];
        while let Some(place) = map.next_key_seed(Name(&self.names))? {
            match place {
                None => drop(map.next_value::<IgnoredAny>()?),
                Some(place) => {
                    let value = map.next_value()?;
                    found[place] = match found[place] {
                        Found::Nothing => Found::Value(value),
                        Found::Value(_) | Found::Twice => Found::Twice,
                    };
                }
            }
        }
        Ok(found)
    }
}

/// Reads a member's name, however it is escaped, and returns its index among the wanted names.
struct Name<'n>(&'n [&'n str]);

impl<'j> DeserializeSeed<'j> for Name<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'j>>(self, reader: D) -> Result<Self::Value, D::Error> {
        reader.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(self.0.iter().position(|wanted| *wanted == name))
    }
}

/// Returns the element at an index. Reads the array to its end, so that invalid JSON behind the element is detected.
struct ArrayElement {
    index: usize,
}

impl<'j> Visitor<'j> for ArrayElement {
    type Value = Found<'j>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'j>>(self, mut array: A) -> Result<Self::Value, A::Error> {
        for _ in 0..self.index {
            if array.next_element::<IgnoredAny>()?.is_none() {
                return Ok(Found::Nothing);
            }
        }
        let found = array.next_element()?.map_or(Found::Nothing, Found::Value);
        while array.next_element::<IgnoredAny>()?.is_some() {}
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(json: &str, pointer: &str) -> String {
        match pointed_to(json.as_bytes(), pointer) {
            Ok(Found::Value(value)) => value.get().to_owned(),
            Ok(Found::Nothing) => "nothing".to_owned(),
            Ok(Found::Twice) => "twice".to_owned(),
            Err(NotJson) => "not JSON".to_owned(),
        }
    }

    #[test]
    fn the_examples_of_rfc_6901_are_found() {
        let json = r#" {"foo": ["bar", "baz"], "": 0, "a/b": 1, "c%d": 2, "e^f": 3, "g|h": 4, "i\\j": 5, "k\"l": 6, " ": 7, "m~n": 8} "#;
        let examples = [
            ("/foo", r#"["bar", "baz"]"#),
            ("/foo/0", r#""bar""#),
            ("/", "0"),
            ("/a~1b", "1"),
            ("/c%d", "2"),
            ("/e^f", "3"),
            ("/g|h", "4"),
            ("/i\\j", "5"),
            ("/k\"l", "6"),
            ("/ ", "7"),
            ("/m~0n", "8"),
        ];
        for (pointer, value) in examples {
            assert_eq!(at(json, pointer), value, "{pointer}");
        }
        assert_eq!(at(json, ""), json.trim());
        assert_eq!(at(r#"{"~1": 9, "/": 8}"#, "/~01"), "9");
    }

    #[test]
    fn what_is_not_there_is_nothing_and_what_is_there_twice_is_not_chosen() {
        for pointer in ["/b", "/a/2", "/a/-", "/a/00", "/a/01", "/a/+1", "/a/", "/a/99999999999999999999999", "/a/0/x"]
        {
            assert_eq!(at(r#"{"a": [10, 20]}"#, pointer), "nothing", "{pointer}");
        }
        assert_eq!(at(r#"{"a": 1, "\u0061": 1}"#, "/a"), "twice");
        assert_eq!(at(r#"{"a": {"b": 1}, "a": 2}"#, "/a/b"), "twice");
        assert_eq!(at(r#"{"a": 1, "b": 2, "b": 3}"#, "/a"), "1");
    }

    #[test]
    fn what_is_not_json_to_its_end_is_not_json() {
        for json in ["", "{", r#"{"a": 1"#, r#"{"a": 1} x"#, r#"{"a": 1,}"#, r#"{"a": 1, "b": }"#, "\u{feff}{}", "NaN"]
        {
            assert_eq!(at(json, "/a"), "not JSON", "{json}");
        }
        assert!(pointed_to(b"{\"a\": \"\xff\"}", "/b").is_err());
        assert!(members(b"[1]", ["a"]).is_err());
    }

    #[test]
    fn no_nesting_is_too_deep() {
        let depth = 20_000;
        let json = format!(r#"{{"deep": {}{}, "id": "x"}}"#, "[".repeat(depth), "]".repeat(depth));
        assert_eq!(at(&json, "/id"), r#""x""#);
        let pointer = format!("/deep{}", "/0".repeat(200));
        assert!(at(&json, &pointer).starts_with("[["));
    }

    #[test]
    fn numbers_are_not_rounded_and_only_strings_and_numbers_are_text() {
        let value = |json: &'static str| scalar(serde_json::from_str(json).unwrap());
        assert_eq!(value("123456789012345678901234567890"), Scalar::Number("123456789012345678901234567890"));
        assert_eq!(value("-1.50e400"), Scalar::Number("-1.50e400"));
        assert_eq!(value(r#""\u00e9\n""#), Scalar::Text("é\n".to_owned()));
        assert_eq!(value(r#""\ud800""#), Scalar::Other);
        assert_eq!(value("null"), Scalar::Null);
        for json in ["true", "false", "[]", "{}"] {
            assert_eq!(value(json), Scalar::Other);
        }
    }

    #[test]
    fn malformed_pointers_are_named() {
        for pointer in ["", "/", "/a~0~1/b", "/~01"] {
            assert_eq!(pointer_problem(pointer), None, "{pointer}");
        }
        for pointer in ["a", "#/a", "/~", "/~2", "/a~/b"] {
            assert!(pointer_problem(pointer).is_some(), "{pointer}");
        }
    }

    proptest! {
        #[test]
        fn any_name_is_found_by_its_pointer(name in ".*", value in any::<u64>()) {
            let json = serde_json::json!({ "outer": [{ name.clone(): value }] }).to_string();
            let pointer = format!("/outer/0/{}", name.replace('~', "~0").replace('/', "~1"));
            prop_assert_eq!(pointer_problem(&pointer), None);
            prop_assert_eq!(at(&json, &pointer), value.to_string());
        }

        #[test]
        fn hostile_bytes_never_panic(json in any::<Vec<u8>>(), pointer in "(/[a0~]{0,2}){0,3}") {
            let _ = pointed_to(&json, &pointer);
            let _ = members(&json, ["id", "source"]);
        }
    }
}
