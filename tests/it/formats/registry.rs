//! A misbehaving registry: only an unknown schema makes a payload undecodable.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::Value;
use support::registry::{Mood, TestRegistry};
use support::tls::Certificates;
use wharf::Record;
use wharf::formats::{Avro, Decoder, Encoded, Registry, Undecoded};

use super::{FIXTURES, client, fixture, started};
use crate::scene::within;

async fn ready(registry: &Registry, name: &str) -> Result<(), Undecoded> {
    let (avro, record) = (Avro::<Value>::new(registry), fixture(name));
    match avro.ready(&Encoded::of(&record)) {
        Some(ready) => ready.await,
        None => avro.decode(&Encoded::of(&record)).map(drop),
    }
}

/// Waits until the client uses the recovered registry: after a failure it waits before the next request.
async fn ready_again(registry: &Registry, name: &str) {
    within(async {
        while let Err(undecoded) = ready(registry, name).await {
            assert!(undecoded.is_unavailable(), "{undecoded}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_requests_fetch_a_schema_once() {
    let registry = started();
    let known = client(&registry);
    let asked = join_all((0..50).map(|_| ready(&known, "avro"))).await;
    assert!(asked.iter().all(Result::is_ok), "{asked:?}");
    ready(&known, "avro").await.unwrap();
    ready(&known, "avro_reference").await.unwrap();
    assert_eq!(
        (registry.count("/schemas/ids/1"), registry.total()),
        (1, 3),
        "one of the two schemas refers to a third"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_the_registry_does_not_know_is_undecodable() {
    let empty = TestRegistry::start(Vec::new());
    let known = client(&empty);
    for name in ["avro", "avro", "avro_header"] {
        let undecoded = ready(&known, name).await.unwrap_err();
        assert!(!undecoded.is_unavailable() && undecoded.to_string().contains("does not know schema"), "{undecoded}");
    }
    assert_eq!(empty.total(), 2, "an unknown schema is not requested again at once");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_other_failure_of_the_registry_counts_as_unavailable() {
    let registry = started();
    for (mood, says) in [
        (Mood::Down, "cannot be reached"),
        (Mood::Fails(500), "answers 500"),
        (Mood::Fails(503), "answers 503"),
        (Mood::Fails(404), "check the address"),
        (Mood::Fails(422), "check the address"),
        (Mood::Fails(429), "answers 429"),
        (Mood::Elsewhere, "check the address"),
        (Mood::Silent, "did not answer within"),
    ] {
        registry.set(mood);
        let known = Registry::at(registry.url()).timeout(Duration::from_millis(200)).build().unwrap();
        let undecoded = ready(&known, "avro").await.unwrap_err();
        assert!(undecoded.is_unavailable() && undecoded.to_string().contains(says), "{undecoded}");
        let undecoded = ready(&known, "avro").await.unwrap_err();
        assert!(undecoded.is_unavailable() && undecoded.to_string().contains(says), "{undecoded}");
        registry.set(Mood::Well);
        ready_again(&known, "avro").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_id_that_the_registry_does_not_support_is_undecodable() {
    let registry = TestRegistry::start(Vec::new());
    let known = client(&registry);
    let ready = async |payload: &[u8]| {
        let record = Record::new("orders").with_payload(payload.to_vec());
        Avro::<Value>::new(&known).ready(&Encoded::of(&record)).unwrap().await.unwrap_err()
    };
    let undecoded = ready(b"\0\xff\xff\xff\xffdata").await;
    assert!(!undecoded.is_unavailable() && undecoded.to_string().contains("schema 4294967295"), "{undecoded}");
    assert_eq!(registry.total(), 0, "no registry assigns such an id, so none is asked");
    registry.set(Mood::Old);
    let undecoded = ready(b"\x01this is no Avro at all").await;
    assert!(!undecoded.is_unavailable() && undecoded.to_string().contains("does not know schema"), "{undecoded}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_address_is_used_when_one_is_unavailable() {
    let (away, well) = (started(), started());
    away.set(Mood::Down);
    let known = Registry::at(format!("{}, {}/", away.url(), well.url())).build().unwrap();
    ready(&known, "avro").await.unwrap();
    ready(&known, "avro_v2").await.unwrap();
    assert_eq!((away.total(), well.total()), (1, 2), "the address that answered last is tried first");
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_sent_and_never_shown() {
    let registry = started();
    let refused = || async {
        let undecoded = ready(&client(&registry), "avro").await.unwrap_err();
        assert!(undecoded.is_unavailable() && undecoded.to_string().contains("answers 401"), "{undecoded}");
    };
    registry.demand("Basic c2hvcDpodW50ZXIy");
    refused().await;
    let with_password = Registry::at(registry.url()).basic_auth("shop", "hunter2");
    assert!(!format!("{with_password:?}").contains("hunter2"));
    let known = with_password.build().unwrap();
    ready(&known, "avro").await.unwrap();
    registry.demand("Bearer hunter3");
    refused().await;
    let known = Registry::at(registry.url()).bearer_token("hunter3").build().unwrap();
    ready(&known, "avro").await.unwrap();
    assert!(!format!("{known:?} {:?}", Avro::<Value>::new(&known)).contains("hunter3"));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_valid_certificate_of_a_trusted_authority_is_accepted() {
    let certificates = Certificates::generate();
    let trusting = |tls| {
        let registry = TestRegistry::start_with_tls(FIXTURES["schemas"].as_array().unwrap().clone(), tls);
        let known = Registry::at(registry.url()).root_certificates(&certificates.authority_path);
        (registry, known.build().unwrap())
    };
    let (registry, known) = trusting(&certificates.server);
    ready(&known, "avro").await.unwrap();
    assert_eq!(registry.total(), 1);
    for tls in [&certificates.wrong_host, &certificates.expired, &certificates.foreign] {
        let (registry, known) = trusting(tls);
        let undecoded = ready(&known, "avro").await.unwrap_err();
        assert!(undecoded.is_unavailable() && registry.total() == 0, "{undecoded}");
    }
}

#[test]
fn an_unusable_address_is_refused_without_showing_its_secrets() {
    for address in
        ["", ",", "host:8081", "ftp://host", "https://", "https://shop:hunter2@host", "https://host?a=hunter2"]
    {
        let error = Registry::at(address).build().unwrap_err();
        assert!(error.is_configuration() && !format!("{error:#}").contains("hunter2"), "{address}: {error:#}");
    }
    let error = Registry::at("https://host").root_certificates("no such file").build().unwrap_err();
    assert!(error.is_configuration(), "{error:#}");
}
