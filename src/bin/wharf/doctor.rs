//! `doctor`: explains why work is not moving, problems first, with advice. With Kafka options it adds the findings of
//! the audit.

use serde_json::json;
use wharf::operate::{Diagnosis, Severity};
use wharf::store::Backend;

use crate::audit::{self, KafkaArguments};
use crate::exit::{Exit, Failure};
use crate::output::{Cell, Output, Tone, cell, text, word};
use crate::session::Session;
use crate::when;

pub async fn run<B: Backend>(session: &Session<B>, arguments: &KafkaArguments) -> Result<Exit, Failure> {
    let kafka = arguments.kafka()?.map(|(kafka, _)| kafka);
    let diagnosis = session.operator().doctor().await?;
    // The findings in the database are shown also when Kafka does not answer.
    let (audit, silence) = match kafka.filter(|_| diagnosis.facts.is_some()) {
        None => (None, None),
        Some(kafka) => match kafka.audit(&session.store).await {
            Ok(audit) => (Some(audit), None),
            Err(error) if error.is_transient() => (None, Some(error.to_string())),
            Err(error) => return Err(error.into()),
        },
    };
    let findings = audit.as_ref().map(wharf::kafka::Audit::findings).unwrap_or_default();
    let mut problems: Vec<(String, &str)> = findings
        .iter()
        .map(|finding| (finding.to_string(), "run wharf audit; see \"Positions in Kafka\" in docs/operations.md"))
        .collect();
    problems.extend(silence.clone().map(|error| (error, "check the brokers and the connection settings")));
    let is_well = diagnosis.is_well() && problems.is_empty();
    match session.output.is_json {
        true => {
            let audit = audit.as_ref().map(audit::document);
            let document =
                json!({ "is_well": is_well, "diagnosis": diagnosis, "audit": audit, "kafka_error": silence });
            session.output.document(&document)?;
        }
        false => print(session.output, &diagnosis, &problems, is_well)?,
    }
    Ok(match (is_well, silence) {
        (true, _) => Exit::Well,
        (false, None) => Exit::Problem,
        (false, Some(_)) => Exit::Connection,
    })
}

fn print(output: Output, diagnosis: &Diagnosis, problems: &[(String, &str)], is_well: bool) -> std::io::Result<()> {
    let symptoms = diagnosis.symptoms.iter().map(|symptom| {
        let tone = if symptom.severity == Severity::Warning { Tone::Warning } else { Tone::Problem };
        vec![cell(symptom.severity).toned(tone), cell(&symptom.what), cell(&symptom.advice)]
    });
    let of_kafka =
        problems.iter().map(|(what, advice)| vec![cell("problem").toned(Tone::Problem), cell(what), cell(advice)]);
    let rows: Vec<Vec<Cell>> = symptoms.chain(of_kafka).collect();
    if !rows.is_empty() {
        output.table(&[word("SEVERITY"), text("PROBLEM"), text("ADVICE")], rows)?;
        output.line("")?;
    }
    if let Some(facts) = diagnosis.facts.as_ref().filter(|facts| !facts.lags.is_empty()) {
        output.line("latency from the record's timestamp to the end of the handler, over the last 1000 messages:")?;
        let row = |lag: &wharf::operate::Lag| {
            vec![cell(&lag.handler_key), cell(when::secs(lag.p50_secs)), cell(when::secs(lag.max_secs))]
        };
        output.table(&[text("HANDLER"), word("P50"), word("MAX")], facts.lags.iter().map(row).collect())?;
        output.line("")?;
    }
    output.line(if is_well { "healthy" } else { "unhealthy" })
}
