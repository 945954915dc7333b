//! The baseline and Wharf, measured alternately, so that other load of the machine affects both.

use super::median;
use super::meter::Measured;

/// The two measurements of one repeat.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    pub bare_sql: Measured,
    pub ours: Measured,
}

impl Pair {
    fn ratio(&self) -> f64 {
        self.ours.per_second / self.bare_sql.per_second
    }

    /// What the ratio would be if only processor time counted.
    fn cpu_ratio(&self) -> f64 {
        self.bare_sql.cpu_us() / self.ours.cpu_us()
    }
}

/// All repeats.
#[derive(Debug, Default)]
pub struct Pairs(Vec<Pair>);

impl Pairs {
    pub fn add(&mut self, pair: Pair) {
        let Pair { bare_sql, ours } = &pair;
        println!(
            "  bare SQL {:>8.0}/s {:>5.1} µs ({bare_sql})   ours {:>8.0}/s {:>5.1} µs ({ours})   ratio {:.2}, of CPU {:.2}",
            bare_sql.per_second,
            bare_sql.cpu_us(),
            ours.per_second,
            ours.cpu_us(),
            pair.ratio(),
            pair.cpu_ratio(),
        );
        self.0.push(pair);
    }

    pub fn ratio(&self) -> f64 {
        median(self.0.iter().map(Pair::ratio))
    }

    pub fn cpu_ratio(&self) -> f64 {
        median(self.0.iter().map(Pair::cpu_ratio))
    }

    /// The baseline, with the median of each figure.
    pub fn bare_sql(&self) -> Measured {
        Measured::median(self.0.iter().map(|pair| pair.bare_sql))
    }

    pub fn ours(&self) -> Measured {
        Measured::median(self.0.iter().map(|pair| pair.ours))
    }

    pub fn print_head(what: &str) {
        println!("{what:<26}{:>12}{:>12}{:>8}   CPU µs a message", "bare SQL/s", "ours/s", "ratio");
    }

    pub fn print(&self, name: &str) {
        let (bare_sql, ours) = (self.bare_sql(), self.ours());
        println!(
            "{name:<26}{:>12.0}{:>12.0}{:>8.2}   bare SQL {bare_sql}, ours {ours}, ratio {:.2}",
            bare_sql.per_second,
            ours.per_second,
            self.ratio(),
            self.cpu_ratio(),
        );
    }
}
