//! Hand-written Avro and hostile bytes. `tests/it/formats` decodes the output of another encoder.

mod evolution;

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use super::*;

fn schema(json: &Value) -> Schema {
    Schema::parse([], &json.to_string()).unwrap()
}

fn record(fields: &Value) -> Value {
    json!({ "type": "record", "name": "R", "fields": fields })
}

/// A linked list: a record that contains itself.
fn recursive() -> Schema {
    schema(&record(&json!([
        { "name": "next", "type": ["null", "R"] },
        { "name": "all", "type": { "type": "array", "items": "null" } },
        { "name": "map", "type": { "type": "map", "values": "bytes" } },
    ])))
}

#[test]
fn fields_that_the_type_does_not_name_are_passed_over() {
    #[derive(Debug, Deserialize, PartialEq)]
    struct Few {
        last: i64,
    }
    let schema = schema(&record(&json!([
        { "name": "first", "type": { "type": "array", "items": "string" } },
        { "name": "second", "type": ["null", { "type": "map", "values": "double" }] },
        { "name": "last", "type": "int" },
    ])));
    let bytes = [2, 2, b'x', 0, 0, 14];
    assert_eq!(read::read(&schema, &bytes), Ok(Few { last: 7 }));
    assert_eq!(read::read::<Value>(&schema, &bytes), Ok(json!({ "first": ["x"], "second": null, "last": 7 })));
}

#[test]
fn a_union_of_records_is_an_enum_with_their_names() {
    #[derive(Debug, Deserialize, PartialEq)]
    enum Event {
        Placed {
            number: i64,
        },
        Sent(Sent),
        #[serde(rename = "string")]
        Text(String),
    }
    #[derive(Debug, Deserialize, PartialEq)]
    struct Sent {
        by: String,
    }
    let schema = schema(&json!([
        { "type": "record", "name": "shop.Placed", "fields": [{ "name": "number", "type": "long" }] },
        { "type": "record", "name": "Sent", "fields": [{ "name": "by", "type": "string" }] },
        "string",
    ]));
    assert_eq!(read::read(&schema, &[0, 34]), Ok(Event::Placed { number: 17 }));
    assert_eq!(read::read(&schema, &[2, 2, b'x']), Ok(Event::Sent(Sent { by: "x".to_owned() })));
    assert_eq!(read::read(&schema, &[4, 2, b'x']), Ok(Event::Text("x".to_owned())));
    assert!(read::read::<Event>(&schema, &[6]).is_err());
}

#[test]
fn bytes_are_lists_and_decimals_are_text() {
    let bytes = schema(&json!("bytes"));
    assert_eq!(read::read(&bytes, &[4, 0, 255]), Ok(vec![0_u8, 255]));
    assert_eq!(read::read::<Value>(&bytes, &[4, 65, 255]), Ok(json!("Aÿ")));
    let decimal = schema(&json!({ "type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3 }));
    assert_eq!(read::read::<String>(&decimal, &[4, 0xff, 0xfb]), Ok("-0.005".to_owned()));
    assert_eq!(read::read::<String>(&decimal, &[4, 0x30, 0x39]), Ok("12.345".to_owned()));
}

/// Like `serde_bytes::ByteBuf`.
#[derive(Debug, PartialEq)]
struct Blob(Vec<u8>);

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Blob;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Blob, E> {
                Ok(Blob(bytes.to_vec()))
            }
            fn visit_str<E>(self, text: &str) -> Result<Blob, E> {
                Ok(Blob(text.as_bytes().to_vec()))
            }
        }
        deserializer.deserialize_byte_buf(Visitor)
    }
}

#[test]
fn bytes_in_a_union_remain_bytes() {
    let union = schema(&json!(["null", "bytes", { "type": "fixed", "name": "F", "size": 1 }]));
    for bytes in [&[2, 2, 0xff][..], &[4, 0xff]] {
        assert_eq!(read::read(&union, bytes), Ok(Blob(vec![0xff])));
        assert_eq!(read::read(&union, bytes), Ok(Some(Blob(vec![0xff]))));
        assert_eq!(read::read(&union, bytes), Ok(vec![0xff_u8]));
        assert!(read::read::<String>(&union, bytes).is_err(), "it is not UTF-8");
    }
    assert_eq!(read::read(&union, &[2, 4, 0xc3, 0xa9]), Ok("é".to_owned()));
    assert!(read::read::<Blob>(&union, &[0]).is_err());
}

