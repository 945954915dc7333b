//! The dashboard shows decoded payloads and keys: with a schema registry, and with a decoder that misbehaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use wharf::Record;
use wharf::dashboard::Dashboard;
use wharf::formats::{Encoded, Readable, Undecoded};

use super::mounted::{access, ask, service};
use super::served::Served;
use crate::conformance::sqlite::scene::Scene;
use crate::formats::{fixture, started};
use crate::scene::Runs;
use support::registry::Mood;

/// Asserts that the page contains these texts in this order.
fn assert_in_order(page: &str, texts: &[&str]) {
    texts.iter().fold(page, |rest, text| {
        let (_, rest) = rest.split_once(text).unwrap_or_else(|| panic!("{text:?} is not at its place in\n{page}"));
        rest
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn wharf_dashboard_shows_the_decoded_form_first_and_reports_an_unavailable_registry() {
    let (scene, registry) = (Scene::new().await, started());
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("mail")).build().unwrap();
    let with_key = fixture("avro").with_key(fixture("avro_key").payload().unwrap().to_vec());
    let event = json!({ "id": "event", "source": "/shop", "type": "placed", "data": { "number": 18 } });
    let event = Record::new("orders").with_header("content-type", "application/cloudevents+json").json(&event);
    inbox.accept_all([with_key, fixture("protobuf"), event]).await.unwrap();
    let nameless = Record::new("orders").with_payload(fixture("json").payload().unwrap().to_vec());
    inbox.accept_or_quarantine([nameless]).await.unwrap();
    registry.demand("Bearer hunter2");
    let arguments = ["--listen", "127.0.0.1:0", "--registry", &registry.url()];
    let served = Served::with(&scene, &arguments, &[("WHARF_REGISTRY_TOKEN", "hunter2")]).await;

    // The payload is decoded when a visitor requests it, and not when the script updates the page.
    assert!(!served.get("/message?message=avro", &[]).await.body.contains("Decoded"));
    let avro = "/message?message=avro&payload=show";
    assert!(!served.get(avro, &[("X-Wharf-Update", "1")]).await.body.contains("Decoded"));
    assert_eq!(registry.total(), 0);

    let payload = ["<h3>Decoded payload", "Avro, schema 1<", "customer", "Ännchen", "</pre>"];
    let key = ["<h3>Decoded key", "Avro, schema 4<", ">17</pre>"];
    let raw = ["as stored", "00000000012110c3846e6e6368656e", "Hide the payload"];
    let texts = [&payload[..], &key, &raw].concat();
    assert_in_order(&served.get(avro, &[]).await.body, &texts);
    let event = served.get("/message?message=event&payload=show", &[]).await.body;
    // The order of the fields depends on the features of serde_json.
    for value in ["placed", "18"] {
        assert_in_order(&event, &["<h3>Decoded payload", "CloudEvent in JSON, data in JSON<", value, "as stored"]);
    }
    let quarantined = served.get("/quarantine/record?id=1&payload=show", &[]).await.body;
    assert_in_order(&quarantined, &["<h3>Decoded payload", "JSON, schema 7<", "</pre>", "as stored"]);

    registry.set(Mood::Down);
    let away = served.get("/message?message=protobuf&payload=show", &[]).await;
    let sentence = "The payload cannot be decoded now: the schema registry at 127.0.0.1 cannot be reached";
    assert_in_order(&away.body, &["<h3>Decoded payload", sentence, "as stored", "Di</pre>"]);
    assert!(away.status == 200 && !away.body.contains("hunter2"), "{}", away.body);
    // The schemas of this message are cached.
    assert_in_order(&served.get(avro, &[]).await.body, &texts);
}

const HOSTILE: &str = "</pre><script>window.hacked=1</script>\u{202e}txt";

/// A decoder whose behaviour the payload selects.
fn hostile(encoded: &Encoded<'_>) -> Result<Option<Readable>, Undecoded> {
    match encoded.bytes() {
        b"html" => Ok(Some(Readable::new(HOSTILE, json!({ HOSTILE: [HOSTILE] })))),
        b"huge" => Ok(Some(Readable::new("big", "x".repeat(8 << 20)))),
        b"panic" => panic!("{HOSTILE}"),
        b"error" => Err(HOSTILE.into()),
        _ => Ok(None),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decoder_cannot_break_the_page_and_is_not_called_without_the_right_to_see_payloads() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("mail")).build().unwrap();
    let ids = ["html", "huge", "panic", "error", "other"];
    inbox.accept_all(ids.map(|id| Record::new("orders").with_id(id).with_payload(id))).await.unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let decoder = move |encoded: &Encoded<'_>| {
        counted.fetch_add(1, Ordering::SeqCst);
        hostile(encoded)
    };
    let address = service(Dashboard::new(&scene.store, access()).decoded_by(decoder)).await;
    let story = |id: &str, more: &str| format!("/message?message={id}{more}");

    assert_eq!(ask(&address, "GET", &story("html", "&payload=show"), "guest", "").await.status, 403);
    assert_eq!(ask(&address, "GET", &story("html", ""), "support", "").await.status, 200);
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    for (id, text) in [
        ("html", "window.hacked=1"),
        ("huge", "Only the first 256 KiB are shown."),
        ("panic", "The payload cannot be decoded: the decoder panicked: "),
        ("error", "The payload cannot be decoded: "),
        ("other", "<h3>Payload</h3>"),
    ] {
        let page = ask(&address, "GET", &story(id, "&payload=show"), "support", "").await;
        assert_eq!(page.status, 200, "{id}");
        assert!(page.body.len() < 1 << 20, "{id}: {} bytes", page.body.len());
        assert_in_order(&page.body, &[text, &format!(">{id}</pre>")]);
        assert!(!page.body.contains("<script>window") && !page.body.contains('\u{202e}'), "{}", page.body);
    }
    assert_eq!(calls.load(Ordering::SeqCst), ids.len());
}
