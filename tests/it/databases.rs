//! The databases that a scene can use, and the SQL that differs between them.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use wharf::store::Backend;
use wharf::{Postgres, Sqlite, Store};

use crate::scene::{status, store_url};
use support::database::TestDatabase;
use support::sqlite::{SqliteFile, connect, execute};

/// The database of one test. Its SQL is PostgreSQL's; operations that differ between databases have a method.
pub trait Database: Sized {
    type Backend: Backend;
    type RunLog: RunLog;

    /// Creates an empty database.
    fn create() -> impl Future<Output = Self>;

    /// A separate store on this database, as in another process.
    fn open(&self) -> impl Future<Output = Store<Self::Backend>>;

    /// The only value of the only row, an integer.
    fn query_one_i64(&self, sql: &str) -> impl Future<Output = i64>;

    /// The first column of every row, as text.
    fn query_texts(&self, sql: &str) -> impl Future<Output = Vec<String>>;

    /// Replays as an operator does, in SQL. Returns the number of deliveries.
    fn replay(&self, message_id: &str, handler_key: &str, source: Option<&str>) -> impl Future<Output = i64>;

    /// Releases a run, in SQL; returns the number of runs.
    fn release(&self, message_id: &str, handler_key: &str, attempt: Option<i32>) -> impl Future<Output = i64>;

    /// Acts on a handler as an operator does, in SQL: for example `open_breaker`, with more arguments. Returns the
    /// number of changes.
    fn act_on_handler(&self, act: &str, handler_key: &str, more: &[(&str, &str)]) -> impl Future<Output = i64>;

    /// Resets or skips a position as an operator does, in SQL: group, topic, partition and offset as SQL values.
    fn move_ledger(&self, act: &str, values: &str) -> impl Future<Output = ()>;

    /// Milliseconds until each delivery is due, by the database's clock.
    fn due_in_ms(&self) -> impl Future<Output = Vec<i64>>;

    /// The URL or path for a child process.
    fn url(&self) -> String;

    /// Opens a store in a child process.
    fn open_at(url: &str) -> impl Future<Output = Store<Self::Backend>>;

    /// Creates the table `run`.
    fn prepare_run_log(&self) -> impl Future<Output = ()>;

    /// A separate connection that writes to the table `run`, whatever transaction is open elsewhere.
    fn run_log(url: &str) -> impl Future<Output = Self::RunLog>;

    /// The next message gets this seq.
    fn restart_sequence(&self, at: i64) -> impl Future<Output = ()>;

    /// The headers of a message as shown to operators: `name=value`, or `name` alone without a value.
    fn headers_of(&self, message_id: &str) -> impl Future<Output = Vec<String>>;

    /// Messages whose id begins with `bad` violate a constraint, which diesel reports as an error of the data.
    fn refuse_bad_by_constraint(&self) -> impl Future<Output = ()>;

    /// Messages whose id begins with `bad` cause an error of a kind that diesel does not know.
    fn refuse_bad_by_trigger(&self) -> impl Future<Output = ()>;

    /// The table `effect` violates a foreign key, which is checked at COMMIT.
    fn refuse_effects_at_commit(&self) -> impl Future<Output = ()>;

    /// The delivery of the message `bad` cannot be settled as done: the store rejects it.
    fn refuse_done_of_bad(&self) -> impl Future<Output = ()>;

    /// The database user of an action in SQL; empty if the database has no users.
    fn database_user(&self) -> &'static str;

    /// Deleting a delivery that is neither done nor discarded, or a quarantined record, is an error.
    fn refuse_deleting_unfinished_rows(&self) -> impl Future<Output = ()>;

    /// Moves the write time of identities back by this many seconds, so that no test waits until they are settled.
    fn age_identities(&self, secs: u32) -> impl Future<Output = ()>;

    /// The hashes of kept identities, as hex.
    fn identity_hashes(&self) -> impl Future<Output = Vec<String>>;
}

/// Where runs are recorded before they begin.
pub trait RunLog: Send + Sync + 'static {
    /// Records a run, given as a row of SQL values.
    fn note(&self, row: &str) -> impl Future<Output = ()> + Send;
}

const RUN_TABLE: &str = "CREATE TABLE IF NOT EXISTS run (message_id text, handler_key text, attempt int)";

