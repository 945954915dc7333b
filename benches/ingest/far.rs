//! Throughput of one hot partition of eight with a distant and with a near database, alternately, both through a proxy.

use std::time::Duration;

use crate::throughput::{ingest_by_way_of, record};
use crate::{PARTITIONS, Scale, Servers};
use support::bench::{Measured, median};

/// The delay to the database in each direction.
pub const EACH_WAY: Duration = Duration::from_millis(2);
/// One record of this many is spread over all partitions. The others are in the hot one.
const HOT_SHARE: usize = 20;

const TOPIC: &str = "hot";

/// The measurements of each repeat, with the database far and near.
#[derive(Debug, Default)]
pub struct Far(Vec<(Measured, Measured)>);

impl Far {
    /// Fills a topic with nearly all records in one partition.
    pub async fn fill(servers: &Servers, scale: Scale) {
        servers.kafka.create_topic(TOPIC, PARTITIONS, &[]).await;
        let trickle = scale.messages / HOT_SHARE;
        let hot = scale.messages - trickle;
        servers.kafka.produce_many(TOPIC, 1, hot, record).await;
        servers.kafka.produce_many(TOPIC, PARTITIONS, trickle, move |number| record(hot + number)).await;
    }

    /// One repeat.
    pub async fn measure(&mut self, servers: &Servers, scale: Scale) {
        let near = ingest_by_way_of(Some(Duration::ZERO), servers, scale, TOPIC, 1).await;
        let far = ingest_by_way_of(Some(EACH_WAY), servers, scale, TOPIC, 1).await;
        let (near_rate, far_rate) = (near.per_second, far.per_second);
        println!(
            "  hot partition: near {near_rate:>8.0}/s   far {far_rate:>8.0}/s   ratio {:.2}",
            far_rate / near_rate
        );
        self.0.push((far, near));
    }

    pub fn ratio(&self) -> f64 {
        median(self.0.iter().map(|(far, near)| far.per_second / near.per_second))
    }

    pub fn far(&self) -> Measured {
        Measured::median(self.0.iter().map(|(far, _)| *far))
    }

    pub fn near(&self) -> Measured {
        Measured::median(self.0.iter().map(|(_, near)| *near))
    }

    pub fn print(&self) {
        println!(
            "one hot partition of {PARTITIONS}: {:.0}/s with the database {EACH_WAY:?} away, {:.0}/s without, ratio {:.2}",
            self.far().per_second,
            self.near().per_second,
            self.ratio()
        );
    }
}
