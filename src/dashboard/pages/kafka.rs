//! The Kafka page: the state and position of each partition, and the gaps. Looked up once for all tabs.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::State;

use super::super::app::{App, KafkaLook};
use super::super::guard::Visit;
use super::super::text::{self, When};
use super::{Frame, Page, PagePlace, html};
use crate::store::Backend;
use crate::types::{IngestFacts, LedgerFilter, LedgerGap, LedgerStatus};

/// How many partitions the page shows.
const PARTITIONS_MAX: u32 = 1_000;
/// How many gaps the page shows.
const GAPS_MAX: u32 = 100;

#[derive(Template)]
#[template(path = "kafka.html")]
struct KafkaPage {
    frame: Frame,
    groups: Vec<ConsumerGroupView>,
    is_cut: bool,
    gaps: Vec<GapRow>,
    ingests: Vec<IngestRow>,
}

/// The partitions of one consumer group.
struct ConsumerGroupView {
    name: String,
    lag: String,
    stopped: usize,
    rows: Vec<PartitionRow>,
}

struct PartitionRow {
    partition: String,
    cluster: String,
    next: String,
    lag: String,
    /// The state in words; `class` is its CSS class.
    state: String,
    class: &'static str,
    since: Option<When>,
    moved: When,
    process: String,
    why: String,
}

struct GapRow {
    group: String,
    partition: String,
    cluster: String,
    from: String,
    to: String,
    missing: String,
    at: When,
}

struct IngestRow {
    group: String,
    /// Empty if it is the group's name.
    source: String,
    name: String,
    seen: String,
    is_silent: bool,
    problem: String,
}

pub(in super::super) async fn kafka<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
) -> Page {
    let (frame, snapshot) = Frame::new(&app, &visit, PagePlace { path: "/kafka", title: "Kafka" }).await;
    let look = async {
        let (operator, all) = (app.operator(), LedgerFilter::default());
        let positions = operator.positions(&all, PARTITIONS_MAX).await?;
        Ok(KafkaLook { positions, gaps: operator.gaps(&all, GAPS_MAX).await? })
    };
    let found = app.kafka.get(app.sample_every, look).await?;
    let now = SystemTime::now();
    let diagnosis = snapshot.as_ref().and_then(|snapshot| snapshot.diagnosis.as_deref());
    let ingests = diagnosis.and_then(|found| found.facts.as_ref()).map(|facts| &facts.ingests[..]).unwrap_or_default();
    let page = KafkaPage {
        frame: frame.reloaded(),
        groups: found
            .positions
            .chunk_by(|one, next| one.consumer_group == next.consumer_group)
            .map(|positions| group(positions, now))
            .collect(),
        is_cut: found.positions.len() >= PARTITIONS_MAX as usize,
        gaps: found.gaps.iter().map(|gap| gap_row(gap, now)).collect(),
        ingests: ingests.iter().map(ingest_row).collect(),
    };
    Ok(html(&page))
}

fn group(positions: &[LedgerStatus], now: SystemTime) -> ConsumerGroupView {
    let lags: Vec<i64> = positions.iter().filter_map(|position| position.lag).collect();
    ConsumerGroupView {
        name: positions.first().map_or_else(String::new, |first| first.consumer_group.clone()),
        lag: if lags.is_empty() { "–".to_owned() } else { text::signed(lags.iter().sum()) },
        stopped: positions.iter().filter(|position| position.stopped_at.is_some()).count(),
        rows: positions.iter().map(|position| row(position, now)).collect(),
    }
}

fn row(position: &LedgerStatus, now: SystemTime) -> PartitionRow {
    let stopped = position.stopped_at.is_some();
    let state = match (stopped, position.state.as_deref()) {
        (true, _) => "stopped",
        (false, Some(state)) => state,
        (false, None) => "not read by any process",
    };
    PartitionRow {
        partition: format!("{}[{}]", position.topic, position.partition),
        cluster: position.cluster_id.clone(),
        next: if position.next_offset < 0 {
            "the first available".to_owned()
        } else {
            text::signed(position.next_offset)
        },
        lag: position.lag.map_or_else(|| "–".to_owned(), text::signed),
        class: match state {
            "reading" => "done",
            "stopped" => "poisoned",
            "blocked" | "refused" => "failed",
            _ => "pending",
        },
        state: state.to_owned(),
        since: position.stopped_at.or(position.state_since).map(|at| When::new(at, now)),
        moved: When::new(position.updated_at, now),
        process: position.ingest.clone().unwrap_or_default(),
        why: position.stopped_why.clone().or_else(|| position.why.clone()).unwrap_or_default(),
    }
}

fn gap_row(gap: &LedgerGap, now: SystemTime) -> GapRow {
    GapRow {
        group: gap.consumer_group.clone(),
        partition: format!("{}[{}]", gap.topic, gap.partition),
        cluster: gap.cluster_id.clone(),
        from: text::signed(gap.from_offset),
        to: text::signed(gap.to_offset),
        missing: text::signed(gap.to_offset.saturating_sub(gap.from_offset)),
        at: When::new(gap.noticed_at, now),
    }
}

fn ingest_row(ingest: &IngestFacts) -> IngestRow {
    IngestRow {
        group: ingest.consumer_group.clone(),
        source: Some(ingest.source.clone()).filter(|source| *source != ingest.consumer_group).unwrap_or_default(),
        name: ingest.name.clone(),
        seen: text::span(ingest.seen_secs_ago),
        is_silent: ingest.seen_secs_ago > 60.0,
        problem: ingest.problem.clone().unwrap_or_default(),
    }
}
