//! A small fleet through the whole story of `rollout.rs`: `fleet` is the same with more cars, a
//! chart and figures.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_tests::rollout::{Rollout, simulate};

#[test]
fn a_bad_release_stops_at_its_canaries_and_the_next_one_reaches_all() {
    let cars = 100;
    let rollout = simulate(cars, 5);
    assert!((1..=5).contains(&rollout.met_bad), "{} cars met the bad release", rollout.met_bad);
    assert!(rollout.taken_back_at > 0, "nobody noticed");
    let last = rollout.hours.last().unwrap();
    assert_eq!(last.live.get(&4), Some(&cars), "{:?}", last.live);
    assert!(
        rollout.hours.iter().all(|h| !h.live.contains_key(&3)),
        "a bad release outlived its hour"
    );
    for (generation, at) in Rollout::good() {
        let [half, all] =
            [50, 100].map(|percent| rollout.hours_to(generation, at, percent).unwrap());
        assert!(half <= 2 && all >= half, "generation {generation}: {half} and {all} hours");
    }
    assert_eq!(rollout.idle_poll.1, 2.0, "a poll that brings nothing takes two requests");
}
