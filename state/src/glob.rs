//! Globs on names: `*`, `?`, `[a-z]`, `{a,b}`; `*` crosses every character, also `/` and `.`.
//!
//! Most patterns are a name, or have stars and nothing else; those are compared without a regular
//! expression, which would take some ten kilobytes each in hundreds of scopes.

use globset::{GlobBuilder, GlobMatcher};

/// Patterns of which any may match.
#[derive(Debug)]
pub struct Globs(Vec<Pattern>);

#[derive(Debug)]
struct Pattern {
    text: String,
    test: Test,
}

#[derive(Debug)]
enum Test {
    Exact,
    Stars,
    Glob(Box<GlobMatcher>),
}

impl Globs {
    /// # Errors
    /// What is wrong with which pattern.
    pub fn compile(patterns: &[String]) -> Result<Self, String> {
        let compiled: Result<_, _> = patterns.iter().map(|text| Pattern::compile(text)).collect();
        compiled.map(Self)
    }

    /// Whether there is no pattern.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether any pattern matches.
    pub fn matches(&self, text: &str) -> bool {
        self.matching(text).is_some()
    }

    /// The first pattern that matches.
    pub fn matching(&self, text: &str) -> Option<&str> {
        let pattern = self.0.iter().find(|pattern| pattern.matches(text))?;
        Some(&pattern.text)
    }
}

impl Pattern {
    fn compile(text: &str) -> Result<Self, String> {
        let is_plain = |text: &str| !text.contains(['*', '?', '[', ']', '{', '}', '\\', ',']);
        let test = if is_plain(text) {
            Test::Exact
        } else if text.split('*').all(is_plain) {
            Test::Stars
        } else {
            let glob = GlobBuilder::new(text)
                .literal_separator(false)
                .backslash_escape(true)
                .build()
                .map_err(|error| format!("{text:?} is not a glob: {}", error.kind()))?;
            Test::Glob(Box::new(glob.compile_matcher()))
        };
        Ok(Self {
            text: text.to_owned(),
            test,
        })
    }

    fn matches(&self, text: &str) -> bool {
        match &self.test {
            Test::Exact => text == self.text,
            Test::Stars => matches_stars(&self.text, text).is_some(),
            Test::Glob(glob) => glob.is_match(text),
        }
    }
}

/// What is before the first star and after the last one is where it must be; the parts between are
/// looked for from left to right, and the first place for each leaves most for the next.
fn matches_stars(pattern: &str, text: &str) -> Option<()> {
    let mut parts = pattern.split('*');
    let mut rest = text.strip_prefix(parts.next()?)?;
    rest = rest.strip_suffix(parts.next_back()?)?;
    for part in parts {
        let at = rest.find(part)?;
        rest = &rest[at + part.len()..];
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, text: &str) -> bool {
        Globs::compile(&[pattern.to_owned()]).unwrap().matches(text)
    }

    #[test]
    fn a_star_crosses_every_separator() {
        assert!(matches("dra.net/*=*", "dra.net/gpu=a/b"));
        assert!(matches("*", "a/b.c"));
        assert!(matches("kata*", "kata-qemu"));
        assert!(matches("*-system", "kube-system"));
        assert!(!matches("kata*", "runc"));
        assert!(!matches("dra.net/*=*", "dra.network/gpu=a"));
    }

    #[test]
    fn a_plain_pattern_is_the_whole_name() {
        assert!(matches("kube-system", "kube-system"));
        assert!(!matches("kube-system", "kube-system-2"));
        assert!(matches("", ""));
        assert!(!matches("", "kata"));
    }

    #[test]
    fn stars_alone_match_as_the_regular_expression_does() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut word = |letters: &[char]| -> String {
            let length = rng.usize(0..7);
            (0..length)
                .map(|_| letters[rng.usize(..letters.len())])
                .collect()
        };
        for _ in 0..2000 {
            let (pattern, text) = (word(&['a', 'b', '*', '*']), word(&['a', 'b', 'a']));
            let glob = GlobBuilder::new(&pattern).literal_separator(false).build();
            let expected = glob.unwrap().compile_matcher().is_match(&text);
            assert_eq!(matches(&pattern, &text), expected, "{pattern:?} {text:?}");
        }
    }

    #[test]
    fn classes_and_alternatives_match() {
        assert!(matches("team-[ab]-{dev,prod}", "team-a-prod"));
        assert!(!matches("team-[ab]-{dev,prod}", "team-c-prod"));
        assert!(matches("a?c", "abc"));
    }

    #[test]
    fn a_broken_pattern_is_an_error_that_shows_it() {
        for bad in ["[a", "{a", "a\\", "x*[z-a]"] {
            let error = Globs::compile(&[bad.to_owned()]).unwrap_err();
            assert!(error.contains("not a glob"), "{error}");
        }
    }
}
