//! Starts partitions: requests their positions and seeks the consumer to them. Also keeps the consumer's token valid,
//! because without a token it cannot connect.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer;
use rdkafka::error::KafkaResult;

use super::super::assigned::TopicPartition;
use super::super::find::{Located, find};
use super::super::native;
use super::super::position::{At, Start};
use super::super::rebalance::offsets;
use super::super::token;
use super::Work;
use crate::store::Backend;
use crate::telemetry::events;

/// The timeout of a seek. It takes only a moment, because no broker is asked.
const SEEK_WAIT: Duration = Duration::from_secs(1);

impl<B: Backend> Work<B> {
    /// Keeps a valid token in the consumer, if it authenticates with tokens. The consumer connects when it has the
    /// first one.
    pub(super) fn keep_token(&mut self) {
        if let Some(tokens) = self.tokens.clone() {
            let is_refused = Arc::clone(&self.consumer.context().access.needs_token);
            let keeping = token::keep(tokens, Arc::downgrade(&self.consumer), is_refused);
            self.tasks.spawn_on(keeping, self.intake.store.backend.reactor());
        }
    }

    /// Requests unknown positions, and applies those that were found. Positions for an assignment that has ended are
    /// ignored.
    pub(super) fn position_partitions(&mut self) {
        let context = self.consumer.context();
        let mut starts = Vec::new();
        for Located { asked, start } in context.take_found() {
            if !context.assigned().is_current(&asked) {
                continue;
            }
            context.assigned().learn(&asked);
            let (topic, partition) = &asked.place;
            match start {
                None => context.assigned().ask_again(&asked.place, Instant::now()),
                Some(Start::At(at)) => starts.push((asked.place, at)),
                Some(Start::AfterGap { from, to }) => {
                    events::kafka::gap(self.source(), topic, *partition, from, to);
                    starts.push((asked.place, At { offset: to, epoch: None }));
                }
                Some(Start::Nowhere(stop)) => self.stop(&asked.place, stop.ledger().offset, &stop.to_string()),
                Some(Start::Stopped { ledger, why }) => self.stop(&asked.place, ledger, &why),
            }
        }
        self.begin(&starts);
        let asked = context.assigned().ask(Instant::now());
        if !asked.is_empty() {
            let (intake, context) = (Arc::clone(&self.intake), Arc::clone(context));
            let finding = find(intake, Arc::downgrade(&self.consumer), context, asked, self.tell.clone());
            self.tasks.spawn_on(finding, self.intake.store.backend.reactor());
        }
    }

    /// Seeks partitions to their positions; positions that could not be set are requested again.
    fn begin(&self, starts: &[(TopicPartition, At)]) {
        let context = self.consumer.context();
        for (place, is_set) in self.seek(starts) {
            match is_set {
                Ok(at) => {
                    events::kafka::partition_begun(self.source(), &place.0, place.1, at.offset);
                    context.statistics.forget(&place);
                    context.assigned().begin(&place, at);
                }
                Err(error) => {
                    self.consumer.context().report_error("set the position of a partition", &error);
                    context.assigned().ask_again(&place, Instant::now());
                }
            }
        }
    }

    /// Stops a partition until an operator acts. The event is not repeated while the partition stays assigned and
    /// stopped for the same reason.
    fn stop(&self, place: &TopicPartition, ledger: i64, why: &str) {
        if self.consumer.context().assigned().stop(place, why, Instant::now()) {
            events::kafka::partition_stopped(self.source(), &place.0, place.1, ledger, why);
        }
    }

    /// Seeks to all positions in one call, with their leader epochs: the broker compares them with its log, which
    /// reveals a truncation. Returns the result for each partition.
    pub(super) fn seek(&self, starts: &[(TopicPartition, At)]) -> Vec<(TopicPartition, KafkaResult<At>)> {
        let Some(list) = positions(starts) else { return Vec::new() };
        match self.consumer.seek_partitions(list, SEEK_WAIT) {
            Err(error) => starts.iter().map(|(place, _)| (place.clone(), Err(error.clone()))).collect(),
            Ok(list) => {
                let elements = list.elements();
                let set = starts.iter().zip(elements.iter());
                set.map(|((place, at), element)| (place.clone(), element.error().map(|()| *at))).collect()
            }
        }
    }
}

/// The positions as a list for librdkafka, with their epochs; `None` when there are none.
pub(super) fn positions(starts: &[(TopicPartition, At)]) -> Option<TopicPartitionList> {
    let at: Vec<(TopicPartition, i64)> = starts.iter().map(|(place, at)| (place.clone(), at.offset)).collect();
    let mut list = offsets(&at)?;
    native::epoch::set_leader_epochs(&mut list, starts.iter().map(|(_, at)| at.epoch));
    Some(list)
}
