//! Checks Prometheus queries: it parses the part of the language that the dashboard and the alert rules use. Anything
//! else is an error, and so is a metric, label or label value that does not exist: Prometheus would find nothing, and
//! an alert would never fire.

use std::collections::{BTreeMap, BTreeSet};

/// A token of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    Number,
    Text(&'a str),
    /// A time in square brackets.
    Range,
    Sign(&'a str),
}

const SIGNS: [&str; 18] =
    ["==", "!=", "=~", "!~", ">=", "<=", "(", ")", "{", "}", ",", "=", "+", "-", "*", "/", ">", "<"];
const AGGREGATIONS: [&str; 4] = ["sum", "max", "min", "avg"];
const FUNCTIONS: [&str; 5] = ["rate", "increase", "histogram_quantile", "min_over_time", "time"];

/// The labels of a metric, each with its possible values; an empty list allows any value.
pub type Labels = BTreeMap<&'static str, Vec<&'static str>>;

/// The labels of a vector; `None` for a scalar.
type Shape<'a> = Option<BTreeSet<&'a str>>;

/// Returns the labels of a query's result, or why the query is wrong. `known` returns the labels of a metric, and
/// `None` if there is no such metric.
pub fn check<'a>(query: &'a str, known: &dyn Fn(&str) -> Option<Labels>) -> Result<BTreeSet<&'a str>, String> {
    let tokens = tokens(query)?;
    let mut reader = Reader { tokens: &tokens, known };
    let shape = reader.expression().map_err(|error| format!("{error}: {query}"))?;
    match reader.tokens {
        [] => Ok(shape.unwrap_or_default()),
        rest => Err(format!("{rest:?} is left over in {query}")),
    }
}

fn tokens(query: &str) -> Result<Vec<Token<'_>>, String> {
    let (mut tokens, mut rest) = (Vec::new(), query.trim_start());
    while let Some(first) = rest.chars().next() {
        let of = |is_part: fn(char) -> bool| rest.find(|letter| !is_part(letter)).unwrap_or(rest.len());
        let length = match first {
            'a'..='z' | 'A'..='Z' | '_' => {
                let length = of(|letter| letter.is_ascii_alphanumeric() || letter == '_');
                tokens.push(Token::Word(&rest[..length]));
                length
            }
            '0'..='9' => {
                tokens.push(Token::Number);
                of(|letter| letter.is_ascii_digit() || letter == '.')
            }
            '"' => {
                let end = rest[1..].find('"').ok_or("a text without an end")? + 1;
                tokens.push(Token::Text(&rest[1..end]));
                end + 1
            }
            '[' => {
                let end = rest.find(']').ok_or("a range without an end")?;
                let (number, unit) = rest[1..end].split_at(end.saturating_sub(2));
                if number.parse::<u32>().is_err() || !["s", "m", "h", "d"].contains(&unit) {
                    return Err(format!("{} is no time", &rest[..=end]));
                }
                tokens.push(Token::Range);
                end + 1
            }
            _ => {
                let sign =
                    SIGNS.iter().find(|sign| rest.starts_with(**sign)).ok_or_else(|| format!("{first} in {query}"))?;
                tokens.push(Token::Sign(sign));
                sign.len()
            }
        };
        rest = rest[length..].trim_start();
    }
    Ok(tokens)
}

struct Reader<'t, 'a> {
    tokens: &'t [Token<'a>],
    known: &'t dyn Fn(&str) -> Option<Labels>,
}

