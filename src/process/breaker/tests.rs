//! What the breaker of one process makes of the results of runs.

use super::*;
use crate::handler::Failure;

const EVERY: Duration = Duration::from_secs(10);

fn breaker(failures: u32) -> Arc<LaneBreaker> {
    Arc::new(LaneBreaker::new(Some(Breaker::new().failures(failures).probe_every(EVERY))))
}

fn away() -> Answer {
    Answer::Finished(Err(Failure::unavailable("away")))
}

fn done() -> Answer {
    Answer::Finished(Ok(()))
}

impl LaneBreaker {
    fn ran(&self, answer: &Answer, message_seq: i64) -> Option<Blame> {
        self.ran_again(answer, message_seq, 0)
    }

    fn ran_again(&self, answer: &Answer, message_seq: i64, outages: u32) -> Option<Blame> {
        let delivery = Judged { of: (message_seq, 1), outages };
        self.judge(answer, delivery, None, || answer.error()).map(|away| away.blame)
    }
}

const NOBODY: Option<Blame> = Some(Blame::Nobody { again_in: EVERY });

#[test]
fn so_many_failures_in_a_row_open_it_and_none_of_them_is_held_against_other_deliveries() {
    let breaker = breaker(3);
    assert_eq!(breaker.ran(&done(), 0), None);
    assert_eq!(breaker.ran(&away(), 1), Some(Blame::Delivery { outages_max: 3 }));
    assert_eq!(breaker.ran(&Answer::TimedOut(EVERY), 2), Some(Blame::Unknown));
    assert!(!breaker.is_open());
    assert_eq!(breaker.ran(&away(), 3), NOBODY);
    assert!(breaker.is_open());
    assert_eq!(breaker.ran(&away(), 4), NOBODY);
}

#[test]
fn a_success_and_any_other_failure_end_the_row() {
    let breaker = breaker(2);
    let others = [done(), Answer::Finished(Err(Failure::retry("no"))), Answer::Finished(Err(Failure::poison("no")))];
    for other in others {
        assert!(breaker.ran(&away(), 1).is_some());
        assert_eq!(breaker.ran(&other, 2), None);
    }
    assert!(!breaker.is_open());
}

#[test]
fn what_says_nothing_about_the_dependency_changes_nothing() {
    let breaker = breaker(2);
    assert!(breaker.ran(&away(), 1).is_some());
    for nothing in [Answer::Panicked("oh".to_owned()), Answer::Finished(Err(Failure::snooze(EVERY)))] {
        assert_eq!(breaker.ran(&nothing, 2), None);
    }
    assert_eq!(breaker.ran(&away(), 3), NOBODY);
}

#[test]
fn one_delivery_that_fails_while_others_succeed_is_blamed_each_time_and_opens_nothing() {
    let breaker = breaker(3);
    for outages in 0..20 {
        assert_eq!(breaker.ran(&done(), 0), None);
        assert_eq!(breaker.ran_again(&away(), 1, outages), Some(Blame::Delivery { outages_max: 3 }));
    }
    assert!(!breaker.is_open());
}

// Each process has seen it fail once or twice only.
#[test]
fn one_delivery_that_has_failed_in_other_processes_opens_it_where_nothing_succeeds() {
    let breaker = breaker(5);
    assert_eq!(breaker.ran_again(&away(), 1, 4), NOBODY);
}

#[test]
fn without_the_option_failures_are_decided_as_usual_until_a_person_opens_it() {
    let breaker = Arc::new(LaneBreaker::new(None));
    assert!((0..100).all(|_| breaker.ran(&away(), 1).is_none()));
    breaker.learn(true);
    assert!(breaker.is_open() && breaker.ran(&away(), 1).is_some());
}

#[test]
fn there_is_one_probe_and_it_cannot_get_lost() {
    let breaker = breaker(1);
    breaker.learn(true);
    assert!(breaker.asks(Instant::now()) && breaker.take_probe().is_none());
    breaker.answered(ProbeAnswer::Granted(7), Instant::now(), EVERY);
    let probe = breaker.take_probe();
    assert!(probe.is_some() && breaker.take_probe().is_none() && !breaker.asks(Instant::now() + EVERY));
    drop(probe);
    assert_eq!(breaker.first_report(), Some(Report::Ended { no: 7, end: ProbeEnd::Unused }));
    assert!(breaker.asks(Instant::now() + EVERY) && !breaker.asks(Instant::now()));
}

#[test]
fn a_probe_that_fails_or_passes_is_reported_as_such() {
    for (answer, end) in [(away(), ProbeEnd::Failed(EVERY)), (done(), ProbeEnd::Passed)] {
        let breaker = breaker(1);
        breaker.learn(true);
        breaker.answered(ProbeAnswer::Granted(7), Instant::now(), EVERY);
        let delivery = Judged { of: (1, 1), outages: 0 };
        breaker.judge(&answer, delivery, breaker.take_probe(), String::new);
        assert_eq!(breaker.first_report(), Some(Report::Ended { no: 7, end }));
        // It is closed when the database says so.
        assert!(breaker.is_open());
    }
}

#[test]
fn what_the_database_says_is_older_than_what_it_has_not_been_told() {
    let breaker = breaker(1);
    assert_eq!(breaker.ran(&away(), 1), NOBODY);
    assert_eq!(breaker.first_report(), Some(Report::Open { error: "away".to_owned() }));
    breaker.learn(false);
    assert!(breaker.is_open());
    breaker.reported();
    breaker.learn(false);
    assert!(!breaker.is_open());
}
