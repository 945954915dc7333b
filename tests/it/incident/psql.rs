//! The incident is resolved with psql alone, with the views and functions described in `docs/operations.md`.

use std::process::Command;
use std::time::Duration;

use super::{Incident, JUNK, MENDABLE, POISONED};
use support::postgres_binaries::program;

struct Psql(String);

impl Psql {
    /// The rows of a statement, one per line, with columns separated by `|`.
    fn ask(&self, sql: &str) -> String {
        let arguments = ["--no-psqlrc", "--tuples-only", "--no-align", "--set", "ON_ERROR_STOP=1", "--command", sql];
        let ran = Command::new(program("psql")).arg(&self.0).args(arguments).output().unwrap();
        assert!(ran.status.success(), "{sql}\n{}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap().trim_end().to_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incident_is_found_and_resolved_with_psql_alone() {
    let incident = Incident::happens().await;
    let psql = Psql(incident.scene.database.url());

    // Find the problems.
    let backlog =
        psql.ask("SELECT handler_key, poisoned, paused_at IS NOT NULL AS is_paused FROM inbox_backlog ORDER BY 1");
    assert_eq!(backlog, format!("mail|0|t\nstock|{POISONED}|f"));
    let errors = psql.ask("SELECT handler_key, reason, poisoned, fingerprint FROM inbox_poisoned_by_error");
    let (known, fingerprint) = errors.rsplit_once('|').unwrap();
    assert_eq!(known, format!("stock|permanent|{POISONED}"));
    assert_eq!(
        psql.ask("SELECT reason, count(*) FROM inbox_quarantined GROUP BY 1"),
        format!("missing identity|{}", MENDABLE + JUNK)
    );
    let dead =
        "SELECT message_id, handler_key FROM inbox_status WHERE state = 'running' AND owner_is_alive IS NOT TRUE";
    incident.scene.until("SELECT count(*) FROM inbox_processor WHERE alive_until < now()").await;
    assert_eq!(psql.ask(dead), "held|stock");

    // Roll back; then replay one, then ten, then the rest.
    let running = incident.rolled_back().start().await.unwrap();
    let replay = |count: usize| {
        let filter = format!(r#"{{"handler_key": "stock", "fingerprint": "{fingerprint}"}}"#);
        psql.ask(&format!("SELECT inbox_replay_matching('{filter}', {count}, 'release 42 was rolled back')"))
    };
    for count in [1, 10] {
        assert_eq!(replay(count), count.to_string());
        let replayed =
            "SELECT (count(*) = 0)::int::bigint FROM inbox_delivery WHERE replays = 1 AND finished_at IS NULL";
        incident.scene.until(replayed).await;
        assert_eq!(psql.ask("SELECT count(*) FROM inbox_status WHERE replays = 1 AND state <> 'done'"), "0");
    }
    assert_eq!(replay(POISONED), (POISONED - 11).to_string());
    assert_eq!(replay(POISONED), "0");

    // Records that the new build accepts leave the quarantine; the rest is discarded.
    let asked = psql
        .ask("SELECT inbox_quarantine_replay('{\"reason\": \"missing identity\"}', because => 'id is in a header')");
    assert_eq!(asked, (MENDABLE + JUNK).to_string());
    // Records are tried in any order: the last accepted record may leave after the last rejected one was tried.
    let tried = format!(
        "SELECT (count(*) = {JUNK} AND count(*) FILTER (WHERE replays = 1) = {JUNK})::int::bigint FROM inbox_quarantine"
    );
    incident.scene.until(&tried).await;
    let discarded =
        psql.ask("SELECT inbox_quarantine_discard('{\"topic\": \"orders\"}', because => 'junk of a test producer')");
    assert_eq!(discarded, JUNK.to_string());

    assert_eq!(psql.ask("SELECT inbox_resume_handler('mail', 'the incident is over')"), "1");

    // The delivery of the crashed instance runs again without an action.
    incident.is_over().await;
    let acts = psql.ask("SELECT DISTINCT action FROM inbox_audit ORDER BY 1");
    assert_eq!(acts, "discard quarantined\npause\nreplay\nreplay quarantined\nresume");
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
