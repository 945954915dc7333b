//! A fresh SQLite file for each test, and a connection for the test's own SQL.
//!
//! The tests use PostgreSQL's SQL. The few expressions that differ in SQLite are translated here.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use diesel::connection::SimpleConnection;
use diesel::deserialize::FromSqlRow;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{BigInt, Text};
use diesel::sqlite::Sqlite;
use diesel::{Connection, QueryResult, RunQueryDsl, SqliteConnection};
use tempfile::TempDir;

/// The file of one test; removed when dropped.
pub struct SqliteFile {
    folder: Arc<TempDir>,
    helper: Mutex<SqliteConnection>,
}

impl SqliteFile {
    /// Creates a folder for the file. The store creates the file.
    pub fn create() -> SqliteFile {
        let folder = Arc::new(tempfile::tempdir().expect("a folder can be made"));
        let helper = connect(&folder.path().join("inbox.db"));
        SqliteFile { folder, helper: Mutex::new(helper) }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("inbox.db")
    }

    /// A separate connection, for raw SQL that is not translated.
    pub fn client(&self) -> SqliteConnection {
        connect(&self.path())
    }

    /// Runs one or more statements.
    pub async fn execute(&self, sql: &str) {
        execute(&mut self.helper.lock().expect("nothing panics while holding it"), &translated(sql));
    }

    /// The only value of the only row, an integer.
    pub async fn query_one_i64(&self, sql: &str) -> i64 {
        let values = self.query_column::<BigInt, i64>(sql);
        let [value] = values[..] else { panic!("not one row but {} from {sql}", values.len()) };
        value
    }

    /// The first column of every row, as text.
    pub async fn query_texts(&self, sql: &str) -> Vec<String> {
        self.query_column::<Text, String>(sql)
    }

    fn query_column<T, V>(&self, sql: &str) -> Vec<V>
    where
        T: 'static,
        V: FromSqlRow<T, Sqlite> + 'static,
        Column<T>: RunQueryDsl<SqliteConnection>,
        for<'q> Column<T>: diesel::query_dsl::LoadQuery<'q, SqliteConnection, V>,
    {
        let mut conn = self.helper.lock().expect("nothing panics while holding it");
        let rows = Column::<T> { sql: translated(sql), of: std::marker::PhantomData }.load::<V>(&mut *conn);
        rows.unwrap_or_else(|error| panic!("cannot query {sql}: {error:?}"))
    }
}

/// Connects to the file with a long busy timeout.
pub fn connect(path: &std::path::Path) -> SqliteConnection {
    let mut conn = SqliteConnection::establish(&path.display().to_string()).expect("the file can be opened");
    execute(&mut conn, "PRAGMA busy_timeout = 60000");
    conn
}

/// Runs one or more statements.
pub fn execute(conn: &mut SqliteConnection, sql: &str) {
    conn.batch_execute(sql).unwrap_or_else(|error| panic!("cannot execute {sql}: {error:?}"));
}

/// A query whose first column has the type `T`.
struct Column<T> {
    sql: String,
    of: std::marker::PhantomData<T>,
}

impl<T> QueryFragment<Sqlite> for Column<T> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Sqlite>) -> QueryResult<()> {
        out.unsafe_to_cache_prepared();
        out.push_sql(&self.sql);
        Ok(())
    }
}

impl<T> QueryId for Column<T> {
    type QueryId = ();
    const HAS_STATIC_QUERY_ID: bool = false;
}

impl<T> Query for Column<T> {
    type SqlType = T;
}

impl<T> RunQueryDsl<SqliteConnection> for Column<T> {}

/// Translates PostgreSQL's expressions for the clock, intervals, casts and bytes to SQLite's.
pub fn translated(sql: &str) -> String {
    let sql = between(sql, "interval '", "'", |interval| micros(interval).to_string());
    let sql = between(&sql, "inbox_text(", ")", |bytes| {
        format!("CASE typeof({bytes}) WHEN 'blob' THEN '\\x' || lower(hex({bytes})) ELSE {bytes} END")
    });
    without_casts(&sql).replace("now()", "(SELECT at FROM inbox_now)")
}

/// Replaces each `start…end` by the result of `with` for the text between.
fn between(sql: &str, start: &str, end: &str, with: impl Fn(&str) -> String) -> String {
    let mut parts = sql.split(start);
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (middle, rest) = part.split_once(end).unwrap_or((part, ""));
        whole.push_str(&with(middle));
        whole.push_str(rest);
    }
    whole
}

fn micros(interval: &str) -> i64 {
    let (number, unit) = interval.split_once(' ').expect("an interval is a number and a unit");
    let secs = match unit.trim_end_matches('s') {
        "" | "second" => 1,
        "minute" => 60,
        "day" => 86_400,
        "year" => 365 * 86_400,
        other => panic!("no such unit: {other}"),
    };
    number.parse::<i64>().expect("an interval begins with a number") * secs * 1_000_000
}

fn without_casts(sql: &str) -> String {
    let mut parts = sql.split("::");
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        whole.push_str(part.trim_start_matches(|c: char| c.is_ascii_lowercase()));
    }
    whole
}
