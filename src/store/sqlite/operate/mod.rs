//! Operator queries and actions for SQLite: the same as PostgreSQL's functions, written as statements.

mod act;
mod backfill;
mod facts;
mod ledger;
mod list;
mod outbox;
mod overview;
mod parked;
mod records;

use std::sync::Arc;
use std::time::Duration;

use super::Sqlite;
use super::errors::database;
use crate::store::operating::{
    Act, BackfillStep, Backfilled, Grouped, OpenGroup, Operating, QuarantineState, ReplayState, Replayed, Returned,
    Signed,
};
use crate::store::story::MessageStory;
use crate::types::{
    AuditEntry, DeliveryDetails, DeliveryFilter, DeliverySummary, ErrorSummary, Facts, HandlerStatus, HeldKey,
    LedgerFilter, LedgerGap, LedgerStatus, OutboxDetails, OutboxFilter, OutboxSummary, ProcessorStatus,
    QuarantineDetails, QuarantineFilter, QuarantineGroup, QuarantineSummary, Record, Result, State, Totals,
};

impl Operating for Sqlite {
    async fn handler_keys(&self) -> Result<Vec<(String, String)>> {
        self.read(list::handler_keys).await
    }

    async fn handlers(&self) -> Result<Vec<HandlerStatus>> {
        self.read(list::handlers).await
    }

    async fn processors(&self) -> Result<Vec<ProcessorStatus>> {
        self.read(list::processors).await
    }

    async fn held_keys(&self, handler_key: &str, limit: u32) -> Result<Vec<HeldKey>> {
        let handler_key = handler_key.to_owned();
        self.read(move |conn| list::held_keys(conn, &handler_key, limit)).await
    }

    async fn deliveries(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        limit: u32,
    ) -> Result<Vec<DeliverySummary>> {
        let filter = filter.clone();
        self.read(move |conn| list::deliveries(conn, &filter, state, limit)).await
    }

    async fn delivery(&self, message_seq: i64, handler_id: i16) -> Result<Option<DeliveryDetails>> {
        self.read(move |conn| records::delivery(conn, message_seq, handler_id)).await
    }

    async fn story(&self, message_seq: i64) -> Result<MessageStory> {
        self.read(move |conn| records::story(conn, message_seq)).await
    }

    async fn message_record(&self, message_seq: i64) -> Result<Option<Record>> {
        self.read(move |conn| records::message_record(conn, message_seq)).await
    }

    async fn poisoned_errors(&self) -> Result<Vec<ErrorSummary>> {
        self.read(list::poisoned_errors).await
    }

    async fn quarantined(&self, filter: &QuarantineFilter, limit: u32) -> Result<Vec<QuarantineSummary>> {
        let filter = filter.clone();
        self.read(move |conn| list::quarantined(conn, &filter, limit)).await
    }

    async fn quarantined_record(&self, id: i64) -> Result<Option<QuarantineDetails>> {
        self.read(move |conn| records::quarantined(conn, id)).await
    }

    async fn outgoing(&self, filter: &OutboxFilter, limit: u32) -> Result<Vec<OutboxSummary>> {
        let filter = filter.clone();
        self.read(move |conn| outbox::list(conn, &filter, limit)).await
    }

    async fn outgoing_record(&self, id: i64) -> Result<Option<OutboxDetails>> {
        self.read(move |conn| outbox::one(conn, id)).await
    }

    async fn positions(&self, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerStatus>> {
        let filter = filter.clone();
        self.read(move |conn| ledger::positions(conn, &filter, limit)).await
    }

    async fn act(&self, act: Act, signed: Signed) -> Result<u64> {
        self.write(move |conn| act::act(conn, &act, &signed)).await
    }

    async fn claim_replays(&self, topics: Vec<String>, lease: Duration, limit: u32) -> Result<Vec<(i64, Record)>> {
        self.write(move |conn| records::claim_replays(conn, &topics, lease, limit)).await
    }

    async fn asked_topics(&self, limit: u32) -> Result<Vec<String>> {
        self.read(move |conn| records::asked_topics(conn, limit)).await
    }

    async fn return_parked(&self, handler_ids: Vec<i16>, processor: Arc<str>, limit: u32) -> Result<Vec<Returned>> {
        self.write(move |conn| parked::return_parked(conn, &handler_ids, &processor, limit)).await
    }

    async fn replayed(&self, id: i64, replayed: Replayed) -> Result<()> {
        self.write(move |conn| records::replayed(conn, id, &replayed)).await
    }

    async fn backfill(&self, step: BackfillStep, signed: Signed) -> Result<Backfilled> {
        self.write(move |conn| backfill::backfill(conn, &step, &signed)).await
    }

    async fn replay_states(&self, rows: &[(i64, i16)]) -> Result<Vec<ReplayState>> {
        let rows = rows.to_vec();
        self.read(move |conn| list::replay_states(conn, &rows)).await
    }

    async fn audit_purge(&self, retention: String, messages: u64, signed: Signed) -> Result<()> {
        let entry = act::NewAuditEntry { action: "purge", filter: retention, affected: messages };
        let write = move |conn: &mut _| act::audit(conn, &entry, &signed).map(drop);
        self.write(move |conn| write(conn).map_err(database("cannot write the audit"))).await
    }

    async fn totals(&self) -> Result<Totals> {
        self.read(facts::totals).await
    }

    async fn facts(&self) -> Result<Facts> {
        self.read(facts::facts).await
    }

    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>> {
        self.read(move |conn| overview::audit(conn, before, limit)).await
    }

    async fn gaps(&self, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerGap>> {
        let filter = filter.clone();
        self.read(move |conn| overview::gaps(conn, &filter, limit)).await
    }

    async fn poisoned_groups(&self, filter: &DeliveryFilter, rows_max: u32) -> Result<Grouped<ErrorSummary>> {
        let filter = filter.clone();
        self.read(move |conn| overview::poisoned_groups(conn, &filter, rows_max)).await
    }

    async fn open_groups(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        rows_max: u32,
    ) -> Result<Grouped<OpenGroup>> {
        let filter = filter.clone();
        self.read(move |conn| overview::open_groups(conn, &filter, state, rows_max)).await
    }

    async fn quarantine_states(&self, ids: &[i64]) -> Result<Vec<QuarantineState>> {
        let ids = ids.to_vec();
        self.read(move |conn| records::quarantine_states(conn, &ids)).await
    }

    async fn quarantine_groups(&self, filter: &QuarantineFilter, rows_max: u32) -> Result<Vec<QuarantineGroup>> {
        let filter = filter.clone();
        self.read(move |conn| overview::quarantine_groups(conn, &filter, rows_max)).await
    }
}
