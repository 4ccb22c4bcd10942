//! How things are printed: the formats of `-o`, tables, and escaping of what others wrote.
//!
//! Plugin names, pod names and reasons come from other processes. On a terminal a control
//! character in them could hide or forge lines, so everything that is printed as text is escaped
//! here, in one place.

use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use serde::Serialize;

use super::error::{CliError, Complaint};

/// The value of `-o`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For people with a wide screen.
    Wide,
    /// One JSON document (`watch`: one object a line).
    Json,
    /// One YAML document (`watch`: one for each event).
    Yaml,
    /// Only names, one a line.
    Name,
}

/// Standard output in the chosen format.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// The chosen format.
    pub format: Format,
    colour: bool,
}

impl Output {
    /// Colour only on a terminal, and not when `NO_COLOR` is set (no-color.org).
    pub fn new(format: Format) -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Output {
            format,
            colour: io::stdout().is_terminal() && !no_color,
        }
    }

    /// Prints `value` in the chosen format; `text` and `names` make the forms for people and for
    /// `-o name`.
    ///
    /// # Errors
    /// [`CliError::BrokenPipe`] when the reader left, [`CliError::Failed`] on another write error.
    pub fn show<T: Serialize>(
        &self,
        value: &T,
        text: impl FnOnce(&Output) -> String,
        names: impl FnOnce() -> Vec<String>,
    ) -> Result<(), CliError> {
        let printed = match self.format {
            Format::Table | Format::Wide => text(self),
            Format::Json => json(value, true)?,
            Format::Yaml => yaml(value)?,
            Format::Name => names()
                .iter()
                .map(|name| format!("{}\n", escape(name)))
                .collect(),
        };
        self.write(&printed)
    }

    /// Whether there is room for the further columns.
    pub fn wide(&self) -> bool {
        self.format == Format::Wide
    }

    /// An empty table with these titles.
    pub fn table(&self, titles: &[&'static str]) -> Table {
        Table {
            titles: titles.to_vec(),
            rows: Vec::new(),
            out: *self,
        }
    }

    /// A word that says how things are, in its colour; any other text as it is.
    pub fn painted(&self, word: &str) -> String {
        let code = match word {
            "present" | "ok" | "admit" => 32,
            "missing" | "FAIL" | "reject" => 31,
            "warn" | "would-reject" | "unvetted" => 33,
            _ => return word.to_string(),
        };
        match self.colour {
            true => format!("\u{1b}[{code}m{word}\u{1b}[0m"),
            false => word.to_string(),
        }
    }

    /// Writes text that is already escaped. Errors as for [`Output::show`].
    pub fn write(&self, text: &str) -> Result<(), CliError> {
        let mut stdout = io::stdout().lock();
        stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.flush())
            .map_err(CliError::from)
    }
}

/// A value as JSON, ending in a newline.
///
/// # Errors
/// [`CliError::Failed`] when the value has no JSON form.
pub fn json<T: Serialize>(value: &T, pretty: bool) -> Result<String, CliError> {
    let made = match pretty {
        true => serde_json::to_string_pretty(value),
        false => serde_json::to_string(value),
    };
    let mut text = String::new();
    // JSON leaves DEL, C1 controls and direction marks as they are; outside of strings there are
    // none, so each may be written as an escape.
    for c in made.map_err(|error| not_printable(&error))?.chars() {
        match c != '\n' && is_unsafe(c) {
            true => c
                .encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| text.push_str(&format!("\\u{unit:04x}"))),
            false => text.push(c),
        }
    }
    text.push('\n');
    Ok(text)
}

/// A value as YAML. Errors as for [`json`].
pub fn yaml<T: Serialize>(value: &T) -> Result<String, CliError> {
    serde_yaml_ng::to_string(value).map_err(|error| not_printable(&error))
}

fn not_printable(error: &dyn std::error::Error) -> CliError {
    CliError::Failed(Complaint::new(
        "print the answer",
        error.to_string(),
        "Try another format: -o table",
    ))
}

/// Characters that change what a terminal shows around them: controls, and the marks that reorder
/// text (Unicode TR9).
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text of others, safe to print on one line.
///
/// ```
/// assert_eq!(nri_lease::cli::render::escape("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
/// ```
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match is_unsafe(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

/// Rows under titles, in columns. Cells are escaped when they are added.
pub struct Table {
    titles: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    out: Output,
}

impl Table {
    /// Adds a row; an empty cell is shown as `-`.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells = cells.into_iter().map(|cell| match cell.is_empty() {
            true => "-".to_string(),
            false => escape(&cell),
        });
        self.rows.push(cells.collect());
    }

    /// The table as text.
    pub fn text(&self) -> String {
        let widths: Vec<usize> = (0..self.titles.len())
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                cells
                    .map(|cell| cell.chars().count())
                    .chain([self.titles[column].len()])
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut text = String::new();
        let titles: Vec<String> = self.titles.iter().map(|title| title.to_string()).collect();
        for row in std::iter::once(&titles).chain(&self.rows) {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&self.out.painted(cell));
                line.push_str(&" ".repeat(width - cell.chars().count() + 3));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Lines of `Name: value`, for one thing in detail. Values are escaped.
#[derive(Default)]
pub struct Fields(String);

impl Fields {
    /// Adds a line; an empty value is left out.
    pub fn add(&mut self, name: &str, value: impl AsRef<str>) -> &mut Self {
        if !value.as_ref().is_empty() {
            let name = format!("{name}:");
            self.0
                .push_str(&format!("{name:<16}{}\n", escape(value.as_ref())));
        }
        self
    }

    /// The lines.
    pub fn text(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_that_reorder_text_are_escaped() {
        assert_eq!(escape("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(escape("käse \u{1f9c0}"), "käse \u{1f9c0}");
    }

    #[test]
    fn json_escapes_what_terminals_obey_and_keeps_its_meaning() {
        let evil = "\u{9b}2J\u{7f}\u{202e}\n";
        let text = json(&evil, true).unwrap();
        assert_eq!(text, "\"\\u009b2J\\u007f\\u202e\\n\"\n");
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), evil);
    }

    #[test]
    fn columns_line_up_and_empty_cells_show_a_dash() {
        let mut table = Output::new(Format::Table).table(&["A", "LONG TITLE"]);
        table.row(["longer".to_string(), String::new()]);
        table.row(["é".to_string(), "x\n".to_string()]);
        assert_eq!(
            table.text(),
            "A        LONG TITLE\nlonger   -\né        x\\n\n"
        );
    }
}
