//! `wharf observe` generates from the table of metrics: documentation that is always current, a dashboard for Grafana
//! and alert rules for Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use wharf::observe::{MetricKind, metrics};

use super::promql::{self, Labels};

/// Marks the generated part of the documentation.
const BEGIN: &str = "<!-- begin: wharf observe metrics --markdown -->\n";
const END: &str = "\n<!-- end -->";

/// The output of `wharf observe`, which needs no database.
fn observe(arguments: &[&str]) -> String {
    let ran = Command::new(env!("CARGO_BIN_EXE_wharf"))
        .arg("observe")
        .args(arguments)
        .env_remove("DATABASE_URL")
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// The alert rules: each field of a rule with its value. Parses only the subset of YAML that they use, and panics on
/// anything else.
fn alerts() -> Vec<BTreeMap<String, String>> {
    let text = observe(&["alerts"]);
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    for expected in ["groups:", "  - name: wharf", "    rules:"] {
        assert_eq!(lines.next(), Some(expected));
    }
    let (mut rules, mut section) = (Vec::new(), String::new());
    for line in lines {
        let (field, value) = line.trim_start().split_once(':').unwrap_or_else(|| panic!("{line}"));
        let depth = line.len() - line.trim_start().len();
        match (depth, field.strip_prefix("- "), value.trim_start()) {
            (6, Some(field), value) => rules.push(BTreeMap::from([(field.to_owned(), value.to_owned())])),
            (8, None, "") => section = format!("{field}."),
            (8 | 10, None, value) => {
                let section = if depth == 10 { section.as_str() } else { "" };
                // A YAML string in double quotes is parsed as a JSON string; one without quotes must be alphanumeric.
                let value = match serde_json::from_str(value) {
                    Ok(Value::String(text)) => text,
                    _ if value.chars().all(|letter| letter.is_ascii_alphanumeric()) => value.to_owned(),
                    _ => panic!("{line}"),
                };
                let is_new = rules.last_mut().unwrap().insert(format!("{section}{field}"), value).is_none();
                assert!(is_new, "{line} occurs twice");
            }
            _ => panic!("{line}"),
        }
    }
    rules
}

fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&observe(&["grafana"])).unwrap();
    dashboard["panels"].as_array().unwrap().clone()
}

/// The queries of the dashboard, with Grafana's variable replaced by a duration, and the legends of their lines.
fn queries() -> Vec<(String, String)> {
    let targets = panels().into_iter().filter_map(|panel| panel["targets"].as_array().cloned()).flatten();
    let query = |target: &Value| target["expr"].as_str().unwrap().replace("$__rate_interval", "5m");
    targets.map(|target| (query(&target), target["legendFormat"].as_str().unwrap().to_owned())).collect()
}

/// The labels that a metric of the table has in Prometheus: its own, and those that Prometheus adds when it scrapes.
fn known(name: &str) -> Option<Labels> {
    let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| Some((name.strip_suffix(end)?, *end)));
    let (base, end) = of_histogram.unwrap_or((name, ""));
    let metric = metrics().iter().find(|metric| {
        let is_histogram = metric.kind == MetricKind::Histogram;
        metric.name == name && !is_histogram || metric.name == base && is_histogram && !end.is_empty()
    })?;
    let mut labels: Labels = metric.labels.iter().map(|label| (*label, vec![])).collect();
    if let (Some(last), false) = (metric.labels.last(), metric.values.is_empty()) {
        labels.insert(*last, metric.values.to_vec());
    }
    labels.extend(metric.fixed.iter().map(|(label, value)| (*label, vec![*value])));
    labels.extend([("instance", vec![]), ("job", vec![])]);
    labels.extend((end == "_bucket").then_some(("le", vec![])));
    Some(labels)
}

/// The names that follow `begin`, as in `{{ $labels.handler }}` or `{{handler}}`.
fn between<'a>(text: &'a str, begin: &'a str) -> impl Iterator<Item = &'a str> {
    let is_letter = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    text.split(begin).skip(1).map(move |rest| rest.split(|letter: char| !is_letter(letter)).next().unwrap_or_default())
}

