//! Handler ids: reads the known keys, lets `aliases.rs` decide, writes the missing ids, all in one turn of the writer.

use std::collections::HashMap;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock;
use super::errors::database;
use super::poison;
use super::statement::{only_row, statements};
use crate::store::aliases;
use crate::store::seam::{HandlerIds, WantedHandler};
use crate::types::Result;

statements! {
    /// Reads all keys: there are as many as handler keys were ever registered.
    KnownKeys("SELECT key, handler_id FROM inbox_handler_key") -> (String, i16) {}

    NewHandler<'a>("INSERT INTO inbox_handler (key, registered_at) VALUES (:key, :now) RETURNING id")
    -> i16 { key: &'a str, now: i64 }

    NewAlias<'a>("INSERT INTO inbox_handler_key (key, handler_id) VALUES (:key, :handler_id)")
    { key: &'a str, handler_id: i16 }

    /// The displayed name is the key of the newest registration.
    Rename<'a>("UPDATE inbox_handler SET key = :key WHERE id = :handler_id AND key <> :key")
    { key: &'a str, handler_id: i16 }

    SetOrder("
        UPDATE inbox_handler SET is_ordered = :is_ordered, passes_poisoned = :passes_poisoned, is_fair = :is_fair
        WHERE id = :handler_id AND (is_ordered <> :is_ordered OR passes_poisoned <> :passes_poisoned OR is_fair <> :is_fair)")
    { is_ordered: bool, passes_poisoned: bool, is_fair: bool, handler_id: i16 }

    /// A limit that an operator has set stays.
    SetRate("
        UPDATE inbox_handler
        SET registered_interval_us = :interval_us, registered_burst = :burst,
            rate_interval_us = CASE WHEN rate_is_set THEN rate_interval_us ELSE :interval_us END,
            rate_burst = CASE WHEN rate_is_set THEN rate_burst ELSE :burst END,
            rate_next_at = CASE WHEN rate_is_set THEN rate_next_at END
        WHERE id = :handler_id AND (registered_interval_us IS NOT :interval_us OR registered_burst IS NOT :burst)")
    { interval_us: Option<i64>, burst: Option<i32>, handler_id: i16 }

    SameAs("SELECT id, same_as FROM inbox_handler") -> (i16, Option<i16>) {}

    SetSameAs("UPDATE inbox_handler SET same_as = :same_as WHERE id = :handler_id")
    { same_as: Option<i16>, handler_id: i16 }

    /// The open state belongs to every id: the probe of the lowest one could not close the breaker of another.
    ShareBreaker("
        UPDATE inbox_handler AS h
        SET breaker_opened_at = o.breaker_opened_at, breaker_error = o.breaker_error, breaker_probe_at = o.breaker_probe_at
        FROM (SELECT * FROM inbox_handler WHERE same_as = :current AND breaker_opened_at IS NOT NULL ORDER BY id LIMIT 1) o
        WHERE h.same_as = :current AND h.breaker_opened_at IS NULL")
    { current: i16 }

    /// A limit that an operator has set belongs to every id, because claims read that of the lowest one. It comes with
    /// its schedule. If several ids have one, that of the current id stays.
    ShareRate("
        UPDATE inbox_handler AS h
        SET rate_is_set = true, rate_interval_us = s.rate_interval_us, rate_burst = s.rate_burst, rate_next_at = s.rate_next_at
        FROM (SELECT * FROM inbox_handler WHERE same_as = :current AND rate_is_set ORDER BY id <> :current, id LIMIT 1) s
        WHERE h.same_as = :current
          AND (NOT h.rate_is_set OR h.rate_interval_us IS NOT s.rate_interval_us OR h.rate_burst IS NOT s.rate_burst)")
    { current: i16 }

    /// A delivery may be held behind one of an id that is another handler now, whose end does not promote it. So the
    /// first held delivery of each key becomes due; one that still has a member before it is held again by the next
    /// claim.
    PromoteParted("
        UPDATE inbox_delivery SET due_at = :now
        WHERE (message_seq, handler_id) IN (
            SELECT min(message_seq), handler_id FROM inbox_delivery INDEXED BY inbox_delivery_due
            WHERE handler_id = :handler_id AND finished_at IS NULL AND due_at = 9223372036854775807 AND order_hash IS NOT NULL
            GROUP BY order_hash)")
    { now: i64, handler_id: i16 }
}

/// One transaction of the writer, so that two processes that start at the same time see each other's keys.
pub(super) fn register(conn: &mut SqliteConnection, wanted: &[WantedHandler]) -> Result<Vec<HandlerIds>> {
    let cannot = || database("cannot register the handlers");
    let known = known_keys(conn).map_err(cannot())?;
    aliases::refuse_shared_ids(wanted, &known)?;
    add_missing(conn, wanted, &known).map_err(cannot())?;
    let ids = aliases::resolve(wanted, &known_keys(conn).map_err(cannot())?)?;
    unite_and_part(conn, wanted, &ids).map_err(cannot())?;
    Ok(ids)
}

fn known_keys(conn: &mut SqliteConnection) -> QueryResult<HashMap<String, i16>> {
    Ok(KnownKeys {}.load(conn)?.into_iter().collect())
}

/// Writes the ids that `aliases.rs` has planned.
fn add_missing(conn: &mut SqliteConnection, wanted: &[WantedHandler], known: &HashMap<String, i16>) -> QueryResult<()> {
    let now = clock::now(conn)?;
    let plan = aliases::plan(wanted, known);
    let mut aliases = plan.aliases;
    for keys in plan.new_handlers {
        let Some(first) = keys.first() else { continue };
        let id = NewHandler { key: first, now }.load::<i16>(conn).and_then(only_row)?;
        aliases.extend(keys.into_iter().map(|key| (key, id)));
    }
    for (key, handler_id) in &aliases {
        NewAlias { key, handler_id: *handler_id }.execute(conn)?;
    }
    Ok(())
}

/// Writes the options of each handler, and which of its ids belong together.
fn unite_and_part(conn: &mut SqliteConnection, wanted: &[WantedHandler], ids: &[HandlerIds]) -> QueryResult<()> {
    let now = clock::now(conn)?;
    let every: Vec<i16> = ids.iter().flat_map(|ids| ids.all.iter().copied()).collect();
    for (handler, ids) in wanted.iter().zip(ids) {
        Rename { key: &handler.key, handler_id: ids.current }.execute(conn)?;
        let passes_poisoned = handler.order.is_some_and(|order| order.passes_poisoned);
        for &handler_id in ids.all.iter() {
            let (is_ordered, is_fair) = (handler.order.is_some(), handler.is_fair);
            SetOrder { is_ordered, passes_poisoned, is_fair, handler_id }.execute(conn)?;
            let (interval_us, burst) = handler.rate.map(|rate| (rate.interval_us, rate.burst)).unzip();
            SetRate { interval_us, burst, handler_id }.execute(conn)?;
        }
        poison::set(conn, handler.calls_on_poison, &ids.all)?;
        // Two handlers of one program are separate, even if a later version united them: that version was rolled back.
        let rows = SameAs {}.load::<(i16, Option<i16>)>(conn)?;
        let stands_for =
            |id: i16| rows.iter().find(|(row, _)| *row == id).map_or(id, |(row, same)| same.unwrap_or(*row));
        let others: Vec<i16> = every.iter().filter(|id| !ids.all.contains(id)).map(|id| stands_for(*id)).collect();
        let is_parted = |(id, same_as): &&(i16, Option<i16>)| {
            ids.all.contains(id) && same_as.is_some_and(|same_as| others.contains(&same_as))
        };
        let mut parted = Vec::new();
        for &(id, same_as) in rows.iter().filter(is_parted) {
            SetSameAs { same_as: None, handler_id: id }.execute(conn)?;
            parted.push(same_as);
        }
        for &(handler_id, _) in rows.iter().filter(|(_, same_as)| parted.contains(same_as)) {
            PromoteParted { now, handler_id }.execute(conn)?;
        }
        // Processes that know only one of the ids must not add deliveries to messages that have one under another id.
        if ids.all.len() > 1 {
            for (id, same_as) in &rows {
                let is_ours = ids.all.contains(id) || same_as.is_some_and(|same_as| ids.all.contains(&same_as));
                if is_ours {
                    SetSameAs { same_as: Some(ids.current), handler_id: *id }.execute(conn)?;
                }
            }
            ShareBreaker { current: ids.current }.execute(conn)?;
            ShareRate { current: ids.current }.execute(conn)?;
        }
    }
    Ok(())
}
