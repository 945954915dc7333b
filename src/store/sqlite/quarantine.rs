//! Writes records that could not become messages, with all their bytes, once each; and finds out whether a message
//! itself is the cause of an error.

use diesel::connection::SimpleConnection;
use diesel::result::Error as DieselError;
use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::accept;
use super::clock::{self, to_stamp};
use super::errors::{database, kind};
use super::statement::{Content, statements};
use crate::store::quarantined::{self, record_hash};
use crate::store::seam::{NewMessage, Quarantined};
use crate::types::{Kind, Result};

statements! {
    /// A redelivered record is quarantined once.
    InsertQuarantined<'a>("
        INSERT INTO inbox_quarantine (quarantined_at, topic, cluster_id, reason, detail, kafka_partition, kafka_offset, recorded_at, message_id,
                                      source, record_key, headers, payload, record_hash)
        VALUES (:quarantined_at, :topic, :cluster_id, :reason, :detail, :kafka_partition, :kafka_offset, :recorded_at, :message_id,
                :source, :record_key, :headers, :payload, :record_hash)
        ON CONFLICT (record_hash) DO NOTHING
        RETURNING id")
    -> i64 {
        quarantined_at: i64, topic: String, cluster_id: Option<String>, reason: &'a str, detail: Option<String>, kafka_partition: Option<i32>,
        kafka_offset: Option<i64>, recorded_at: Option<i64>, message_id: Content<'a>, source: Content<'a>,
        record_key: Content<'a>, headers: Option<&'a [u8]>, payload: Content<'a>, record_hash: Vec<u8>,
    }

    /// A record that was already in quarantine.
    FindQuarantined("SELECT id FROM inbox_quarantine WHERE record_hash = :record_hash") -> i64 { record_hash: Vec<u8> }
}

/// Returns the id of the row. A redelivered record keeps its id.
pub(super) fn insert(conn: &mut SqliteConnection, row: &Quarantined, now: i64) -> QueryResult<Option<i64>> {
    let record = &row.record;
    let record_hash = record_hash(record);
    let insert = InsertQuarantined {
        quarantined_at: now,
        topic: quarantined::topic(row),
        cluster_id: quarantined::cluster(row),
        reason: row.reason,
        detail: quarantined::detail(row),
        kafka_partition: record.position.map(|p| p.partition),
        kafka_offset: record.position.map(|p| p.offset),
        recorded_at: record.recorded_at.map(to_stamp),
        message_id: record.id.as_deref().into(),
        source: record.source.as_deref().into(),
        record_key: record.key.as_deref().into(),
        headers: record.headers.encoded(),
        payload: record.payload.as_deref().into(),
        record_hash: record_hash.clone(),
    };
    match insert.load(conn)?.pop() {
        Some(id) => Ok(Some(id)),
        None => Ok(FindQuarantined { record_hash }.load(conn)?.pop()),
    }
}

/// Whether the database rejects the message because of its content. Inserts it and rolls back.
pub(super) fn refuses(conn: &mut SqliteConnection, message: &NewMessage) -> Result<bool> {
    let cannot = || database("cannot find out why a message is rejected");
    let now = clock::now(conn).map_err(cannot())?;
    conn.batch_execute("SAVEPOINT wharf_refusal").map_err(cannot())?;
    let inserted = accept::insert(message, now).load::<i64>(conn);
    conn.batch_execute("ROLLBACK TO wharf_refusal; RELEASE wharf_refusal").map_err(cannot())?;
    Ok(inserted.is_err_and(|error| is_refusal(&error)))
}

/// Whether an error is about the values: a constraint, a limit, or an error that a trigger raised, which may have any
/// text. Known errors of the database itself are excluded.
fn is_refusal(error: &DieselError) -> bool {
    const OWN_ERRORS: [&str; 6] = [
        "no such ",
        "database disk image",
        "file is not a database",
        "interrupted",
        "access permission",
        "SQL logic error",
    ];
    match kind(error) {
        Kind::Data => true,
        Kind::Server => {
            let message = error.to_string();
            !OWN_ERRORS.iter().any(|error| message.starts_with(error))
        }
        Kind::Bug
        | Kind::Configuration
        | Kind::Schema
        | Kind::Connection
        | Kind::Passing
        | Kind::Refused
        | Kind::Stopped => false,
    }
}
