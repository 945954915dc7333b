//! Handler ids: reads what is known, lets `aliases.rs` decide, writes what is missing, all under one lock.

use std::collections::HashMap;

use diesel::sql_types::{Array, Bool, SmallInt, Text};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::statement::statement;
use crate::error::Result;
use crate::store::aliases;
use crate::store::seam::{HandlerIds, WantedHandler};

statement! {
    /// Two processes that start at once must not give one handler two ids.
    Lock("SELECT pg_advisory_xact_lock(hashtextextended('wharf register ' || current_schema(), 0)) IS NULL")
    -> (Bool) {}
}

statement! {
    KnownKeys<'a>("SELECT key, handler_id FROM inbox_handler_key WHERE key = ANY($1)") -> (Text, SmallInt) {
        keys: &'a [&'a str] => Array<Text>,
    }
}

statement! {
    NewHandler<'a>("
        WITH handler AS (INSERT INTO inbox_handler (key) VALUES (($1::text[])[1]) RETURNING id)
        INSERT INTO inbox_handler_key (key, handler_id) SELECT unnest($1), id FROM handler") {
        keys: &'a [String] => Array<Text>,
    }
}

statement! {
    NewAlias<'a>("INSERT INTO inbox_handler_key (key, handler_id) VALUES ($1, $2)") {
        key: &'a str => Text,
        handler_id: i16 => SmallInt,
    }
}

statement! {
    /// The name people see is the one the newest registration uses.
    Rename<'a>("UPDATE inbox_handler SET key = $1 WHERE id = $2 AND key <> $1") {
        key: &'a str => Text,
        handler_id: i16 => SmallInt,
    }
}

pub(super) async fn register(conn: &mut AsyncPgConnection, wanted: &[WantedHandler]) -> Result<Vec<HandlerIds>> {
    let known = conn
        .transaction(async |conn| {
            Lock {}.get_result::<(bool,)>(conn).await?;
            let plan = aliases::plan(wanted, &known_keys(conn, wanted).await?);
            for keys in &plan.new_handlers {
                NewHandler { keys }.execute(conn).await?;
            }
            for (key, handler_id) in &plan.aliases {
                NewAlias { key, handler_id: *handler_id }.execute(conn).await?;
            }
            let known = known_keys(conn, wanted).await?;
            for handler in wanted {
                if let Some(&handler_id) = known.get(&handler.key) {
                    Rename { key: &handler.key, handler_id }.execute(conn).await?;
                }
            }
            diesel::QueryResult::Ok(known)
        })
        .await
        .map_err(database("cannot register the handlers"))?;
    aliases::resolve(wanted, &known)
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
    Ok(KnownKeys { keys: &keys }.load::<(String, i16)>(conn).await?.into_iter().collect())
}
