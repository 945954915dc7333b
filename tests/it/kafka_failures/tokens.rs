//! SASL/OAUTHBEARER with tokens from the user's function: renewed before they expire, requested again when they are
//! refused or missing, and never shown.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tokio::sync::OnceCell;
use wharf::kafka::{Kafka as Source, Token};

use super::stage::{Stage, end, range};
use crate::outbox::post;
use crate::scene::{Runs, Scene, within};
use support::events::{Event, Events};
use support::kafka::{Kafka, KafkaOptions};
use support::kafka_acls::ACL_SETTINGS;

/// How long a connection may last without a new authentication.
const SESSION: Duration = Duration::from_secs(3);

/// A broker with tokens and ACLs, for the tests of this folder and of others. It is a separate cluster.
pub async fn guarded() -> &'static Kafka {
    static GUARDED: OnceCell<Kafka> = OnceCell::const_new();
    let start = || async {
        let mut options = KafkaOptions { tokens: Some(SESSION), is_another_cluster: true, ..KafkaOptions::steady() };
        options.settings.extend(ACL_SETTINGS.map(|(name, value)| (name.to_owned(), value.to_owned())));
        Kafka::start_with(options).await
    };
    GUARDED.get_or_init(start).await
}

/// An unsigned token for this user.
pub fn token(user: &str, valid: Duration) -> Token {
    Token::new(jwt(user, valid), SystemTime::now() + valid).principal(user)
}