impl<'a> Reader<'_, 'a> {
    fn next(&mut self) -> Result<Token<'a>, String> {
        let (first, rest) = self.tokens.split_first().ok_or("the query ends too early")?;
        self.tokens = rest;
        Ok(first.clone())
    }

    /// Takes the next token if it is this one.
    fn takes(&mut self, token: &Token<'_>) -> bool {
        let is_it = self.tokens.first() == Some(token);
        self.tokens = &self.tokens[usize::from(is_it)..];
        is_it
    }

    fn expect(&mut self, sign: &str) -> Result<(), String> {
        if self.takes(&Token::Sign(sign)) { Ok(()) } else { Err(format!("{sign} and not {:?}", self.tokens.first())) }
    }

    /// Parses from left to right: the precedence of operators does not matter for labels.
    fn expression(&mut self) -> Result<Shape<'a>, String> {
        let mut shape = self.operand()?;
        loop {
            let is_operator = ["+", "-", "*", "/", ">", "<", "==", "!=", ">=", "<="]
                .iter()
                .map(|sign| Token::Sign(sign))
                .chain(["and", "or", "unless"].iter().map(|word| Token::Word(word)))
                .any(|operator| self.takes(&operator));
            if !is_operator {
                return Ok(shape);
            }
            let on = if self.takes(&Token::Word("on")) { Some(self.labels()?) } else { None };
            shape = joined(shape, self.operand()?, on)?;
        }
    }

    fn operand(&mut self) -> Result<Shape<'a>, String> {
        match self.next()? {
            Token::Number => Ok(None),
            Token::Sign("(") => {
                let shape = self.expression()?;
                self.expect(")")?;
                Ok(shape)
            }
            Token::Word(word) if AGGREGATIONS.contains(&word) => {
                let by = if self.takes(&Token::Word("by")) { self.labels()? } else { BTreeSet::new() };
                let inner = self.arguments()?.unwrap_or_default();
                match by.iter().find(|label| !inner.contains(*label)) {
                    Some(label) => Err(format!("by ({label}), and there is only {inner:?}")),
                    None => Ok(Some(by)),
                }
            }
            Token::Word("histogram_quantile") => {
                let mut inner = self.arguments()?.unwrap_or_default();
                if !inner.remove("le") {
                    return Err("a quantile needs the label le".to_owned());
                }
                Ok(Some(inner))
            }
            Token::Word(word) if FUNCTIONS.contains(&word) => self.arguments(),
            Token::Word(metric) => self.selector(metric),
            other => Err(format!("{other:?} where a value should be")),
        }
    }

    /// Parses the matchers and the range that follow the name of a metric.
    fn selector(&mut self, metric: &str) -> Result<Shape<'a>, String> {
        let labels = (self.known)(metric).ok_or_else(|| format!("there is no metric {metric}"))?;
        if self.takes(&Token::Sign("{")) {
            while !self.takes(&Token::Sign("}")) {
                let (label, sign, value) = (self.next()?, self.next()?, self.next()?);
                let (Token::Word(label), Token::Sign(sign), Token::Text(value)) = (&label, &sign, &value) else {
                    return Err(format!("{label:?} {sign:?} {value:?} is no matcher"));
                };
                let possible = labels.get(*label).ok_or_else(|| format!("{metric} has no label {label}"))?;
                let wanted: Vec<&str> = match *sign {
                    "=" | "!=" => vec![*value],
                    "=~" | "!~" => value.split('|').collect(),
                    other => return Err(format!("{other} is no matcher")),
                };
                if let Some(other) = wanted.iter().find(|value| !possible.is_empty() && !possible.contains(*value)) {
                    return Err(format!("{label} of {metric} is never {other}"));
                }
                if !self.takes(&Token::Sign(",")) && self.tokens.first() != Some(&Token::Sign("}")) {
                    return Err("matchers without a comma".to_owned());
                }
            }
        }
        self.takes(&Token::Range);
        Ok(Some(labels.into_keys().collect()))
    }

    /// Parses arguments. Returns the labels of the last one.
    fn arguments(&mut self) -> Result<Shape<'a>, String> {
        self.expect("(")?;
        if self.takes(&Token::Sign(")")) {
            return Ok(None);
        }
        let mut shape = self.expression()?;
        while self.takes(&Token::Sign(",")) {
            shape = self.expression()?;
        }
        self.expect(")")?;
        Ok(shape)
    }

    fn labels(&mut self) -> Result<BTreeSet<&'a str>, String> {
        self.expect("(")?;
        let mut labels = BTreeSet::new();
        loop {
            match self.next()? {
                Token::Word(label) => labels.insert(label),
                other => return Err(format!("{other:?} is no label")),
            };
            if self.takes(&Token::Sign(")")) {
                return Ok(labels);
            }
            self.expect(",")?;
        }
    }
}

/// The labels of a binary operation: two vectors match only if both sides have the compared labels.
fn joined<'a>(left: Shape<'a>, right: Shape<'a>, on: Option<BTreeSet<&'a str>>) -> Result<Shape<'a>, String> {
    match (left, right, on) {
        (left, None, None) => Ok(left),
        (None, right, None) => Ok(right),
        (Some(left), Some(right), None) if left == right => Ok(Some(left)),
        (Some(left), Some(right), Some(on)) if on.is_subset(&left) && on.is_subset(&right) => Ok(Some(left)),
        (left, right, on) => Err(format!("{left:?} never matches {right:?} on {on:?}")),
    }
}

/// The metrics `a` and `b` have the labels `x` and `y`, where `y` is `c` or `d`. `a_bucket` also has `le`.
fn of_test(metric: &str) -> Option<Labels> {
    let labels = Labels::from([("x", vec![]), ("y", vec!["c", "d"])]);
    match metric {
        "a" | "b" => Some(labels),
        "a_bucket" => Some(labels.into_iter().chain([("le", vec![])]).collect()),
        _ => None,
    }
}

#[test]
fn correct_queries_are_accepted_and_queries_with_mistakes_are_rejected() {
    for (query, labels) in [
        ("time() - max(a) > 3", &[] as &[&str]),
        ("sum by (x, y) (rate(a{x=~\"b|c\", y!=\"d\"}[5m])) / 2 > 14.4 * 0.001 and on (x) b == 0", &["x", "y"]),
        ("histogram_quantile(0.5, sum by (le, x) (rate(a_bucket[5m])))", &["x"]),
    ] {
        assert_eq!(check(query, &of_test), Ok(labels.iter().copied().collect()), "{query}");
    }
    for query in [
        "sum by (x (a)",
        "sum by (x) a",
        "rate(a[5])",
        "a{x=b}",
        "a >",
        "max(a",
        "a{x=\"b\" y=\"c\"}",
        "a b",
        "\"a",
        "a ; b",
        // Metrics, labels or values that do not exist, and vectors that never match.
        "c",
        "sum by (z) (a)",
        "sum by (y) (sum by (x) (a))",
        "a{z=\"b\"}",
        "a{y=\"e\"}",
        "a{y=~\"c|e\"}",
        "max by (x) (a) and on (y) b",
        "sum by (x) (a) / sum by (y) (b)",
        "histogram_quantile(0.5, sum by (x) (rate(a_bucket[5m])))",
    ] {
        assert!(check(query, &of_test).is_err(), "{query}");
    }
}
