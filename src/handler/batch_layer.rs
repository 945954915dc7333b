//! Layers around calls of batch handlers: one run of the layer for each message, all of them around one call.
//!
//! The layers of a call run concurrently, each with its own message. `Next::run` waits until every other layer has
//! called it or has answered. Then the handler is called once, with the messages whose layers called `Next::run`, and
//! each of these layers gets the answer for its message.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{mpsc, oneshot};

use super::answers::Answered;
use super::batch::{ErasedBatchHandler, ErasedTxBatchHandler, Handed};
use super::failure::Failure;
use super::key::HandlerKey;
use super::layer::{Attempt, LayerFn, Layered, Next};

impl ErasedBatchHandler for Layered<dyn ErasedBatchHandler> {
    fn run(&self, batch: Vec<Handed>) -> BoxFuture<'_, Answered> {
        async move { around(&self.layer, &self.key, &batch, |batch| self.inner.run(batch)).await }.boxed()
    }
}

impl<C: Send + 'static> ErasedTxBatchHandler<C> for Layered<dyn ErasedTxBatchHandler<C>> {
    fn run<'c>(&'c self, batch: Vec<Handed>, conn: &'c mut C) -> BoxFuture<'c, Answered> {
        async move { around(&self.layer, &self.key, &batch, |batch| self.inner.run(batch, conn)).await }.boxed()
    }
}

/// A layer that has called `Next::run` and waits for the answer to the message at this place of the batch.
struct Arrival {
    place: usize,
    answer: oneshot::Sender<Result<(), Failure>>,
}

/// Calls the handler with a layer around it for each message. Layers are polled while the handler runs, because a layer
/// may do work of its own beside it.
async fn around<F: Future<Output = Answered>>(
    layer: &Arc<LayerFn>,
    key: &HandlerKey,
    batch: &[Handed],
    call: impl FnOnce(Vec<Handed>) -> F,
) -> Answered {
    // The channel is not bounded, but each layer sends at most once. `arrive` lives until the end, so `recv` never
    // returns `None`.
    let (arrive, mut arrivals) = mpsc::unbounded_channel();
    let mut layers = FuturesUnordered::new();
    for (place, handed) in batch.iter().enumerate() {
        let next = Next::new(arriving(place, arrive.clone()).boxed());
        let run = layer(Attempt::new(key, handed.claim.attempt, &handed.message), next);
        layers.push(run.map(move |answer| (place, answer)));
    }
    let mut ended: Vec<Option<Result<(), Failure>>> = batch.iter().map(|_| None).collect();
    let mut arrived: Vec<Option<Arrival>> = batch.iter().map(|_| None).collect();
    // The number of layers that have neither called `Next::run` nor answered.
    let mut open = batch.len();
    while open > 0 {
        let place = tokio::select! {
            Some((place, answer)) = layers.next() => {
                ended[place] = Some(answer);
                place
            }
            Some(arrival) = arrivals.recv() => {
                let place = arrival.place;
                arrived[place] = Some(arrival);
                place
            }
        };
        // A layer that has done both is counted once.
        open -= usize::from(ended[place].is_none() || arrived[place].is_none());
    }
    // A layer that has called `Next::run` and then answered without it does not wait any more.
    let arrived: Vec<Arrival> = arrived.into_iter().flatten().filter(|arrival| !arrival.answer.is_closed()).collect();
    let asked_for: Vec<Handed> = arrived.iter().map(|arrival| batch[arrival.place].clone()).collect();
    let answered = match asked_for.is_empty() {
        true => Answered::Each(Vec::new()),
        false => {
            let mut call = pin!(call(asked_for));
            loop {
                tokio::select! {
                    biased;
                    answered = &mut call => break answered,
                    Some((place, answer)) = layers.next() => ended[place] = Some(answer),
                }
            }
        }
    };
    let (answers, whole) = match answered {
        Answered::Each(answers) => (answers, None),
        Answered::Whole(failure) => (arrived.iter().map(|_| Err(failure.clone())).collect(), Some(failure)),
    };
    for (arrival, answer) in arrived.into_iter().zip(answers) {
        // The send fails for a layer that has answered without waiting.
        drop(arrival.answer.send(answer));
    }
    while let Some((place, answer)) = layers.next().await {
        ended[place] = Some(answer);
    }
    match whole {
        Some(failure) => Answered::Whole(failure),
        None => Answered::Each(ended.into_iter().map(|answer| answer.unwrap_or_else(|| Err(unanswered()))).collect()),
    }
}

/// The future behind `Next::run` of one message.
async fn arriving(place: usize, arrive: mpsc::UnboundedSender<Arrival>) -> Result<(), Failure> {
    let (answer, answered) = oneshot::channel();
    drop(arrive.send(Arrival { place, answer }));
    answered.await.unwrap_or_else(|_| Err(unanswered()))
}

/// For a layer that got no answer because the call was dropped.
fn unanswered() -> Failure {
    Failure::retry("the call was dropped before it was answered")
}
