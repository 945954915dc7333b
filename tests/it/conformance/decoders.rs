//! Decoders of subscriptions: for every kind of handler, an undecodable payload is poisoned for that handler only, and
//! a payload that cannot be decoded now waits without consuming a retry.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use wharf::batch::{batch_handler, tx_batch_handler};
use wharf::formats::{Decoder, Encoded, Undecoded};
use wharf::{Failure, Inbox, Message, Registration, RetryPolicy, handler, tx_handler};

use super::effect::{self, Connection, effects};
use super::scene::{Db, Runs, Scene, key, record, records, within};

/// The decoder's result. Its `Deserialize` cannot read the payload.
#[derive(serde::Deserialize)]
struct Text(String);

/// A decoder that is unavailable until it is opened.
#[derive(Clone, Default)]
struct Gate {
    is_open: Arc<AtomicBool>,
    asked: Arc<AtomicUsize>,
}

impl Decoder<Text> for Gate {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<Text, Undecoded> {
        assert!(self.is_open.load(Ordering::SeqCst), "it was not waited for");
        from_payload(encoded)
    }

    fn ready<'a>(&'a self, _: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        let asking = async {
            self.asked.fetch_add(1, Ordering::SeqCst);
            Err(Undecoded::unavailable("the registry is away").again_in(Duration::from_millis(20)))
        };
        (!self.is_open.load(Ordering::SeqCst)).then(|| asking.boxed())
    }
}

fn from_payload(encoded: &Encoded<'_>) -> Result<Text, Undecoded> {
    let text = std::str::from_utf8(encoded.bytes())?;
    Ok(Text(text.strip_prefix("payload of ").ok_or("it does not begin as it should")?.to_owned()))
}

