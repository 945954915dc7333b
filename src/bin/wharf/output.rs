//! The one place that prints: tables and lines for people, one JSON document for machines.
//!
//! Everything is escaped here. Tables and lines fit the terminal, or 80 columns where there is none; there are colours only on a terminal
//! and not with `NO_COLOR`. Nothing here panics when nobody reads any more.

use std::io::{self, IsTerminal, Write};

use comfy_table::{Attribute, CellAlignment, Color, ColumnConstraint, ContentArrangement, Table, presets};
use serde::Serialize;
use wharf::operate::HandlerStatus;

use crate::escape;

/// As wide as what is read in a mail or a ticket.
const WIDTH: u16 = 80;
/// Narrower, and a table has no room for its columns.
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
    /// Takes what room is left, in several lines where it must.
    Text,
    /// Short, never broken.
    Word,
    /// Never broken, to the right.
    Number,
}

/// A value in a table.
#[derive(Debug, Clone)]
pub struct Cell {
    text: String,
    tone: Tone,
}

/// How much a value wants to be seen.
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

/// A dash for what is not there.
pub fn maybe(value: Option<impl ToString>) -> Cell {
    value.map_or_else(|| cell("-"), cell)
}

/// A text that may be long, on one line and cut.
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

    /// Stands out when there is any.
    pub fn count(count: u64, tone: Tone) -> Self {
        counted(count).toned(if count > 0 { tone } else { Tone::Plain })
    }
}

/// A count of deliveries: where counting ended, there may be more.
pub fn counted(count: u64) -> Cell {
    match count {
        HandlerStatus::COUNT_MAX.. => cell("10,000+"),
        _ => cell(count),
    }
}

impl Output {
    pub fn new(is_json: bool) -> Self {
        // Set and not empty, as no-color.org has it.
        let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_terminal = io::stdout().is_terminal();
        Self { is_json, is_terminal, is_coloured: is_terminal && !is_plain }
    }

    /// One line, broken where it is wider than the terminal.
    pub fn line(self, line: impl AsRef<str>) -> io::Result<()> {
        print(&self.wrapped(line.as_ref()))
    }

    /// The line, escaped, as it fits the terminal.
    pub fn wrapped(self, line: &str) -> String {
        let mut table = self.empty_table();
        table.add_row([comfy_table::Cell::new_owned(escape::text(line))]);
        if let Some(column) = table.column_mut(0) {
            column.set_padding((0, 0));
        }
        table.trim_fmt()
    }

    pub fn document(self, document: &impl Serialize) -> io::Result<()> {
        debug_assert!(self.is_json, "people are shown tables");
        print(&escape::json(&serde_json::to_string_pretty(document)?))
    }

    pub fn table(self, columns: &[Column], rows: Vec<Vec<Cell>>) -> io::Result<()> {
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
        print(&table.trim_fmt())
    }

    /// Names and values, one below the other.
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

/// One line as it is, however long: what is meant to be copied.
pub fn verbatim(line: &str) -> io::Result<()> {
    print(&escape::text(line))
}

/// Text of our own, with its lines: SQL, scripts.
pub fn own_text(text: &str) -> io::Result<()> {
    print(text.trim_end())
}

fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}")?;
    stdout.flush()
}
