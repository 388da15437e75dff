//! `fleet CARS [CHART.svg]`: simulates the rollout of `rollout.rs` with this many cars. Prints the
//! hours until 50, 95 and 100 % of the fleet have a release, the bytes and requests of a car, and
//! what they come to for ten million cars. Draws the live generations by hour as a chart.

use anyhow::{Context, Result};
use hatchback_tests::rollout::{Rollout, simulate};
use hatchback_tools::report;
use hatchback_tools::report::plot::{self, Axis, Series};
use std::path::Path;

/// Cars for which the costs are printed.
const MANY: f64 = 1e7;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let cars = args.next().context("usage: fleet CARS [CHART.svg]")?.parse()?;
    let rollout = simulate(cars, 5);
    let mut table =
        report::table(&["release", "published", "50 %", "95 %", "100 %", "bytes a car"]);
    for (generation, at) in Rollout::good() {
        let hours = |percent| {
            let hours = rollout.hours_to(generation, at, percent);
            hours.map_or("never".to_owned(), |hours| format!("{hours} h"))
        };
        let bytes = rollout.release_bytes.get(&generation).copied().unwrap_or_default();
        table.add_row([
            generation.to_string(),
            format!("hour {at}"),
            hours(50),
            hours(95),
            hours(100),
            report::bytes(bytes as u64),
        ]);
    }
    println!("{table}");

    let (bytes, requests) = rollout.idle_poll;
    println!(
        "{cars} cars; the bad release was live on {}, and was revoked at hour {}",
        rollout.met_bad, rollout.revoked_at
    );
    println!("a poll without news: {bytes:.0} bytes, {requests:.1} requests");
    let (a_day, a_second) = (24.0 * MANY * bytes, MANY * requests / 3600.0);
    println!(
        "ten million cars polling hourly: {a_second:.0} requests/s, {:.1} GB a day",
        a_day / 1e9
    );

    if let Some(path) = args.next() {
        chart(&rollout, Path::new(&path))?;
    }
    Ok(())
}

fn chart(rollout: &Rollout, path: &Path) -> Result<()> {
    let series = |(color, generation): (usize, u64)| Series {
        name: format!("generation {generation}"),
        color,
        dashed: false,
        points: (rollout.hours.iter().enumerate())
            .map(|(h, hour)| {
                let n = hour.live.get(&generation).copied().unwrap_or(0);
                (h as f64, 100.0 * n as f64 / rollout.cars as f64)
            })
            .collect(),
    };

    let series = [(0, 1), (1, 2), (3, 4)].into_iter().map(series).collect();
    let title = format!("{} cars: which generation is live", rollout.cars);
    plot::lines(path, &title, Axis::linear("hour"), Axis::linear("share of the fleet, %"), series)
}