/// One handler of each kind, none of which may fail even once.
fn all_kinds() -> Vec<Registration<Db>> {
    async fn write(order: Message<Text>, conn: &mut Connection) -> Result<(), Failure> {
        Ok(effect::write(conn, &order.payload.0).await?)
    }
    async fn write_all(orders: Vec<Message<Text>>, conn: &mut Connection) -> Result<(), Failure> {
        for order in orders {
            effect::write(conn, &order.payload.0).await?;
        }
        Ok(())
    }
    let plain = handler(key("plain"), async |order: Message<Text>| match order.payload.0 == order.id() {
        true => Ok(()),
        false => Err(Failure::poison("decoded wrongly")),
    });
    let batch = batch_handler(key("batch"), async |_: Vec<Message<Text>>| Ok::<(), Failure>(()));
    vec![
        plain.timeout(Duration::from_secs(60)),
        tx_handler(key("tx"), write),
        tx_handler(key("shared"), write).share_transaction(8),
        batch.batch(8, Duration::ZERO),
        tx_batch_handler(key("write_all"), write_all).batch(8, Duration::ZERO),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_decoder_is_unavailable_deliveries_of_every_kind_of_handler_wait_without_consuming_a_retry() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let gate = Gate::default();
    let kinds = all_kinds();
    let (count, mut inbox) = (kinds.len() * 10, scene.inbox());
    for registration in kinds {
        inbox = inbox.subscribe("orders", registration.retry(RetryPolicy::never()).decoded_by(gate.clone()));
    }
    let inbox = inbox.build().unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    let running = inbox.start().await.unwrap();
    // Each was tried more than once, and one counted failure would have poisoned it.
    within(async {
        while gate.asked.load(Ordering::SeqCst) < 3 * count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let charged = "inbox_status WHERE errors > 0 OR crashes > 0 OR state IN ('poisoned', 'done', 'discarded')";
    assert_eq!(scene.count(charged).await, 0);

    gate.is_open.store(true, Ordering::SeqCst);
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(scene.count_done_uncharged().await, i64::try_from(count).unwrap());
    assert_eq!(effects(&scene).await.len(), 30, "three of the handlers write");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_payload_is_poisoned_at_once_for_its_handlers_only() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let raw = Runs::new();
    let mut inbox = scene.inbox().subscribe("orders", raw.handler("raw"));
    for registration in all_kinds() {
        inbox = inbox.subscribe("orders", registration.decoded_by(from_payload));
    }
    let inbox = inbox.build().unwrap();
    inbox.accept_all([records(4), vec![record("bad").with_payload("secret")]].concat()).await.unwrap();
    inbox.drain().await.unwrap();
    let poisoned = "SELECT concat_ws('|', message_id, handler_key, reason, errors, last_error) FROM inbox_status \
                    WHERE state = 'poisoned' ORDER BY 1";
    let expected = ["batch", "plain", "shared", "tx", "write_all"]
        .map(|key| format!("bad|{key}|undecodable|0|it does not begin as it should"));
    assert_eq!(scene.database.query_texts(poisoned).await, expected);
    assert_eq!(scene.count_done_at_first().await, 5 * 4 + 5);
    assert_eq!(raw.count(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decoder_that_panics_while_it_waits_or_decodes_is_a_failure_of_its_handler() {
    struct Panics;
    impl Decoder<Text> for Panics {
        fn decode(&self, _: &Encoded<'_>) -> Result<Text, Undecoded> {
            panic!("while decoding")
        }
        fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
            match encoded.bytes() {
                b"at once" => panic!("at once"),
                b"waiting" => Some(async { panic!("waiting") }.boxed()),
                _ => None,
            }
        }
    }
    let scene = Scene::new().await;
    let mail = handler(key("mail"), async |_: Message<Text>| Ok::<(), Failure>(()));
    let mail = mail.retry(RetryPolicy::never()).decoded_by(Panics);
    let inbox = scene.inbox().subscribe("orders", mail).build().unwrap();
    for id in ["at once", "waiting", "while decoding"] {
        inbox.accept(record(id).with_payload(id)).await.unwrap();
    }
    inbox.drain().await.unwrap();
    let errors = "SELECT last_error FROM inbox_status WHERE reason = 'retries exhausted' ORDER BY message_id";
    let expected = ["the decoder panicked: at once", "panicked: waiting", "panicked: while decoding"];
    assert_eq!(scene.database.query_texts(errors).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_decoder_of_a_topic_is_used_by_handlers_of_its_output_type() {
    let scene = Scene::new().await;
    let (texts, raw) = (Arc::new(AtomicUsize::new(0)), Runs::new());
    let counted = Arc::clone(&texts);
    let mail = handler(key("mail"), move |_: Message<Text>| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok::<(), Failure>(()) }
    });
    let inbox = scene
        .inbox()
        .subscribe(["orders", "json"], mail)
        .subscribe("orders", raw.handler("raw"))
        .decoded_by("orders", from_payload)
        .build()
        .unwrap();
    inbox.accept(record("text")).await.unwrap();
    inbox.accept(wharf::Record::new("json").with_id("json").json("text")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.count_done_at_first().await, 3);
    assert_eq!((texts.load(Ordering::SeqCst), raw.count()), (2, 1));
}

fn refusal(inbox: wharf::Result<Inbox<Db>>) -> String {
    let error = inbox.unwrap_err();
    assert!(error.is_configuration(), "{error:?}");
    error.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decoder_with_another_output_type_or_without_users_is_refused() {
    fn number(_: &Encoded<'_>) -> Result<u32, Undecoded> {
        Ok(0)
    }
    let scene = Scene::new().await;
    let mail = || -> Registration<Db> { handler(key("mail"), async |_: Message<Text>| Ok::<(), Failure>(())) };
    let of_handler = scene.inbox().subscribe("orders", mail().decoded_by(number)).build();
    let error = refusal(of_handler);
    assert!(error.contains("the decoder of mail produces u32, but the handler takes"), "{error}");

    let of_topic = scene.inbox().subscribe("orders", mail()).decoded_by("orders", number).build();
    let error = refusal(of_topic);
    assert!(error.contains("but no decoder of the topic \"orders\" produces it"), "{error}");
    assert!(error.contains("no handler uses the decoder of \"orders\" that produces u32"), "{error}");
}
