//! Every metric that a service exports: name, kind, unit, labels and meaning, in one table.
//!
//! The code that counts refers to these entries, so names and labels are defined only here. The page
//! `docs/observability.md` is generated from the table, and the Grafana dashboard and the alert rules use its names
//! only (`wharf observe`). A test compares the table with the metrics of a running service.

use super::metric::{Metric, MetricKind, MetricScope, MetricUnit};

/// Buckets for durations of handlers and statements: those of OpenTelemetry and a few more.
const SHORT: &[f64] = &[0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 60.0];
/// Buckets for the time since a record's timestamp. After an outage it is as long as the outage.
const LONG: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0,
    86_400.0,
];
/// Buckets for the number of records in a batch.
const ROWS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1_000.0, 2_500.0, 5_000.0, 10_000.0];

/// Every metric that a service exports with the feature `metrics`, in the order of the documentation.
///
/// A recorder for Prometheus has to know the buckets of the histograms; without them it exports summaries, which cannot
/// be aggregated over processes:
///
/// ```
/// use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
/// use wharf::observe::{MetricKind, metrics};
///
/// let mut builder = PrometheusBuilder::new();
/// for metric in metrics().iter().filter(|metric| metric.kind == MetricKind::Histogram) {
///     builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), metric.buckets)?;
/// }
/// let recorder = builder.build_recorder(); // a service calls `install_recorder()`, before it builds its inbox
/// # Ok::<(), metrics_exporter_prometheus::BuildError>(())
/// ```
#[must_use]
pub fn metrics() -> &'static [&'static Metric] {
    TABLE
}

/// Defines a static for each entry, and `TABLE` with all of them, so that no entry can be forgotten.
macro_rules! table {
    ($($entry:ident: $kind:ident $name:literal [$($label:literal),*] $unit:ident $scope:ident $({$($field:ident: $value:expr),*})? $meaning:literal;)*) => {
        $(pub(crate) static $entry: Metric = Metric {
            $($($field: $value,)*)?
            ..Metric {
                name: $name,
                kind: MetricKind::$kind,
                unit: MetricUnit::$unit,
                scope: MetricScope::$scope,
                labels: &[$($label),*],
                values: &[],
                fixed: &[],
                buckets: &[],
                opentelemetry: None,
                meaning: $meaning,
            }
        };)*

        static TABLE: &[&Metric] = &[$(&$entry),*];
    };
}