impl RunLog for tokio_postgres::Client {
    async fn note(&self, row: &str) {
        self.batch_execute(&format!("INSERT INTO run VALUES {row}")).await.unwrap();
    }
}

impl RunLog for Mutex<diesel::SqliteConnection> {
    async fn note(&self, row: &str) {
        use diesel::connection::SimpleConnection;
        self.lock().unwrap().batch_execute(&format!("INSERT INTO run VALUES {row}")).unwrap();
    }
}

impl Database for TestDatabase {
    type Backend = Postgres;
    type RunLog = tokio_postgres::Client;

    fn url(&self) -> String {
        self.url()
    }

    async fn open_at(url: &str) -> Store<Postgres> {
        Store::connect(url).await.unwrap()
    }

    async fn prepare_run_log(&self) {
        self.execute(RUN_TABLE).await;
    }

    async fn run_log(url: &str) -> tokio_postgres::Client {
        support::postgres::connect(url).await
    }

    async fn create() -> Self {
        TestDatabase::create().await
    }

    async fn open(&self) -> Store<Postgres> {
        Store::connect(&store_url(self).await).await.unwrap()
    }

    async fn query_one_i64(&self, sql: &str) -> i64 {
        self.query_one_i64(sql).await
    }

    async fn query_texts(&self, sql: &str) -> Vec<String> {
        self.query_texts(sql).await
    }

    async fn replay(&self, message_id: &str, handler_key: &str, source: Option<&str>) -> i64 {
        let source = source.map_or("NULL".to_owned(), |source| format!("'{source}'"));
        self.query_one_i64(&format!("SELECT inbox_replay('{message_id}', '{handler_key}', {source})")).await
    }

    async fn release(&self, message_id: &str, handler_key: &str, attempt: Option<i32>) -> i64 {
        let attempt = attempt.map_or("NULL".to_owned(), |attempt| attempt.to_string());
        self.query_one_i64(&format!("SELECT inbox_release('{message_id}', '{handler_key}', attempt => {attempt})"))
            .await
    }

    async fn act_on_handler(&self, act: &str, handler_key: &str, more: &[(&str, &str)]) -> i64 {
        let more: String = more.iter().map(|(name, value)| format!(", {name} => {value}")).collect();
        self.query_one_i64(&format!("SELECT inbox_{act}('{handler_key}'{more})")).await
    }

    async fn move_ledger(&self, act: &str, values: &str) {
        self.query_one_i64(&format!("SELECT inbox_ledger_{act}({values})")).await;
    }

    async fn due_in_ms(&self) -> Vec<i64> {
        let sql = "SELECT (extract(epoch FROM due_at - now()) * 1000)::bigint::text FROM inbox_delivery";
        self.query_texts(sql).await.iter().map(|ms| ms.parse().unwrap()).collect()
    }

    async fn restart_sequence(&self, at: i64) {
        self.execute(&format!("ALTER SEQUENCE inbox_message_seq RESTART WITH {at}")).await;
    }

    async fn headers_of(&self, message_id: &str) -> Vec<String> {
        let sql = "SELECT concat(inbox_text(h.name), '=' || inbox_text(h.value)) FROM inbox_message m, inbox_headers(m.headers) h";
        self.query_texts(&format!("{sql} WHERE m.message_id = '{message_id}' ORDER BY h.ordinal")).await
    }

    async fn refuse_bad_by_constraint(&self) {
        let check = "CHECK (message_id NOT LIKE 'bad%') NOT VALID";
        self.execute(&format!("ALTER TABLE inbox_message ADD CONSTRAINT no_bad {check}")).await;
    }

    async fn refuse_bad_by_trigger(&self) {
        self.execute(
            "CREATE FUNCTION refuse_bad() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF NEW.message_id LIKE 'bad%' THEN RAISE EXCEPTION 'we do not like %', NEW.message_id; END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER refuse_bad BEFORE INSERT ON inbox_message FOR EACH ROW EXECUTE FUNCTION refuse_bad()",
        )
        .await;
    }

    async fn refuse_effects_at_commit(&self) {
        self.execute(
            "CREATE TABLE nobody (id text PRIMARY KEY);
             ALTER TABLE effect ADD FOREIGN KEY (message_id) REFERENCES nobody (id) DEFERRABLE INITIALLY DEFERRED",
        )
        .await;
    }

