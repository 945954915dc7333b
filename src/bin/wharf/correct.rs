//! `poisoned replay --edit` and `--payload-file`: runs one delivery again with a corrected payload, which is kept
//! beside the original.
//!
//! The edited file is in a folder that only its owner can enter. The folder is removed at the end with everything that
//! the editor left in it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::json;
use wharf::operate::{DeliveryFilter, State};
use wharf::store::Backend;

use crate::confirm::Confirming;
use crate::deliveries;
use crate::exit::{Exit, Failure};
use crate::session::Session;

/// Where the corrected payload comes from.
#[derive(Debug, Args)]
pub struct CorrectionArguments {
    /// Correct the payload of one delivery in $VISUAL or $EDITOR; the original is kept
    #[arg(long = "edit", requires = "message", conflicts_with_all = [
        "payload_file", "is_all", "limit", "is_canary", "wait", "topic", "reason", "error", "fingerprint", "older_than", "newer_than",
    ])]
    is_edit: bool,
    /// Run one delivery with the payload in this file; the original is kept
    #[arg(long, value_name = "FILE", requires = "message", conflicts_with_all = [
        "is_all", "limit", "is_canary", "wait", "topic", "reason", "error", "fingerprint", "older_than", "newer_than",
    ])]
    payload_file: Option<PathBuf>,
}

impl CorrectionArguments {
    pub fn is_asked_for(&self) -> bool {
        self.is_edit || self.payload_file.is_some()
    }

    fn payload(&self, current: &[u8]) -> Result<Vec<u8>, Failure> {
        match &self.payload_file {
            Some(file) => {
                fs::read(file).map_err(|error| Failure::usage(format!("cannot read {}: {error}", file.display())))
            }
            None => edited(current),
        }
    }
}

pub async fn replay<B: Backend>(
    session: &Session<B>,
    filter: &DeliveryFilter,
    confirming: &Confirming,
    arguments: &CorrectionArguments,
) -> Result<Exit, Failure> {
    confirming.check()?;
    let mut found = session.operator().deliveries(filter, None, 100).await?;
    found.retain(|one| matches!(one.state, State::Poisoned | State::Discarded));
    let Some(one) = deliveries::only(found)? else {
        return Err(Failure::problem("there is no such poisoned or discarded delivery: nothing was done"));
    };
    let Some(details) = session.operator().delivery(&one).await? else {
        return Err(Failure::problem("the delivery has just been purged"));
    };
    let corrected = details.correction.as_ref().map(|correction| &*correction.payload);
    let current = corrected.or_else(|| details.record.as_ref()?.payload());
    let payload = arguments.payload(current.unwrap_or_default())?;
    if current.unwrap_or_default() == payload {
        return Err(Failure::problem("the payload is unchanged: nothing was done"));
    }
    let (bytes, was_bytes) = (payload.len(), current.map(<[u8]>::len));
    let is_dry_run = confirming.is_dry_run;
    let mut report = json!({
        "action": "replay corrected", "dry_run": is_dry_run, "payload_bytes": bytes, "payload_was_bytes": was_bytes,
    });
    let what =
        format!("{bytes} bytes instead of {}", was_bytes.map_or_else(|| "none".to_owned(), |was| was.to_string()));
    if !is_dry_run {
        confirming.ask(&format!("replay it with {what}?"))?;
        if !session.acting(confirming.because.as_ref()).replay_corrected(&one, payload).await? {
            return Err(Failure::problem("it has just been replayed or has run: nothing was done"));
        }
        report["affected"] = 1.into();
    }
    match session.output.is_json {
        true => session.output.document(&report)?,
        false if is_dry_run => session.output.line(format!("would replay it with {what}"))?,
        false => session.output.line(format!("replayed with {what}"))?,
    }
    Ok(Exit::Well)
}

/// Lets a person edit the payload.
fn edited(current: &[u8]) -> Result<Vec<u8>, Failure> {
    let set = |name| std::env::var(name).ok().filter(|editor| !editor.trim().is_empty());
    let Some(editor) = set("VISUAL").or_else(|| set("EDITOR")) else {
        return Err(Failure::usage("set VISUAL or EDITOR to an editor, or give --payload-file"));
    };
    let folder = Folder::make()?;
    let file = folder.0.join("payload");
    write_private(&file, current).map_err(cannot("write the payload to", &file))?;
    // Through a shell, as git does it, because the variable may hold arguments too.
    let ended = Command::new("sh").arg("-c").arg(format!("{editor} \"$1\"")).arg(&editor).arg(&file).status();
    let ended = ended.map_err(cannot("start `sh` to edit", &file))?;
    if !ended.success() {
        return Err(Failure::problem(format!("the editor failed ({ended}): nothing was done")));
    }
    fs::read(&file).map_err(cannot("read the edited payload from", &file))
}

/// What could not be done to a file. Without it, the error would be reported as one of writing the output.
fn cannot(what: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    move |error| Failure::problem(format!("cannot {what} {}: {error}: nothing was done", path.display()))
}

/// A folder that is removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn make() -> Result<Self, Failure> {
        let name = format!("wharf-{}-{:016x}", std::process::id(), rand::random::<u64>());
        let folder = std::env::temp_dir().join(name);
        #[cfg_attr(not(unix), allow(unused_mut))]
        let mut builder = DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&folder).map_err(cannot("create the folder", &folder))?;
        Ok(Self(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // If this fails, the rest is still in a folder that only its owner can enter.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file: File = options.open(path)?;
    file.write_all(bytes)
}
