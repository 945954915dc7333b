//! Operator queries and actions for PostgreSQL, on the views and functions of the migration.

mod act;
mod backfill;
mod facts;
mod ledger;
mod list;
mod outbox;
mod overview;
mod records;

use std::sync::Arc;
use std::time::Duration;

use super::{Postgres, act};
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

impl Operating for Postgres {
    async fn handler_keys(&self) -> Result<Vec<(String, String)>> {
        act!(self, conn => list::handler_keys(&mut conn))
    }

    async fn handlers(&self) -> Result<Vec<HandlerStatus>> {
        act!(self, conn => list::handlers(&mut conn))
    }

    async fn processors(&self) -> Result<Vec<ProcessorStatus>> {
        act!(self, conn => list::processors(&mut conn))
    }

    async fn held_keys(&self, handler_key: &str, limit: u32) -> Result<Vec<HeldKey>> {
        act!(self, conn => list::held_keys(&mut conn, handler_key, limit))
    }

    async fn deliveries(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        limit: u32,
    ) -> Result<Vec<DeliverySummary>> {
        act!(self, conn => list::deliveries(&mut conn, filter, state, limit))
    }

    async fn delivery(&self, message_seq: i64, handler_id: i16) -> Result<Option<DeliveryDetails>> {
        act!(self, conn => records::delivery(&mut conn, message_seq, handler_id))
    }

    async fn story(&self, message_seq: i64) -> Result<MessageStory> {
        act!(self, conn => records::story(&mut conn, message_seq))
    }

    async fn message_record(&self, message_seq: i64) -> Result<Option<Record>> {
        act!(self, conn => records::message_record(&mut conn, message_seq))
    }

    async fn poisoned_errors(&self) -> Result<Vec<ErrorSummary>> {
        act!(self, conn => list::poisoned_errors(&mut conn))
    }

    async fn quarantined(&self, filter: &QuarantineFilter, limit: u32) -> Result<Vec<QuarantineSummary>> {
        act!(self, conn => list::quarantined(&mut conn, filter, limit))
    }

    async fn quarantined_record(&self, id: i64) -> Result<Option<QuarantineDetails>> {
        act!(self, conn => records::quarantined(&mut conn, id))
    }

    async fn outgoing(&self, filter: &OutboxFilter, limit: u32) -> Result<Vec<OutboxSummary>> {
        act!(self, conn => outbox::list(&mut conn, filter, limit))
    }

    async fn outgoing_record(&self, id: i64) -> Result<Option<OutboxDetails>> {
        act!(self, conn => outbox::one(&mut conn, id))
    }

    async fn positions(&self, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerStatus>> {
        act!(self, conn => ledger::positions(&mut conn, filter, limit))
    }

    async fn act(&self, act: Act, signed: Signed) -> Result<u64> {
        act!(self, conn => act::act(&mut conn, &act, &signed))
    }

    async fn claim_replays(&self, topics: Vec<String>, lease: Duration, limit: u32) -> Result<Vec<(i64, Record)>> {
        act!(self, conn => records::claim_replays(&mut conn, &topics, lease, limit))
    }

    async fn asked_topics(&self, limit: u32) -> Result<Vec<String>> {
        act!(self, conn => records::asked_topics(&mut conn, limit))
    }

    async fn return_parked(&self, handler_ids: Vec<i16>, processor: Arc<str>, limit: u32) -> Result<Vec<Returned>> {
        act!(self, conn => act::return_parked(&mut conn, &handler_ids, &processor, limit))
    }

    async fn replayed(&self, id: i64, replayed: Replayed) -> Result<()> {
        act!(self, conn => records::replayed(&mut conn, id, &replayed))
    }

    async fn backfill(&self, step: BackfillStep, signed: Signed) -> Result<Backfilled> {
        act!(self, conn => backfill::backfill(&mut conn, &step, &signed))
    }

    async fn replay_states(&self, rows: &[(i64, i16)]) -> Result<Vec<ReplayState>> {
        act!(self, conn => list::replay_states(&mut conn, rows))
    }

    async fn audit_purge(&self, retention: String, messages: u64, signed: Signed) -> Result<()> {
        act!(self, conn => act::audit_purge(&mut conn, &retention, messages, &signed))
    }

    async fn totals(&self) -> Result<Totals> {
        act!(self, conn => facts::totals(&mut conn))
    }

    async fn facts(&self) -> Result<Facts> {
        act!(self, conn => facts::facts(&mut conn))
    }

    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>> {
        act!(self, conn => overview::audit(&mut conn, before, limit))
    }

    async fn gaps(&self, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerGap>> {
        act!(self, conn => overview::gaps(&mut conn, filter, limit))
    }

    async fn poisoned_groups(&self, filter: &DeliveryFilter, rows_max: u32) -> Result<Grouped<ErrorSummary>> {
        act!(self, conn => overview::poisoned_groups(&mut conn, filter, rows_max))
    }

    async fn open_groups(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        rows_max: u32,
    ) -> Result<Grouped<OpenGroup>> {
        act!(self, conn => overview::open_groups(&mut conn, filter, state, rows_max))
    }

    async fn quarantine_states(&self, ids: &[i64]) -> Result<Vec<QuarantineState>> {
        act!(self, conn => records::quarantine_states(&mut conn, ids))
    }

    async fn quarantine_groups(&self, filter: &QuarantineFilter, rows_max: u32) -> Result<Vec<QuarantineGroup>> {
        act!(self, conn => overview::quarantine_groups(&mut conn, filter, rows_max))
    }
}