    async fn refuse_done_of_bad(&self) {
        self.execute(&format!(
            "CREATE FUNCTION refuse_done() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF EXISTS (SELECT FROM inbox_message WHERE seq = NEW.message_seq AND message_id LIKE 'bad%') THEN
                     RAISE EXCEPTION 'refused by the store';
                 END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER refuse_done BEFORE UPDATE ON inbox_delivery FOR EACH ROW WHEN (NEW.status = {})
             EXECUTE FUNCTION refuse_done()",
            status::DONE,
        ))
        .await;
    }

    fn database_user(&self) -> &'static str {
        "postgres"
    }

    async fn refuse_deleting_unfinished_rows(&self) {
        self.execute(&format!(
            "CREATE FUNCTION tripwire() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN RAISE EXCEPTION 'this was to stay'; END $$;
             CREATE TRIGGER tripwire BEFORE DELETE ON inbox_delivery FOR EACH ROW
             WHEN (OLD.status NOT IN ({}, {})) EXECUTE FUNCTION tripwire();
             CREATE TRIGGER tripwire BEFORE DELETE ON inbox_quarantine FOR EACH ROW EXECUTE FUNCTION tripwire()",
            status::DONE,
            status::DISCARDED,
        ))
        .await;
    }

    async fn age_identities(&self, secs: u32) {
        self.execute(&format!(
            "CREATE FUNCTION age_identity() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN NEW.purged_at := NEW.purged_at - interval '{secs} seconds'; RETURN NEW; END $$;
             CREATE TRIGGER age_identity BEFORE INSERT ON inbox_identity FOR EACH ROW EXECUTE FUNCTION age_identity()"
        ))
        .await;
    }

    async fn identity_hashes(&self) -> Vec<String> {
        self.query_texts("SELECT replace(hash::text, '-', '') FROM inbox_identity ORDER BY 1").await
    }
}

impl Database for SqliteFile {
    type Backend = Sqlite;
    type RunLog = Mutex<diesel::SqliteConnection>;

    fn url(&self) -> String {
        self.path().display().to_string()
    }

    async fn open_at(url: &str) -> Store<Sqlite> {
        Store::<Sqlite>::open(url).await.unwrap()
    }

    /// In a separate file: a transactional handler holds the writer of the other.
    async fn prepare_run_log(&self) {
        let log = run_log_beside(&self.url());
        execute(&mut connect(&log), &format!("PRAGMA journal_mode = WAL; {RUN_TABLE}"));
        self.execute(&format!("ATTACH '{}' AS log", log.display())).await;
    }

    async fn run_log(url: &str) -> Mutex<diesel::SqliteConnection> {
        let mut log = connect(&run_log_beside(url));
        // Only processes crash in these tests, so written data survives without fsync.
        execute(&mut log, "PRAGMA synchronous = OFF");
        Mutex::new(log)
    }

    async fn create() -> Self {
        SqliteFile::create()
    }

    async fn open(&self) -> Store<Sqlite> {
        Store::<Sqlite>::open(self.path()).await.unwrap()
    }

    async fn query_one_i64(&self, sql: &str) -> i64 {
        self.query_one_i64(sql).await
    }

    async fn query_texts(&self, sql: &str) -> Vec<String> {
        self.query_texts(sql).await
    }

    async fn replay(&self, message_id: &str, handler_key: &str, source: Option<&str>) -> i64 {
        let source = source.map_or("NULL".to_owned(), |source| format!("'{source}'"));
        let values = format!("VALUES ('{message_id}', '{handler_key}', {source})");
        self.execute(&format!("INSERT INTO inbox_replay (message_id, handler_key, source) {values}")).await;
        self.query_one_i64("SELECT affected FROM inbox_audit ORDER BY id DESC LIMIT 1").await
    }

    async fn release(&self, message_id: &str, handler_key: &str, attempt: Option<i32>) -> i64 {
        let attempt = attempt.map_or("NULL".to_owned(), |attempt| attempt.to_string());
        let values = format!("VALUES ('{message_id}', '{handler_key}', {attempt})");
        self.execute(&format!("INSERT INTO inbox_release (message_id, handler_key, attempt) {values}")).await;
        self.query_one_i64("SELECT affected FROM inbox_audit ORDER BY id DESC LIMIT 1").await
    }

