//! Events in binary and in structured mode, and payloads that are not events.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value, json};

use super::*;
use crate::types::{Message, Raw, Record};

#[allow(clippy::needless_pass_by_value, reason = "records are made where they are read")]
fn read<T: Payload>(record: Record) -> Result<CloudEvent<T>, String> {
    CloudEvent::decode(&Encoded::of(&record)).map_err(|error| error.to_string())
}

fn structured(event: &Value) -> Record {
    Record::new("t").with_header("content-type", "application/cloudevents+json; charset=utf-8").json(event)
}

fn binary() -> Record {
    Record::new("t").with_header("ce_id", "17").with_header("ce_source", "/shop").with_header("ce_type", "placed")
}

#[test]
fn both_modes_give_the_same_event() {
    let headers = binary()
        .with_header("ce_specversion", "1.0")
        .with_header("ce_subject", "order/17")
        .with_header("ce_time", "2024-02-29T12:00:00.5Z")
        .with_header("ce_dataschema", "urn:order")
        .with_header("ce_traceparent", "00-1")
        .with_header("content-type", "application/json")
        .with_header("ce_id", "a second one does not count")
        .json(&json!({ "number": 17 }));
    let envelope = structured(&json!({
        "specversion": "1.0", "id": "17", "source": "/shop", "type": "placed", "subject": "order/17",
        "time": "2024-02-29T14:00:00.5+02:00", "dataschema": "urn:order", "traceparent": "00-1",
        "datacontenttype": "application/json", "data": { "number": 17 }, "sequence": null,
    }));
    let event: CloudEvent<Value> = read(headers).unwrap();
    assert_eq!(event, read(envelope.with_header("ce_id", "headers do not count")).unwrap());
    assert_eq!(event.time, Some(UNIX_EPOCH + Duration::from_millis(1_709_208_000_500)));
    assert_eq!(event.extensions, BTreeMap::from([("traceparent".to_owned(), "00-1".to_owned())]));
    assert_eq!(event.data, json!({ "number": 17 }));
}

#[test]
fn data_is_raw_binary_or_none() {
    let event = |data: Value| {
        let mut event = json!({ "id": "17", "source": "/shop", "type": "placed" });
        event.as_object_mut().unwrap().extend(data.as_object().unwrap().clone());
        structured(&event)
    };
    let raw = |record| read::<Raw>(record).map(|event| event.data.0);
    assert_eq!(raw(event(json!({ "data": [1, 2] }))).unwrap().unwrap(), "[1,2]");
    assert_eq!(raw(event(json!({ "data_base64": "AP8=" }))).unwrap().unwrap(), [0, 255].as_slice());
    assert_eq!(raw(event(json!({}))), Ok(None));
    assert_eq!(raw(binary()), Ok(None));
    assert_eq!(read::<Option<u8>>(event(json!({}))).unwrap().data, None);
    assert!(raw(event(json!({ "data": 1, "data_base64": "AA==" }))).unwrap_err().contains("both"));
    let bad = raw(event(json!({ "data_base64": "secret" }))).unwrap_err();
    assert!(bad.contains("base64") && !bad.contains("secret"), "{bad}");
}

#[test]
fn a_record_that_is_not_an_event_is_refused_with_the_missing_attribute() {
    let said = |record| read::<Raw>(record).unwrap_err();
    assert_eq!(said(Record::new("t")), "not a CloudEvent: there is no attribute `id`");
    assert_eq!(said(Record::new("t").with_header("ce_id", "17")), "not a CloudEvent: there is no attribute `source`");
    assert!(said(binary().with_header("ce_specversion", "0.3")).contains("specversion"));
    assert!(said(binary().with_header("ce_time", "yesterday")).contains("`time`"));
    assert!(said(structured(&json!({ "id": "17", "source": "/", "type": {} }))).contains("\"type\" is not text"));
    let extension = said(structured(&json!({ "id": "17", "source": "/", "type": "t", "hunter2": [] })));
    assert_eq!(extension, "an attribute of the CloudEvent is not text");
    assert!(read::<Raw>(structured(&json!([]))).is_err());
}

// `accept` reads the identity from the first header of a name. A later header must not give the event another id.
#[test]
fn the_first_header_of_a_name_counts_even_if_it_has_no_text() {
    let later = |record: Record| record.with_header("ce_source", "/shop").with_header("ce_type", "placed");
    let missing = "not a CloudEvent: there is no attribute `id`";
    for first in [Record::new("t").with_null_header("ce_id"), Record::new("t").with_header("ce_id", b"\xff".as_slice())]
    {
        assert_eq!(read::<Raw>(later(first.with_header("ce_id", "too late"))).unwrap_err(), missing);
    }
}

#[test]
fn a_message_of_an_event_without_an_explicit_id_has_the_id_of_the_event() {
    let message: Message<CloudEvent<Raw>> = Message::from_record(binary()).unwrap();
    assert_eq!((message.id(), message.source()), ("17", "/shop"));
}

#[test]
fn timestamps_have_offsets_and_never_panic() {
    let noon = timestamp("2024-02-29T12:00:00Z");
    assert!(noon.is_some());
    for same in ["2024-02-29t12:00:00z", "2024-02-29T12:00:00+00:00", "2024-02-29T06:30:00-05:30"] {
        assert_eq!(timestamp(same), noon, "{same}");
    }
    for bad in ["", "Z", "+02:00", "2024-02-29T12:00:00", "2024-02-29T12:00:00+99:00", "2024-02-29T12:00:00é02:00"] {
        assert_eq!(timestamp(bad), None, "{bad}");
    }
}

#[test]
fn a_structured_event_in_protobuf_or_avro_is_the_same_event_and_other_formats_are_refused() {
    let of = |format: &str, payload: &'static [u8]| {
        Record::new("t").with_header("content-type", format!("application/cloudevents+{format}")).with_payload(payload)
    };
    let protobuf = of("protobuf", b"\x0a\x0217\x12\x05/shop\x22\x06placed\x3a\x02{}");
    let avro = of("avro", b"\x06\x04id\x06\x0417\x0csource\x06\x0a/shop\x08type\x06\x0cplaced\x00\x00\x04{}");
    for record in [protobuf, avro] {
        let event: CloudEvent<Value> = read(record).unwrap();
        assert_eq!((&*event.id, &*event.source, &*event.event_type), ("17", "/shop", "placed"));
        assert_eq!(event.data, json!({}));
    }
    assert_eq!(read::<Raw>(of("xml", b"<event/>")).unwrap_err(), IS_UNKNOWN);
    assert!(read::<Raw>(of("protobuf", b"\x0a\xff")).is_err());
}
