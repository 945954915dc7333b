//! Reads the plans that `auto_explain` wrote to the server's log, and reports plans whose cost grows with a table.

use serde_json::Value;

/// The tables that grow without bound.
const TABLES: [&str; 6] =
    ["inbox_delivery", "inbox_message", "inbox_quarantine", "inbox_identity", "inbox_attempt", "inbox_outbox"];

/// The maximum number of rows that one scan of a statement may read: the requested rows, plus those that are running or
/// not settled yet. This is much less than a table.
const ROWS_MAX: f64 = 20_000.0;

/// The maximum number of rows that one scan may read per handler when it counts the backlog: `inbox_backlog` and the
/// groups of open deliveries count no further.
const BACKLOG_ROWS_MAX: f64 = 12_000.0;
const COUNTED_BY_HANDLER: [&str; 2] = ["inbox_backlog", "count(*) AS deliveries"];

/// One executed statement.
pub struct Plan {
    pub sql: String,
    root: Value,
    is_compiled: bool,
}

/// The plans in `log` of sessions that Wharf opened to `database`. The line prefix ends with the two names.
pub fn plans(log: &str, database: &str) -> Vec<Plan> {
    let ours = format!(" {database} wharf LOG:  duration: ");
    let mut plans = Vec::new();
    let mut lines = log.lines().peekable();
    while let Some(line) = lines.next() {
        if !line.contains(&ours) || !line.ends_with("plan:") {
            continue;
        }
        let mut json = String::new();
        while let Some(more) = lines.next_if(|line| line.starts_with('\t')) {
            json.push_str(more);
        }
        let explained: Value = serde_json::from_str(&json).expect("auto_explain writes JSON");
        let sql = explained["Query Text"].as_str().expect("a plan has its statement").to_owned();
        let is_compiled = explained.get("JIT").is_some();
        plans.push(Plan { sql, root: explained["Plan"].clone(), is_compiled });
    }
    plans
}

impl Plan {
    /// Pages that the statement read, from memory or disk.
    pub fn pages(&self) -> u64 {
        let pages = |name: &str| self.root[name].as_u64().expect("buffers are logged");
        pages("Shared Hit Blocks") + pages("Shared Read Blocks")
    }

    /// Rows the statement returned.
    pub fn rows(&self) -> f64 {
        number(&self.root, "Actual Rows")
    }

    /// Whether the plan contains this text.
    pub fn mentions(&self, piece: &str) -> bool {
        self.root.to_string().contains(piece)
    }

    /// Everything in this plan whose cost grows with the tables, or exceeds the limits above.
    pub fn offences(&self) -> Vec<String> {
        let mut offences = Vec::new();
        if self.is_compiled {
            offences.push(format!("JIT for\n{}\n{:#}", self.sql, self.root));
        }
        walk(&self.root, &mut |node| {
            let kind = node["Node Type"].as_str().unwrap_or_default();
            let table = node["Relation Name"].as_str().unwrap_or_default();
            if !TABLES.contains(&table) || !kind.ends_with("Scan") {
                return;
            }
            let each = number(node, "Actual Rows")
                + number(node, "Rows Removed by Filter")
                + number(node, "Rows Removed by Index Recheck");
            let seen = each * number(node, "Actual Loops");
            let is_too_much = match COUNTED_BY_HANDLER.iter().any(|piece| self.sql.contains(piece)) {
                true => each > BACKLOG_ROWS_MAX,
                false => seen > ROWS_MAX,
            };
            if kind == "Seq Scan" || is_too_much {
                offences.push(format!("{kind} on {table} that looks at {seen} rows in\n{}\n{:#}", self.sql, self.root));
            }
        });
        offences
    }
}

/// Whether a plan from `EXPLAIN (FORMAT JSON)` reads `table` by `index` and in no other way.
pub fn reads_by_index(explained: &Value, table: &str, index: &str) -> bool {
    let mut scans = Vec::new();
    walk(&explained[0]["Plan"], &mut |node| {
        let is_scan = node["Node Type"].as_str().is_some_and(|kind| kind.ends_with("Scan"));
        if is_scan && node["Relation Name"] == table {
            let below = node["Plans"].as_array().cloned().unwrap_or_default();
            scans.push(node["Index Name"] == index || below.iter().any(|node| node["Index Name"] == index));
        }
    });
    !scans.is_empty() && scans.into_iter().all(|by_index| by_index)
}

fn walk(node: &Value, visit: &mut impl FnMut(&Value)) {
    visit(node);
    for child in node["Plans"].as_array().into_iter().flatten() {
        walk(child, visit);
    }
}

fn number(node: &Value, name: &str) -> f64 {
    node[name].as_f64().unwrap_or_default()
}