    async fn act_on_handler(&self, act: &str, handler_key: &str, more: &[(&str, &str)]) -> i64 {
        let (names, values): (Vec<_>, Vec<_>) = more.iter().map(|(n, v)| (format!(", {n}"), format!(", {v}"))).unzip();
        let (names, values) = (names.concat(), values.concat());
        self.execute(&format!("INSERT INTO inbox_{act} (handler_key{names}) VALUES ('{handler_key}'{values})")).await;
        self.query_one_i64("SELECT affected FROM inbox_audit ORDER BY id DESC LIMIT 1").await
    }

    async fn move_ledger(&self, act: &str, values: &str) {
        let columns = "consumer_group, topic, kafka_partition, to_offset";
        self.execute(&format!("INSERT INTO inbox_ledger_{act} ({columns}) VALUES ({values})")).await;
    }

    async fn due_in_ms(&self) -> Vec<i64> {
        let sql = "SELECT (due_at - now()) / 1000 FROM inbox_delivery";
        self.query_texts(sql).await.iter().map(|ms| ms.parse().unwrap()).collect()
    }

    async fn restart_sequence(&self, at: i64) {
        let set = "INSERT INTO sqlite_sequence (name, seq) VALUES ('inbox_message'";
        self.execute(&format!("DELETE FROM sqlite_sequence WHERE name = 'inbox_message'; {set}, {})", at - 1)).await;
    }

    async fn headers_of(&self, message_id: &str) -> Vec<String> {
        let sql = "SELECT concat(h.value ->> 'name', '=' || (h.value ->> 'value')) FROM inbox_headers m, json_each(m.headers) h";
        self.query_texts(&format!("{sql} WHERE m.message_id = '{message_id}' ORDER BY h.key")).await
    }

    async fn refuse_bad_by_constraint(&self) {
        self.execute(
            "CREATE TABLE refused (only_once INTEGER PRIMARY KEY);
             CREATE TRIGGER refuse_bad BEFORE INSERT ON inbox_message WHEN NEW.message_id LIKE 'bad%'
             BEGIN INSERT INTO refused VALUES (1), (1); END",
        )
        .await;
    }

    async fn refuse_bad_by_trigger(&self) {
        self.execute(
            "CREATE TRIGGER refuse_bad BEFORE INSERT ON inbox_message WHEN NEW.message_id LIKE 'bad%'
             BEGIN SELECT RAISE(ABORT, 'we do not like it'); END",
        )
        .await;
    }

    async fn refuse_effects_at_commit(&self) {
        self.execute(
            "CREATE TABLE nobody (id text PRIMARY KEY);
             DROP TABLE effect;
             CREATE TABLE effect (message_id text REFERENCES nobody (id) DEFERRABLE INITIALLY DEFERRED)",
        )
        .await;
    }

    async fn refuse_done_of_bad(&self) {
        self.execute(&format!(
            "CREATE TRIGGER refuse_done BEFORE UPDATE ON inbox_delivery
             WHEN NEW.status = {} AND (SELECT message_id FROM inbox_message WHERE seq = NEW.message_seq) LIKE 'bad%'
             BEGIN SELECT RAISE(ABORT, 'refused by the store'); END",
            status::DONE,
        ))
        .await;
    }

    fn database_user(&self) -> &'static str {
        ""
    }

    async fn refuse_deleting_unfinished_rows(&self) {
        let raise = "BEGIN SELECT RAISE(ABORT, 'this was to stay'); END";
        let is_finished = format!("OLD.status IN ({}, {})", status::DONE, status::DISCARDED);
        let delivery = format!("BEFORE DELETE ON inbox_delivery WHEN NOT {is_finished}");
        self.execute(&format!("CREATE TRIGGER tripwire {delivery} {raise}")).await;
        self.execute(&format!("CREATE TRIGGER tripwire_2 BEFORE DELETE ON inbox_quarantine {raise}")).await;
    }

    async fn age_identities(&self, _: u32) {}

    async fn identity_hashes(&self) -> Vec<String> {
        self.query_texts("SELECT lower(hex(hash)) FROM inbox_identity ORDER BY 1").await
    }
}

fn run_log_beside(url: &str) -> PathBuf {
    Path::new(url).with_file_name("run.db")
}
