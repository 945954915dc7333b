//! What every command has: the store, the output, and the name for the audit.

use wharf::Store;
use wharf::operate::Operator;
use wharf::store::Backend;

use crate::exit::Failure;
use crate::output::Output;

pub struct Session<B: Backend> {
    pub store: Store<B>,
    pub output: Output,
    pub actor: String,
}

impl<B: Backend> Session<B> {
    /// For reading.
    pub fn operator(&self) -> Operator<B> {
        self.store.operate().acting_as(&self.actor)
    }

    /// For actions.
    pub fn acting(&self, because: Option<&String>) -> Operator<B> {
        match because {
            Some(because) => self.operator().because(because),
            None => self.operator(),
        }
    }

    /// Fails with advice if the schema is missing or old, before a statement fails because of it.
    pub async fn check_schema(&self) -> Result<(), Failure> {
        let version = self.store.schema_version().await?;
        match version.found {
            None => Err(Failure::problem("there is no inbox in this database: run `wharf migrate`")),
            Some(found) if found < version.known => Err(Failure::problem(format!(
                "the inbox schema has version {found} and this build needs {}: run `wharf migrate`",
                version.known
            ))),
            Some(_) => Ok(()),
        }
    }
}

/// The user and host of this machine.
pub fn actor() -> String {
    let user = whoami::username().unwrap_or_else(|_| "somebody".to_owned());
    match whoami::hostname() {
        Ok(host) => format!("{user}@{host}"),
        Err(_) => user,
    }
}
