//! The rollout of `rollout.rs` with a small fleet. The program `fleet` runs it with more cars and
//! draws a chart.

use hatchback_tests::rollout::{Rollout, simulate};

#[test]
fn a_bad_release_stops_at_its_canaries_and_the_next_one_reaches_every_car() {
    let cars = 100;
    let rollout = simulate(cars, 5);
    assert!(
        (1..=5).contains(&rollout.met_bad),
        "the bad release was live on {} cars",
        rollout.met_bad
    );
    assert!(rollout.revoked_at > 0, "the publisher did not notice");
    let last = rollout.hours.last().unwrap();
    assert_eq!(last.live.get(&4), Some(&cars), "{:?}", last.live);
    assert!(
        rollout.hours.iter().all(|h| !h.live.contains_key(&3)),
        "the bad release was live for over an hour"
    );
    for (generation, at) in Rollout::good() {
        let [half, all] =
            [50, 100].map(|percent| rollout.hours_to(generation, at, percent).unwrap());
        assert!(half <= 2 && all >= half, "generation {generation}: {half} and {all} hours");
    }
    assert_eq!(rollout.idle_poll.1, 2.0, "a poll without news takes two requests");
}
