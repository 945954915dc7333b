//! Loads payloads that claims have withheld (`claim.rs`).

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::statement::statements;
use crate::store::rows::{CorrectedRow, PayloadRow};
use crate::store::seam::{Payloads, Withheld};
use crate::types::Result;

statements! {
    OfMessages<'a>("SELECT seq, payload FROM inbox_message WHERE seq = ANY (:message_seqs) AND payload IS NOT NULL")
    -> PayloadRow { message_seqs: &'a [i64] }

    /// The newest one of each delivery, as a claim reads it.
    Corrected<'a>("
        SELECT w.message_seq, w.handler_id, k.payload
        FROM unnest(:message_seqs, :handler_ids) AS w (message_seq, handler_id)
        CROSS JOIN LATERAL (SELECT n.payload FROM inbox_correction n
                            WHERE n.message_seq = w.message_seq AND n.handler_id = w.handler_id
                            ORDER BY n.audit_id DESC LIMIT 1) k")
    -> CorrectedRow { message_seqs: &'a [i64], handler_ids: &'a [i16] }
}

pub(super) async fn payloads(conn: &mut AsyncPgConnection, withheld: &Withheld) -> Result<Payloads> {
    let cannot = || database("cannot load payloads");
    let (message_seqs, mut payloads) = (&withheld.message_seqs[..], Payloads::default());
    if !message_seqs.is_empty() {
        let rows = OfMessages { message_seqs }.load::<PayloadRow>(conn).await.map_err(cannot())?;
        payloads.of_messages = rows.into_iter().map(PayloadRow::into_pair).collect();
    }
    if !withheld.corrected.is_empty() {
        let (message_seqs, handler_ids): (Vec<i64>, Vec<i16>) = withheld.corrected.iter().copied().unzip();
        let corrected = Corrected { message_seqs: &message_seqs, handler_ids: &handler_ids };
        let rows = corrected.load::<CorrectedRow>(conn).await.map_err(cannot())?;
        payloads.corrected = rows.into_iter().map(CorrectedRow::into_pair).collect();
    }
    Ok(payloads)
}
