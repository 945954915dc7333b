//! The output of Confluent's encoders is decoded correctly, with the schema id in the payload and in a header.

use base64::Engine;
use serde::Deserialize;
use serde_json::{Value, json};
use wharf::formats::{
    Avro, Decoder, Encoded, JsonSchema, Keyed, Protobuf, ProtobufJson, Undecoded, cloud_event, keyed,
};
use wharf::{Message, Record};

use super::{client, fixture, started};

/// Waits until the decoder is ready, then decodes.
pub async fn decode<P>(decoder: &impl Decoder<P>, record: &Record) -> Result<P, Undecoded> {
    let encoded = Encoded::of(record);
    if let Some(ready) = decoder.ready(&encoded) {
        ready.await?;
    }
    decoder.decode(&encoded)
}

#[derive(Debug, Deserialize, PartialEq)]
struct Order {
    number: i32,
    customer: String,
    state: State,
    price: String,
    placed_at: i64,
    note: Option<String>,
    lines: Vec<Line>,
    labels: std::collections::BTreeMap<String, String>,
    digest: [u8; 4],
    ratio: f32,
    gift: bool,
    /// Not in the schema of the writer.
    #[serde(default)]
    channel: Option<String>,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(rename_all = "UPPERCASE")]
enum State {
    Open,
    Sent,
}

#[derive(Debug, Deserialize, PartialEq)]
struct Line {
    article: String,
    weight: f64,
    parts: Option<Box<Line>>,
}