// Accepting.
table! {
    RECORDS: Counter "wharf_records_total" ["topic", "result"] Count Process
        { values: &["accepted", "duplicate", "quarantined", "unwanted"] }
        "Records, by their result. `unwanted`: no handler wants the record; the topic is `(other)` if no handler subscribes to it. A record counts each time it is read or replayed, and as `duplicate` also if the answer to the first try was lost.";
    QUARANTINED: Counter "wharf_quarantined_total" ["topic", "reason"] Count Process
        "Records that were put into quarantine, by `inbox_quarantine.reason`: `conflict`, `missing identity` and others.";
    MISSING_IDENTITIES: Counter "wharf_missing_identities_total" ["topic", "replacement"] Count Process
        { values: &["position", "undeduplicated"] }
        "Records without an identity that were accepted, by what replaced the identity.";
    ACCEPT_BATCH_RECORDS: Histogram "wharf_accept_batch_records" ["from"] Count Process
        { values: &["kafka", "service"], buckets: ROWS }
        "Records accepted by one statement. `kafka`: read from Kafka. `service`: passed in by the service, or replayed from quarantine.";
    ACCEPT_BATCH_SECONDS: Histogram "wharf_accept_batch_seconds" ["from"] Seconds Process
        { values: &["kafka", "service"], buckets: SHORT }
        "How long such a statement took, without the wait for a connection. Failed statements are not counted.";

// Handlers.
    CLAIMS: Counter "wharf_claims_total" ["handler", "claim"] Count Process
        { values: &["claimed", "handed over", "reclaimed", "lost"] }
        "Claims. `claimed`: from the database. `handed over`: by accept, in memory. `reclaimed`: from a process that crashed. `lost`: to another process.";
    OUTCOMES: Counter "wharf_outcomes_total" ["handler", "outcome"] Count Process
        { values: &["done", "retried", "snoozed", "store failed", "unavailable", "discarded", "expired", "poisoned", "released", "overran", "in doubt"] }
        "Outcomes of attempts. Two values are counted in addition to the outcome: `overran` (the handler has not ended long after its timeout) and `in doubt` (a COMMIT without an answer).";
    POISONED: Counter "wharf_poisoned_total" ["handler", "reason"] Count Process
        { values: &["retries exhausted", "crashed", "permanent", "undecodable", "unknown key", "message missing", "store error", "unavailable"] }
        "Deliveries that became poisoned, by `inbox_poisoned.reason`.";
    BREAKERS: Counter "wharf_breakers_total" ["handler", "state"] Count Process { values: &["open", "closed"] }
        "Breakers that this process opened or closed. Actions of operators are not counted.";
    HANDLER_SECONDS: Histogram "wharf_handler_seconds" ["handler"] Seconds Process { buckets: SHORT }
        "How long each run took, without the wait for a transaction. A call of a batch handler counts once.";
    END_TO_END: Histogram "wharf_end_to_end_seconds" ["handler"] Seconds Process { buckets: LONG }
        "Effective lag: from the timestamp of the record to the moment at which its delivery was done. Records without a timestamp are not counted. It compares the clock of this machine with that of the producer or broker.";
    PURGED: Counter "wharf_purged_total" ["rows"] Count Process { values: &["messages", "deliveries"] }
        "Rows that retention removed.";
    ERRORS: Counter "wharf_errors_total" ["component", "operation"] Count Process
        "Failures that are retried. `component` is `store`, `kafka`, `outbox`, `engine`, `decoder` or `service` (the service's `on_poison` function); `operation` is the operation that failed.";

// The state of this process.
    HANDLER_SLOTS: Gauge "wharf_handler_slots" ["handler"] Count Process
        "How many runs of the handler this process allows at a time: its `concurrency`. For a batch handler, calls.";
    HANDLER_RUNNING: Gauge "wharf_handler_running" ["handler"] Count Process
        "How many of the slots are taken by runs.";
    HANDLER_WAITING: Gauge "wharf_handler_waiting" ["handler"] Count Process
        "Deliveries that this process has claimed ahead and that wait in memory for a slot.";
    IN_FLIGHT: Gauge "wharf_in_flight" [] Count Process
        "Claims that this process holds: waiting for a slot, running, or with an outcome that is not written yet.";
    UNSETTLED: Gauge "wharf_unsettled" [] Count Process
        "Deliveries whose handler has returned and whose outcome is not written yet. They run again if the process crashes.";
    NO_PROGRESS: Gauge "wharf_no_progress_seconds" [] Seconds Process
        "For how long handlers have been running without one of them returning. 0 if none runs.";
    DATABASE_UNAVAILABLE: Gauge "wharf_database_unavailable_seconds" [] Seconds Process
        "For how long the database has not answered this process. 0 if it answers.";
    POOL: Gauge "wharf_pool_connections" ["state"] Count Process { values: &["in use", "max"] }
        "Connections of the engine to the database; those of transactional handlers are not among them. `max`: the size of the pool.";
    POOL_WAITING: Gauge "wharf_pool_waiting" [] Count Process
        "Tasks that wait for a connection to the database.";

// The state of the database.
    DELIVERIES: Gauge "wharf_deliveries" ["handler", "state"] Count Database
        { values: &["due", "later", "held", "running", "poisoned"] }
        "Open and poisoned deliveries, counted up to 10,000 each. `due`: can start now. `later`: retries and delays. `held`: waits for another delivery of its key.";
    OLDEST_DUE: Gauge "wharf_oldest_due_seconds" ["handler"] Seconds Database
        "How long the oldest delivery has been due that is due or running. 0 if there is none.";
    HANDLER_PROCESSES: Gauge "wharf_handler_processes" ["handler"] Count Database
        "Live processes that run the handler.";
    HANDLER_PAUSED: Gauge "wharf_handler_paused_seconds" ["handler"] Seconds Database
        "For how long an operator has paused the handler. 0 if it is not paused.";
    BREAKER_OPEN: Gauge "wharf_breaker_open_seconds" ["handler"] Seconds Database
        "For how long the breaker of the handler has been open. 0 if it is closed.";
    QUARANTINE: Gauge "wharf_quarantine_records" [] Count Database
        "Records in quarantine, counted up to 10,000.";
    OUTBOX_RECORDS: Gauge "wharf_outbox_records" ["state"] Count Database { values: &["waiting", "poisoned"] }
        "Records in the outbox that are to be sent, or that Kafka refused, counted up to 10,000 each.";
    OUTBOX_OLDEST: Gauge "wharf_outbox_oldest_seconds" [] Seconds Database
        "How long ago the oldest record was published that is still to be sent. 0 if there is none.";
    DATABASE_SAMPLED: Gauge "wharf_database_sampled_timestamp_seconds" [] Seconds Database
        "When this process last read the metrics of the database, in seconds since 1970.";

// Kafka.
    KAFKA_EVENTS: Counter "wharf_kafka_events_total" ["source", "event"] Count Process
        { values: &["ingest failed", "topics changed", "partitions assigned", "partitions revoked", "partition begun", "gap", "partition stopped", "ledger behind", "ledger moved", "ledger lost", "group ahead", "record out of place", "partition blocked", "partition waits for its decoder", "partition paused", "partition resumed", "intake open", "intake closed", "topic begins", "access refused", "access granted"] }
        "Events of consumption. `partition stopped` counts once for each assignment.";
    KAFKA_PARTITIONS: Gauge "wharf_kafka_partitions" ["source", "state"] Count Process
        { values: &["reading", "waiting", "blocked", "refused", "stopped"] }
        "Partitions that are assigned to this process. `waiting`: the position is not known yet, or the decoder of its identity is unavailable. `blocked`: the next records cannot be read. `refused`: Kafka refuses this process the right to read the topic. `stopped`: until an operator acts.";
    KAFKA_LAG: Gauge "wharf_kafka_lag_records" ["source", "topic", "partition"] Count Process
        "Offsets that Kafka had at the last fetch and that are not stored yet. 0 for partitions that this process does not read.";
    KAFKA_LAG_SECONDS: Gauge "wharf_kafka_lag_seconds" ["source", "topic", "partition"] Seconds Process
        "About how old the oldest record is that is not stored yet, by the timestamps of records. 0 if everything is stored.";
    KAFKA_INTAKE_OPEN: Gauge "wharf_kafka_intake_open" ["source"] Count Process
        "1 while records are read from Kafka, 0 while this process waits for the database or its handlers.";
    KAFKA_FETCH_QUEUE_RECORDS: Gauge "wharf_kafka_fetch_queue_records" ["source"] Count Process
        "Records that librdkafka has fetched and holds in memory.";
    KAFKA_FETCH_QUEUE_BYTES: Gauge "wharf_kafka_fetch_queue_bytes" ["source"] Bytes Process
        "The memory that these records take.";
    KAFKA_ROUND_TRIP: Gauge "wharf_kafka_broker_round_trip_seconds" ["source", "broker"] Seconds Process
        "How long the broker takes to answer: 99th percentile of the last five seconds.";
    OUTBOX: Counter "wharf_outbox_total" ["topic", "result"] Count Process { values: &["sent", "poisoned"] }
        "Records of the outbox that this process sent, and those that Kafka refused.";

// The names of OpenTelemetry's messaging conventions.
    CONSUMED: Counter "messaging_client_consumed_messages_total" ["messaging_destination_name"] Count Process
        { fixed: &[("messaging_system", "kafka"), ("messaging_operation_name", "poll")], opentelemetry: Some("messaging.client.consumed.messages") }
        "Records that were read from Kafka, including those that no handler wants.";
    PROCESS_DURATION: Histogram "messaging_process_duration_seconds" ["messaging_destination_name", "error_type"] Seconds Process
        { fixed: &[("messaging_system", "kafka"), ("messaging_operation_name", "process")], buckets: SHORT, opentelemetry: Some("messaging.process.duration") }
        "How long each run took, by topic. `error_type` is empty for runs without an error; otherwise it is as in traces: `failed`, `timed out`, `panicked`, `unavailable`, `permanent`, `undecodable`, `store error` or `claim lost`. Calls of batch handlers with several messages, and runs that were rolled back with others in their transaction, are not counted.";
    OPERATION_DURATION: Histogram "messaging_client_operation_duration_seconds" ["messaging_system", "messaging_operation_name", "error_type"] Seconds Process
        { buckets: SHORT, opentelemetry: Some("messaging.client.operation.duration") }
        "How long it took to store a batch of records (`accept`) or a batch of outcomes (`settle`), including the wait for a connection. `messaging_system` is `kafka` for records that were read from Kafka, else `wharf`. `error_type` is empty without an error; otherwise it is as in traces: `store error`, `refused`, `stopped`, `configuration` or `bug`.";
    SENT: Counter "messaging_client_sent_messages_total" ["messaging_destination_name"] Count Process
        { fixed: &[("messaging_system", "kafka"), ("messaging_operation_name", "send")], opentelemetry: Some("messaging.client.sent.messages") }
        "Records of the outbox that the broker has acknowledged.";
}
