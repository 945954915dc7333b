//! The hook of a service for poisoned deliveries: it is called at least once for each, even if a process crashes in
//! between.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use wharf::poison::Poisoned;
use wharf::{Failure, Inbox};

use super::scene::{Db, Runs, Scene, record, within};

/// The calls of the hook, and how many of them must fail first.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<Poisoned>>>, usize);

impl Told {
    fn inbox(&self, scene: &Scene) -> Inbox<Db> {
        let told = self.clone();
        let hook = move |poisoned: Poisoned| {
            let told = told.clone();
            async move {
                let mut list = told.0.lock().unwrap();
                list.push(poisoned);
                if list.len() <= told.1 { Err(Failure::retry("the pager is away")) } else { Ok(()) }
            }
        };
        scene.inbox().subscribe("orders", Runs::new().obeying("stock")).on_poison(hook).build().unwrap()
    }

    fn all(&self) -> Vec<Poisoned> {
        self.0.lock().unwrap().clone()
    }
}

async fn all_called(scene: &Scene) {
    within(async {
        while scene.count("inbox_poison_call").await > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hook_is_called_for_each_poisoned_delivery_and_for_no_other() {
    let scene = Scene::new().await;
    let told = Told::default();
    let inbox = told.inbox(&scene);
    let running = inbox.start().await.unwrap();
    inbox.accept_all(["done", "poison", "discard"].map(record)).await.unwrap();
    scene.settled().await;
    all_called(&scene).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let [poisoned] = &told.all()[..] else { panic!("{:?}", told.all()) };
    assert_eq!((poisoned.message_id.as_deref(), poisoned.handler_key.as_str()), (Some("poison"), "stock"));
    assert_eq!((poisoned.reason.as_str(), poisoned.error.as_deref()), ("permanent", Some("hopeless")));
    assert_eq!((poisoned.attempts, poisoned.call), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_call_is_repeated() {
    let scene = Scene::new().await;
    let told = Told(Arc::default(), 1);
    let inbox = told.inbox(&scene);
    let running = inbox.start().await.unwrap();
    inbox.accept(record("poison")).await.unwrap();
    scene.settled().await;
    all_called(&scene).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(told.all().iter().map(|poisoned| poisoned.call).collect::<Vec<_>>(), [1, 2]);
}

// A drain runs due deliveries and makes no calls, as if the process had crashed right after it poisoned the delivery.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_a_process_missed_is_made_by_the_next_one() {
    let scene = Scene::new().await;
    let told = Told::default();
    let first = told.inbox(&scene);
    first.accept(record("poison")).await.unwrap();
    first.drain().await.unwrap();
    assert!(told.all().is_empty());
    assert_eq!(scene.count("inbox_poison_call").await, 1);

    let next = Told::default();
    let running = next.inbox(&scene).start().await.unwrap();
    all_called(&scene).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(next.all().len(), 1);
}
