//! SASL/OAUTHBEARER with librdkafka's own OIDC client (feature `oidc`), which gets its tokens from an endpoint over
//! HTTP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use tokio::net::TcpListener;
use wharf::kafka::Kafka as Source;

use super::stage::{Stage, end, range};
use super::tokens::{guarded, is_refused, jwt, source};
use crate::scene::{Runs, within};
use support::events::Events;

/// `shop:hunter2`
const CREDENTIALS: &str = "Basic c2hvcDpodW50ZXIy";

/// An endpoint that returns tokens for the credentials.
#[derive(Clone, Default)]
struct Endpoint {
    is_away: Arc<AtomicBool>,
    given: Arc<AtomicUsize>,
}

impl Endpoint {
    async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/token", listener.local_addr().unwrap());
        let router = Router::new().route("/token", post(give)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    }
}

/// librdkafka accepts a response only if its type is JSON.
type Response = (StatusCode, [(header::HeaderName, &'static str); 1], String);

async fn give(State(endpoint): State<Endpoint>, headers: HeaderMap) -> Response {
    let respond = |status, body| (status, [(header::CONTENT_TYPE, "application/json")], body);
    let is_known = headers.get("authorization").is_some_and(|value| value == CREDENTIALS);
    if endpoint.is_away.load(Ordering::Relaxed) || !is_known {
        return respond(StatusCode::SERVICE_UNAVAILABLE, r#"{"error": "away"}"#.to_owned());
    }
    endpoint.given.fetch_add(1, Ordering::Relaxed);
    let token = jwt("admin", Duration::from_secs(5));
    respond(StatusCode::OK, format!(r#"{{"access_token": "{token}", "token_type": "Bearer", "expires_in": 5}}"#))
}

fn with_oidc(source: Source, url: &str) -> Source {
    source
        .set("sasl.mechanism", "OAUTHBEARER")
        .set("sasl.oauthbearer.method", "oidc")
        .set("sasl.oauthbearer.client.id", "shop")
        .set("sasl.oauthbearer.client.secret", "hunter2")
        .set("sasl.oauthbearer.token.endpoint.url", url)
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_read_with_tokens_that_librdkafka_fetches_and_renews() {
    let (stage, endpoint) = (Stage::on(guarded().await.clone(), 1).await, Endpoint::default());
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(with_oidc(source(&stage), &endpoint.serve().await), &runs).await;
    let mut produced = 0;
    while endpoint.given.load(Ordering::Relaxed) < 3 {
        stage.produce(0, 10).await;
        produced += 10;
        runs.reached(produced).await;
    }
    end(running).await;
    assert_eq!(stage.positions().await, range(0, 0..i64::try_from(produced).unwrap()));
    assert_eq!(events.matching(is_refused(&stage, "credentials")), Vec::new());
    assert_eq!(events.matching(|event| format!("{event:?}").contains("hunter2")), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_token_endpoint_is_reported_once_and_reading_begins_when_it_answers() {
    let (stage, endpoint) = (Stage::on(guarded().await.clone(), 1).await, Endpoint::default());
    stage.produce(0, 2).await;
    endpoint.is_away.store(true, Ordering::Relaxed);
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(with_oidc(source(&stage), &endpoint.serve().await), &runs).await;
    let told = events.wait_for(is_refused(&stage, "credentials")).await;
    assert!(told.fields["why"].starts_with("there is no token to authenticate with: "), "{told:?}");
    assert!(running.health().to_string().contains("there is no token"), "{}", running.health());
    endpoint.is_away.store(false, Ordering::Relaxed);
    runs.reached(2).await;
    assert_eq!(events.matching(is_refused(&stage, "credentials")).len(), 1);
    assert!(!running.health().is_degraded(), "{}", running.health());
    end(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incomplete_configuration_is_refused_at_the_start_without_the_secret() {
    let stage = Stage::on(guarded().await.clone(), 1).await;
    let incomplete = source(&stage)
        .set("sasl.mechanism", "OAUTHBEARER")
        .set("sasl.oauthbearer.method", "oidc")
        .set("sasl.oauthbearer.client.secret", "hunter2");
    let error = within(stage.inbox(&Runs::new()).start_from(incomplete)).await.unwrap_err();
    assert!(error.is_configuration() && !format!("{error:#} {error:?}").contains("hunter2"), "{error:#}");
    assert!(format!("{error:#}").contains("sasl.oauthbearer.token.endpoint.url"), "{error:#}");
}
