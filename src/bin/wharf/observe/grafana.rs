//! A dashboard for Grafana: a first row with an overview, then a panel for each metric of the table.
//!
//! One rule makes the panels of the table: counters are shown as rates, metrics of the database and durations as the
//! maximum over processes, gauges of processes as the sum, histograms as quantiles. So a metric that is added to the
//! table appears on the dashboard.

use serde_json::{Value, json};
use wharf::observe::{Metric, MetricKind, MetricScope, MetricUnit, metrics};

/// Grafana's grid has 24 columns.
const WIDTH: usize = 8;
const HEIGHT: usize = 8;
const COLUMNS: usize = 24;

/// Grafana's unit for a point in time.
const MOMENT: &str = "dateTimeFromNow";

/// A panel and its lines.
struct Panel {
    title: String,
    description: String,
    unit: &'static str,
    /// Queries and the legends of their lines.
    lines: Vec<(String, String)>,
}

/// The dashboard as a document to import.
pub fn dashboard() -> Value {
    let mut panels = Vec::new();
    let mut top = 0;
    for (title, row) in rows() {
        panels.push(json!({
            "type": "row", "title": title, "id": panels.len() + 1, "collapsed": false, "panels": [],
            "gridPos": { "x": 0, "y": top, "w": COLUMNS, "h": 1 },
        }));
        top += 1;
        for (place, panel) in row.iter().enumerate() {
            let (x, y) = (place * WIDTH % COLUMNS, top + place * WIDTH / COLUMNS * HEIGHT);
            panels.push(shown(panel, panels.len() + 1, x, y));
        }
        top += (row.len() * WIDTH).div_ceil(COLUMNS) * HEIGHT;
    }
    json!({
        "title": "Wharf",
        "uid": "wharf",
        "tags": ["wharf"],
        "schemaVersion": 39,
        "editable": true,
        "refresh": "30s",
        "time": { "from": "now-3h", "to": "now" },
        "templating": { "list": [
            { "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source" },
            {
                "name": "handler", "type": "query", "label": "Handler", "multi": true, "includeAll": true, "allValue": ".*", "refresh": 2,
                "current": { "text": "All", "value": "$__all" },
                "datasource": { "type": "prometheus", "uid": "${datasource}" },
                "query": { "query": "label_values(wharf_oldest_due_seconds, handler)", "refId": "handlers" },
            },
        ] },
        "panels": panels,
    })
}

fn rows() -> Vec<(&'static str, Vec<Panel>)> {
    let of = |belongs: fn(&Metric) -> bool| {
        metrics().iter().filter(|metric| belongs(metric)).map(|metric| panel(metric)).collect()
    };
    vec![
        ("At a glance", at_a_glance()),
        ("Handlers", of(|metric| section(metric) == Section::Handlers)),
        ("In the database", of(|metric| section(metric) == Section::Database)),
        ("Intake", of(|metric| section(metric) == Section::Intake)),
        ("Processes", of(|metric| section(metric) == Section::Processes)),
        ("OpenTelemetry's names", of(|metric| section(metric) == Section::Conventions)),
    ]
}

#[derive(PartialEq, Eq)]
enum Section {
    Handlers,
    Database,
    Intake,
    Processes,
    Conventions,
}

fn section(metric: &Metric) -> Section {
    match (metric.opentelemetry, metric.scope, metric.labels.first()) {
        (Some(_), ..) => Section::Conventions,
        (None, MetricScope::Database, _) => Section::Database,
        (None, _, Some(&"handler")) => Section::Handlers,
        (None, _, Some(&("topic" | "source" | "from"))) => Section::Intake,
        (None, ..) => Section::Processes,
    }
}

