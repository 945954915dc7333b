//! The one module that prints: tables and lines for people, one JSON document for machines.
//!
//! Everything is escaped here. Tables and lines fit the terminal, or 80 columns without one. Colours are used only on a
//! terminal and not with `NO_COLOR`. Nothing here panics when the reader closes the output.

use std::io::{self, IsTerminal, Write};

use comfy_table::{Attribute, CellAlignment, Color, ColumnConstraint, ContentArrangement, Table, presets};
use serde::Serialize;
use wharf::operate::HandlerStatus;

use crate::escape;

/// The width without a terminal, for mails and tickets.
const WIDTH: u16 = 80;
/// The minimum width: below it, a table has no room for its columns.
const WIDTH_MIN: u16 = 60;

/// How the program prints.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub is_json: bool,
    is_terminal: bool,
    is_coloured: bool,
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    title: &'static str,
    kind: ColumnKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnKind {
    /// Takes the remaining width, and breaks into several lines where necessary.
    Text,
    /// Short, and never broken into lines.
    Word,
    /// Never broken into lines, and aligned to the right.
    Number,
}

/// A value in a table.
#[derive(Debug, Clone)]
pub struct Cell {
    text: String,
    tone: Tone,
}

/// How a value is highlighted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Warning,
    Problem,
}

pub fn text(title: &'static str) -> Column {
    Column { title, kind: ColumnKind::Text }
}

pub fn word(title: &'static str) -> Column {
    Column { title, kind: ColumnKind::Word }
}

pub fn number(title: &'static str) -> Column {
    Column { title, kind: ColumnKind::Number }
}

#[allow(clippy::needless_pass_by_value, reason = "numbers, texts and references to them alike")]
pub fn cell(value: impl ToString) -> Cell {
    Cell { text: escape::text(&value.to_string()), tone: Tone::Plain }
}

/// The value, or a dash without one.
pub fn maybe(value: Option<impl ToString>) -> Cell {
    value.map_or_else(|| cell("-"), cell)
}

/// A text that may be long, on one line and cut off.
pub fn brief(value: Option<&str>, chars_max: usize) -> Cell {
    let mut cell = maybe(value);
    cell.text = escape::cut(&cell.text, chars_max);
    cell
}

impl Cell {
    pub fn toned(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }

    /// A count that is highlighted when it is not zero.
    pub fn count(count: u64, tone: Tone) -> Self {
        counted(count).toned(if count > 0 { tone } else { Tone::Plain })
    }
}

/// A count of deliveries, which stops at `COUNT_MAX`.
pub fn counted(count: u64) -> Cell {
    match count {
        HandlerStatus::COUNT_MAX.. => cell("10,000+"),
        _ => cell(count),
    }
}

impl Output {
    pub fn new(is_json: bool) -> Self {
        // The variable counts when it is set and not empty, as no-color.org defines.
        let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_terminal = io::stdout().is_terminal();
        Self { is_json, is_terminal, is_coloured: is_terminal && !is_plain }
    }

    /// Prints one line, which is broken where it is wider than the terminal.
    pub fn line(self, line: impl AsRef<str>) -> io::Result<()> {
        print(&self.wrapped(line.as_ref()))
    }

    /// Escapes the line and breaks it at the width of the terminal.
    pub fn wrapped(self, line: &str) -> String {
        let mut table = self.empty_table();
        table.add_row([comfy_table::Cell::new_owned(escape::text(line))]);
        if let Some(column) = table.column_mut(0) {
            column.set_padding((0, 0));
        }
        table.trim_fmt()
    }

    pub fn document(self, document: &impl Serialize) -> io::Result<()> {
        debug_assert!(self.is_json, "a document is printed only with --json");
        print(&escape::json(&serde_json::to_string_pretty(document)?))
    }

    pub fn table(self, columns: &[Column], rows: Vec<Vec<Cell>>) -> io::Result<()> {
        print(&self.table_text(columns, rows))
    }

    /// The table as it is printed.
    pub fn table_text(self, columns: &[Column], rows: Vec<Vec<Cell>>) -> String {
        let mut table = self.empty_table();
        table.set_header(
            columns.iter().map(|column| comfy_table::Cell::new(column.title).add_attribute(Attribute::Bold)),
        );
        for row in rows {
            table.add_row(row.into_iter().map(|cell| {
                let shown = comfy_table::Cell::new_owned(cell.text);
                match cell.tone {
                    Tone::Plain => shown,
                    Tone::Warning => shown.fg(Color::Yellow),
                    Tone::Problem => shown.fg(Color::Red),
                }
            }));
        }
        for (index, column) in columns.iter().enumerate() {
            let Some(shown) = table.column_mut(index) else { continue };
            shown.set_padding((0, if index + 1 == columns.len() { 0 } else { 2 }));
            if column.kind != ColumnKind::Text {
                shown.set_constraint(ColumnConstraint::ContentWidth);
            }
            if column.kind == ColumnKind::Number {
                shown.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.trim_fmt()
    }

    pub fn is_terminal(self) -> bool {
        self.is_terminal
    }

    /// Prints one of several documents, on its own line.
    pub fn json_line(self, document: &impl Serialize) -> io::Result<()> {
        debug_assert!(self.is_json, "a document is printed only with --json");
        print(&escape::json(&serde_json::to_string(document)?))
    }

    /// Prints one of several screens: on a terminal it replaces the one before, otherwise it follows below. The text is
    /// escaped already.
    pub fn watched(self, text: &str) -> io::Result<()> {
        if !self.is_terminal {
            return print(text);
        }
        let rows = terminal_size::terminal_size().map_or(usize::MAX, |(_, height)| usize::from(height.0));
        // Starts at the upper left corner. Each line clears the rest of its row, and the last one everything below. One
        // more line would scroll.
        let lines = text.lines().take(rows.saturating_sub(1)).map(|line| format!("{line}\x1b[K"));
        print(&format!("\x1b[H{}\x1b[J", lines.collect::<Vec<_>>().join("\n")))
    }

    /// Prints names and values, one pair per line.
    pub fn fields(self, fields: Vec<(&'static str, Cell)>) -> io::Result<()> {
        let mut table = self.empty_table();
        for (name, cell) in fields {
            table.add_row([comfy_table::Cell::new(name), comfy_table::Cell::new_owned(cell.text)]);
        }
        if let Some(names) = table.column_mut(0) {
            names.set_padding((0, 2)).set_constraint(ColumnConstraint::ContentWidth);
        }
        if let Some(values) = table.column_mut(1) {
            values.set_padding((0, 0));
        }
        print(&table.trim_fmt())
    }

    fn empty_table(self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
        let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let width = if self.is_terminal { table.width().or(columns) } else { columns };
        table.set_width(width.unwrap_or(WIDTH).max(WIDTH_MIN));
        if !self.is_coloured {
            table.force_no_tty();
        }
        table
    }
}

/// Prints one line without breaking it, for text that people copy.
pub fn verbatim(line: &str) -> io::Result<()> {
    print(&escape::text(line))
}

/// Prints text of this program with its line breaks, unescaped: SQL, scripts.
pub fn own_text(text: &str) -> io::Result<()> {
    print(text.trim_end())
}

fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}")?;
    stdout.flush()
}
