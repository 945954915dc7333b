//! Progress of what takes long: on stderr, only on a terminal, and never beside JSON.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

/// A bar where the end is known, else a counter.
pub fn of(output: Output, total: Option<u64>, what: &'static str) -> ProgressBar {
    if output.is_json {
        return ProgressBar::hidden();
    }
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::no_length(),
    };
    // Hidden by itself where stderr is no terminal.
    bar.set_draw_target(ProgressDrawTarget::stderr());
    let template = match total {
        Some(_) => "{prefix} {wide_bar} {pos}/{len} {msg}",
        None => "{prefix} {pos} {msg} {elapsed}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_prefix(what);
    bar
}
