//! A typical incident: a bad deploy has poisoned ten thousand deliveries, a producer sends records that cannot be
//! accepted, a handler is paused, an instance has crashed. It is found and resolved with an operator's tools alone.

mod cli;
mod dashboard;
mod psql;

use std::time::Duration;

use wharf::{Failure, Identity, Inbox, Postgres, Record, Registration};

use crate::scene::{Runs, Scene, records};
use crate::worker::{Worker, accept, order};
use support::child::Child;

/// Deliveries that the bad deploy poisoned.
pub const POISONED: usize = 10_000;
/// Records that the next build can accept, and records that no build can accept.
pub const MENDABLE: usize = 5;
pub const JUNK: usize = 2;

pub struct Incident {
    pub scene: Scene,
    /// Runs of the repaired build.
    pub runs: Runs,
    _dead: Child,
}

impl Incident {
    pub async fn happens() -> Self {
        let scene = Scene::new().await;
        let runs = Runs::new();
        let broken = Runs::new().answering("stock", |message| {
            Err(Failure::poison(format!("no column named price_eur in order {}", message.id())))
        });
        let bad = build(&scene, broken, &Runs::new(), Identity::cloud_events());
        // The handler `mail` was paused and forgotten.
        bad.accept_all([]).await.unwrap();
        scene.store.operate().acting_as("bob").because("too many mails").pause("mail").await.unwrap();
        bad.accept_all(records(POISONED)).await.unwrap();
        bad.accept_or_quarantine(
            (0..MENDABLE).map(|number| Record::new("orders").with_header("id", format!("late-{number}"))),
        )
        .await
        .unwrap();
        bad.accept_or_quarantine((0..JUNK).map(|number| Record::new("orders").with_payload(format!("junk {number}"))))
            .await
            .unwrap();
        bad.drain().await.unwrap();
        // An instance crashes with two claimed deliveries. Their lease is long enough to be found and short enough to
        // wait for.
        let worker = Worker { lease: Duration::from_secs(25), ..Worker::on(&scene).await };
        accept(&scene, &["stock"], vec![order("held", "hang once")]).await;
        let dead = worker.spawn();
        dead.await_said("hanging").await;
        dead.kill9().await;
        // Its last heartbeat was a while ago.
        let silent = "UPDATE inbox_processor SET alive_until = now()";
        scene.database.execute(silent).await;
        Self { scene, runs, _dead: dead }
    }

    /// The build from before the bad deploy. It also knows where that producer's records have their identity.
    pub fn rolled_back(&self) -> Inbox<Postgres> {
        build(&self.scene, self.runs.handler("stock"), &self.runs, Identity::header("id"))
    }

    pub async fn is_over(&self) {
        self.scene.settled().await;
        let expected = POISONED + MENDABLE + 1;
        assert_eq!(
            self.scene.count("inbox_status WHERE state = 'done' AND handler_key = 'stock'").await,
            expected as i64
        );
        assert_eq!(self.scene.count("inbox_status WHERE state <> 'done'").await, 0);
        assert_eq!(self.scene.count("inbox_quarantine").await, 0);
        assert_eq!(self.scene.count("inbox_audit WHERE because IS NULL").await, 0, "every act says why");
    }
}

fn build(scene: &Scene, stock: Registration<Postgres>, runs: &Runs, identity: Identity) -> Inbox<Postgres> {
    let inbox = scene.inbox().subscribe("orders", stock).subscribe("orders", runs.handler("mail"));
    inbox.identity("orders", identity).build().unwrap()
}
