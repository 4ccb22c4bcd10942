//! What must hold when: the windows in which something is broken on purpose, when a live lease
//! covers the pods, and when the daemon is surely away. Knows nothing of how faults are made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use super::journal::{MILLISECOND, Time, lock};

/// From the fault's begin to the confirmed recovery.
struct Window {
    begin: Time,
    end: Option<Time>,
    /// The plugin was away at some time in it: refusing is right.
    may_refuse: bool,
    /// Our daemon may not have been connected to the runtime.
    daemon_away: bool,
}

#[derive(Default)]
struct Spans(Vec<(Time, Option<Time>)>);

impl Spans {
    fn begin(&mut self, at: Time) {
        if self.0.last().is_none_or(|last| last.1.is_some()) {
            self.0.push((at, None));
        }
    }

    fn end(&mut self, at: Time) {
        if let Some(last) = self.0.last_mut() {
            last.1.get_or_insert(at);
        }
    }

    fn contain(&self, begin: Time, end: Time) -> bool {
        self.0
            .iter()
            .any(|(from, to)| *from <= begin && to.is_none_or(|to| end < to))
    }
}

#[derive(Default)]
struct Inner {
    windows: Vec<Window>,
    covered: Spans,
    daemon_dead: Spans,
    faults: BTreeMap<&'static str, u32>,
    recoveries: BTreeMap<&'static str, Vec<Time>>,
}

/// Written by the injector, read by the workers. Every beginning is written down before the fault
/// is made and every end after the recovery was seen, so a worker that looks after its call has
/// all it needs.
#[derive(Default)]
pub struct Ledger(Mutex<Inner>);

impl Ledger {
    pub fn open_window(&self, kind: &'static str, at: Time, may_refuse: bool, daemon_away: bool) {
        let mut inner = lock(&self.0);
        *inner.faults.entry(kind).or_default() += 1;
        // A fault in two parts: its first window ends where the second begins.
        if let Some(last) = inner.windows.last_mut() {
            last.end.get_or_insert(at);
        }
        inner.windows.push(Window {
            begin: at,
            end: None,
            may_refuse,
            daemon_away,
        });
    }

    pub fn close_window(&self, at: Time) {
        if let Some(last) = lock(&self.0).windows.last_mut() {
            last.end.get_or_insert(at);
        }
    }

    /// How long after the last obstacle was gone all was well again.
    pub fn recovered(&self, kind: &'static str, after: Time) {
        let mut inner = lock(&self.0);
        inner.recoveries.entry(kind).or_default().push(after);
    }

    pub fn lease_lives_from(&self, at: Time) {
        lock(&self.0).covered.begin(at);
    }

    pub fn lease_ends_at(&self, at: Time) {
        lock(&self.0).covered.end(at);
    }

    pub fn daemon_dead_from(&self, at: Time) {
        lock(&self.0).daemon_dead.begin(at);
    }

    pub fn daemon_dead_until(&self, at: Time) {
        lock(&self.0).daemon_dead.end(at);
    }

    /// A live lease covered the whole call.
    pub fn covers(&self, begin: Time, end: Time) -> bool {
        lock(&self.0).covered.contain(begin, end)
    }

    /// No daemon ran during the whole call.
    pub fn daemon_was_dead(&self, begin: Time, end: Time) -> bool {
        lock(&self.0).daemon_dead.contain(begin, end)
    }

    pub fn may_refuse(&self, begin: Time, end: Time) -> bool {
        self.overlaps(begin, end, |window| window.may_refuse)
    }

    pub fn daemon_may_be_away(&self, begin: Time, end: Time) -> bool {
        self.overlaps(begin, end, |window| window.daemon_away)
    }

    /// In a window of any kind.
    pub fn is_disturbed(&self, begin: Time, end: Time) -> bool {
        self.overlaps(begin, end, |_| true)
    }

    fn overlaps(&self, begin: Time, end: Time, wanted: impl Fn(&Window) -> bool) -> bool {
        lock(&self.0).windows.iter().any(|window| {
            wanted(window) && window.begin <= end && window.end.is_none_or(|over| begin <= over)
        })
    }

    pub fn faults(&self) -> u32 {
        lock(&self.0).faults.values().sum()
    }

    /// One line per kind of fault: how often, and how long until all was well again.
    pub fn kinds(&self) -> String {
        let inner = lock(&self.0);
        let mut text = format!(
            "    {:<34}{:>6}{:>12}{:>12}\n",
            "fault", "times", "median ms", "max ms"
        );
        let kinds: BTreeSet<_> = inner.faults.keys().chain(inner.recoveries.keys()).collect();
        for kind in kinds {
            let times = inner.faults.get(kind).copied().unwrap_or(0);
            let mut took = inner.recoveries.get(kind).cloned().unwrap_or_default();
            took.sort_unstable();
            let ms = |time: Option<&Time>| {
                time.map_or("-".to_owned(), |t| (t / MILLISECOND).to_string())
            };
            text.push_str(&format!(
                "    {kind:<34}{times:>6}{:>12}{:>12}\n",
                ms(took.get(took.len() / 2)),
                ms(took.last())
            ));
        }
        text
    }
}
