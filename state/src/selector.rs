//! Kubernetes' label selectors: `app=db,tier in (a,b),!legacy`.
//!
//! Syntax and meaning as in apimachinery's `labels.Parse`, without `<` and `>`: `!=` and `notin`
//! also match where the label is missing.

use std::collections::HashMap;

/// Requirements of which all must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    Exists,
    Missing,
    In(Vec<String>),
    NotIn(Vec<String>),
}

/// Longest selector, in bytes.
pub const MAX_SELECTOR_BYTES: usize = 4096;

const WANTED: &str = "give requirements like: app=db,tier in (a,b),env!=dev,canary,!legacy";

impl Selector {
    /// # Errors
    /// What is wrong, with an example of what is right. An empty selector is an error: leave it
    /// out to match everything.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_SELECTOR_BYTES {
            return Err(format!(
                "the label selector has {} bytes, at most {MAX_SELECTOR_BYTES} are allowed",
                text.len()
            ));
        }
        Parser::new(text)
            .selector()
            .map_err(|problem| format!("{text:?} is not a label selector: {problem}; {WANTED}"))
    }

    /// Whether all requirements hold.
    pub fn matches(&self, labels: &HashMap<String, String>) -> bool {
        self.0.iter().all(|requirement| requirement.holds(labels))
    }
}

impl Requirement {
    fn holds(&self, labels: &HashMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        match &self.test {
            Test::Exists => value.is_some(),
            Test::Missing => value.is_none(),
            Test::In(values) => value.is_some_and(|value| values.contains(value)),
            Test::NotIn(values) => !value.is_some_and(|value| values.contains(value)),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    Comma,
    Open,
    Close,
    Not,
    Equals,
    NotEquals,
    End,
}

struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Self {
        Self { rest: text }
    }

    fn selector(mut self) -> Result<Selector, String> {
        let mut requirements = Vec::new();
        loop {
            requirements.push(self.requirement()?);
            match self.next()? {
                Token::Comma => {}
                Token::End => return Ok(Selector(requirements)),
                other => return Err(format!("{} where a comma belongs", show(other))),
            }
        }
    }

    fn requirement(&mut self) -> Result<Requirement, String> {
        let first = self.next()?;
        if first == Token::Not {
            let key = self.key()?;
            return Ok(Requirement {
                key,
                test: Test::Missing,
            });
        }
        let key = check_key(word(first)?)?;
        let before = self.rest;
        let test = match self.next()? {
            Token::Equals => Test::In(vec![self.value()?]),
            Token::NotEquals => Test::NotIn(vec![self.value()?]),
            Token::Word("in") => Test::In(self.values()?),
            Token::Word("notin") => Test::NotIn(self.values()?),
            Token::Comma | Token::End => {
                self.rest = before;
                Test::Exists
            }
            other => return Err(format!("{} after the key {key:?}", show(other))),
        };
        Ok(Requirement { key, test })
    }

    fn key(&mut self) -> Result<String, String> {
        check_key(word(self.next()?)?)
    }

    /// A value after an operator; nothing is the empty value.
    fn value(&mut self) -> Result<String, String> {
        let before = self.rest;
        match self.next()? {
            Token::Word(value) => check_value(value),
            Token::Comma | Token::End => {
                self.rest = before;
                Ok(String::new())
            }
            other => Err(format!("{} where a value belongs", show(other))),
        }
    }

    /// `(a,b)`; nothing between commas is the empty value.
    fn values(&mut self) -> Result<Vec<String>, String> {
        if self.next()? != Token::Open {
            return Err("in and notin need a list like (a,b)".to_owned());
        }
        let mut values = Vec::new();
        loop {
            let value = match self.next()? {
                Token::Word(value) => {
                    let value = check_value(value)?;
                    (value, self.next()?)
                }
                end @ (Token::Comma | Token::Close) => (String::new(), end),
                other => return Err(format!("{} where a value belongs", show(other))),
            };
            values.push(value.0);
            match value.1 {
                Token::Comma => {}
                Token::Close => return Ok(values),
                other => return Err(format!("{} where a comma or ) belongs", show(other))),
            }
        }
    }

    fn next(&mut self) -> Result<Token<'a>, String> {
        self.rest = self.rest.trim_start();
        let Some(first) = self.rest.chars().next() else {
            return Ok(Token::End);
        };
        let (token, length) = match first {
            ',' => (Token::Comma, 1),
            '(' => (Token::Open, 1),
            ')' => (Token::Close, 1),
            '!' if self.rest.starts_with("!=") => (Token::NotEquals, 2),
            '!' => (Token::Not, 1),
            '=' if self.rest.starts_with("==") => (Token::Equals, 2),
            '=' => (Token::Equals, 1),
            '<' | '>' => return Err("< and > are not supported".to_owned()),
            _ => {
                let ends = |c: char| c.is_whitespace() || ",()!=<>".contains(c);
                let length = self.rest.find(ends).unwrap_or(self.rest.len());
                (Token::Word(&self.rest[..length]), length)
            }
        };
        self.rest = &self.rest[length..];
        Ok(token)
    }
}

