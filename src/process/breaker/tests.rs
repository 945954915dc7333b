//! How the breaker of one process reacts to the results of runs.

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
fn the_configured_number_of_failures_in_a_row_opens_it() {
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
fn a_success_or_another_failure_resets_the_count() {
    let breaker = breaker(2);
    let others = [done(), Answer::Finished(Err(Failure::retry("no"))), Answer::Finished(Err(Failure::poison("no")))];
    for other in others {
        assert!(breaker.ran(&away(), 1).is_some());
        assert_eq!(breaker.ran(&other, 2), None);
    }
    assert!(!breaker.is_open());
}

#[test]
fn outcomes_unrelated_to_the_dependency_change_nothing() {
    let breaker = breaker(2);
    assert!(breaker.ran(&away(), 1).is_some());
    for nothing in [Answer::Panicked("oh".to_owned()), Answer::Finished(Err(Failure::snooze(EVERY)))] {
        assert_eq!(breaker.ran(&nothing, 2), None);
    }
    assert_eq!(breaker.ran(&away(), 3), NOBODY);
}

// It consumes a retry, so the next delivery must not follow at once.
#[test]
fn after_a_probe_that_panics_the_next_one_is_as_far_away_as_after_one_that_fails() {
    let breaker = breaker(1);
    breaker.learn(breaker.asking(), true);
    breaker.answered(breaker.asking(), ProbeAnswer::Granted(7), Instant::now(), EVERY);
    let (probe, delivery) = (breaker.take_probe(), Judged { of: (1, 1), outages: 0 });

    assert!(breaker.judge(&Answer::Panicked("oh".to_owned()), delivery, probe, String::new).is_none());

    assert_eq!(breaker.first_report(), Some(Report::Ended { no: 7, end: ProbeEnd::Failed(EVERY) }));
    assert!(breaker.is_open());
}

#[test]
fn one_delivery_that_fails_while_others_succeed_is_counted_and_does_not_open_it() {
    let breaker = breaker(3);
    for outages in 0..20 {
        assert_eq!(breaker.ran(&done(), 0), None);
        assert_eq!(breaker.ran_again(&away(), 1, outages), Some(Blame::Delivery { outages_max: 3 }));
    }
    assert!(!breaker.is_open());
}

// Each process has seen it fail once or twice only.
#[test]
fn one_delivery_that_has_failed_in_other_processes_opens_it_if_nothing_succeeds() {
    let breaker = breaker(5);
    assert_eq!(breaker.ran_again(&away(), 1, 4), NOBODY);
}

#[test]
fn without_the_option_failures_are_decided_as_usual_until_an_operator_opens_it() {
    let breaker = Arc::new(LaneBreaker::new(None));
    assert!((0..100).all(|_| breaker.ran(&away(), 1).is_none()));
    breaker.learn(breaker.asking(), true);
    assert!(breaker.is_open() && breaker.ran(&away(), 1).is_some());
}

#[test]
fn there_is_one_probe_and_it_cannot_get_lost() {
    let breaker = breaker(1);
    breaker.learn(breaker.asking(), true);
    assert!(breaker.asks(Instant::now()) && breaker.take_probe().is_none());
    breaker.answered(breaker.asking(), ProbeAnswer::Granted(7), Instant::now(), EVERY);
    let probe = breaker.take_probe();
    assert!(probe.is_some() && breaker.take_probe().is_none() && !breaker.asks(Instant::now() + EVERY));
    drop(probe);
    assert_eq!(breaker.first_report(), Some(Report::Ended { no: 7, end: ProbeEnd::Unused }));
    assert!(breaker.asks(Instant::now() + EVERY) && !breaker.asks(Instant::now()));
}

#[test]
fn only_a_right_that_is_in_use_is_kept_and_renewed() {
    let breaker = breaker(1);
    breaker.learn(breaker.asking(), true);
    breaker.answered(breaker.asking(), ProbeAnswer::Granted(7), Instant::now(), EVERY);
    assert_eq!(breaker.right_in_use(), None);
    breaker.give_back_unused();
    assert_eq!(breaker.first_report(), Some(Report::Ended { no: 7, end: ProbeEnd::Unused }));
    assert!(breaker.take_probe().is_none());
    // Other processes can request it first.
    assert!(breaker.asks(Instant::now() + EVERY) && !breaker.asks(Instant::now()));
    breaker.reported();

    breaker.answered(breaker.asking(), ProbeAnswer::Granted(8), Instant::now(), EVERY);
    let probe = breaker.take_probe();
    breaker.give_back_unused();
    assert!(probe.is_some() && breaker.right_in_use() == Some(8) && breaker.first_report().is_none());
}

#[test]
fn a_right_of_an_opening_that_an_operator_has_ended_is_not_used_in_the_next_one() {
    let breaker = breaker(1);
    breaker.learn(breaker.asking(), true);
    breaker.answered(breaker.asking(), ProbeAnswer::Granted(7), Instant::now(), EVERY);
    breaker.learn(breaker.asking(), false);
    assert_eq!(breaker.ran(&away(), 1), NOBODY);
    assert!(breaker.take_probe().is_none() && breaker.asks(Instant::now()));
}

// The number of the probe is needed to end it; meanwhile no other right is requested.
#[test]
fn a_probe_that_runs_when_an_operator_closes_the_breaker_keeps_its_right_until_it_ends() {
    let breaker = breaker(1);
    breaker.learn(breaker.asking(), true);
    breaker.answered(breaker.asking(), ProbeAnswer::Granted(7), Instant::now(), EVERY);
    let probe = breaker.take_probe();
    breaker.learn(breaker.asking(), false);
    breaker.learn(breaker.asking(), true);
    assert!(breaker.right_in_use() == Some(7) && !breaker.asks(Instant::now() + EVERY));
    drop(probe);
    assert_eq!(breaker.first_report(), Some(Report::Ended { no: 7, end: ProbeEnd::Unused }));
}

#[test]
fn the_result_of_a_probe_is_reported() {
    for (answer, end) in [(away(), ProbeEnd::Failed(EVERY)), (done(), ProbeEnd::Passed)] {
        let breaker = breaker(1);
        breaker.learn(breaker.asking(), true);
        breaker.answered(breaker.asking(), ProbeAnswer::Granted(7), Instant::now(), EVERY);
        let delivery = Judged { of: (1, 1), outages: 0 };
        breaker.judge(&answer, delivery, breaker.take_probe(), String::new);
        assert_eq!(breaker.first_report(), Some(Report::Ended { no: 7, end }));
        // It stays open until the database says that it is closed.
        assert!(breaker.is_open());
    }
}

#[test]
fn unwritten_reports_override_the_state_in_the_database() {
    let breaker = breaker(1);
    assert_eq!(breaker.ran(&away(), 1), NOBODY);
    assert_eq!(breaker.first_report(), Some(Report::Open { error: "away".to_owned() }));
    breaker.learn(breaker.asking(), false);
    assert!(breaker.is_open());
    breaker.reported();
    breaker.learn(breaker.asking(), false);
    assert!(!breaker.is_open());
}

#[test]
fn an_answer_to_a_question_that_is_older_than_a_report_does_not_close_it() {
    let breaker = breaker(1);
    let asked = breaker.asking();
    assert_eq!(breaker.ran(&away(), 1), NOBODY);
    breaker.reported();
    breaker.learn(asked, false);
    assert!(breaker.is_open());
}

#[test]
fn calls_of_several_deliveries_that_time_out_open_it_and_blame_none_of_them() {
    let breaker = breaker(3);
    breaker.call_timed_out(|| "late".to_owned());
    breaker.call_timed_out(|| "late".to_owned());
    assert_eq!(breaker.ran(&done(), 1), None);
    for _ in 0..2 {
        breaker.call_timed_out(|| "late".to_owned());
        assert!(!breaker.is_open());
    }
    breaker.call_timed_out(|| "late".to_owned());
    assert!(breaker.is_open());
    assert_eq!(breaker.first_report(), Some(Report::Open { error: "late".to_owned() }));
}
