//! Finds the database URL without exposing its password, and connects.
//!
//! A URL with a password comes from `DATABASE_URL` or a file, never from the command line: arguments are visible in
//! `ps` and in the shell's history. Commands other than `migrate` never create a SQLite file.

use std::path::{Path, PathBuf};

use clap::Args;
use wharf::store::PostgresOptions;
use wharf::{Postgres, Sqlite, Store};

use crate::exit::{Exit, Failure};

/// Where the URL comes from.
#[derive(Debug, Args)]
pub struct DatabaseArguments {
    /// postgres://user@host/database or sqlite:file; a URL with a password is refused here
    #[arg(
        long,
        global = true,
        value_name = "URL",
        conflicts_with = "database_url_file",
        help_heading = "Options of every command"
    )]
    database: Option<String>,
    /// A file that holds the URL. Without either option, DATABASE_URL is used
    #[arg(long, global = true, value_name = "FILE", help_heading = "Options of every command")]
    database_url_file: Option<PathBuf>,
}

/// A database by its kind.
#[derive(Clone)]
pub enum Database {
    Postgres(String),
    Sqlite(PathBuf),
}

impl Database {
    pub fn given(arguments: &DatabaseArguments) -> Result<Self, Failure> {
        if let Some(url) = &arguments.database {
            if holds_password(url) {
                return Err(Failure::usage(
                    "--database holds a password, which other users see in `ps` and the shell's history keeps. \
                     Put the URL into DATABASE_URL or into a file for --database-url-file",
                ));
            }
            return Self::parse(url);
        }
        if let Some(path) = &arguments.database_url_file {
            let url = std::fs::read_to_string(path)
                .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))?;
            return Self::parse(url.trim());
        }
        match std::env::var("DATABASE_URL") {
            Ok(url) if !url.trim().is_empty() => Self::parse(url.trim()),
            Ok(_) | Err(_) => {
                Err(Failure::usage("no database is given: set DATABASE_URL, or use --database-url-file or --database"))
            }
        }
    }

    /// The text may hold a secret, so errors never quote it.
    fn parse(url: &str) -> Result<Self, Failure> {
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            return Ok(Self::Postgres(url.to_owned()));
        }
        let path = url.strip_prefix("sqlite:").map(|path| path.strip_prefix("//").unwrap_or(path));
        match path {
            Some("" | ":memory:") => Err(Failure::usage("sqlite: must be followed by the path of a file")),
            Some(path) => Ok(Self::Sqlite(PathBuf::from(path))),
            None => Err(Failure::usage(
                "cannot parse the database URL: use the form postgres://user@host:5432/database or sqlite:file.db",
            )),
        }
    }
}

/// The tool uses few connections, because the service needs the rest.
pub async fn postgres(url: &str, connections: usize) -> Result<Store<Postgres>, Failure> {
    let options = PostgresOptions::default().pool_size(connections);
    Ok(Store::<Postgres>::connect_with(url, options).await?)
}

/// Opens the file, which must exist unless it may be created.
pub async fn sqlite(path: &Path, is_made: bool) -> Result<Store<Sqlite>, Failure> {
    if !is_made && !path.is_file() {
        let message = format!("there is no file {}; `wharf migrate` creates it", path.display());
        return Err(Failure::Told(Exit::Connection, message));
    }
    Ok(Store::<Sqlite>::open(path).await?)
}

/// Refuses when in doubt: a colon before the last `@`, or a parameter that may be a password.
fn holds_password(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let is_sqlite = url.starts_with("sqlite:");
    let is_in_front = rest.rfind('@').is_some_and(|at| rest[..at].contains(':'));
    // A percent-encoded name may spell `password`.
    let is_parameter = |pair: &str| {
        let name = pair.split('=').next().unwrap_or_default().to_ascii_lowercase();
        name.contains("password") || name.contains('%')
    };
    let is_behind = rest.split_once('?').is_some_and(|(_, query)| query.split('&').any(is_parameter));
    !is_sqlite && (is_in_front || is_behind || url.to_ascii_lowercase().contains("password="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_found_in_every_part_of_a_url() {
        for url in [
            "postgres://me:hunter2@db/shop",
            "postgresql://me:hunt/er2@db:5432/shop",
            "postgres://db/shop?user=me&password=hunter2",
            "postgres://db/shop?p%61ssword=hunter2",
            "host=db user=me password=hunter2",
        ] {
            assert!(holds_password(url), "{url}");
        }
        for url in ["postgres://me@db:5432/shop", "postgres://db/shop?sslmode=require", "sqlite:a@b:c.db"] {
            assert!(!holds_password(url), "{url}");
        }
    }

    #[test]
    fn a_url_that_cannot_be_parsed_is_not_quoted() {
        for url in ["mysql://me:hunter2@db", "hunter2", "sqlite:"] {
            let Err(Failure::Told(exit, message)) = Database::parse(url) else { panic!("{url}") };
            assert_eq!(exit, Exit::Usage);
            assert!(!message.contains("hunter2"), "{message}");
        }
    }
}