fn show(token: Token<'_>) -> String {
    match token {
        Token::Word(word) => format!("{word:?}"),
        Token::Comma => "a comma".to_owned(),
        Token::Open => "(".to_owned(),
        Token::Close => ")".to_owned(),
        Token::Not => "!".to_owned(),
        Token::Equals => "=".to_owned(),
        Token::NotEquals => "!=".to_owned(),
        Token::End => "the end".to_owned(),
    }
}

fn word(token: Token<'_>) -> Result<&str, String> {
    match token {
        Token::Word(word) => Ok(word),
        other => Err(format!("{} where a label key belongs", show(other))),
    }
}

/// At most 63 of `[A-Za-z0-9._-]`, with a letter or digit at both ends.
fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else {
        return false;
    };
    bytes.len() <= 63
        && first.is_ascii_alphanumeric()
        && last.is_ascii_alphanumeric()
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(b))
}

/// `[PREFIX/]NAME`, the prefix a DNS subdomain.
fn check_key(key: &str) -> Result<String, String> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    let is_domain = |prefix: &str| {
        prefix.len() <= 253
            && prefix.split('.').all(|part| {
                !part.is_empty()
                    && !part.starts_with('-')
                    && !part.ends_with('-')
                    && part
                        .bytes()
                        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            })
    };
    if is_name(name) && prefix.is_none_or(is_domain) {
        Ok(key.to_owned())
    } else {
        Err(format!("{key:?} cannot be a label key"))
    }
}

fn check_value(value: &str) -> Result<String, String> {
    if value.is_empty() || is_name(value) {
        Ok(value.to_owned())
    } else {
        Err(format!("{value:?} cannot be a label value"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        pairs.iter().map(owned).collect()
    }

    fn matches(selector: &str, pairs: &[(&str, &str)]) -> bool {
        Selector::parse(selector).unwrap().matches(&labels(pairs))
    }

    #[test]
    fn equality_compares_the_value() {
        for selector in ["app=db", "app==db", " app = db ", "app in (db)"] {
            assert!(matches(selector, &[("app", "db")]), "{selector}");
            assert!(!matches(selector, &[("app", "web")]), "{selector}");
            assert!(!matches(selector, &[]), "{selector}");
        }
    }

    #[test]
    fn inequality_holds_where_the_label_is_missing() {
        for selector in ["app!=db", "app notin (db,x)"] {
            assert!(!matches(selector, &[("app", "db")]), "{selector}");
            assert!(matches(selector, &[("app", "web")]), "{selector}");
            assert!(matches(selector, &[]), "{selector}");
        }
    }

    #[test]
    fn keys_alone_ask_for_existence() {
        assert!(matches("canary", &[("canary", "")]));
        assert!(!matches("canary", &[]));
        assert!(matches("!legacy", &[]));
        assert!(!matches("! legacy", &[("legacy", "x")]));
    }

    #[test]
    fn all_requirements_must_hold() {
        let selector = "app.kubernetes.io/name=db, tier in (a, b),!legacy,env!=dev,canary";
        let mut pod = vec![
            ("app.kubernetes.io/name", "db"),
            ("tier", "b"),
            ("canary", "1"),
        ];
        assert!(matches(selector, &pod));
        pod.push(("legacy", "1"));
        assert!(!matches(selector, &pod));
    }

    #[test]
    fn the_empty_value_can_be_asked_for() {
        assert!(matches("app=", &[("app", "")]));
        assert!(matches("app=,x", &[("app", ""), ("x", "1")]));
        assert!(matches("app in (,a)", &[("app", "")]));
        assert!(matches("app in ()", &[("app", "")]));
        assert!(!matches("app=", &[]));
    }

    #[test]
    fn what_is_no_selector_is_an_error() {
        for bad in [
            "",
            " ",
            ",",
            "a,",
            "a,,b",
            "=b",
            "a=b=c",
            "a in b",
            "a in (b",
            "a in (b c)",
            "a notin",
            "!",
            "!a=b",
            "a>1",
            "a b",
            "a=(b)",
            "-a=b",
            "a/b/c=d",
            "A.b/=x",
            "UPPER.example/x",
            "a=b/c",
            "ä=b",
            &format!("{}=x", "k".repeat(64)),
            &"a,".repeat(3000),
        ] {
            assert!(Selector::parse(bad).is_err(), "{bad:?}");
        }
    }
}
