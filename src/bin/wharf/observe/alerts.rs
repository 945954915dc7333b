//! Alert rules for Prometheus: they alert on the age of work and on the burn rate of an error budget, not on the amount
//! of work.
//!
//! Each rule says what is wrong and what to do. Metrics of the database are the same in every process, so rules take
//! their maximum.

/// An alert rule.
pub struct Alert {
    pub name: &'static str,
    /// The PromQL expression: true while there is a problem.
    expr: &'static str,
    /// For how long it has to be true before the alert fires.
    lasts: &'static str,
    severity: Severity,
    pub summary: &'static str,
    pub action: &'static str,
}

/// How urgent it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Severity {
    /// Wakes a person up.
    Page,
    /// To be handled within a working day.
    Ticket,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Page => "page",
            Self::Ticket => "ticket",
        }
    }
}

pub static ALERTS: &[Alert] = &[
    Alert {
        name: "WharfDeliveriesOverdue",
        expr: "max by (handler) (wharf_oldest_due_seconds) > 300 \
               unless on (handler) max by (handler) (wharf_handler_paused_seconds) > 0 \
               unless on (handler) max by (handler) (wharf_breaker_open_seconds) > 0",
        lasts: "5m",
        severity: Severity::Page,
        summary: "A delivery of {{ $labels.handler }} has been due for {{ $value | humanizeDuration }}.",
        action: "Run `wharf doctor`. If handlers are busy all the time (wharf_handler_running equals wharf_handler_slots), start more processes or raise the concurrency of the handler.",
    },
    Alert {
        name: "WharfHandlerWithoutProcess",
        expr: "max by (handler) (wharf_handler_processes) == 0 and on (handler) max by (handler) (wharf_oldest_due_seconds) > 60",
        lasts: "5m",
        severity: Severity::Page,
        summary: "Deliveries of {{ $labels.handler }} wait, and no live process runs this handler.",
        action: "Start a process that registers the handler. If it was renamed, the new one has to name its former key: `wharf handlers rename-plan`.",
    },
    Alert {
        name: "WharfHandlersMakeNoProgress",
        expr: "max by (instance) (wharf_no_progress_seconds) > 600",
        lasts: "1m",
        severity: Severity::Page,
        summary: "No handler of {{ $labels.instance }} has returned for {{ $value | humanizeDuration }}, although handlers are running.",
        action: "Check what the handlers wait for. `wharf doctor` names the one that runs longest; `wharf deliveries release` lets another process run its delivery. Set a timeout for the handler.",
    },
    Alert {
        name: "WharfPoisonBurnsFast",
        expr: "sum by (handler) (rate(wharf_outcomes_total{outcome=\"poisoned\"}[1h])) / sum by (handler) (rate(wharf_outcomes_total{outcome=~\"done|discarded|expired|poisoned\"}[1h])) > 14.4 * 0.001 \
               and sum by (handler) (rate(wharf_outcomes_total{outcome=\"poisoned\"}[5m])) / sum by (handler) (rate(wharf_outcomes_total{outcome=~\"done|discarded|expired|poisoned\"}[5m])) > 14.4 * 0.001",
        lasts: "2m",
        severity: Severity::Page,
        summary: "{{ $value | humanizePercentage }} of what {{ $labels.handler }} finishes is poisoned: a budget of 0.1% for a month would be used up within two days.",
        action: "Run `wharf poisoned list --by-error`, correct the cause, then `wharf poisoned replay --handler {{ $labels.handler }}`.",
    },
    Alert {
        name: "WharfPoisonBurnsSlowly",
        expr: "sum by (handler) (rate(wharf_outcomes_total{outcome=\"poisoned\"}[6h])) / sum by (handler) (rate(wharf_outcomes_total{outcome=~\"done|discarded|expired|poisoned\"}[6h])) > 6 * 0.001 \
               and sum by (handler) (rate(wharf_outcomes_total{outcome=\"poisoned\"}[30m])) / sum by (handler) (rate(wharf_outcomes_total{outcome=~\"done|discarded|expired|poisoned\"}[30m])) > 6 * 0.001",
        lasts: "15m",
        severity: Severity::Ticket,
        summary: "{{ $value | humanizePercentage }} of what {{ $labels.handler }} finishes is poisoned: a budget of 0.1% for a month would be used up within five days.",
        action: "Run `wharf poisoned list --by-error`, correct the cause, then `wharf poisoned replay --handler {{ $labels.handler }}`.",
    },
    Alert {
        name: "WharfMostAttemptsFail",
        expr: "sum by (handler) (rate(wharf_outcomes_total{outcome=~\"retried|store failed|unavailable|poisoned\"}[15m])) / sum by (handler) (rate(wharf_outcomes_total{outcome!~\"released|snoozed|overran|in doubt\"}[15m])) > 0.5",
        lasts: "15m",
        severity: Severity::Ticket,
        summary: "{{ $value | humanizePercentage }} of the attempts of {{ $labels.handler }} fail.",
        action: "Run `wharf poisoned list --handler {{ $labels.handler }}` and read the log for `retried`. Failing deliveries are poisoned when their retries are used up.",
    },
    Alert {
        name: "WharfBreakerOpen",
        expr: "max by (handler) (wharf_breaker_open_seconds) > 900",
        lasts: "1m",
        severity: Severity::Page,
        summary: "The breaker of {{ $labels.handler }} has been open for {{ $value | humanizeDuration }}.",
        action: "`wharf doctor` shows the error that opened it. Repair the handler's dependency: the breaker then closes by itself.",
    },
    Alert {
        name: "WharfHandlerPausedForLong",
        expr: "max by (handler) (wharf_handler_paused_seconds) > 86400",
        lasts: "1m",
        severity: Severity::Ticket,
        summary: "{{ $labels.handler }} has been paused for {{ $value | humanizeDuration }}.",
        action: "If it was forgotten: `wharf handlers resume {{ $labels.handler }}`.",
    },
    Alert {
        name: "WharfPartitionStopped",
        expr: "sum by (source, state) (wharf_kafka_partitions{state=~\"stopped|blocked|refused\"}) > 0",
        lasts: "2m",
        severity: Severity::Page,
        summary: "{{ $value }} partitions of source {{ $labels.source }} are not read: {{ $labels.state }}.",
        action: "`wharf doctor` shows which and why. A stopped partition resumes after `wharf ledger reset` or `wharf ledger skip`, a refused one when READ on its topic is granted.",
    },
    Alert {
        name: "WharfPartitionWithoutPosition",
        expr: "sum by (source) (wharf_kafka_partitions{state=\"waiting\"}) > 0",
        lasts: "10m",
        severity: Severity::Ticket,
        summary: "{{ $value }} partitions of source {{ $labels.source }} have no position yet.",
        action: "Check whether the brokers that lead them answer: `wharf doctor --brokers … --group …`.",
    },
    Alert {
        name: "WharfKafkaLagIsOld",
        expr: "max by (source, topic) (wharf_kafka_lag_seconds) > 300",
        lasts: "5m",
        severity: Severity::Page,
        summary: "Records of {{ $labels.topic }} have waited in Kafka for about {{ $value | humanizeDuration }}.",
        action: "Run `wharf doctor`. Compare wharf_kafka_intake_open (0: the database or the handlers are too slow) and wharf_accept_batch_seconds (a slow database).",
    },
    Alert {
        name: "WharfIntakeClosed",
        expr: "max by (source) (wharf_kafka_intake_open) == 0",
        lasts: "10m",
        severity: Severity::Page,
        summary: "No process of source {{ $labels.source }} has read from Kafka for ten minutes.",
        action: "Run `wharf doctor`: the database does not answer, the backlog has reached its limit, or only quarantined records come.",
    },
    Alert {
        name: "WharfRecordsLost",
        expr: "sum by (source, event) (increase(wharf_kafka_events_total{event=~\"gap|ledger behind|ledger lost\"}[15m])) > 0",
        lasts: "0m",
        severity: Severity::Page,
        summary: "Source {{ $labels.source }}: {{ $labels.event }}.",
        action: "`gap`: Kafka had deleted records before they were read; the table inbox_gap has their offsets. `ledger behind` and `ledger lost`: the database has lost stored records, and they are read again.",
    },
    Alert {
        name: "WharfQuarantineBurnsFast",
        expr: "sum by (topic) (rate(wharf_records_total{result=\"quarantined\"}[1h])) / sum by (topic) (rate(wharf_records_total[1h])) > 14.4 * 0.001 \
               and sum by (topic) (rate(wharf_records_total{result=\"quarantined\"}[5m])) / sum by (topic) (rate(wharf_records_total[5m])) > 14.4 * 0.001",
        lasts: "2m",
        severity: Severity::Ticket,
        summary: "{{ $value | humanizePercentage }} of the records of {{ $labels.topic }} cannot become messages.",
        action: "`wharf quarantine list --topic {{ $labels.topic }}` shows the reasons. Correct the producer or the identity of the topic, then `wharf quarantine replay`.",
    },
    Alert {
        name: "WharfEndToEndSlow",
        expr: "histogram_quantile(0.95, sum by (handler, le) (rate(wharf_end_to_end_seconds_bucket[15m]))) > 900",
        lasts: "15m",
        severity: Severity::Ticket,
        summary: "One delivery of {{ $labels.handler }} in twenty is done later than {{ $value | humanizeDuration }} after its record was produced.",
        action: "Compare wharf_kafka_lag_seconds (records wait in Kafka) with wharf_oldest_due_seconds (deliveries wait for the handler).",
    },
    Alert {
        name: "WharfOutboxIsOld",
        expr: "max(wharf_outbox_oldest_seconds) > 300",
        lasts: "5m",
        severity: Severity::Page,
        summary: "A published record has waited for {{ $value | humanizeDuration }} to be sent.",
        action: "`wharf doctor` says whether a relay is alive and why it cannot send; `wharf outbox list --state waiting` shows the waiting records.",
    },
    Alert {
        name: "WharfOutboxPoisonBurns",
        expr: "sum by (topic) (rate(wharf_outbox_total{result=\"poisoned\"}[1h])) / sum by (topic) (rate(wharf_outbox_total[1h])) > 0.01",
        lasts: "5m",
        severity: Severity::Ticket,
        summary: "Kafka refuses {{ $value | humanizePercentage }} of the records for {{ $labels.topic }}.",
        action: "`wharf outbox list` shows the reasons. Correct the topic or its rights, then `wharf outbox replay`.",
    },
    Alert {
        name: "WharfDatabaseUnavailable",
        expr: "max by (instance) (wharf_database_unavailable_seconds) > 60",
        lasts: "1m",
        severity: Severity::Page,
        summary: "The database has not answered {{ $labels.instance }} for {{ $value | humanizeDuration }}.",
        action: "Check the database and the network. Nothing is lost and no retry is consumed; processing resumes by itself.",
    },
    Alert {
        name: "WharfConnectionsExhausted",
        expr: "min_over_time(wharf_pool_waiting[10m]) > 0",
        lasts: "5m",
        severity: Severity::Ticket,
        summary: "{{ $labels.instance }} has waited for database connections for ten minutes without a break.",
        action: "Raise pool_size, or lower accept_batches.",
    },
    Alert {
        name: "WharfMetricsAreOld",
        expr: "time() - max(wharf_database_sampled_timestamp_seconds) > 300",
        lasts: "5m",
        severity: Severity::Ticket,
        summary: "No process has read the metrics of the database for {{ $value | humanizeDuration }}.",
        action: "Alerts on due deliveries and the outbox do not work meanwhile. Check wharf_database_unavailable_seconds, and the log for `store error`.",
    },
];

/// A file for Prometheus' `rule_files`.
pub fn yaml() -> String {
    let mut text = String::from(
        "# Alert rules for services that use Wharf, generated by `wharf observe alerts`.\n\
         # They alert on ages and on the burn rate of an error budget of 0.1%. Adapt the thresholds to your service's objectives.\n\
         groups:\n  - name: wharf\n    rules:\n",
    );
    for alert in ALERTS {
        let Alert { name, expr, lasts, severity, summary, action } = alert;
        let lines = [
            format!("      - alert: {name}"),
            format!("        expr: {}", quoted(expr)),
            format!("        for: {lasts}"),
            "        labels:".to_owned(),
            format!("          severity: {}", severity.as_str()),
            "        annotations:".to_owned(),
            format!("          summary: {}", quoted(summary)),
            format!("          description: {}", quoted(action)),
        ];
        lines.iter().for_each(|line| text.extend([line.as_str(), "\n"]));
    }
    text
}

/// A JSON string is a valid YAML string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
