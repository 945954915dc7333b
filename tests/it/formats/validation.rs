//! JSON payloads are validated with the schema that they were written with.

use serde_json::{Value, json};
use support::registry::{Mood, TestRegistry};
use wharf::formats::JsonSchema;
use wharf::{Failure, Message, Record, RetryPolicy, handler};

use super::decode::decode;
use super::{client, fixture, started};
use crate::scene::{Scene, key};

/// The id of the fixture's schema: `number` is an integer.
const ORDER: u32 = 7;

fn framed(schema: u32, payload: &Value) -> Record {
    let bytes = [&[0][..], &schema.to_be_bytes(), payload.to_string().as_bytes()].concat();
    Record::new("orders").with_id(payload.to_string()).with_payload(bytes)
}

fn schema(id: u32, subject: &str, text: &Value, references: &Value) -> Value {
    json!({ "id": id, "subject": subject, "version": 1, "schemaType": "JSON", "schema": text.to_string(), "references": references })
}

/// Decodes a record that must be undecodable, and returns the reason.
async fn refused(decoder: &JsonSchema<Value>, record: &Record) -> String {
    let undecoded = decode(decoder, record).await.unwrap_err();
    assert!(!undecoded.is_unavailable(), "{undecoded}");
    undecoded.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_payload_is_undecodable_and_the_error_quotes_nothing_of_it() {
    let registry = started();
    let decoder = JsonSchema::new().validated_by(&client(&registry));
    assert_eq!(decode(&decoder, &fixture("json")).await.unwrap(), json!({ "number": 17 }));
    let told = refused(&decoder, &framed(ORDER, &json!({ "number": "hunter2" }))).await;
    assert_eq!(told, r#"the payload violates schema 7 at "/properties/number/type""#);
    assert_eq!(registry.count("/schemas/ids/7"), 1, "the schema is fetched once");
    // Without validation, the same payload is decoded.
    assert!(decode(&JsonSchema::<Value>::new(), &framed(ORDER, &json!({ "number": "hunter2" }))).await.is_ok());

    let told = refused(&decoder, &Record::new("orders").with_payload("{}")).await;
    assert!(told.contains("has no schema id"), "{told}");
    let told = refused(&decoder, &Record::new("orders").with_payload(&b"\0\0\0\0\x07{\"number\": hunter2"[..])).await;
    assert!(told.starts_with("not JSON") && !told.contains("hunter2"), "{told}");
    assert_eq!(decode(&decoder, &Record::new("orders")).await.unwrap(), Value::Null, "a tombstone");
}

#[tokio::test(flavor = "multi_thread")]
async fn schemas_may_refer_to_schemas_of_the_registry_and_to_nothing_else() {
    let refers = |name: &str| json!([{ "name": name, "subject": "customer", "version": 1 }]);
    let order = |reference: &str| json!({ "properties": { "customer": { "$ref": reference } } });
    let mut with_id = order("customer.json");
    with_id["$id"] = json!("https://shop.example.com/order.json");
    let registry = TestRegistry::start(vec![
        schema(1, "customer", &json!({ "type": "string", "pattern": "^[A-Z]" }), &json!([])),
        schema(2, "order", &order("customer.json"), &refers("customer.json")),
        schema(3, "order-with-id", &with_id, &refers("customer.json")),
        schema(4, "order-by-uri", &order("https://crm.example.com/c"), &refers("https://crm.example.com/c")),
        schema(5, "unlisted", &order("https://crm.example.com/c"), &json!([])),
        schema(6, "file", &order("file:///etc/passwd"), &json!([])),
    ]);
    let decoder = JsonSchema::new().validated_by(&client(&registry));
    for id in [2, 3, 4] {
        assert!(decode(&decoder, &framed(id, &json!({ "customer": "Di" }))).await.is_ok(), "schema {id}");
        let told = refused(&decoder, &framed(id, &json!({ "customer": "di" }))).await;
        assert!(told.contains(&format!("violates schema {id} at")), "{told}");
    }
    for id in [5, 6] {
        let told = refused(&decoder, &framed(id, &json!({ "customer": "Di" }))).await;
        assert!(told.starts_with(&format!("schema {id}: it cannot be used: ")), "{told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_schema_is_an_error_and_a_cyclic_one_does_not_hang() {
    let endless = json!({ "$ref": "#/definitions/a", "definitions": { "a": { "$ref": "#/definitions/b" }, "b": { "$ref": "#/definitions/a" } } });
    let registry = TestRegistry::start(vec![
        schema(1, "no-schema", &json!({ "type": "no such type" }), &json!([])),
        schema(2, "endless", &endless, &json!([])),
        json!({ "id": 3, "subject": "avro", "version": 1, "schema": "\"long\"" }),
        json!({ "id": 4, "subject": "no-json", "version": 1, "schemaType": "JSON", "schema": "{" }),
        // `items` may be a list in draft 7, the default draft.
        schema(5, "draft", &json!({ "items": [{ "type": "integer" }] }), &json!([])),
    ]);
    let decoder = JsonSchema::new().validated_by(&client(&registry));
    for (id, says) in [(1, "it cannot be used: "), (3, "it is not a JSON Schema"), (4, "it is not JSON")] {
        let told = refused(&decoder, &framed(id, &json!(17))).await;
        assert!(told.starts_with(&format!("schema {id}: {says}")) && told.len() < 300, "{told}");
    }
    let _ = decode(&decoder, &framed(2, &json!(17))).await;
    assert!(refused(&decoder, &framed(5, &json!(["x"]))).await.contains("/items/0/type"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_poisons_invalid_payloads_and_waits_while_the_registry_is_unavailable() {
    let (scene, registry) = (Scene::new().await, started());
    registry.set(Mood::Down);
    let reading = handler(key("mail"), async |_: Message<Value>| Ok::<(), Failure>(()));
    let reading =
        reading.retry(RetryPolicy::never()).decoded_by(JsonSchema::<Value>::new().validated_by(&client(&registry)));
    let inbox = scene.inbox().subscribe("orders", reading).build().unwrap();
    inbox.accept(framed(ORDER, &json!({ "number": 17 }))).await.unwrap();
    inbox.accept(framed(ORDER, &json!({ "number": "hunter2" }))).await.unwrap();
    let running = inbox.start().await.unwrap();
    registry.reached(2).await;
    assert_eq!(scene.count("inbox_status WHERE errors > 0 OR state IN ('poisoned', 'done')").await, 0);
    registry.set(Mood::Well);
    scene.settled().await;
    running.shutdown(std::time::Duration::from_secs(5)).await.unwrap();
    let states = "SELECT concat_ws(' ', state, reason) FROM inbox_status ORDER BY 1";
    assert_eq!(scene.database.query_texts(states).await, ["done", "poisoned undecodable"]);
    assert_eq!(scene.count("inbox_status WHERE last_error LIKE '%hunter2%'").await, 0);
}