/// The text of this token.
pub fn jwt(user: &str, valid: Duration) -> String {
    let since_1970 = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    let (now, ends_at) = (SystemTime::now(), SystemTime::now() + valid);
    let claims = format!(r#"{{"sub":"{user}","iat":{:.3},"exp":{:.3}}}"#, since_1970(now), since_1970(ends_at));
    let encoded = |json: &str| URL_SAFE_NO_PAD.encode(json);
    format!("{}.{}.", encoded(r#"{"alg":"none"}"#), encoded(&claims))
}

/// The prefix of every token in the tests.
fn beginning() -> String {
    URL_SAFE_NO_PAD.encode(r#"{"alg":"none"}"#)
}

pub fn source(stage: &Stage) -> Source {
    Source::new(stage.kafka.token_brokers(), &stage.group)
        .set("security.protocol", "sasl_plaintext")
        .set("reconnect.backoff.max.ms", "200")
}

async fn stage() -> Stage {
    Stage::on(guarded().await.clone(), 1).await
}

/// A counter of calls, for the provider and the test.
fn counter() -> (Arc<AtomicUsize>, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    (Arc::clone(&calls), calls)
}

pub fn is_refused(stage: &Stage, of: &str) -> impl Fn(&Event) -> bool {
    let (group, of) = (stage.group.clone(), of.to_owned());
    move |event| event.message == "access refused" && event.has("group", &group) && event.has("resource", &of)
}

fn assert_no_token_is_shown(events: &Events) {
    let beginning = beginning();
    assert_eq!(events.matching(|event| format!("{event:?}").contains(&beginning)), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_read_while_tokens_expire_and_are_renewed() {
    let stage = stage().await;
    let (calls, called) = counter();
    let (runs, events) = (Runs::new(), Events::capture());
    let source = source(&stage).set("debug", "security,broker").token_from(move || {
        called.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, String>(token("admin", SESSION)) }
    });
    assert!(!format!("{source:?}").contains(&beginning()));
    let running = stage.start_from(source, &runs).await;
    let mut produced = 0;
    while calls.load(Ordering::Relaxed) < 4 {
        stage.produce(0, 10).await;
        produced += 10;
        runs.reached(produced).await;
    }
    end(running).await;
    assert_eq!(stage.positions().await, range(0, 0..i64::try_from(produced).unwrap()));
    let of_group = |event: &Event| event.message == "access refused" && event.has("group", &stage.group);
    assert_eq!(events.matching(of_group), Vec::new());
    assert_no_token_is_shown(&events);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_provider_is_reported_once_and_reading_begins_when_it_succeeds() {
    let stage = stage().await;
    stage.produce(0, 2).await;
    let (calls, called) = counter();
    let (runs, events) = (Runs::new(), Events::capture());
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let source =
        source(&stage).token_from(move || {
            called.fetch_add(1, Ordering::Relaxed);
            let is_open = opened.available_permits() > 0;
            async move {
                if is_open { Ok(token("admin", Duration::from_secs(60))) } else { Err("the token service is away") }
            }
        });
    let running = stage.start_from(source, &runs).await;
    let told = events.wait_for(is_refused(&stage, "token")).await;
    assert!(told.fields["why"].contains("the token service is away"), "{told:?}");
    within(async {
        while calls.load(Ordering::Relaxed) < 3 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(running.health().to_string().contains("the token service is away"), "{}", running.health());
    gate.add_permits(1);
    runs.reached(2).await;
    assert_eq!(events.matching(is_refused(&stage, "token")).len(), 1);
    assert!(!running.health().is_degraded(), "{}", running.health());
    end(running).await;
}

// A token that the client accepts and the broker refuses.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_token_is_reported_once_and_replaced_early() {
    let stage = stage().await;
    stage.produce(0, 2).await;
    let (runs, events) = (Runs::new(), Events::capture());
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let source = source(&stage).token_from(move || {
        let is_open = opened.available_permits() > 0;
        let wrong = Token::new(format!("{}.secret.", beginning()), SystemTime::now() + Duration::from_secs(3_600));
        async move { Ok::<_, String>(if is_open { token("admin", Duration::from_secs(60)) } else { wrong }) }
    });
    let running = stage.start_from(source, &runs).await;
    events.wait_for(is_refused(&stage, "credentials")).await;
    assert!(running.health().to_string().contains("Kafka refuses the credentials"), "{}", running.health());
    stage.scene.until("SELECT count(*) FROM inbox_ingest WHERE problem LIKE 'Kafka refuses the credentials%'").await;
    // The token was refused again since then.
    let again = |event: &Event| event.message == "kafka error" && event.has("group", &stage.group);
    events.wait_for(again).await;
    gate.add_permits(1);
    runs.reached(2).await;
    assert_eq!(events.matching(is_refused(&stage, "credentials")).len(), 1);
    let is_granted = |event: &Event| event.message == "access granted" && event.has("group", &stage.group);
    assert_eq!(events.matching(is_granted).len(), 1);
    assert!(!running.health().is_degraded(), "{}", running.health());
    end(running).await;
    assert_no_token_is_shown(&events);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_and_the_audit_authenticate_with_tokens_too() {
    let stage = stage().await;
    let provider = || async { Ok::<_, String>(token("admin", SESSION)) };
    let scene = Scene::new().await;
    scene.database.execute(&post::publish_sql(&stage.topic, "a", "one")).await;
    let relay =
        post::relay(&stage.kafka.token_brokers()).set("security.protocol", "sasl_plaintext").token_from(provider);
    let relay = relay.start(&scene.store).unwrap();
    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_outbox WHERE status = 0").await;
    post::end(relay).await;

    let runs = Runs::new();
    let running = stage.start_from(source(&stage).token_from(provider), &runs).await;
    runs.reached(1).await;
    end(running).await;
    let audit = within(source(&stage).token_from(provider).audit(&stage.scene.store)).await.unwrap();
    assert_eq!((audit.findings(), audit.partitions[0].lag()), (Vec::new(), Some(0)));
    let failing = source(&stage).token_from(|| async { Err::<Token, _>("no token today") });
    let error = within(failing.audit(&stage.scene.store)).await.unwrap_err();
    assert!(error.to_string().contains("no token today"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_with_a_refused_token_reports_it_in_its_health_and_sends_with_the_next_one() {
    let stage = stage().await;
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let provider = move || {
        let is_open = opened.available_permits() > 0;
        let wrong = Token::new("no.secret.", SystemTime::now() + Duration::from_secs(3_600));
        async move { Ok::<_, String>(if is_open { token("admin", SESSION) } else { wrong }) }
    };
    let relay =
        post::relay(&stage.kafka.token_brokers()).set("security.protocol", "sasl_plaintext").token_from(provider);
    let runs = Runs::new();
    let inbox = stage.build(stage.scene.inbox().relay(relay), &runs);
    let running = within(inbox.start()).await.unwrap();
    stage.scene.database.execute(&post::publish_sql(&stage.topic, "a", "one")).await;
    within(async {
        while !running.health().to_string().contains("Kafka refuses the credentials") {
            tokio::task::yield_now().await;
        }
    })
    .await;
    gate.add_permits(1);
    stage.scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_outbox WHERE status = 0").await;
    end(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_token_source_is_refused_at_the_start() {
    let stage = stage().await;
    let without = source(&stage).set("sasl.mechanism", "OAUTHBEARER");
    let error = within(stage.inbox(&Runs::new()).start_from(without)).await.unwrap_err();
    assert!(error.is_configuration() && error.to_string().contains("Kafka::token_from"), "{error}");
    let relay = post::relay("localhost:1").set("security.protocol", "sasl_ssl").set("sasl.mechanism", "OAUTHBEARER");
    let error = relay.start(&stage.scene.store).unwrap_err();
    assert!(error.is_configuration() && error.to_string().contains("Relay::token_from"), "{error}");
}
