//! Batch handlers that record their calls.

use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use wharf::batch::{Answers, batch_handler};
use wharf::{Failure, Message, Raw, Registration, RetryPolicy};

use super::scene::{Db, key, within};

/// The calls of a batch handler: the ids in each call. Clones share the list.
#[derive(Clone, Default)]
pub struct Calls {
    pub list: Arc<Mutex<Vec<Vec<String>>>>,
    count: watch::Sender<usize>,
}

impl Calls {
    pub fn note<P>(&self, messages: &[Message<P>]) {
        self.list.lock().unwrap().push(messages.iter().map(|message| message.id().to_owned()).collect());
        self.count.send_modify(|count| *count += 1);
    }

    /// The sizes of the calls, in order.
    pub fn sizes(&self) -> Vec<usize> {
        self.list.lock().unwrap().iter().map(Vec::len).collect()
    }

    /// All ids in the calls, sorted; an id of two calls is listed twice.
    pub fn ids(&self) -> Vec<String> {
        let mut ids: Vec<String> = self.list.lock().unwrap().iter().flatten().cloned().collect();
        ids.sort();
        ids
    }

    pub async fn reached(&self, count: usize) {
        within(self.count.subscribe().wait_for(|current| *current >= count)).await.unwrap();
    }

    /// A handler that records its calls and returns the result of `answer`.
    pub fn answering<A: Into<Answers> + Send + 'static>(
        &self,
        answer: impl Fn(&[Message<Raw>]) -> A + Clone + Send + Sync + 'static,
    ) -> Registration<Db> {
        let calls = self.clone();
        let handler = move |messages: Vec<Message<Raw>>| {
            calls.note(&messages);
            let answer = answer.clone();
            async move { answer(&messages) }
        };
        batch_handler(key("stock"), handler).retry(RetryPolicy::never())
    }

    /// A handler that records its calls and succeeds.
    pub fn handler(&self) -> Registration<Db> {
        self.answering(|_| Ok::<(), Failure>(()))
    }

    /// A handler that records its calls and succeeds when the gate opens.
    pub fn gated(&self, gate: &watch::Sender<bool>) -> Registration<Db> {
        self.gated_answering(gate, || Ok(()))
    }

    /// A handler that records its calls and returns this answer when the gate opens.
    pub fn gated_answering(
        &self,
        gate: &watch::Sender<bool>,
        answer: impl Fn() -> Result<(), Failure> + Clone + Send + Sync + 'static,
    ) -> Registration<Db> {
        let (calls, gate) = (self.clone(), gate.clone());
        let handler = move |messages: Vec<Message<Raw>>| {
            calls.note(&messages);
            let (mut opened, answer) = (gate.subscribe(), answer.clone());
            async move {
                // The sender lives in the handler, so this cannot fail.
                let _ = opened.wait_for(|is_open| *is_open).await;
                answer()
            }
        };
        batch_handler(key("stock"), handler)
    }
}
