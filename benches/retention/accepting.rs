//! Accepts records one by one at a fixed rate, however long each takes, and measures each from its scheduled start.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use wharf::{Failure, HandlerKey, Inbox, Message, Postgres, Raw, Record, Store, handler};

/// Starts an accept at each tick. A slow accept does not delay the next one, so a stall is measured in full.
pub struct Accepting {
    inbox: Inbox<Postgres>,
    interval: Duration,
    number: AtomicUsize,
}

impl Accepting {
    pub async fn start(url: &str, rate: usize) -> Self {
        let store = Store::<Postgres>::connect(url).await.unwrap();
        let no_op = handler(HandlerKey::new("bench"), async |_: Message<Raw>| Ok::<(), Failure>(()));
        let inbox = Inbox::builder(store).subscribe("bench", no_op).build().unwrap();
        inbox.accept_all([]).await.unwrap();
        Self { inbox, interval: Duration::from_secs(1) / u32::try_from(rate).unwrap(), number: AtomicUsize::new(0) }
    }

    /// Accepts while `work` runs.
    pub async fn during<T>(&self, work: impl Future<Output = T>) -> (T, Latencies) {
        let mut work = std::pin::pin!(work);
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut accepts = JoinSet::new();
        let mut latencies = Latencies::default();
        let worked = loop {
            tokio::select! {
                worked = &mut work => break worked,
                due_at = ticks.tick() => drop(accepts.spawn(self.accept(due_at))),
                Some(took) = accepts.join_next() => latencies.0.push(took.unwrap()),
            }
        };
        while let Some(took) = accepts.join_next().await {
            latencies.0.push(took.unwrap());
        }
        (worked, latencies)
    }

    fn accept(&self, due_at: Instant) -> impl Future<Output = Duration> + use<> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let record = Record::new("bench").with_id(format!("new-{number}")).with_payload(vec![b'x'; 512]);
        let inbox = self.inbox.clone();
        async move {
            inbox.accept(record).await.unwrap();
            due_at.elapsed()
        }
    }
}

#[derive(Debug, Default)]
pub struct Latencies(Vec<Duration>);

impl Latencies {
    pub fn extend(&mut self, more: Latencies) {
        self.0.extend(more.0);
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The latency at this quantile, in seconds.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = ((sorted.len() as f64 * share) as usize).min(sorted.len() - 1);
        sorted[at].as_secs_f64()
    }
}
