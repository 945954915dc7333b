//! Traces: the spans of runs, of accepted batches and of batches of outcomes, and their parents and links.

mod collector;
mod recorder;
mod spans;
pub mod through_kafka;
