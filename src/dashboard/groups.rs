//! Groups of rows that fail alike, and the actions that apply to each of them. The pages of poisoned deliveries, of all
//! deliveries and of the quarantine show them, and so do the previews of actions.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::app::App;
use super::query::{DeliveryQuery, QuarantineQuery};
use super::refusal::Refusal;
use super::text::{self, When};
use crate::operate::Operator;
use crate::store::Backend;
use crate::store::operating::{Grouped, OpenGroup};
use crate::types::{DeliverySummary, ErrorSummary, HandlerStatus, QuarantineGroup, Result as Found, State};

/// The value of the filter field for deliveries without an error.
const NO_ERROR: &str = "none";
/// How many deliveries of each handler are counted for the groups.
const LOOKED_MAX: u32 = HandlerStatus::COUNT_MAX as u32;

/// An action on a group or on all that match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ActLink {
    /// The verb in the URL.
    pub(super) verb: &'static str,
    pub(super) name: &'static str,
    pub(super) is_quiet: bool,
}

const REPLAY: ActLink = ActLink { verb: "replay", name: "Replay", is_quiet: false };
const DISCARD: ActLink = ActLink { verb: "discard", name: "Discard", is_quiet: true };
const RELEASE: ActLink = ActLink { verb: "release", name: "Release", is_quiet: true };
const ACCEPT: ActLink = ActLink { verb: "accept", name: "Replay", is_quiet: false };
const DELETE: ActLink = ActLink { verb: "delete", name: "Delete", is_quiet: true };

/// The actions on many deliveries in this state. Done and discarded ones are only changed one by one.
pub(super) fn acts_on(state: Option<State>) -> &'static [ActLink] {
    match state {
        Some(State::Poisoned) => &[REPLAY, DISCARD],
        Some(State::Pending) => &[DISCARD],
        Some(State::Running) => &[RELEASE],
        Some(State::Done | State::Discarded) | None => &[],
    }
}

/// A table of groups, the most frequent first.
pub(super) struct Groups {
    /// The headings of the columns.
    pub(super) of: &'static str,
    pub(super) what: &'static str,
    pub(super) counted: &'static str,
    /// The page that lists the rows of a group.
    pub(super) path: &'static str,
    pub(super) rows: Vec<GroupView>,
    /// How many rows match, counted up to the limit.
    pub(super) total: u64,
    /// The actions on all that match.
    pub(super) acts: &'static [ActLink],
}

pub(super) struct GroupView {
    /// The handler, or the topic.
    pub(super) of: String,
    /// The state, if the groups of a table differ in it.
    pub(super) state: Option<&'static str>,
    pub(super) what: String,
    pub(super) detail: String,
    pub(super) count: String,
    pub(super) note: String,
    pub(super) first: Option<When>,
    pub(super) last: Option<When>,
    /// The filter of the group as a URL query.
    pub(super) query: String,
    pub(super) acts: &'static [ActLink],
}

impl Groups {
    /// No groups: the rows are shown one by one.
    pub(super) fn none(total: usize) -> Self {
        Self::new(["Handler", "Error", "Deliveries"], "/deliveries", (Vec::new(), total as u64), &[])
    }

    fn new(
        [of, what, counted]: [&'static str; 3],
        path: &'static str,
        (rows, total): (Vec<GroupView>, u64),
        acts: &'static [ActLink],
    ) -> Self {
        Self { of, what, counted, path, rows, total: total.min(HandlerStatus::COUNT_MAX), acts }
    }

    pub(super) fn total(&self) -> String {
        text::count(self.total)
    }

    /// Only the first groups, for a preview.
    pub(super) fn first(mut self, rows: usize) -> Self {
        self.rows.truncate(rows);
        self
    }

    /// The groups of poisoned deliveries.
    pub(super) fn of_poisoned(found: &DeliveryGroups, query: &DeliveryQuery) -> Self {
        let now = SystemTime::now();
        let view = |group| GroupView { state: None, ..GroupView::of_poisoned(group, query, now) };
        let rows = found.poisoned.iter().map(view).collect();
        Self::new(["Handler", "Error", "Poisoned"], "/poisoned", (rows, found.total), acts_on(Some(State::Poisoned)))
    }

    /// The groups of pending and running deliveries, and of poisoned ones.
    pub(super) fn of_deliveries(found: &DeliveryGroups, query: &DeliveryQuery, state: Option<State>) -> Self {
        let now = SystemTime::now();
        let open = found.open.iter().map(|group| (group.deliveries, GroupView::of_open(group, query, now)));
        let given_up = DeliveryQuery { state: State::Poisoned.as_str().to_owned(), ..query.clone() };
        let poisoned = found.poisoned.iter();
        let poisoned = poisoned.map(|group| (group.poisoned, GroupView::of_poisoned(group, &given_up, now)));
        let mut rows: Vec<(u64, GroupView)> = open.chain(poisoned).collect();
        // Stable: groups of the same size stay in their order.
        rows.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        let rows = rows.into_iter().map(|(_, view)| view).collect();
        Self::new(["Handler", "Error", "Deliveries"], "/deliveries", (rows, found.total), acts_on(state))
    }

    pub(super) fn of_quarantine(found: &[QuarantineGroup], query: &QuarantineQuery) -> Self {
        let now = SystemTime::now();
        let rows = found.iter().map(|group| GroupView::of_quarantine(group, query, now)).collect();
        let total = found.iter().map(|group| group.records).sum();
        Self::new(["Topic", "Reason", "Records"], "/quarantine", (rows, total), &[ACCEPT, DELETE])
    }
}

impl GroupView {
    fn of_poisoned(group: &ErrorSummary, query: &DeliveryQuery, now: SystemTime) -> Self {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        Self {
            of: text(&group.handler_key),
            state: Some(State::Poisoned.as_str()),
            what: text(&group.example),
            detail: text(&group.reason),
            count: text::count(group.poisoned.min(HandlerStatus::COUNT_MAX)),
            note: String::new(),
            first: group.first_at.map(|at| When::new(at, now)),
            last: group.last_at.map(|at| When::new(at, now)),
            query: of_errors(group, query).encoded(),
            acts: acts_on(Some(State::Poisoned)),
        }
    }

