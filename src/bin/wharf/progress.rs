//! Progress bars: on stderr, only on a terminal, and never together with JSON.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

/// A bar if the total is known, otherwise a counter.
pub fn of(output: Output, total: Option<u64>, what: &'static str) -> ProgressBar {
    if output.is_json {
        return ProgressBar::hidden();
    }
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::no_length(),
    };
    // The library hides it where stderr is not a terminal.
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
