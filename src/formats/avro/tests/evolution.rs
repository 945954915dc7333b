//! Schema evolution: names, aliases, unions, defaults and promotions, and schemas that are hostile.

use super::*;

fn read_through<T: DeserializeOwned>(written: &Value, wanted: &Value, bytes: &[u8]) -> Result<T, String> {
    let wanted = schema(wanted);
    defaults::check(&wanted)?;
    let resolved = resolve::resolve(&schema(written), &wanted)?;
    read::read(&resolved, bytes).map_err(|error| error.to_string())
}

fn symbols(name: &str, symbols: &[&str]) -> Value {
    json!({ "type": "enum", "name": name, "symbols": symbols })
}

#[test]
fn bytes_that_are_promoted_to_a_string_are_utf_8_and_strings_become_bytes() {
    let (bytes, string) = (json!("bytes"), json!("string"));
    assert_eq!(read_through(&bytes, &string, b"\x04\xc3\xa9"), Ok("é".to_owned()));
    assert_eq!(read_through(&bytes, &string, b"\x04\xc3\xa9"), Ok(json!("é")));
    assert!(read_through::<Value>(&bytes, &string, b"\x02\xff").is_err(), "it is not UTF-8");
    assert_eq!(read_through(&string, &bytes, b"\x04\xc3\xa9"), Ok(vec![0xc3_u8, 0xa9]));
    let decimal = json!({ "type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2 });
    assert_eq!(read_through(&bytes, &decimal, &[4, 4, 0xe2]), Ok("12.50".to_owned()));
    assert_eq!(read_through(&decimal, &bytes, &[4, 4, 0xe2]), Ok(vec![4_u8, 0xe2]));
}

#[test]
fn a_branch_of_a_union_is_chosen_by_its_name_then_by_its_alias_then_by_promotion() {
    let (a, b) = (symbols("a.State", &["X"]), symbols("b.State", &["Y", "X"]));
    let written = json!([a, b, "int"]);
    // The order of the branches does not matter.
    let wanted = json!([{ "type": "fixed", "name": "F", "size": 1 }, "string", "double", "long", b, a]);
    assert_eq!(read_through(&written, &wanted, &[2, 0]), Ok(json!("Y")));
    assert_eq!(read_through(&written, &wanted, &[0, 0]), Ok(json!("X")));
    assert_eq!(read_through(&written, &wanted, &[4, 14]), Ok(json!(7)));
    assert!(read_through::<Value>(&written, &json!([a, "string"]), &[4, 14]).is_err());

    let (one, two) = (symbols("One", &["X"]), symbols("Two", &["Y"]));
    assert_eq!(read_through(&json!([one, two]), &json!([one, two]), &[2, 0]), Ok(json!("Y")));
    let renamed = json!({ "type": "enum", "name": "Deux", "namespace": "fr", "symbols": ["Y"], "aliases": [".Two"] });
    let by_alias = json!({ "type": "enum", "name": "Deux", "symbols": ["Y"], "aliases": ["Two"] });
    for renamed in [renamed, by_alias] {
        assert_eq!(read_through(&json!([one, two]), &json!([one, renamed]), &[2, 0]), Ok(json!("Y")), "{renamed}");
    }
    let fixed = |name: &str| json!({ "type": "fixed", "name": name, "size": 2 });
    let both = json!([fixed("F"), fixed("G")]);
    assert_eq!(read_through(&both, &json!([fixed("G"), fixed("F")]), b"\x02ab"), Ok(json!("ab")));
    assert!(read_through::<Value>(&both, &json!([fixed("F"), "string"]), b"\x02ab").is_err(), "G is not F");
}

#[test]
fn a_branch_that_cannot_be_resolved_is_an_error_only_where_it_occurs() {
    let of = |name: &str, field: &Value| json!({ "type": "record", "name": name, "fields": [field] });
    let (old, number) = (json!({ "name": "n", "type": "string" }), json!({ "name": "n", "type": "long" }));
    let demanding = json!({ "name": "more", "type": "long" });
    let written = json!([of("A", &number), of("B", &old), of("C", &number)]);
    let wanted = json!([of("A", &number), of("B", &number), of("C", &demanding)]);
    assert_eq!(read_through(&written, &wanted, &[0, 14]), Ok(json!({ "n": 7 })));
    let error = |bytes: &[u8]| read_through::<Value>(&written, &wanted, bytes).unwrap_err();
    assert!(error(&[2, 2, b'x']).contains("another type"));
    assert!(error(&[4, 14]).contains("\"more\" of the reader's schema was not written"));
}

#[derive(Debug, Deserialize, PartialEq)]
enum Event {
    Placed {
        number: i64,
    },
    #[serde(rename = "string")]
    Text(String),
}

#[test]
fn what_was_written_without_a_union_is_read_through_the_readers_union_into_an_enum() {
    let placed = |name: &str, aliases: &[&str]| json!({ "type": "record", "name": name, "aliases": aliases, "fields": [{ "name": "number", "type": "long" }] });
    let wanted = json!(["null", placed("Placed", &["shop.Ordered"]), "string"]);
    let (number, text) = (|| Event::Placed { number: 17 }, || Event::Text("x".to_owned()));
    assert_eq!(read_through(&placed("Placed", &[]), &wanted, &[34]), Ok(number()));
    assert_eq!(read_through(&json!("string"), &wanted, &[2, b'x']), Ok(Some(text())));
    assert_eq!(read_through(&json!("null"), &wanted, &[]), Ok(None::<Event>));
    // The variant has the reader's name, whether the writer has a union or not.
    assert_eq!(read_through(&placed("shop.Ordered", &[]), &wanted, &[34]), Ok(number()));
    assert_eq!(read_through(&json!(["string", placed("shop.Ordered", &[])]), &wanted, &[2, 34]), Ok(Some(number())));
    assert_eq!(read_through(&placed("Placed", &[]), &wanted, &[34]), Ok(json!({ "number": 17 })));
}

#[test]
fn a_symbol_that_the_reader_does_not_have_is_read_as_its_default() {
    let wanted = json!({ "type": "enum", "name": "S", "symbols": ["A", "OTHER"], "default": "OTHER" });
    let written = symbols("S", &["A", "B"]);
    assert_eq!(read_through(&written, &wanted, &[0]), Ok(json!("A")));
    assert_eq!(read_through(&written, &wanted, &[2]), Ok(json!("OTHER")));
    assert!(read_through::<Value>(&written, &wanted, &[4]).is_err(), "the writer does not have it either");
}

#[test]
fn a_field_is_found_by_its_name_before_a_former_name_of_another_field() {
    let written = record(&json!([{ "name": "b", "type": "int" }, { "name": "a", "type": "int" }]));
    let wanted = record(&json!([{ "name": "a", "type": "int", "aliases": ["b"] }, { "name": "b", "type": "int" }]));
    assert_eq!(read_through(&written, &wanted, &[2, 4]), Ok(json!({ "a": 2, "b": 1 })));
    let wanted = record(&json!([{ "name": "a", "type": "int", "aliases": ["b"] }]));
    assert_eq!(read_through(&written, &wanted, &[2, 4]), Ok(json!({ "a": 2 })));
}

#[test]
fn defaults_are_read_like_values_that_were_written() {
    #[derive(Debug, Deserialize, PartialEq)]
    struct Filled {
        bytes: Vec<u8>,
        fixed: [u8; 2],
        price: String,
        maybe: Option<Event>,
        inner: Inner,
        list: Vec<f64>,
        map: std::collections::BTreeMap<String, bool>,
        state: String,
    }
    #[derive(Debug, Deserialize, PartialEq)]
    struct Inner {
        a: i64,
        b: Option<String>,
    }
    let inner = json!({ "type": "record", "name": "Inner", "fields": [
        { "name": "a", "type": "long" }, { "name": "b", "type": ["null", "string"], "default": null },
    ] });
    let wanted = record(&json!([
        { "name": "bytes", "type": "bytes", "default": "\u{0}\u{ff}" },
        { "name": "fixed", "type": { "type": "fixed", "name": "F", "size": 2 }, "default": "\u{1}\u{fe}" },
        { "name": "price", "default": "\u{4}\u{e2}",
          "type": { "type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2 } },
        { "name": "maybe", "type": ["null", "string"], "default": "x" },
        { "name": "inner", "type": inner, "default": { "a": -7 } },
        { "name": "list", "type": { "type": "array", "items": "double" }, "default": [1, 2.5] },
        { "name": "map", "type": { "type": "map", "values": "boolean" }, "default": { "yes": true } },
        { "name": "state", "type": symbols("S", &["A", "B"]), "default": "B" },
    ]));
    let expected = Filled {
        bytes: vec![0, 255],
        fixed: [1, 254],
        price: "12.50".to_owned(),
        maybe: Some(Event::Text("x".to_owned())),
        inner: Inner { a: -7, b: None },
        list: vec![1.0, 2.5],
        map: [("yes".to_owned(), true)].into(),
        state: "B".to_owned(),
    };
    assert_eq!(read_through(&record(&json!([])), &wanted, &[]), Ok(expected));
}

#[test]
fn a_wrong_default_of_the_readers_schema_is_refused() {
    let endless = json!({ "name": "x", "type": "R", "default": {} });
    let twice = json!([endless, { "name": "y", "type": ["R", "null"], "default": {} }]);
    for fields in [
        json!([{ "name": "x", "type": "string", "default": null }]),
        json!([{ "name": "x", "type": "int", "default": 5_000_000_000_u64 }]),
        json!([{ "name": "x", "type": "bytes", "default": "ā" }]),
        json!([{ "name": "x", "type": { "type": "fixed", "name": "F", "size": 2 }, "default": "a" }]),
        json!([{ "name": "x", "type": symbols("S", &["A"]), "default": "B" }]),
        json!([endless]),
        twice,
    ] {
        let error = defaults::check(&schema(&record(&fields))).unwrap_err();
        assert!(error.starts_with("the default of the field \"x\" "), "{error}");
    }
}

/// A chain of records, as references of a schema: each has fields of the type before it, with these names.
fn chain(length: usize, fields: &[&str]) -> Vec<String> {
    let of = |at: usize| {
        let kind = if at == 0 { "null".to_owned() } else { format!("R{}", at - 1) };
        let fields: Vec<_> = fields.iter().map(|name| json!({ "name": name, "type": kind })).collect();
        json!({ "type": "record", "name": format!("R{at}"), "fields": fields }).to_string()
    };
    (0..length).map(of).collect()
}

#[test]
fn a_long_chain_of_types_does_not_overflow_the_stack() {
    let chain = chain(100_000, &["next"]);
    let root = json!({ "type": "record", "name": "Root", "fields": [{ "name": "x", "type": "R99999" }] }).to_string();
    let written = Schema::parse(chain.iter().map(String::as_str), &root).unwrap();
    let wanted = schema(&json!({ "type": "record", "name": "Root", "fields": [] }));
    for resolved in [resolve::resolve(&written, &written).unwrap(), resolve::resolve(&written, &wanted).unwrap()] {
        assert_eq!(read::read::<Value>(&resolved, &[]).unwrap_err().to_string(), "the Avro value is nested too deeply");
    }
    let nested = format!("{}\"null\"{}", "{\"type\": \"array\", \"items\": ".repeat(10_000), "}".repeat(10_000));
    assert!(Schema::parse([], &nested).is_err());
}

#[test]
fn records_that_take_no_bytes_have_a_bound() {
    let chain = chain(60, &["a", "b"]);
    let doubled = Schema::parse(chain.iter().map(String::as_str), "\"R59\"").unwrap();
    let too_many = "the Avro arrays and maps have more items than their bytes allow";
    assert_eq!(read::read::<Value>(&doubled, &[]).unwrap_err().to_string(), too_many);
    assert_eq!(read::read::<serde::de::IgnoredAny>(&doubled, &[]).unwrap_err().to_string(), too_many);
    let few = Schema::parse(chain.iter().map(String::as_str), "\"R2\"").unwrap();
    let leaf = json!({ "a": null, "b": null });
    let inner = json!({ "a": leaf, "b": leaf });
    assert_eq!(read::read::<Value>(&few, &[]), Ok(json!({ "a": inner, "b": inner })));
}
