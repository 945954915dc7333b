//! Layers: functions around each run of a handler. They see the delivery, and can return a result instead of the
//! handler.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use wharf::{Failure, Message, Raw, RetryPolicy, handler, tx_handler};

use super::effect::{self, Connection, effects};
use super::scene::{Runs, Scene, key, record};

/// The steps of layers and handlers, in order.
#[derive(Clone, Default)]
struct Steps(Arc<Mutex<Vec<String>>>);

impl Steps {
    fn add(&self, step: impl Into<String>) {
        self.0.lock().unwrap().push(step.into());
    }

    fn taken(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_of_the_inbox_wrap_those_of_the_handler_and_the_last_one_is_outermost() {
    let scene = Scene::new().await;
    let steps = Steps::default();
    let layer = |name: &'static str| {
        let steps = steps.clone();
        move |attempt: wharf::layer::Attempt<'_>| steps.add(format!("{name} {} {}", attempt.message_id(), attempt.number()))
    };
    let (first, second, outer) = (layer("first"), layer("second"), layer("outer"));
    let run = steps.clone();
    let handled = handler(key("stock"), move |_: Message<Raw>| {
        run.add("run");
        async { Ok::<(), Failure>(()) }
    });
    let handled = handled
        .layer(move |attempt, next| {
            first(attempt);
            next.run()
        })
        .layer(move |attempt, next| {
            second(attempt);
            next.run()
        });
    let inbox = scene.inbox().subscribe("orders", handled).layer(move |attempt, next| {
        outer(attempt);
        next.run()
    });
    let inbox = inbox.build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    assert_eq!(steps.taken(), ["outer a 1", "second a 1", "first a 1", "run"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_can_return_a_result_without_the_handler() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let refused = runs.handler("refused").retry(RetryPolicy::never());
    let refused = refused.layer(|_, _| Box::pin(async { Err(Failure::retry("the door is shut")) }));
    let skipped = runs.handler("skipped").layer(|_, _| Box::pin(async { Ok(()) }));
    let inbox = scene.inbox().subscribe("orders", refused).subscribe("orders", skipped).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.states().await, ["a refused poisoned", "a skipped done"]);
    assert!(runs.ids().is_empty());
    let error = "SELECT last_error FROM inbox_status WHERE handler_key = 'refused'";
    assert_eq!(scene.database.query_texts(error).await, ["the door is shut"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_around_a_transactional_handler_can_roll_back_its_writes() {
    async fn write_effect(message: Message<Raw>, conn: &mut Connection) -> Result<(), diesel::result::Error> {
        effect::write(conn, message.id()).await
    }
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let stock = tx_handler(key("stock"), write_effect).retry(RetryPolicy::exponential().delay_by(|_, _| Some(Duration::ZERO)));
    let stock = stock.layer(|attempt, next| {
        Box::pin(async move {
            next.run().await?;
            if attempt.number() == 1 { Err(Failure::retry("not yet")) } else { Ok(()) }
        })
    });
    let inbox = scene.inbox().subscribe("orders", stock).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 2);
    assert_eq!(scene.states().await, ["a stock done"]);
    assert_eq!(effects(&scene).await, ["a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_panics_is_a_failed_attempt() {
    let scene = Scene::new().await;
    let broken = Runs::new().handler("stock").retry(RetryPolicy::never()).layer(|_, _| panic!("in a layer"));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let error = "SELECT last_error FROM inbox_status";
    assert_eq!(scene.database.query_texts(error).await, ["panicked: in a layer"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn log_lines_of_a_handler_have_message_handler_and_attempt() {
    let scene = Scene::new().await;
    let events = support::events::Events::capture();
    let logging = handler(key("stock"), |message: Message<Raw>| async move {
        tracing::info!(target: "wharf::test", logged = message.id(), "handled");
        Ok::<(), Failure>(())
    });
    let inbox = scene.inbox().subscribe("orders", logging).build().unwrap();
    // The module path distinguishes the stores.
    let id = module_path!().to_owned();
    inbox.accept(record(&id)).await.unwrap();
    inbox.drain().await.unwrap();
    let logged = events.wait_for(|event| event.message == "handled" && event.has("logged", &id)).await;
    let in_span = ["message_id", "handler", "attempt"].map(|field| logged.field(field).unwrap_or("none").to_owned());
    assert_eq!(in_span, [id.as_str(), "stock", "1"]);
}