    fn of_open(group: &OpenGroup, query: &DeliveryQuery, now: SystemTime) -> Self {
        let of_group = DeliveryQuery {
            handler: group.handler_key.clone(),
            fingerprint: group.fingerprint.clone().unwrap_or_else(|| NO_ERROR.to_owned()),
            state: group.state.as_str().to_owned(),
            ..query.clone()
        };
        Self {
            of: group.handler_key.clone(),
            state: Some(group.state.as_str()),
            what: group.example.clone().unwrap_or_else(|| "no error".to_owned()),
            detail: String::new(),
            count: text::count(group.deliveries.min(HandlerStatus::COUNT_MAX)),
            note: String::new(),
            first: group.first_at.map(|at| When::new(at, now)),
            last: group.last_at.map(|at| When::new(at, now)),
            query: of_group.encoded(),
            acts: acts_on(Some(group.state)),
        }
    }

    fn of_quarantine(group: &QuarantineGroup, query: &QuarantineQuery, now: SystemTime) -> Self {
        let of_group = QuarantineQuery { topic: group.topic.clone(), reason: group.reason.clone(), ..query.clone() };
        Self {
            of: group.topic.clone(),
            state: None,
            what: group.reason.clone(),
            detail: group.example.clone().unwrap_or_default(),
            count: text::count(group.records.min(HandlerStatus::COUNT_MAX)),
            note: match group.replay_asked {
                0 => String::new(),
                asked => format!("{} with a requested replay", text::number(asked)),
            },
            first: Some(When::new(group.first_at, now)),
            last: Some(When::new(group.last_at, now)),
            query: of_group.encoded(),
            acts: &[ACCEPT, DELETE],
        }
    }
}

/// The query that matches the deliveries of this group and no others.
pub(super) fn of_errors(group: &ErrorSummary, query: &DeliveryQuery) -> DeliveryQuery {
    DeliveryQuery {
        handler: group.handler_key.clone().unwrap_or_default(),
        reason: group.reason.clone().unwrap_or_default(),
        fingerprint: group.fingerprint.clone().unwrap_or_else(|| NO_ERROR.to_owned()),
        ..query.clone()
    }
}

/// The groups that a search for deliveries has found.
#[derive(Default)]
pub(super) struct DeliveryGroups {
    pub(super) open: Vec<OpenGroup>,
    pub(super) poisoned: Vec<ErrorSummary>,
    /// How many deliveries they and the groups that were left out have.
    total: u64,
}

impl DeliveryGroups {
    /// Groups of deliveries that were read one by one, all in this state.
    pub(super) fn of_rows(found: &[DeliverySummary], state: State) -> Self {
        let mut groups: BTreeMap<(&Option<String>, &Option<String>), OpenGroup> = BTreeMap::new();
        for one in found {
            let group = groups.entry((&one.handler_key, &one.fingerprint)).or_insert_with(|| OpenGroup {
                handler_key: one.handler_key.clone().unwrap_or_default(),
                state,
                fingerprint: one.fingerprint.clone(),
                deliveries: 0,
                first_at: None,
                last_at: None,
                example: one.last_error.clone(),
            });
            group.deliveries += 1;
            group.first_at = [group.first_at, one.received_at].into_iter().flatten().min();
            group.last_at = group.last_at.max(one.received_at);
        }
        Self { open: groups.into_values().collect(), poisoned: Vec::new(), total: found.len() as u64 }
    }
}

/// Returns the first rows that match, and groups of all that match. The few deliveries of a message are not grouped,
/// nor are done and discarded deliveries, because no index lists them.
pub(super) async fn search<B: Backend>(
    app: &App<B>,
    query: &DeliveryQuery,
    state: Option<State>,
    rows_max: u32,
) -> Result<(DeliveryGroups, Vec<DeliverySummary>), Refusal> {
    let (filter, operator) = (query.filter()?, app.operator());
    let search = async move {
        let groups = match filter.message_id {
            Some(_) => DeliveryGroups::default(),
            None => groups(&operator, &filter, state).await?,
        };
        Ok((groups, operator.deliveries(&filter, state, rows_max).await?))
    };
    app.reads.run(search).await
}

async fn groups<B: Backend>(
    operator: &Operator<B>,
    filter: &crate::types::DeliveryFilter,
    state: Option<State>,
) -> Found<DeliveryGroups> {
    let open = match state {
        None | Some(State::Pending | State::Running) => operator.open_groups(filter, state, LOOKED_MAX).await?,
        Some(State::Done | State::Poisoned | State::Discarded) => Grouped { groups: Vec::new(), total: 0 },
    };
    let poisoned = match state {
        None | Some(State::Poisoned) => operator.poisoned_counted(filter, LOOKED_MAX).await?,
        Some(State::Pending | State::Running | State::Done | State::Discarded) => {
            Grouped { groups: Vec::new(), total: 0 }
        }
    };
    Ok(DeliveryGroups { total: open.total + poisoned.total, open: open.groups, poisoned: poisoned.groups })
}