#[test]
fn the_documentation_has_the_current_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/observability.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the mark where the table begins");
    let (table, after) = rest.split_once(END).expect("the mark where the table ends");
    let generated = observe(&["metrics", "--markdown"]);
    if std::env::var_os("WHARF_BLESS").is_some() {
        fs::write(&path, format!("{before}{BEGIN}{}{END}{after}", generated.trim_end())).unwrap();
        return;
    }
    assert_eq!(table, generated.trim_end(), "`WHARF_BLESS=1 cargo test --test it metrics::generated` updates it");
}

#[test]
fn names_of_metrics_are_unique_and_show_kind_and_unit() {
    let mut seen = BTreeSet::new();
    for metric in metrics() {
        let name = metric.name;
        assert!(seen.insert(name), "{name} occurs twice");
        assert_eq!(name.ends_with("_total"), metric.kind == MetricKind::Counter, "{name}");
        assert_eq!(name.contains("_seconds"), metric.unit.as_str() == "seconds", "{name}");
        assert_eq!(metric.buckets.is_empty(), metric.kind != MetricKind::Histogram, "{name}");
        assert!(metric.buckets.is_sorted() && metric.meaning.ends_with('.'), "{name}");
    }
}

#[test]
fn every_alert_is_a_rule_that_prometheus_understands_and_says_what_to_do() {
    let alerts = alerts();
    assert!(alerts.len() >= 15);
    for rule in &alerts {
        let fields: Vec<&str> = rule.keys().map(String::as_str).collect();
        assert_eq!(
            fields,
            ["alert", "annotations.description", "annotations.summary", "expr", "for", "labels.severity"]
        );
        let (name, expr, lasts) = (&rule["alert"], &rule["expr"], &rule["for"]);
        let labels = promql::check(expr, &known).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(lasts.strip_suffix('m').is_some_and(|minutes| minutes.parse::<u32>().is_ok()), "{name}: {lasts}");
        assert!(["page", "ticket"].contains(&rule["labels.severity"].as_str()), "{name}");
        for text in [&rule["annotations.summary"], &rule["annotations.description"]] {
            assert!(text.len() > 20 && text.ends_with('.'), "{name}: {text}");
            let unknown: Vec<&str> = between(text, "$labels.").filter(|label| !labels.contains(label)).collect();
            assert!(unknown.is_empty(), "{name}: the alert has no label {unknown:?}, only {labels:?}");
            // Metrics that the text names must exist.
            let named = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
            for metric in named.filter(|word| word.starts_with("wharf_")) {
                assert!(metrics().iter().any(|known| known.name == metric), "{name}: there is no {metric}");
            }
        }
    }
    let unique: BTreeSet<&String> = alerts.iter().map(|rule| &rule["alert"]).collect();
    assert_eq!(unique.len(), alerts.len());
}

#[test]
fn the_dashboard_has_a_panel_for_each_metric_and_queries_that_prometheus_understands() {
    let queries = queries();
    for (query, legend) in &queries {
        let labels = promql::check(query, &known).unwrap_or_else(|error| panic!("{error}"));
        let unknown: Vec<&str> = between(legend, "{{").filter(|label| !labels.contains(label)).collect();
        assert!(unknown.is_empty(), "{legend} of {query}: it has only {labels:?}");
    }
    for metric in metrics() {
        assert!(queries.iter().any(|(query, _)| query.contains(metric.name)), "{} has no panel", metric.name);
    }
    let panels = panels();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
    let places: BTreeSet<String> =
        panels.iter().map(|panel| format!("{} {}", panel["gridPos"]["x"], panel["gridPos"]["y"])).collect();
    assert_eq!(places.len(), panels.len(), "two panels have the same position");
}

#[test]
fn the_table_is_also_json() {
    let table: Value = serde_json::from_str(&observe(&["metrics", "--json"])).unwrap();
    let first = &table.as_array().unwrap()[0];
    assert_eq!((&first["name"], &first["kind"]), (&Value::from(metrics()[0].name), &Value::from("counter")));
}
