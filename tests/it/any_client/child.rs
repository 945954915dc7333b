//! The child process that is killed: an inbox whose handler settles its own deliveries with tokio-postgres.

use std::time::Duration;

use wharf::{Failure, Inbox, Limits, Message, Postgres, Raw, Record, Store, handler};

use crate::effect;
use crate::scene::{Scene, key, quick};
use support::child::{Child, Role, parameter, say};

pub const ROLE: (&str, Role) = ("settler", work);

const URL: &str = "SETTLER_URL";

/// The settings of the child.
pub struct Settler {
    url: String,
}

impl Settler {
    pub async fn on(scene: &Scene) -> Settler {
        effect::prepare(scene).await;
        Settler { url: scene.database.url() }
    }

    pub fn spawn(&self) -> Child {
        Child::spawn(ROLE.0, &[(URL, &self.url)])
    }

    /// Accepts for the child's handler without running anything.
    pub async fn accept(&self, scene: &Scene, records: Vec<Record>) {
        let idle = handler(key("stock"), async |_: Message<Raw>| Ok::<(), Failure>(()));
        scene.inbox().subscribe("orders", idle).build().unwrap().accept_all(records).await.unwrap();
    }
}

/// The limits of the child: its claims expire soon, and kills must not poison deliveries.
fn limits() -> Limits {
    quick().lease(Duration::from_secs(1)).crash_limit(100)
}

fn work() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = Store::<Postgres>::connect(&parameter(URL)).await.unwrap();
        let settling = handler(key("stock"), async |message: Message<Raw>| {
            super::settle(&parameter(URL), &message).await?;
            say(format!("committed {}", message.id()));
            if &*message.payload == b"hang" {
                std::future::pending::<()>().await;
            }
            Ok::<(), Failure>(())
        });
        let settling = settling.concurrency(4).settles_itself();
        let inbox = Inbox::builder(store).limits(limits()).subscribe("orders", settling).build().unwrap();
        let _running = inbox.start().await.unwrap();
        say("at work");
        std::future::pending::<()>().await;
    });
}
