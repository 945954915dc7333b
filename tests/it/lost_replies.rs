//! The reply to an accept statement is lost, or the statement itself: it is sent again, the record is stored once,
//! every handler runs once, and nothing waits for an expired claim.

use std::time::Duration;

use wharf::{Failure, Inbox, Postgres, Receipt};

use crate::scene::{Runs, Scene, quick, record, records};
use support::proxy::{Fault, Proxy};

struct Stage {
    scene: Scene,
    proxy: Proxy,
    stock: Runs,
    mail: Runs,
    inbox: Inbox<Postgres>,
}

impl Stage {
    /// An inbox that reaches the database through a proxy, with slots for some deliveries of a batch but not for all.
    /// The lease is longer than a test, so a delivery that waits for an expired claim fails the test.
    async fn set() -> Self {
        let scene = Scene::new().await;
        let (proxy, store) = scene.store_behind_a_proxy().await;
        let (stock, mail) = (Runs::new(), Runs::new());
        let limits = quick().lease(Duration::from_secs(600));
        let inbox = Inbox::builder(store)
            .limits(limits)
            .subscribe("orders", stock.handler("stock").concurrency(100))
            .subscribe("orders", mail.handler("mail").concurrency(3))
            .build()
            .unwrap();
        Self { scene, proxy, stock, mail, inbox }
    }

    /// Each handler has run each message once, and no crash is counted.
    async fn assert_handled_once(&self, messages: usize) {
        self.scene.settled().await;
        assert_eq!((self.stock.count(), self.mail.count()), (messages, messages));
        let messages = i64::try_from(messages).unwrap();
        assert_eq!(self.scene.count("inbox_message").await, messages);
        assert_eq!(self.scene.count_done_uncharged().await, 2 * messages);
        assert_eq!(self.scene.count("inbox_delivery").await, 2 * messages);
    }
}

fn is_stored(receipt: &Receipt) -> bool {
    matches!(receipt, Receipt::Accepted { deliveries: 2 } | Receipt::Duplicate { added: 0 })
}

#[tokio::test(flavor = "multi_thread")]
async fn an_accept_whose_reply_or_request_is_lost_is_stored_once_and_handled_at_once() {
    for fault in [Fault::LoseReply, Fault::LoseRequest] {
        let stage = Stage::set().await;
        let running = stage.inbox.start().await.unwrap();
        stage.inbox.accept(record("first")).await.unwrap();
        let lost = stage.proxy.on_next_statement("INSERT INTO inbox_message", fault);

        let receipts = stage.inbox.accept_all(records(10)).await.unwrap();

        lost.fired().await;
        assert!(receipts.iter().all(is_stored), "{receipts:?}");
        stage.assert_handled_once(11).await;
        assert_eq!(stage.scene.count("inbox_quarantine").await, 0);
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repeatedly_lost_replies_under_load_change_nothing() {
    let stage = Stage::set().await;
    let running = stage.inbox.start().await.unwrap();
    for round in 0..15 {
        let fault = if round % 3 == 2 { Fault::LoseRequest } else { Fault::LoseReply };
        let lost = stage.proxy.on_next_statement("INSERT INTO inbox_message", fault);

        // Two callers: one batch may be handed over while the other is in doubt.
        let batch = |half: &str| (0..10).map(|number| record(&format!("{round} {half} {number}"))).collect::<Vec<_>>();
        let (left, right) = tokio::join!(stage.inbox.accept_all(batch("left")), stage.inbox.accept_all(batch("right")));

        assert!(left.unwrap().iter().chain(&right.unwrap()).all(is_stored));
        lost.fired().await;
    }
    stage.assert_handled_once(300).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_lost_with_quarantined_records_in_the_batch_keeps_each_once() {
    for fault in [Fault::LoseReply, Fault::LoseRequest] {
        let stage = Stage::set().await;
        let running = stage.inbox.start().await.unwrap();
        stage.inbox.accept(record("first")).await.unwrap();
        let lost = stage.proxy.on_next_commit(fault);

        let batch = [record("a"), record(""), record("first").with_payload("forged"), record("b")];
        let receipts = stage.inbox.accept_or_quarantine(batch).await.unwrap();

        lost.fired().await;
        assert!(is_stored(&receipts[0]) && is_stored(&receipts[3]), "{receipts:?}");
        assert_eq!(receipts[1], Receipt::Quarantined { reason: "empty identity" });
        assert_eq!(receipts[2], Receipt::Quarantined { reason: "conflict" });
        stage.assert_handled_once(3).await;
        assert_eq!(stage.scene.count("inbox_quarantine").await, 2);
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

// The first statement has committed the deliveries that were handed over; the second is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_second_statement_for_known_records_affects_neither_old_nor_new_records() {
    for (fault, statement) in [
        (Fault::LoseReply, "FOR NO KEY UPDATE) f"),
        (Fault::LoseRequest, "FOR NO KEY UPDATE) f"),
        (Fault::LoseReply, "taken AS MATERIALIZED"),
        (Fault::LoseRequest, "taken AS MATERIALIZED"),
    ] {
        let stage = Stage::set().await;
        let running = stage.inbox.start().await.unwrap();
        stage.inbox.accept(record("first")).await.unwrap();
        let lost = stage.proxy.on_next_statement(statement, fault);

        let receipts = stage.inbox.accept_all([record("first"), record("new")]).await.unwrap();

        lost.fired().await;
        assert_eq!(receipts[0], Receipt::Duplicate { added: 0 });
        assert!(is_stored(&receipts[1]));
        stage.assert_handled_once(2).await;
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_that_only_accepts_recovers_from_lost_replies() {
    let stage = Stage::set().await;
    stage.inbox.accept(record("first")).await.unwrap();
    for (number, fault) in [Fault::LoseReply, Fault::LoseRequest].into_iter().enumerate() {
        let lost = stage.proxy.on_next_statement("INSERT INTO inbox_message", fault);
        assert!(is_stored(&stage.inbox.accept(record(&number.to_string())).await.unwrap()));
        lost.fired().await;
    }

    assert_eq!(stage.inbox.drain().await.unwrap(), 6);
    stage.assert_handled_once(3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_whose_settlement_is_sent_again_is_stored_once_and_consumes_one_retry() {
    for fault in [Fault::LoseReply, Fault::LoseRequest] {
        let scene = Scene::new().await;
        let (proxy, store) = scene.store_behind_a_proxy().await;
        let failing = Runs::new().answering("stock", |_| Err(Failure::retry_after(Duration::from_secs(3_600), "no")));
        let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", failing).build().unwrap();
        let lost = proxy.on_next_statement("INSERT INTO inbox_attempt", fault);
        let running = inbox.start().await.unwrap();
        inbox.accept(record("a")).await.unwrap();
        lost.fired().await;
        scene.until("SELECT count(*) FROM inbox_status WHERE state = 'pending' AND errors = 1 AND attempts = 1").await;
        // Everything that must be sent again has been sent when this returns.
        running.shutdown(Duration::from_secs(5)).await.unwrap();
        assert_eq!(scene.count("inbox_status WHERE state = 'pending' AND errors = 1 AND attempts = 1").await, 1);
        assert_eq!(scene.count("inbox_attempt WHERE attempt = 1 AND why = 'failed'").await, 1);
    }
}
