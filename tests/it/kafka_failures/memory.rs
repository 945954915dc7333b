//! Memory: records that are read and cannot be stored stay bounded, whatever the number of partitions and their size.

use std::fs;

use super::ingester::{Ingester, await_event};
use super::stage::Stage;
use support::child::Child;
use support::kafka_records::TestRecord;
use support::proxy::Proxy;

const PARTITIONS: i32 = 64;
const RECORDS: usize = 320;
/// Records that wait to be accepted (64 MiB by default), librdkafka's read-ahead (16 MiB) and one fetch (16 MiB),
/// batches in progress in two encodings, and the process itself. This is far less than all records, so it cannot be met
/// by reading them all.
const RESIDENT_MIB_MAX: usize = 256;

/// The peak resident memory of the process.
fn resident_mib_max(child: &Child) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() / 1024
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_stays_bounded_during_a_database_outage_with_megabytes_in_every_partition() {
    const { assert!(RECORDS > RESIDENT_MIB_MAX) };
    let stage = Stage::new(PARTITIONS).await;
    let proxy = Proxy::start_for(&stage.scene.database.url()).await;
    let ingester = Ingester { url: proxy.url(&stage.scene.database.url()), ..Ingester::on(&stage) };
    let child = ingester.spawn(&stage);
    for partition in 0..PARTITIONS {
        let begun = format!(" partition={partition} ");
        child.await_line(|line| line.starts_with("partition begun") && line.contains(&begun)).await;
    }

    proxy.black_hole().await;
    stage.kafka.produce_many(&stage.topic, PARTITIONS, RECORDS, |_| TestRecord::new(vec![b'x'; 1 << 20])).await;
    await_event(&child, "intake closed").await;
    let while_away = resident_mib_max(&child);
    proxy.pass().await;
    stage.stored(RECORDS).await;
    let in_all = resident_mib_max(&child);

    assert!(while_away <= RESIDENT_MIB_MAX && in_all <= RESIDENT_MIB_MAX, "{while_away} MiB, {in_all} MiB");
}
