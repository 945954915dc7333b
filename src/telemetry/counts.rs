//! Counts of what the events tell, for the `metrics` facade: names and labels stand here and in `events.rs`, and nowhere else.
//!
//! Without the feature `metrics` nothing of this exists. With it, what happens to every record and every delivery is counted by a look into
//! a table of the thread and an atomic addition; what happens seldom asks the recorder each time, which may forget what was idle. Labels
//! are topics, handler keys, groups and fixed words: never anything that comes out of a record.

#[cfg(feature = "metrics")]
pub(crate) use with_metrics::{Clock, add, add_often, took};
#[cfg(not(feature = "metrics"))]
pub(crate) use without_metrics::{Clock, add, add_often, took};

/// What is counted, by its name and its labels.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Count {
    pub(crate) name: &'static str,
    /// The label whose value comes with each count.
    pub(crate) of: &'static str,
    /// A label that is the same for all of this count.
    pub(crate) what: Option<(&'static str, &'static str)>,
}

#[cfg(feature = "metrics")]
mod with_metrics {
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::time::Instant;

    use metrics::{Counter, Histogram};

    use super::Count;

    #[derive(Default)]
    struct Handles {
        counters: HashMap<Count, HashMap<Box<str>, Counter>>,
        runs: HashMap<Box<str>, Histogram>,
    }

    thread_local! {
        static KNOWN: RefCell<Handles> = RefCell::default();
    }

    pub(crate) fn add(count: Count, of: &str, number: u64) {
        counter(count, of).increment(number);
    }

    /// As [`add`], for what happens all the time.
    pub(crate) fn add_often(count: Count, of: &str) {
        let add_one = |known: &mut Handles| {
            let counters = known.counters.entry(count).or_default();
            known_or(counters, of, || counter(count, of)).increment(1);
        };
        with_known(add_one);
    }

    /// How long a run of a handler took.
    pub(crate) fn took(handler: &str, clock: Clock) {
        let ask = || metrics::histogram!("wharf_handler_seconds", "handler" => handler.to_owned());
        with_known(|known| known_or(&mut known.runs, handler, ask).record(clock.0.elapsed()));
    }

    fn counter(count: Count, of: &str) -> Counter {
        match count.what {
            Some((label, value)) => metrics::counter!(count.name, count.of => of.to_owned(), label => value),
            None => metrics::counter!(count.name, count.of => of.to_owned()),
        }
    }

    fn with_known(counting: impl FnOnce(&mut Handles)) {
        // A thread that is ending has no table any more; and a recorder is the user's code, which may lead back here.
        let _ = KNOWN.try_with(|known| known.try_borrow_mut().map(|mut known| counting(&mut known)));
    }

    fn known_or<'k, H>(known: &'k mut HashMap<Box<str>, H>, of: &str, ask: impl FnOnce() -> H) -> &'k H {
        if !known.contains_key(of) {
            known.insert(of.into(), ask());
        }
        &known[of]
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Clock(Instant);

    impl Clock {
        pub(crate) fn start() -> Self {
            Self(Instant::now())
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod without_metrics {
    use super::Count;

    pub(crate) fn add(_: Count, _of: &str, _number: u64) {}

    pub(crate) fn add_often(_: Count, _of: &str) {}

    pub(crate) fn took(_handler: &str, _: Clock) {}

    #[derive(Clone, Copy)]
    pub(crate) struct Clock;

    impl Clock {
        pub(crate) fn start() -> Self {
            Self
        }
    }
}
