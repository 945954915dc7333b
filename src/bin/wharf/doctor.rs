//! `doctor`: why work is not moving, the worst first, with what to do. With a Kafka also what the audit finds.

use serde_json::json;
use wharf::kafka::Finding;
use wharf::operate::{Diagnosis, Severity};
use wharf::store::Backend;

use crate::audit::{self, KafkaArguments};
use crate::exit::{Exit, Failure};
use crate::output::{Cell, Output, Tone, cell, text, word};
use crate::session::Session;
use crate::when;

pub async fn run<B: Backend>(session: &Session<B>, arguments: &KafkaArguments) -> Result<Exit, Failure> {
    let kafka = arguments.kafka()?;
    let diagnosis = session.operator().doctor().await?;
    let audit = match kafka.filter(|_| diagnosis.facts.is_some()) {
        Some(kafka) => Some(kafka.audit(&session.store).await?),
        None => None,
    };
    let findings = audit.as_ref().map(wharf::kafka::Audit::findings).unwrap_or_default();
    let is_well = diagnosis.is_well() && findings.is_empty();
    match session.output.is_json {
        true => {
            let audit = audit.as_ref().map(audit::document);
            session.output.document(&json!({ "is_well": is_well, "diagnosis": diagnosis, "audit": audit }))?;
        }
        false => print(session.output, &diagnosis, &findings, is_well)?,
    }
    Ok(if is_well { Exit::Well } else { Exit::Problem })
}

fn print(output: Output, diagnosis: &Diagnosis, findings: &[Finding], is_well: bool) -> std::io::Result<()> {
    let symptoms = diagnosis.symptoms.iter().map(|symptom| {
        let tone = if symptom.severity == Severity::Warning { Tone::Warning } else { Tone::Problem };
        vec![cell(symptom.severity).toned(tone), cell(&symptom.what), cell(&symptom.advice)]
    });
    let of_kafka = findings.iter().map(|finding| {
        vec![
            cell("problem").toned(Tone::Problem),
            cell(finding),
            cell("wharf audit; see docs/operations.md, where in Kafka"),
        ]
    });
    let rows: Vec<Vec<Cell>> = symptoms.chain(of_kafka).collect();
    if !rows.is_empty() {
        output.table(&[word("HOW BAD"), text("WHAT"), text("WHAT TO DO")], rows)?;
        output.line("")?;
    }
    if let Some(facts) = diagnosis.facts.as_ref().filter(|facts| !facts.lags.is_empty()) {
        output.line("from the broker's stamp to the handler's end, of the last 1000 messages:")?;
        let row = |lag: &wharf::operate::Lag| {
            vec![cell(&lag.handler_key), cell(when::secs(lag.p50_secs)), cell(when::secs(lag.max_secs))]
        };
        output.table(&[text("HANDLER"), word("HALF WITHIN"), word("LONGEST")], facts.lags.iter().map(row).collect())?;
        output.line("")?;
    }
    output.line(if is_well { "all is well" } else { "not well" })
}
