//! Handler ids: reads what is known, lets `aliases.rs` decide, writes what is missing, all under one lock.

use std::collections::HashMap;

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::{Trouble, database};
use super::statement::statements;
use crate::store::aliases;
use crate::store::seam::{HandlerIds, WantedHandler};
use crate::types::Result;

statements! {
    /// Two processes that start at once must not give one handler two ids.
    Lock("SELECT pg_advisory_xact_lock(hashtextextended('wharf register ' || current_schema(), 0)) IS NULL") -> bool {}

    KnownKeys<'a>("SELECT key, handler_id FROM inbox_handler_key WHERE key = ANY(:keys)")
    -> (String, i16) { keys: &'a [&'a str] }

    NewHandler<'a>("
        WITH handler AS (INSERT INTO inbox_handler (key) VALUES ((:keys::text[])[1]) RETURNING id)
        INSERT INTO inbox_handler_key (key, handler_id) SELECT unnest(:keys), id FROM handler") { keys: &'a [String] }

    NewAlias<'a>("INSERT INTO inbox_handler_key (key, handler_id) VALUES (:key, :handler_id)")
    { key: &'a str, handler_id: i16 }

    /// The name people see is the one the newest registration uses.
    Rename<'a>("UPDATE inbox_handler SET key = :key WHERE id = :handler_id AND key <> :key")
    { key: &'a str, handler_id: i16 }

    /// Under every id: deliveries that are stored under an older one are this handler's too.
    SetOrder<'a>("
        UPDATE inbox_handler SET is_ordered = :is_ordered, passes_poisoned = :passes_poisoned
        WHERE id = ANY (:all) AND (is_ordered, passes_poisoned) IS DISTINCT FROM (:is_ordered, :passes_poisoned)")
    { is_ordered: bool, passes_poisoned: bool, all: &'a [i16] }

    /// Processes that know only one of the ids must not add deliveries to what is there under another.
    Unite<'a>("
        UPDATE inbox_handler SET same_as = :current
        WHERE (id = ANY (:all) OR same_as = ANY (:all)) AND same_as IS DISTINCT FROM :current")
    { current: i16, all: &'a [i16] }

    /// Two handlers of one program are two, whatever a later version made of them: it was rolled back.
    Part<'a>("
        UPDATE inbox_handler h SET same_as = NULL
        WHERE h.id = ANY (:own) AND h.same_as IS NOT NULL
          AND (SELECT true FROM inbox_handler o
               WHERE o.id = ANY (:others) AND coalesce(o.same_as, o.id) = h.same_as LIMIT 1)")
    { own: &'a [i16], others: &'a [i16] }
}

pub(super) async fn register(conn: &mut AsyncPgConnection, wanted: &[WantedHandler]) -> Result<Vec<HandlerIds>> {
    let registered = conn
        .build_transaction()
        .read_committed()
        .run(async |conn| {
            Lock {}.load::<bool>(conn).await?;
            let known = known_keys(conn, wanted).await?;
            aliases::refuse_shared_ids(wanted, &known)?;
            let plan = aliases::plan(wanted, &known);
            for keys in &plan.new_handlers {
                NewHandler { keys }.execute(conn).await?;
            }
            for (key, handler_id) in &plan.aliases {
                NewAlias { key, handler_id: *handler_id }.execute(conn).await?;
            }
            let ids = aliases::resolve(wanted, &known_keys(conn, wanted).await?)?;
            let every: Vec<i16> = ids.iter().flat_map(|ids| ids.all.iter().copied()).collect();
            for (handler, ids) in wanted.iter().zip(&ids) {
                Rename { key: &handler.key, handler_id: ids.current }.execute(conn).await?;
                let passes_poisoned = handler.order.is_some_and(|order| order.passes_poisoned);
                let set = SetOrder { is_ordered: handler.order.is_some(), passes_poisoned, all: &ids.all };
                set.execute(conn).await?;
                let others = every.iter().copied().filter(|id| !ids.all.contains(id)).collect::<Vec<i16>>();
                Part { own: &ids.all, others: &others }.execute(conn).await?;
                if ids.all.len() > 1 {
                    Unite { current: ids.current, all: &ids.all }.execute(conn).await?;
                }
            }
            Result::<_, Trouble>::Ok(ids)
        })
        .await;
    registered.map_err(|trouble| trouble.or(database("cannot register the handlers")))
}

async fn known_keys(
    conn: &mut AsyncPgConnection,
    wanted: &[WantedHandler],
) -> diesel::QueryResult<HashMap<String, i16>> {
    let keys: Vec<&str> = wanted
        .iter()
        .flat_map(|handler| std::iter::once(&handler.key).chain(&handler.former_keys))
        .map(String::as_str)
        .collect();
    Ok(KnownKeys { keys: &keys }.load(conn).await?.into_iter().collect())
}
