//! Prints Wharf's events as lines while they happen. On a terminal it also shows a table of the deliveries and updates
//! it.

use std::collections::BTreeMap;
use std::fmt::{Debug, Write};
use std::io::{IsTerminal, stdout};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use diesel::sql_types::{BigInt, Text};
use diesel::{Connection, QueryableByName, RunQueryDsl, SqliteConnection};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

const REFRESH: Duration = Duration::from_millis(100);

/// The output of the quickstart. It has its own connection to the database, as any other program could have.
pub struct Board {
    conn: SqliteConnection,
    lines: Arc<Mutex<Vec<Line>>>,
    is_terminal: bool,
    /// The height of the table at the bottom, which the next frame overwrites.
    drawn: usize,
}

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = Text)]
    handler_key: String,
    #[diesel(sql_type = Text)]
    state: String,
    #[diesel(sql_type = BigInt)]
    deliveries: i64,
}

#[derive(QueryableByName)]
struct Answer {
    #[diesel(sql_type = BigInt)]
    value: i64,
}

impl Board {
    pub fn open(database: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let lines = Arc::default();
        tracing_subscriber::registry().with(Listener(Arc::clone(&lines))).init();
        let mut conn = SqliteConnection::establish(database)?;
        diesel::sql_query("PRAGMA busy_timeout = 5000").execute(&mut conn)?;
        Ok(Self { conn, lines, is_terminal: stdout().is_terminal(), drawn: 0 })
    }

    pub fn execute(&mut self, sql: &str) -> diesel::QueryResult<usize> {
        diesel::sql_query(sql).execute(&mut self.conn)
    }

    /// Returns the value of an SQL expression: a number, or 1 if it is true.
    pub fn ask(&mut self, expression: &str) -> diesel::QueryResult<i64> {
        let question = format!("SELECT CAST(coalesce({expression}, 0) AS INTEGER) AS value");
        Ok(diesel::sql_query(question).get_result::<Answer>(&mut self.conn)?.value)
    }

    /// Shows lines and the table until the condition is true.
    pub async fn show_until(&mut self, condition: &str) -> diesel::QueryResult<()> {
        loop {
            self.show()?;
            if self.ask(condition)? == 1 {
                return Ok(());
            }
            tokio::time::sleep(REFRESH).await;
        }
    }

    /// Shows the last lines and the final table.
    pub fn finish(&mut self) -> diesel::QueryResult<()> {
        self.show()?;
        if !self.is_terminal {
            println!("\n{}", self.table()?);
        }
        Ok(())
    }

    fn show(&mut self) -> diesel::QueryResult<()> {
        let lines = std::mem::take(&mut *self.lines.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        if !self.is_terminal {
            lines.iter().for_each(|line| println!("{}", line.text(false)));
            return Ok(());
        }
        let table = self.table()?;
        let mut frame = String::new();
        if self.drawn > 0 {
            let _ = write!(frame, "\x1b[{}A\x1b[J", self.drawn);
        }
        for line in &lines {
            let _ = writeln!(frame, "{}", line.text(true));
        }
        let _ = writeln!(frame, "\n{table}");
        self.drawn = table.lines().count() + 1;
        print!("{frame}");
        Ok(())
    }

    fn table(&mut self) -> diesel::QueryResult<String> {
        let sql = "SELECT handler_key, state, count(*) AS deliveries FROM inbox_status GROUP BY handler_key, state";
        let mut handlers: BTreeMap<String, BTreeMap<String, i64>> = BTreeMap::new();
        for Count { handler_key, state, deliveries } in diesel::sql_query(sql).load(&mut self.conn)? {
            handlers.entry(handler_key).or_default().insert(state, deliveries);
        }
        let states = ["pending", "running", "done", "poisoned"];
        let mut table = format!("{:<16}", "handler");
        for state in states {
            let _ = write!(table, "{state:>10}");
        }
        for (handler, counts) in handlers {
            let _ = write!(table, "\n{handler:<16}");
            for state in states {
                let _ = write!(table, "{:>10}", counts.get(state).unwrap_or(&0));
            }
        }
        Ok(table)
    }
}

/// One event as a line.
#[derive(Default)]
struct Line {
    what: String,
    fields: BTreeMap<&'static str, String>,
}

impl Line {
    fn text(&self, is_coloured: bool) -> String {
        let field = |name: &str| self.fields.get(name).map_or("", String::as_str);
        let why = match self.what.as_str() {
            "accepted" => format!("for {} handlers", field("deliveries")),
            "quarantined" => field("reason").to_owned(),
            "retried" => format!("attempt {}: {}, again in {} ms", field("attempt"), field("error"), field("after_ms")),
            "poisoned" => format!("attempt {}: {} ({})", field("attempt"), field("error"), field("reason")),
            _ => String::new(),
        };
        let colour = match self.what.as_str() {
            _ if !is_coloured || std::env::var_os("NO_COLOR").is_some() => "",
            "done" => "\x1b[32m",
            "retried" | "duplicate" => "\x1b[33m",
            "poisoned" | "quarantined" => "\x1b[31m",
            _ => "\x1b[36m",
        };
        let reset = if colour.is_empty() { "" } else { "\x1b[0m" };
        let text = format!("{:<12}{reset}{:<10}{:<16}{why}", self.what, field("message_id"), field("handler"));
        format!("{colour}{}", text.trim_end())
    }
}

/// Collects the events that are decisions. Called while Wharf works, so it only stores them; `show` prints them.
struct Listener(Arc<Mutex<Vec<Line>>>);

impl<S: Subscriber> Layer<S> for Listener {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let decisions = ["accepted", "duplicate", "quarantined", "done", "retried", "poisoned"];
        let mut line = Line::default();
        event.record(&mut line);
        if event.metadata().target().starts_with("wharf::") && decisions.contains(&line.what.as_str()) {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(line);
        }
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.what = format!("{value:?}"),
            name => drop(self.fields.insert(name, format!("{value:?}"))),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }
}