fn at_a_glance() -> Vec<Panel> {
    let made = |title: &str, description: &str, unit, lines: &[(&str, &str)]| Panel {
        title: title.to_owned(),
        description: description.to_owned(),
        unit,
        lines: lines.iter().map(|(query, legend)| ((*query).to_owned(), (*legend).to_owned())).collect(),
    };
    vec![
        made(
            "Oldest due delivery",
            "Work is late when this grows.",
            "s",
            &[("max by (handler) (wharf_oldest_due_seconds{handler=~\"$handler\"})", "{{handler}}")],
        ),
        made(
            "Done per second",
            "Deliveries that were done, over all processes.",
            "cps",
            &[(
                "sum by (handler) (rate(wharf_outcomes_total{handler=~\"$handler\", outcome=\"done\"}[$__rate_interval]))",
                "{{handler}}",
            )],
        ),
        made(
            "Failed attempts per second",
            "Retries, unavailable dependencies, store errors and poisoned deliveries.",
            "cps",
            &[(
                "sum by (handler, outcome) (rate(wharf_outcomes_total{handler=~\"$handler\", outcome=~\"retried|store failed|unavailable|poisoned\"}[$__rate_interval]))",
                "{{handler}} {{outcome}}",
            )],
        ),
        made(
            "Poisoned deliveries",
            "They wait for an operator: `wharf poisoned list --by-error`.",
            "short",
            &[("max by (handler) (wharf_deliveries{handler=~\"$handler\", state=\"poisoned\"})", "{{handler}}")],
        ),
        made(
            "From the record's timestamp to done",
            "The median and the 95th percentile.",
            "s",
            &[
                (
                    "histogram_quantile(0.5, sum by (le) (rate(wharf_end_to_end_seconds_bucket{handler=~\"$handler\"}[$__rate_interval])))",
                    "p50",
                ),
                (
                    "histogram_quantile(0.95, sum by (le) (rate(wharf_end_to_end_seconds_bucket{handler=~\"$handler\"}[$__rate_interval])))",
                    "p95",
                ),
            ],
        ),
        made(
            "Records that wait in Kafka",
            "Records that are not stored yet, by topic.",
            "short",
            &[("sum by (topic) (wharf_kafka_lag_records)", "{{topic}}")],
        ),
    ]
}

/// The panel of a metric.
fn panel(metric: &Metric) -> Panel {
    let (name, labels) = (metric.name, metric.labels.join(", "));
    let filter = if metric.labels.contains(&"handler") { "{handler=~\"$handler\"}" } else { "" };
    let legend = match metric.labels {
        [] => name.to_owned(),
        labels => labels.iter().map(|label| format!("{{{{{label}}}}}")).collect::<Vec<_>>().join(" "),
    };
    let by = |labels: &str| if labels.is_empty() { String::new() } else { format!(" by ({labels})") };
    let lines = match metric.kind {
        MetricKind::Counter => {
            vec![(format!("sum{} (rate({name}{filter}[$__rate_interval]))", by(&labels)), legend)]
        }
        MetricKind::Histogram => {
            let labels = [&["le"], metric.labels].concat().join(", ");
            let line = |quantile: &str| {
                let rate = format!("rate({name}_bucket{filter}[$__rate_interval])");
                (
                    format!("histogram_quantile({quantile}, sum{} ({rate}))", by(&labels)),
                    format!("{legend} p{}", &quantile[2..]),
                )
            };
            vec![line("0.50"), line("0.95")]
        }
        // This includes kinds of a later version.
        _ => {
            let is_maximum = metric.scope == MetricScope::Database || metric.unit == MetricUnit::Seconds;
            let over = if is_maximum { "max" } else { "sum" };
            vec![(format!("{over}{} ({name}{filter})", by(&labels)), legend)]
        }
    };
    Panel { title: name.to_owned(), description: metric.meaning.to_owned(), unit: unit(metric), lines }
}

/// The unit in Grafana's terms.
fn unit(metric: &Metric) -> &'static str {
    match (metric.kind, metric.unit) {
        (MetricKind::Counter, _) => "cps",
        (_, MetricUnit::Seconds) if metric.name.ends_with("_timestamp_seconds") => MOMENT,
        (_, MetricUnit::Seconds) => "s",
        (_, MetricUnit::Bytes) => "bytes",
        _ => "short",
    }
}

fn shown(panel: &Panel, id: usize, x: usize, y: usize) -> Value {
    let datasource = json!({ "type": "prometheus", "uid": "${datasource}" });
    // A point in time is in milliseconds, and its axis does not begin at 0.
    let is_moment = panel.unit == MOMENT;
    let (factor, min) = if is_moment { (" * 1000", Value::Null) } else { ("", json!(0)) };
    let target = |(place, (expr, legend)): (usize, &(String, String))| {
        let expr = format!("{expr}{factor}");
        json!({ "refId": format!("q{place}"), "expr": expr, "legendFormat": legend, "datasource": datasource })
    };
    let targets: Vec<Value> = panel.lines.iter().enumerate().map(target).collect();
    json!({
        "type": "timeseries", "title": panel.title, "description": panel.description, "id": id,
        "datasource": datasource,
        "gridPos": { "x": x, "y": y, "w": WIDTH, "h": HEIGHT },
        "fieldConfig": { "defaults": { "unit": panel.unit, "min": min }, "overrides": [] },
        "options": { "tooltip": { "mode": "multi", "sort": "desc" }, "legend": { "displayMode": "list", "placement": "bottom" } },
        "targets": targets,
    })
}