fn order() -> Order {
    let line = |article: &str, weight, parts| Line { article: article.to_owned(), weight, parts };
    Order {
        number: -17,
        customer: "Ännchen".to_owned(),
        state: State::Sent,
        price: "-12.50".to_owned(),
        placed_at: 1_769_850_000_000,
        note: None,
        lines: vec![line("tea", 0.25, Some(Box::new(line("bag", 0.01, None)))), line("cup", 0.5, None)],
        labels: [("a", "1"), ("b", "2")].map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        digest: [0, 1, 0xfe, 0xff],
        ratio: 0.5,
        gift: true,
        channel: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn avro_is_read_into_types_with_the_id_in_the_payload_and_in_a_header() {
    let registry = started();
    let avro = Avro::<Order>::new(&client(&registry));
    for name in ["avro", "avro_header"] {
        assert_eq!(decode(&avro, &fixture(name)).await, Ok(order()), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn avro_is_read_into_a_value_and_follows_references() {
    let registry = client(&started());
    let avro = Avro::<Value>::new(&registry);
    let value = decode(&avro, &fixture("avro")).await.unwrap();
    assert_eq!((&value["customer"], &value["price"]), (&json!("Ännchen"), &json!("-12.50")));
    let visit = decode(&avro, &fixture("avro_reference")).await.unwrap();
    assert_eq!(visit, json!({ "who": { "name": "Cy" }, "by": null }));
}

#[tokio::test(flavor = "multi_thread")]
async fn old_and_new_records_are_read_through_the_readers_schema() {
    #[derive(Debug, Deserialize, PartialEq)]
    struct Evolved {
        number: i64,
        buyer: String,
        channel: String,
    }
    let registry = started();
    let schema =
        super::FIXTURES["schemas"].as_array().unwrap().iter().find(|schema| schema["subject"] == "evolved-value");
    let schema = schema.unwrap()["schema"].as_str().unwrap();
    let avro = Avro::<Evolved>::new(&client(&registry)).reader_schema(schema).unwrap();
    let evolved = |number, buyer: &str, channel: &str| Evolved { number, buyer: buyer.into(), channel: channel.into() };
    assert_eq!(decode(&avro, &fixture("avro")).await, Ok(evolved(-17, "Ännchen", "shop")));
    assert_eq!(decode(&avro, &fixture("avro_v2")).await, Ok(evolved(1 << 40, "Bo", "web")));
    assert!(Avro::<Evolved>::new(&client(&registry)).reader_schema("nonsense").is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_decoded_with_a_separate_decoder() {
    let registry = client(&started());
    let key = fixture("avro_key").payload().unwrap().to_vec();
    let decoder = keyed(Avro::<i64>::new(&registry), Avro::<Order>::new(&registry));
    let (prefix, data) = key.split_at(5);
    // The id of the key's schema is in the key or in a separate header.
    let in_header = fixture("avro_header").with_key(data.to_vec()).with_header("__key_schema_id", prefix.to_vec());
    for record in [fixture("avro").with_key(key.clone()), in_header] {
        assert_eq!(decode(&decoder, &record).await, Ok(Keyed { key: 17, value: order() }));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn protobuf_is_read_into_prost_types_and_by_its_descriptor_into_json() {
    #[derive(Clone, PartialEq, prost::Message)]
    struct Order {
        #[prost(int64, tag = "1")]
        number: i64,
        #[prost(string, tag = "2")]
        customer: String,
    }
    let registry = started();
    let by_descriptor = ProtobufJson::<Value>::new(&client(&registry));
    for name in ["protobuf", "protobuf_header"] {
        let message: Message<Protobuf<Order>> = Message::from_record(fixture(name)).unwrap();
        assert_eq!((message.payload.number, message.payload.customer.as_str()), (17, "Di"), "{name}");
        let value = decode(&by_descriptor, &fixture(name)).await;
        assert_eq!(value, Ok(json!({ "number": 17, "customer": "Di" })), "{name}");
    }
    assert_eq!(decode(&by_descriptor, &fixture("protobuf_nested")).await, Ok(json!({ "text": "deep" })));
}

#[tokio::test(flavor = "multi_thread")]
async fn json_is_read_without_its_frame() {
    let json = JsonSchema::<Value>::new();
    assert_eq!(decode(&json, &fixture("json")).await, Ok(json!({ "number": 17 })));
    assert_eq!(decode(&json, &Record::new("t").with_payload("17")).await, Ok(json!(17)));
    assert_eq!(decode(&json, &Record::new("t")).await, Ok(Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn truncated_records_cause_no_panic_and_never_count_as_unavailable() {
    let registry = client(&started());
    let (avro, protobuf) = (Avro::<Value>::new(&registry), ProtobufJson::<Value>::new(&registry));
    let whole = fixture("avro").payload().unwrap().to_vec();
    for length in 0..whole.len() {
        let record = Record::new("t").with_payload(whole[..length].to_vec());
        let undecoded = decode(&avro, &record).await.unwrap_err();
        assert!(!undecoded.is_unavailable(), "{length}: {undecoded}");
    }
    let whole = fixture("protobuf").payload().unwrap().to_vec();
    for length in 0..whole.len() {
        let record = Record::new("t").with_payload(whole[..length].to_vec());
        // Some truncated payloads are valid shorter messages.
        if let Err(undecoded) = decode(&protobuf, &record).await {
            assert!(!undecoded.is_unavailable(), "{length}: {undecoded}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_of_another_format_is_undecodable() {
    let registry = client(&started());
    let undecoded = decode(&Avro::<Value>::new(&registry), &fixture("protobuf")).await.unwrap_err();
    assert_eq!(
        (undecoded.is_unavailable(), undecoded.to_string().as_str()),
        (false, "schema 8: it is not an Avro schema")
    );
    let undecoded = decode(&ProtobufJson::<Value>::new(&registry), &fixture("avro")).await.unwrap_err();
    assert!(!undecoded.is_unavailable(), "{undecoded}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_of_a_cloud_event_is_decoded_by_its_own_decoder_in_every_mode() {
    let registry = started();
    let decoder = cloud_event(Avro::<Value>::new(&client(&registry)));
    let data = fixture("avro").payload().unwrap().to_vec();
    let binary =
        fixture("avro").with_header("ce_id", "17").with_header("ce_source", "/shop").with_header("ce_type", "placed");
    let structured = Record::new("orders").with_header("content-type", "application/cloudevents+json").json(&json!({
        "id": "17", "source": "/shop", "type": "placed", "data_base64": base64::prelude::BASE64_STANDARD.encode(&data),
    }));
    let field = |number: u8, bytes: &[u8]| [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat();
    let message = [field(1, b"17"), field(2, b"/shop"), field(4, b"placed"), field(6, &data)].concat();
    let protobuf =
        Record::new("orders").with_header("content-type", "application/cloudevents+protobuf").with_payload(message);
    let length = |bits: usize| u8::try_from(bits).unwrap();
    let doubled = data.len() * 2;
    let length = [length(doubled & 0x7f | 0x80), length(doubled >> 7)];
    let attributes = b"\x06\x04id\x06\x0417\x0csource\x06\x0a/shop\x08type\x06\x0cplaced\x00";
    let event = [&attributes[..], &[0], &length, &data].concat();
    let avro = Record::new("orders").with_header("content-type", "application/cloudevents+avro").with_payload(event);
    for record in [binary, structured, protobuf, avro] {
        let event = decode(&decoder, &record).await.unwrap();
        assert_eq!((&*event.id, &event.data["number"]), ("17", &json!(-17)));
    }
    assert_eq!(registry.total(), 1, "the schema is fetched once");
    let unknown = fixture("avro").with_header("content-type", "application/cloudevents+xml");
    let undecoded = decode(&decoder, &unknown).await.unwrap_err();
    assert!(!undecoded.is_unavailable() && undecoded.to_string().contains("a format that is not known"), "{undecoded}");
}
