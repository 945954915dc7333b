//! Starts the task that watches the backlog of the handlers, if it has limits: beyond them, reading stops.

use std::sync::Arc;

use super::super::backlog;
use super::Work;
use crate::store::Backend;

impl<B: Backend> Work<B> {
    pub(super) fn watch_backlog(&mut self) {
        let limits = &self.intake.limits;
        if limits.backlog_rows_max.is_none() && limits.backlog_age_max.is_none() {
            return;
        }
        let watching = backlog::watch(Arc::clone(&self.intake), self.tell.clone());
        self.tasks.spawn_on(watching, self.intake.store.backend.reactor());
    }
}
