//! Priority: how transactional handlers of one process share its database connections.

/// The priority of a transactional handler for database connections.
/// [`Registration::priority`](crate::Registration::priority) takes it.
///
/// ```
/// use wharf::flow::Priority;
/// assert!(Priority::High > Priority::default());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    /// A quarter of the reserved connections of a handler with high priority.
    Low,
    /// Half of the reserved connections of a handler with high priority. This is the default.
    #[default]
    Normal,
    /// Usually the first to get a free connection.
    High,
}

impl Priority {
    /// The weight by which connections are reserved.
    pub(crate) fn weight(self) -> usize {
        match self {
            Self::Low => 1,
            Self::Normal => 2,
            Self::High => 4,
        }
    }
}
