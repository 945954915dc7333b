//! Static membership: a member that is fenced by another one with the same id ends with the reason. A restart in time
//! moves no partition.

use super::reader::{Reader, times_said};
use super::stage::Stage;
use support::child::Child;

#[tokio::test(flavor = "multi_thread")]
async fn of_two_readers_with_one_instance_id_the_first_ends_with_the_reason() {
    let stage = Stage::new(2).await;
    let observer = stage.observed();
    let reader = Reader::on(&stage).soon_missed().named("twin");
    let first = reader.spawn();
    first.await_line(|line| line.starts_with("partition begun")).await;
    stage.produce(0, 50).await;

    let second = reader.spawn();

    let error = first.await_line(|line| line.starts_with("failed: ")).await;
    assert!(error.contains("group.instance.id") && error.contains(&stage.group), "{error}");
    assert!(first.wait().await.success());
    stage.produce(1, 50).await;
    stage.caught_up(&[50, 50]).await;
    second.term();
    assert!(second.wait().await.success());
    observer.finish().await;
    stage.assert_whole(&[50, 50]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_that_restarts_in_time_moves_no_partition() {
    let stage = Stage::new(4).await;
    // With the eager protocol, any move assigns all partitions of every member again.
    let reader = |name| {
        let settings = Reader::on(&stage).set("session.timeout.ms", "30000");
        settings.set("partition.assignment.strategy", "range").named(name)
    };
    let (coming, staying) = (reader("coming and going"), reader("staying").spawn());
    staying.await_line(|line| line.starts_with("partition begun")).await;
    let mut goes = coming.spawn();
    shared_out(&goes).await;
    staying.await_line(|line| line.starts_with("partitions assigned") && line.contains("partitions=2")).await;
    shared_out(&staying).await;
    let rebalances = times_said(&staying, "partitions ");

    for is_killed in [false, true] {
        if is_killed {
            goes.kill9().await;
        } else {
            goes.term();
            goes.wait().await;
        }
        goes = coming.spawn();
        shared_out(&goes).await;
    }

    for partition in 0..4 {
        stage.produce(partition, 10).await;
    }
    stage.caught_up(&[10; 4]).await;
    assert_eq!(times_said(&staying, "partitions "), rebalances, "{:?}", staying.lines());
    for member in [goes, staying] {
        member.term();
        assert!(member.wait().await.success());
    }
    stage.assert_whole(&[10; 4]).await;
}

/// Waits until the member reads its two partitions.
async fn shared_out(member: &Child) {
    member.await_line(|line| line.starts_with("partitions assigned") && line.contains("partitions=2")).await;
}