#[test]
fn an_optional_enum_is_a_union_of_null_and_several_types() {
    #[derive(Debug, Deserialize, PartialEq)]
    enum Event {
        A { n: i64 },
        B(String),
        State(State),
        Digest([u8; 1]),
    }
    #[derive(Debug, Deserialize, PartialEq)]
    enum State {
        Open,
    }
    let of =
        |name: &str, kind: &str| json!({ "type": "record", "name": name, "fields": [{ "name": "n", "type": kind }] });
    let state = json!({ "type": "enum", "name": "State", "symbols": ["Open"] });
    let fixed = json!({ "type": "fixed", "name": "x.Digest", "size": 1 });
    let union = schema(&json!(["null", of("A", "int"), state, fixed]));
    assert_eq!(read::read(&union, &[0]), Ok(None::<Event>));
    assert_eq!(read::read(&union, &[2, 14]), Ok(Some(Event::A { n: 7 })));
    assert_eq!(read::read(&union, &[2, 14]), Ok(Event::A { n: 7 }));
    assert_eq!(read::read(&union, &[4, 0]), Ok(Some(Event::State(State::Open))));
    assert_eq!(read::read(&union, &[4, 0]), Ok(Some(State::Open)));
    assert_eq!(read::read(&union, &[6, 9]), Ok(Some(Event::Digest([9]))));
    // A record that is not in a union is the variant with its name. The text of a string is the name of a variant.
    assert_eq!(read::read(&schema(&of("A", "int")), &[14]), Ok(Event::A { n: 7 }));
    assert_eq!(read::read(&schema(&json!(["null", "string"])), b"\x02\x08Open"), Ok(Some(State::Open)));
    assert!(read::read::<Event>(&schema(&of("C", "int")), &[14]).is_err());
}

#[test]
fn nesting_and_items_have_a_bound() {
    let nested = [vec![2; 100_000], vec![0; 300_000]].concat();
    let too_deep = "the Avro value is nested too deeply";
    assert_eq!(read::read::<Value>(&recursive(), &nested).unwrap_err().to_string(), too_deep);
    let ignored = read::read::<serde::de::IgnoredAny>(&recursive(), &nested);
    assert_eq!(ignored.unwrap_err().to_string(), too_deep);
    // An array with a billion items that take no bytes.
    let many = [0, 0x80, 0xa8, 0xd6, 0xb9, 0x07, 0, 0];
    let too_many = "the Avro arrays and maps have more items than their bytes allow";
    assert_eq!(read::read::<Value>(&recursive(), &many).unwrap_err().to_string(), too_many);
    let endless = schema(&record(&json!([{ "name": "self", "type": "R" }])));
    assert_eq!(read::read::<Value>(&endless, &[]).unwrap_err().to_string(), too_deep);
}

#[test]
fn no_error_quotes_what_was_read() {
    let schema = schema(&record(&json!([{ "name": "a", "type": "string" }])));
    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "it is never read")]
    struct Number {
        a: u8,
    }
    let error = read::read::<Number>(&schema, b"\x0csecret").unwrap_err().to_string();
    assert_eq!(error, "expected u8");
}

#[test]
fn a_readers_schema_renames_passes_over_and_fills_in() {
    let written = schema(&record(&json!([
        { "name": "gone", "type": { "type": "array", "items": "long" } },
        { "name": "old", "type": "int" },
        { "name": "maybe", "type": "string" },
        { "name": "state", "type": { "type": "enum", "name": "S", "symbols": ["A", "B"] } },
    ])));
    let wanted = schema(&record(&json!([
        { "name": "new", "type": "double", "aliases": ["old"] },
        { "name": "maybe", "type": ["null", "string"] },
        { "name": "state", "type": { "type": "enum", "name": "S", "symbols": ["A"] } },
        { "name": "added", "type": "string", "default": "default" },
    ])));
    let resolved = resolve::resolve(&written, &wanted).unwrap();
    let value: Value = read::read(&resolved, &[2, 2, 0, 14, 2, b'x', 0]).unwrap();
    assert_eq!(value, json!({ "new": 7, "maybe": "x", "state": "A", "added": "default" }));
    assert!(
        read::read::<Value>(&resolved, &[2, 2, 0, 14, 2, b'x', 2]).is_err(),
        "a symbol that the reader does not have"
    );

    let demanding = schema(&record(&json!([{ "name": "added", "type": "string" }])));
    assert!(resolve::resolve(&written, &demanding).unwrap_err().contains("has no default"));
    assert!(resolve::resolve(&written, &schema(&json!("string"))).is_err());
}

#[test]
fn a_recursive_schema_can_be_resolved_with_another() {
    let resolved = resolve::resolve(&recursive(), &recursive()).unwrap();
    let value: Value = read::read(&resolved, &[2, 0, 0, 0, 0, 0]).unwrap();
    assert_eq!(value, json!({ "next": { "next": null, "all": [], "map": {} }, "all": [], "map": {} }));
}

#[test]
fn what_is_no_schema_is_refused() {
    for text in [
        "",
        "17",
        "\"Unknown\"",
        r#"{"type": "record"}"#,
        r#"{"type": "array"}"#,
        r#"{"type": "fixed", "name": "f", "size": -1}"#,
        r#"["null", ["string", "long"]]"#,
    ] {
        assert!(Schema::parse([], text).is_err(), "{text}");
    }
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes in any::<Vec<u8>>()) {
        let _ = read::read::<Value>(&recursive(), &bytes);
        let _ = read::read::<serde::de::IgnoredAny>(&recursive(), &bytes);
    }
}
