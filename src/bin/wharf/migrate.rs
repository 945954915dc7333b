//! `migrate`: updates the schema to the version of this build, shows its version, or prints the SQL for other migration
//! tools.

use serde_json::json;
use wharf::Store;
use wharf::store::Backend;

use crate::arguments::MigrateCommand;
use crate::exit::{Exit, Failure};
use crate::output::{Output, own_text};
use crate::session::Session;

pub async fn run<B: Backend>(session: &Session<B>, command: Option<MigrateCommand>) -> Result<Exit, Failure> {
    let before = session.store.schema_version().await?;
    if command.is_none() {
        session.store.migrate().await?;
    }
    let now = session.store.schema_version().await?;
    let is_current = now.found == Some(now.known);
    let version = |found: Option<i32>| found.map_or_else(|| "none".to_owned(), |found| found.to_string());
    let text = match command {
        _ if session.output.is_json => {
            session.output.document(&json!({
                "found": before.found, "now": now.found, "known": now.known, "is_current": is_current,
            }))?;
            return Ok(if is_current { Exit::Well } else { Exit::Problem });
        }
        Some(MigrateCommand::Status) => {
            format!("schema version {}, this build knows {}", version(now.found), now.known)
        }
        None if before.found == now.found => format!("schema version {}: nothing to do", version(now.found)),
        None => format!("schema version {}, it was {}", version(now.found), version(before.found)),
    };
    session.output.line(text)?;
    Ok(if is_current { Exit::Well } else { Exit::Problem })
}

/// The SQL of every migration, in order. Needs no database.
pub fn print<B: Backend>(output: Output) -> Result<Exit, Failure> {
    let migrations = Store::<B>::migrations();
    if output.is_json {
        let migrations: Vec<_> =
            migrations.iter().map(|(version, sql)| json!({ "version": version, "sql": sql })).collect();
        output.document(&migrations)?;
        return Ok(Exit::Well);
    }
    for (version, sql) in migrations {
        own_text(&format!("-- version {version}\n{sql}"))?;
    }
    Ok(Exit::Well)
}
