//! Traces: the spans of each run, accepted batch and batch of outcomes, and how they are connected.

mod collector;
mod recorder;
mod spans;
pub mod through_kafka;
