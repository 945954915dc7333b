//! Sets partitions out: has their positions found, and sets the consumer to them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer;
use rdkafka::error::KafkaResult;

use super::super::desk::TopicPartition;
use super::super::find::{Located, find};
use super::super::native;
use super::super::position::{At, Begin};
use super::super::rebalance::offsets;
use super::Work;
use crate::store::Backend;
use crate::telemetry::events;

/// How long setting positions may take: nobody outside of this process is asked.
const SEEK_WAIT: Duration = Duration::from_secs(1);

impl<B: Backend> Work<B> {
    /// Asks for positions that are not known, and takes up those that were found.
    pub(super) fn set_out(&mut self) {
        let context = self.consumer.context();
        let mut starts = Vec::new();
        for Located { asked, start } in context.take_found() {
            if !context.desk().is_current(&asked) {
                continue;
            }
            let (topic, partition) = &asked.place;
            match start {
                None => context.desk().ask_again(&asked.place, Instant::now()),
                Some(Begin::At(at)) => starts.push((asked.place, at)),
                Some(Begin::AfterGap { from, to }) => {
                    events::kafka::gap(self.group(), topic, *partition, from, to);
                    starts.push((asked.place, At { offset: to, epoch: None }));
                }
                Some(Begin::Nowhere(stop)) => self.stop(&asked.place, stop.ledger().offset, &stop.to_string()),
                Some(Begin::Stopped { ledger, why }) => self.stop(&asked.place, ledger, &why),
            }
        }
        self.begin(&starts);
        let asked = context.desk().ask(Instant::now());
        if !asked.is_empty() {
            let intake = Arc::clone(&self.intake);
            let finding = find(intake, Arc::downgrade(&self.consumer), asked, self.tell.clone());
            self.tasks.spawn_on(finding, self.intake.store.backend.reactor());
        }
    }

    /// Sets partitions to their positions; those that could not be set are asked for again.
    fn begin(&self, starts: &[(TopicPartition, At)]) {
        let context = self.consumer.context();
        for (place, is_set) in self.seek(starts) {
            match is_set {
                Ok(at) => {
                    events::kafka::partition_begun(self.group(), &place.0, place.1, at.offset);
                    context.desk().begin(&place, at);
                }
                Err(error) => {
                    self.consumer.context().tell_trouble("set the position of a partition", &error);
                    context.desk().ask_again(&place, Instant::now());
                }
            }
        }
    }

    /// The partition is not read until a person has acted. Said once for each assignment, and again when the reason changes.
    fn stop(&self, place: &TopicPartition, ledger: i64, why: &str) {
        if self.consumer.context().desk().stop(place, why, Instant::now()) {
            events::kafka::partition_stopped(self.group(), &place.0, place.1, ledger, why);
        }
    }

    /// Sets all positions in one call, with their epochs: the broker compares those with its log, and a truncation is noticed.
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

/// Positions with their epochs; `None` when there are none.
pub(super) fn positions(starts: &[(TopicPartition, At)]) -> Option<TopicPartitionList> {
    let at: Vec<(TopicPartition, i64)> = starts.iter().map(|(place, at)| (place.clone(), at.offset)).collect();
    let mut list = offsets(&at)?;
    native::epoch::set_leader_epochs(&mut list, starts.iter().map(|(_, at)| at.epoch));
    Some(list)
}
