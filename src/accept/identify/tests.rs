//! The identity that each policy finds in each record.

use proptest::prelude::*;

use super::*;

const CHANCE: u128 = 0xabc;

fn identified(record: &Record, policy: &Identity) -> Result<Identified, Refusal> {
    identify(&Attributes::of(record), policy, &Answers::default(), || CHANCE).map_err(|unidentified| match unidentified
    {
        Unidentified::Refused(refusal) => refusal,
        Unidentified::NotYet(_) => "not yet".into(),
    })
}

/// `id @ source`, with the fallback before it; or the reason for the quarantine.
fn identity(record: &Record, policy: &Identity) -> String {
    match identified(record, policy) {
        Ok(Identified { id, source, fallback }) => {
            let fallback = fallback.map_or(String::new(), |fallback| format!("{fallback:?}: "));
            format!("{fallback}{id} @ {}", source.unwrap_or_else(|| record.topic.clone()))
        }
        Err(refusal) => refusal.reason.to_owned(),
    }
}

fn record() -> Record {
    Record::new("t")
}

/// The identity at `/o/id` of this payload.
fn pointed(payload: &str) -> String {
    identity(&record().with_payload(payload.to_owned()), &Identity::json_pointer("/o/id"))
}

#[test]
fn each_place_gives_its_identity() {
    let structured = record()
        .with_header("content-type", "application/cloudevents+json")
        .with_payload(r#"{"id": "I", "source": "/S", "type": "T"}"#);
    let cases = [
        (Identity::cloud_events(), record().with_header("ce_id", "I").with_header("ce_source", "/S"), "I @ /S"),
        (Identity::cloud_events(), structured, "I @ /S"),
        (Identity::header("h"), record().with_header("h", "1").with_header("h", "2"), "1 @ t"),
        (Identity::key(), record().with_key("k"), "k @ t"),
        (Identity::json_pointer("/a/0"), record().with_payload(r#"{"a": ["x"]}"#), "x @ t"),
        (Identity::position(), record().with_position(3, 17), "t/3/17 @ t"),
        (Identity::position(), record().with_position(3, 17).with_cluster("C"), "t/3/17@C @ t"),
        (Identity::by(|record| record.key().map(<[u8]>::to_vec)), record().with_key("k"), "k @ t"),
        (
            Identity::all_of([Identity::key(), Identity::position()]),
            record().with_key("k").with_position(3, 17),
            "k|t/3/17 @ t",
        ),
        (
            Identity::all_of([Identity::header("v"), Identity::cloud_events()]),
            record().with_header("v", "2").with_header("ce_id", "I").with_header("ce_source", "/S"),
            "2|I @ /S",
        ),
    ];
    for (policy, record, expected) in cases {
        assert_eq!(identity(&record, &policy), expected, "{policy:?}");
        assert!(identity(&record.clone().with_source("mine"), &policy).ends_with(" @ mine"), "{policy:?}");
        assert_eq!(identity(&record.clone().with_id("explicit"), &policy), "explicit @ t", "{policy:?}");
        assert_eq!(identity(&record.with_id("").with_position(0, 0), &policy.or_position()), "empty identity");
    }
}

#[test]
fn the_first_place_that_has_a_value_counts_and_a_bad_value_is_not_passed_over() {
    let policy = Identity::first_of([Identity::cloud_events(), Identity::header("h"), Identity::key()]);
    let event = record().with_header("ce_id", "I").with_header("ce_source", "/S");
    assert_eq!(identity(&event.with_header("h", "H").with_key("K"), &policy), "I @ /S");
    assert_eq!(
        identity(&record().with_header("ce_id", "no source").with_header("h", "H").with_key("K"), &policy),
        "H @ t"
    );
    assert_eq!(identity(&record().with_header("h", "").with_key("K"), &policy), "K @ t");
    assert_eq!(identity(&record().with_header("h", vec![0xff]).with_key("K"), &policy), "identity is not text");
    assert_eq!(identity(&record(), &policy), "missing identity");
    let or_position = policy.or_position();
    assert_eq!(identity(&record().with_position(3, 17), &or_position), "Position: t/3/17 @ t");
    assert_eq!(identity(&record().with_key("t/3/17"), &or_position), "identity has the form of a position");
}

#[test]
fn what_to_do_without_identity_is_a_policy() {
    let header = || Identity::header("h");
    let placed = record().with_position(3, 17);
    let random = "Undeduplicated: undeduplicated/00000000000000000000000000000abc @ t";
    for without in [record(), record().with_null_header("h").with_header("h", "late")] {
        assert_eq!(identity(&without, &header()), "missing identity");
        assert_eq!(identity(&without, &header().or_position().or_quarantine()), "missing identity");
        assert_eq!(identity(&without, &header().or_position()), "missing identity", "no position");
        assert_eq!(identity(&without, &header().or_undeduplicated()), random);
    }
    assert_eq!(identity(&placed, &header().or_position()), "Position: t/3/17 @ t");
    assert_eq!(identity(&placed.clone().with_header("h", ""), &header()), "empty identity");
    assert_eq!(identity(&placed.with_header("h", ""), &header().or_position()), "Position: t/3/17 @ t");
}

#[test]
fn half_an_identity_is_none() {
    let event = |record: Record| identity(&record.with_position(0, 1), &Identity::cloud_events());
    assert_eq!(event(record().with_header("ce_id", "I")), "missing source");
    assert_eq!(event(record().with_header("ce_id", "I").with_header("ce_source", "")), "empty source");
    assert_eq!(event(record().with_header("ce_source", "/S")), "missing identity");
    let both = Identity::all_of([Identity::key(), Identity::header("h")]);
    assert_eq!(identity(&record().with_key("k"), &both), "missing identity");
    assert_eq!(identity(&record().with_key("k").with_position(0, 1), &both.or_position()), "Position: t/0/1 @ t");
}

#[test]
fn no_policy_makes_a_bad_identity_good() {
    let both = || Identity::all_of([Identity::header("none"), Identity::key()]);
    let broken = || record().with_header("content-type", "application/cloudevents+json").with_payload("{\"id\": \"I\"");
    let cases = [
        (Identity::key(), record().with_key(vec![0xff]), "identity is not text"),
        (Identity::key(), record().with_key("a\0b"), "identity is not text"),
        (Identity::key(), record().with_key("é".repeat(201)), "identity too long"),
        (Identity::key(), record().with_key(vec![b'x'; 5_000_000]), "identity too long"),
        (both(), record().with_key(vec![0xff]), "identity is not text"),
        (Identity::all_of([Identity::key(), Identity::key()]), record().with_key("x".repeat(100)), "identity too long"),
        (Identity::cloud_events(), broken(), "cloud event is not a JSON object"),
        (
            Identity::cloud_events(),
            record().with_header("ce_id", "I").with_header("ce_source", vec![0xff]),
            "source is not text",
        ),
        (Identity::json_pointer("/a"), record().with_payload("no JSON"), "payload is not JSON"),
        (Identity::json_pointer("/a"), record().with_payload(""), "payload is not JSON"),
        (Identity::by(|_| -> Option<String> { panic!("on purpose") }), record(), "identity function panicked"),
        (Identity::by(|_| Some("\0")), record(), "identity is not text"),
    ];
    for (policy, record, reason) in cases {
        let record = record.with_position(0, 1);
        for policy in [policy.clone(), policy.clone().or_position(), policy.or_undeduplicated()] {
            assert_eq!(identity(&record, &policy), reason, "{policy:?}");
        }
    }
}

#[test]
fn a_pointer_finds_strings_and_numbers() {
    assert_eq!(pointed(r#"{"o": {"id": "a b"}}"#), "a b @ t");
    assert_eq!(pointed(r#"{"o": {"id": 123456789012345678901234567890}}"#), "123456789012345678901234567890 @ t");
    assert_eq!(pointed(r#"{"o": {"id": 1.0}}"#), "1.0 @ t");
    assert_eq!(pointed(r#"{"o": {"id": null}}"#), "missing identity");
    assert_eq!(pointed(r#"{"o": "id"}"#), "missing identity");
    assert_eq!(pointed(r#"{"o": {"id": ""}}"#), "empty identity");
    assert_eq!(pointed(r#"{"o": {"id": 1, "id": 1}}"#), "identity occurs twice");
    for other in ["{}", "[1]", "true", r#""\ud800""#, r#""\u0000""#] {
        assert_eq!(pointed(&format!(r#"{{"o": {{"id": {other}}}}}"#)), "identity is not text", "{other}");
    }
    assert_eq!(identity(&record(), &Identity::json_pointer("/o/id")), "missing identity", "a tombstone");
}

#[test]
fn no_record_can_take_the_position_of_another() {
    let named = |id: &'static str| record().with_position(0, 1).with_header("h", id);
    let policy = Identity::header("h").or_position();
    for id in ["t/0/2", "t/0/2@C", "t/0/2@", "t/0/2@C/D"] {
        assert_eq!(identity(&named(id), &policy), "identity has the form of a position");
    }
    for id in ["t/0", "t/0/2/3", "t/a/2", "u/0/2", "t/0/", "t/0/@C", "t/0/a@C", "t@C"] {
        assert_eq!(identity(&named(id), &policy), format!("{id} @ t"));
    }
    assert_eq!(identity(&named("t/0/2"), &Identity::header("h")), "t/0/2 @ t");
    assert_eq!(identity(&named("").with_id("t/0/2"), &policy), "t/0/2 @ t", "an explicit id is not checked");
    assert_eq!(identity(&named(""), &Identity::position().or_position()), "t/0/1 @ t");
}

#[test]
fn a_refusal_says_where_it_looked_and_nothing_of_the_record() {
    let policy = Identity::all_of([Identity::key(), Identity::header("h")]);
    let refusal = |record: &Record| identified(record, &policy).err();
    let without = record().with_key("secret");
    let detail = Some(r#"looked for the header "h""#.to_owned());
    assert_eq!(refusal(&without), Some(Refusal { reason: "missing identity", detail: detail.clone() }));
    let binary = without.with_header("h", b"secret\xff".to_vec());
    assert_eq!(refusal(&binary), Some(Refusal { reason: "identity is not text", detail }));
}

#[test]
fn neighbouring_parts_do_not_run_into_one_another() {
    let id = |parts: [&str; 2]| joined(&parts.map(str::to_owned));
    assert_eq!(id(["a", "b|c"]), r"a|b\|c");
    assert_eq!(id(["a|b", "c"]), r"a\|b|c");
    assert_eq!(id([r"a\", "c"]), r"a\\|c");
}

proptest! {
    #[test]
    fn two_lists_of_parts_give_one_id_only_when_they_are_the_same(
        left in prop::collection::vec(r"[a|\\]{1,4}", 1..4), right in prop::collection::vec(r"[a|\\]{1,4}", 1..4),
    ) {
        prop_assert_eq!(joined(&left) == joined(&right), left == right);
    }

    #[test]
    fn any_record_has_a_storable_identity_or_a_reason(
        key in any::<Option<Vec<u8>>>(), payload in any::<Option<Vec<u8>>>(), structured in any::<bool>(),
        headers in prop::collection::vec(("(ce_id|ce_source|h)", any::<Vec<u8>>()), 0..4),
        offset in any::<Option<i64>>(), place in 0..6usize, missing in 0..3usize,
    ) {
        let mut record = record();
        record.key = key.map(Into::into);
        record.payload = payload.map(Into::into);
        record.position = offset.map(|offset| Position { partition: i32::MAX, offset });
        if structured {
            record = record.with_header("content-type", "application/cloudevents+json");
        }
        for (name, value) in headers {
            record = record.with_header(name, value);
        }
        let places = [
            Identity::cloud_events(), Identity::header("h"), Identity::key(), Identity::json_pointer("/a"), Identity::position(),
            Identity::all_of([Identity::key(), Identity::header("h")]),
        ];
        let policy = places[place].clone();
        let policy = [policy.clone(), policy.clone().or_position(), policy.or_undeduplicated()][missing].clone();
        if let Ok(identified) = identified(&record, &policy) {
            for text in [Some(identified.id), identified.source].into_iter().flatten() {
                prop_assert!((1..=200).contains(&text.chars().count()) && !text.contains('\0'));
            }
        }
    }
}
