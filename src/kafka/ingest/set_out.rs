//! Sets partitions out: has their positions found, and sets the consumer to them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::Consumer;
use rdkafka::error::KafkaResult;

use super::super::desk::Place;
use super::super::find::{Found, find};
use super::super::position::Start;
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
        for Found { asked, start } in context.take_found() {
            if !context.desk().is_current(&asked) {
                continue;
            }
            let (topic, partition) = &asked.place;
            match start {
                None => context.desk().ask_again(&asked.place, Instant::now()),
                Some(Start::At(at)) => starts.push((asked.place, at)),
                Some(Start::AfterGap { from, to }) => {
                    events::kafka::gap(self.group(), topic, *partition, from, to);
                    starts.push((asked.place, to));
                }
                Some(Start::Nowhere { ledger, high }) => {
                    events::kafka::partition_stopped(self.group(), topic, *partition, ledger, high);
                    context.desk().stop(&asked.place, Instant::now());
                }
            }
        }
        self.begin(&starts);
        let asked = context.desk().ask(Instant::now());
        if !asked.is_empty() {
            let (intake, group) = (Arc::clone(&self.intake), Arc::clone(&context.group));
            let finding = find(intake, group, Arc::downgrade(&self.consumer), asked, self.tell.clone());
            self.tasks.spawn_on(finding, self.intake.store.backend.reactor());
        }
    }

    /// Sets partitions to their positions; those that could not be set are asked for again.
    fn begin(&self, starts: &[(Place, i64)]) {
        let context = self.consumer.context();
        for (place, is_set) in self.seek(starts) {
            match is_set {
                Ok(at) => {
                    events::kafka::partition_begun(self.group(), &place.0, place.1, at);
                    context.desk().begin(&place, at);
                }
                Err(error) => {
                    events::kafka::trouble(self.group(), "set the position of a partition", &error);
                    context.desk().ask_again(&place, Instant::now());
                }
            }
        }
    }

    /// Sets all positions in one call.
    pub(super) fn seek(&self, starts: &[(Place, i64)]) -> Vec<(Place, KafkaResult<i64>)> {
        let Some(list) = offsets(starts) else { return Vec::new() };
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
