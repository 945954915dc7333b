//! The metrics of an open breaker. A child process exports them: a metrics recorder is global.

use std::time::Duration;

use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusBuilder;
use wharf::flow::Breaker;
use wharf::{Failure, Inbox, Sqlite, Store};

use super::exported::until;
use crate::scene::{Runs, quick, record};
use support::child::{Child, Role, say};

pub const ROLE: (&str, Role) = ("with an open breaker", serve);

/// The breaker of `mail` opens during a drain, so the first sample after the start finds it open.
#[tokio::main]
async fn serve() {
    let exported = PrometheusBuilder::new().install_recorder().unwrap();
    let store = Store::<Sqlite>::in_memory().await.unwrap();
    store.migrate().await.unwrap();
    let mail = Runs::new().answering("mail", |_| Err(Failure::unavailable("the mail server is away")));
    let breaker = Breaker::new().failures(1).probe_every(Duration::from_secs(3_600));
    let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", mail.breaker(breaker));
    let inbox = inbox.subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let mut running = inbox.start().await.unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let router = Router::new().route("/metrics", get(move || std::future::ready(exported.render())));
    say(format!("listening on {}", listener.local_addr().unwrap()));
    tokio::select! {
        served = axum::serve(listener, router) => panic!("{served:?}"),
        failure = running.failure() => panic!("{failure}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_breaker_is_in_the_gauge_and_the_counter_of_its_handler_and_of_no_other() {
    let service = Child::spawn(ROLE.0, &[]);
    let said = service.await_line(|line| line.starts_with("listening on ")).await;
    let address = said.trim_start_matches("listening on ");

    let open_for = "wharf_breaker_open_seconds";
    let exported = until(address, |exported| exported.value(open_for, &["mail"]) > Some(0.0)).await;

    let count = |handler, state| exported.value("wharf_breakers_total", &[handler, state]);
    assert_eq!((count("mail", "open"), count("mail", "closed")), (Some(1.0), Some(0.0)));
    assert_eq!((count("stock", "open"), exported.value(open_for, &["stock"])), (Some(0.0), Some(0.0)));
    service.kill9().await;
}
