//! Counts of what the events tell, for the `metrics` facade: names and labels stand here and in `events.rs`, and nowhere else.
//!
//! Without the feature `metrics` nothing of this exists. With it, a count is a look into a table of the thread and an atomic addition, so that
//! counting every record is no matter; the first count of its kind asks the recorder. Labels are topics, handler keys, groups and fixed
//! words: never anything that comes out of a record.

#[cfg(feature = "metrics")]
pub(crate) use with_metrics::{Clock, add, took};
#[cfg(not(feature = "metrics"))]
pub(crate) use without_metrics::{Clock, add, took};

/// What is counted, by its name and its labels.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
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
    struct Known {
        counters: HashMap<Count, HashMap<Box<str>, Counter>>,
        runs: HashMap<Box<str>, Histogram>,
    }

    thread_local! {
        static KNOWN: RefCell<Known> = RefCell::default();
    }

    pub(crate) fn add(count: Count, of: &str, number: u64) {
        let ask = || match count.what {
            Some((label, value)) => metrics::counter!(count.name, count.of => of.to_owned(), label => value),
            None => metrics::counter!(count.name, count.of => of.to_owned()),
        };
        with_known(|known| known_or(known.counters.entry(count).or_default(), of, ask).increment(number));
    }

    /// How long a run of a handler took.
    pub(crate) fn took(handler: &str, clock: Clock) {
        let ask = || metrics::histogram!("wharf_handler_seconds", "handler" => handler.to_owned());
        with_known(|known| known_or(&mut known.runs, handler, ask).record(clock.0.elapsed()));
    }

    fn with_known(counting: impl FnOnce(&mut Known)) {
        // A thread that is ending has no table any more.
        let _ = KNOWN.try_with(|known| counting(&mut known.borrow_mut()));
    }

    fn known_or<H: Clone>(known: &mut HashMap<Box<str>, H>, of: &str, ask: impl FnOnce() -> H) -> H {
        if let Some(handle) = known.get(of) {
            return handle.clone();
        }
        let handle = ask();
        known.insert(of.into(), handle.clone());
        handle
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

    pub(crate) fn took(_handler: &str, _: Clock) {}

    #[derive(Clone, Copy)]
    pub(crate) struct Clock;

    impl Clock {
        pub(crate) fn start() -> Self {
            Self
        }
    }
}
