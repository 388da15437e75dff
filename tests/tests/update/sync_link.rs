//! Links that break, mix answers up, are slow or expensive, in simulation and over HTTP: a download
//! resumes where it broke, and every received byte is counted.

use hatchback::bundle::BundleReader;
use hatchback::car::sync_steps::SyncSteps;
use hatchback::io::disk::Disk;
use hatchback::update::error::UpdateError;
use hatchback::update::link::{Fetcher, Link, LinkError, LinkLimits, LinkRules, Take};
use hatchback::update::staging::Staging;
use hatchback_link::{DirectoryLink, HttpLink, LinkOptions};
use hatchback_tests::fleet::{Car, FRESH_S, Fleet, T0, Ticks, VERSIONS, first_release};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[test]
fn a_download_cut_at_every_byte_resumes_at_the_chunk() {
    let (fleet, release, clock) = (Fleet::new(), first_release(), Ticks::still());
    let bundle = BundleReader::open(&VERSIONS.snapshots[0]).unwrap();
    let blobs = &bundle.manifest().blobs;
    let largest = blobs.iter().flat_map(|b| &b.chunks).map(|c| u64::from(c.stored)).max().unwrap();
    let largest = largest.max(release.manifest_bytes);
    let total = release.manifest_bytes + blobs.iter().map(|b| b.stored_bytes()).sum::<u64>();
    let stage = |disk: &SimDisk, wire: &mut Wire<DirectoryLink>| {
        let staging = Staging::open(disk, Path::new("/staged")).unwrap();
        staging
            .stage(&release, &mut Fetcher::new(wire, &clock, LinkLimits::default()), |_, _| Ok(()))
    };

    for cut in 0..total {
        let disk = SimDisk::default();
        let mut wire =
            Wire::new(fleet.link(), Faults { breaks_after: Some(cut), ..Faults::default() });
        let error = stage(&disk, &mut wire).unwrap_err();
        assert!(matches!(error, UpdateError::LinkBroken { .. }), "cut {cut}: {error:?}");
        wire.faults = Faults::default();
        let path = stage(&disk, &mut wire).unwrap();
        assert_eq!(
            disk.read(&path, u64::MAX).unwrap(),
            std::fs::read(&VERSIONS.snapshots[0]).unwrap(),
            "cut {cut}"
        );
        assert!(wire.bytes < total + largest, "cut {cut}: {} bytes instead of {total}", wire.bytes);
    }
    println!("{total} cuts");

    // A break after some bytes does not end the run.
    let mut wire =
        Wire::new(fleet.link(), Faults { breaks_each: Some(largest / 20), ..Faults::default() });
    stage(&SimDisk::default(), &mut wire).unwrap();

    assert_eq!(wire.bytes, total);
}

/// How a server answers a request for a range.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ranges {
    Right,
    /// With the whole object, as if no range had been asked for.
    Ignored,
    /// With the whole object as if it were the range.
    Unsaid,
    /// With a range that begins earlier.
    Early,
    /// With 500 bytes of the range.
    Short,
}

/// Starts a web server over `folder` and returns its address. The server answers two of 29 requests
/// with an error, and breaks answers off after `breaks` bytes. If it ignores ranges, it also
/// answers like a bucket that nobody may list: 403 for what does not exist.
fn serve(folder: PathBuf, breaks: usize, ranges: Ranges) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/models", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let (mut stream, mut from, mut path) = (stream.unwrap(), 0, String::new());
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let line = line.unwrap_or_default().to_lowercase();
                if let Some(rest) = line.strip_prefix("get /models/") {
                    path = rest.split(' ').next().unwrap().to_owned();
                } else if let Some(range) = line.strip_prefix("range: bytes=") {
                    from = range.trim_end_matches('-').parse().unwrap();
                } else if line.is_empty() {
                    break;
                }
            }

            let head = |status: &str, bytes| {
                format!("HTTP/1.1 {status}\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n")
            };
            // Without a right range an object arrives only from an answer that is whole.
            let breaks = if ranges == Ranges::Right || n % 2 == 0 { breaks } else { usize::MAX };
            let answer = match std::fs::read(folder.join(&path)) {
                _ if n % 29 >= 27 => head("503 Busy", 0).into_bytes(),
                Err(_) if ranges != Ranges::Ignored => head("404 Not Found", 0).into_bytes(),
                Err(_) => head("403 Forbidden", 0).into_bytes(),
                Ok(content) => {
                    let (status, sent) = part_of(&content, from, ranges);
                    [head(&status, sent.len()).as_bytes(), &sent[..sent.len().min(breaks)]].concat()
                }
            };

            let _ = stream.write_all(&answer);
        }
    });

    address
}

/// Returns the status line with the range, and the bytes, of an answer from byte `from` on.
fn part_of(content: &[u8], from: usize, ranges: Ranges) -> (String, &[u8]) {
    let of = |start: usize, end: usize| {
        let range = format!("Content-Range: bytes {start}-{}/{}", end - 1, content.len());
        (format!("206 Partial Content\r\n{range}"), &content[start..end])
    };
    match ranges {
        _ if from == 0 => ("200 OK".to_owned(), content),
        Ranges::Ignored => ("200 OK".to_owned(), content),
        _ if from == content.len() => (format!("416 Beyond\r\nContent-Range: bytes */{from}"), &[]),
        Ranges::Right => of(from, content.len()),
        Ranges::Unsaid => ("206 Partial Content".to_owned(), content),
        Ranges::Early => of(from.saturating_sub(100), content.len()),
        Ranges::Short => of(from, content.len().min(from + 500)),
    }
}

#[test]
fn over_http_with_broken_answers_and_error_storms() {
    let fleet = Fleet::new();
    for (breaks, ranges) in [
        (usize::MAX, Ranges::Right),
        (3_000, Ranges::Right),
        (usize::MAX, Ranges::Ignored),
        (3_000, Ranges::Ignored),
        (3_000, Ranges::Unsaid),
        (3_000, Ranges::Early),
        (3_000, Ranges::Short),
    ] {
        let car = Car::new(&fleet);
        let mut link =
            HttpLink::new(&serve(fleet.repository(), breaks, ranges), &LinkOptions::default())
                .unwrap();
        let (mut runs, mut bytes) = (0, 0);
        while car.live() == 0 {
            if let Err(e) = car.run(&mut link, T0 + 1) {
                assert!(matches!(e, UpdateError::LinkBroken { .. }), "{e:?}");
            }
            bytes += car.sync.status().unwrap().bytes_received;
            runs += 1;
            assert!(runs < 50, "never ends: {:?}", car.sync.status().unwrap());
        }
        println!("breaks {breaks}, ranges {ranges:?}: {runs} runs, {bytes} bytes");
    }
}

/// A car asks for the root after its newest one at each poll. Every other object that it asks for
/// exists, so a refusal must not look like a release that is gone.
#[test]
fn a_forbidden_root_does_not_exist_and_another_forbidden_object_is_an_error() {
    let address = serve(PathBuf::from("/nowhere"), usize::MAX, Ranges::Ignored);
    let mut link = HttpLink::new(&address, &LinkOptions::default()).unwrap();
    let mut get = |path| link.get(path, 0, &mut |_| ControlFlow::Continue(()));
    assert_eq!(get("metadata/2.root.json"), Err(LinkError::NotFound));
    for path in ["metadata/timestamp.json", "metadata/2.targets.json", "chunks/ab", "targets/m"] {
        assert!(
            matches!(get(path), Err(LinkError::Broken(said)) if said.contains("403")),
            "{path}"
        );
    }
}

/// A server without ranges sends an object again from its start; both times count.
#[test]
fn bytes_received_twice_count_twice() {
    let (listener, content) = (TcpListener::bind("127.0.0.1:0").unwrap(), [7; 10_000]);
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            lines.map_while(Result::ok).find(String::is_empty);
            let sent = if n == 0 { 3_000 } else { content.len() };
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                content.len()
            );
            // The client may close the connection early.
            let _ = stream.write_all(&[head.as_bytes(), &content[..sent]].concat());
        }
    });
    let (mut link, clock) =
        (HttpLink::new(&address, &LinkOptions::default()).unwrap(), Ticks::still());
    let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
    assert_eq!(fetcher.get("object", 20_000).unwrap(), content);
    assert_eq!(fetcher.bytes(), 13_000);
}

#[test]
fn a_byte_budget_stops_a_run_and_the_next_run_continues() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    // Even with a budget below the size of any object, a run fetches one chunk.
    let limits = LinkLimits { bytes_max: 1, ..LinkLimits::default() };
    let runs = runs_until_live(&fleet, &car, limits, |e| {
        matches!(e, UpdateError::ByteBudget { bytes_max: 1 })
    });
    // The end of the hours for fetching stops runs at the same places.
    let limits = LinkLimits { time_max: Duration::ZERO, ..LinkLimits::default() };
    let car = Car::new(&fleet);
    assert_eq!(
        runs_until_live(&fleet, &car, limits, |e| matches!(e, UpdateError::OutsideHours)),
        runs
    );
}

/// A newer release is listed before the runs have brought the whole of an older one.
#[test]
fn a_slow_link_brings_one_release_before_it_begins_the_next() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let limits = LinkLimits { bytes_max: 1, ..LinkLimits::default() };
    let run = |now| car.run_timed(&mut fleet.link(), now, &Ticks::still(), limits);
    run(T0 + 1).unwrap_err();
    fleet.publish(T0 + 2, &VERSIONS.snapshots[1]);
    let mut now = T0 + 2;
    while car.live() == 0 {
        now += 1;
        assert!(now < T0 + 500, "nothing is live");
        let _ = run(now);
    }
    assert_eq!(car.live(), 1);
}

/// The clock was ahead when the bytes of its day were spent. A day of polls by the right clock ends
/// that day, although each poll is of another process.
#[test]
fn bytes_that_a_clock_ahead_spent_cost_a_day() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let rules =
        LinkRules { poll_minutes: 60, bytes_per_day_max: 1, bytes_per_s_max: 0, hours: [0, 24] };
    let is_over = |now| {
        let mut steps = SyncSteps::new(car.sync.clone(), None, rules);
        let polled = steps.poll(&mut fleet.link(), &Ticks::still(), now, 0.5);
        matches!(polled, Err(UpdateError::ByteBudget { .. }))
    };
    assert!(!is_over(T0 + 10 * 24 * 3600));
    let hours = (0..100).find(|hour| !is_over(T0 + hour * 3600));
    assert_eq!(hours, Some(24));
}

/// Returns the runs within `limits` that a new car needs. Each ends as `ends` accepts.
fn runs_until_live(
    fleet: &Fleet,
    car: &Car,
    limits: LinkLimits,
    ends: fn(&UpdateError) -> bool,
) -> u32 {
    let (mut runs, clock) = (0, Ticks::still());
    while car.live() == 0 {
        let ran = car.run_timed(&mut fleet.link(), T0 + 1, &clock, limits);
        assert!(ran.as_ref().err().is_none_or(ends), "{ran:?}");
        runs += 1;
        assert!(runs < 100, "never ends");
    }
    assert!(runs > 1);
    runs
}

/// A power cut at any moment leaves every received byte charged to the daily budget.
#[test]
fn bytes_of_a_run_without_an_end_are_charged() {
    let fleet = Fleet::new();
    let now = std::time::Duration::from_secs(T0 + 1);
    let received = |car: &Car| u64::MAX - car.sync.status().unwrap().received.left(u64::MAX, now);
    let whole = Car::new(&fleet);
    let calls = whole.disk.calls();
    let mut wire = Wire::new(fleet.link(), Faults::default());
    whole.run(&mut wire, T0 + 1).unwrap();
    assert_eq!(received(&whole), wire.bytes, "a complete run is charged what arrived");
    let calls = whole.disk.calls() - calls;
    for cut in 0..calls {
        let (car, mut wire) = (Car::new(&fleet), Wire::new(fleet.link(), Faults::default()));
        car.disk.cut_after(cut);
        let _ = car.run(&mut wire, T0 + 1);
        car.disk.reboot(cut);
        assert!(received(&car) >= wire.bytes, "cut {cut}: {} of {}", received(&car), wire.bytes);
    }
}

#[test]
fn a_link_that_loses_a_third_or_mixes_answers_up() {
    let fleet = Fleet::new();
    for faults in [
        Faults { loss_percent: 30, ..Faults::default() },
        Faults { swaps_one_in: 4, ..Faults::default() },
    ] {
        let (car, mut wire, mut runs) =
            (Car::new(&fleet), Wire::new(fleet.link(), faults.clone()), 0);
        while car.live() == 0 {
            let ran = car.run(&mut wire, T0 + 1);
            runs += 1;
            assert!(runs < 500, "{faults:?} never ends: {ran:?}");
        }
        println!("{faults:?}: {runs} runs, {} bytes", wire.bytes);
        assert_eq!(car.live(), 1);
    }
}

#[test]
fn a_link_of_a_byte_a_second_is_too_slow_and_costs_few_bytes() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let mut slow = Wire::new(fleet.link(), Faults { single_bytes: true, ..Faults::default() });
    for _ in 0..3 {
        let ran = car.run_timed(&mut slow, T0 + 1, &Ticks::stepping(1), LinkLimits::default());
        assert!(matches!(ran, Err(UpdateError::SlowRetrieval { .. })), "{ran:?}");
    }
    assert!(slow.bytes < 200, "{} bytes at a byte a second", slow.bytes);
    car.run(&mut fleet.link(), T0 + 2).unwrap();
    assert_eq!(car.live(), 1);
}

#[test]
fn a_download_resumes_after_a_pause_of_three_days() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let total = std::fs::metadata(&VERSIONS.snapshots[0]).unwrap().len();
    let half = Faults { breaks_after: Some(total / 2), ..Faults::default() };
    let mut wire = Wire::new(fleet.link(), half);

    assert!(matches!(car.run(&mut wire, T0 + 1), Err(UpdateError::LinkBroken { .. })));
    let later = T0 + 3 * 24 * 3600;
    wire.faults = Faults::default();

    // The publisher has signed nothing since, so the car must assume a freeze.
    assert!(matches!(car.run(&mut wire, later), Err(UpdateError::Freeze { .. })));
    let before = wire.bytes;
    let refresh = Change { expires_s: FRESH_S, ..Change::default() };
    publish(&Objects::directory(&fleet.repository()).unwrap(), &fleet.keys(), &refresh, later)
        .unwrap();
    let mut wire2 = Wire::new(fleet.link(), Faults::default());
    car.run(&mut wire2, later + 1).unwrap();

    assert_eq!(car.live(), 1);
    let chunks = BundleReader::open(&VERSIONS.snapshots[0]).unwrap();
    let largest =
        chunks.manifest().blobs.iter().flat_map(|b| &b.chunks).map(|c| u64::from(c.stored)).max();
    let fetched = wire2.asked.iter().filter(|p| p.starts_with("chunks/")).count();
    let all = chunks.manifest().blobs.iter().flat_map(|b| &b.chunks).count();

    assert!(fetched < all, "{fetched} of {all} chunks were fetched after the pause");
    assert!(before + wire2.bytes < total + largest.unwrap() + 20_000);
}

/// A link that sends whole objects only, and breaks off so many times within a chunk.
struct Rangeless(DirectoryLink, u32);

impl Link for Rangeless {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        if from > 0 {
            return Err(LinkError::NoRanges);
        }
        if self.1 == 0 || !path.starts_with("chunks/") {
            return self.0.get(path, 0, take);
        }
        self.1 -= 1;
        self.0.get(path, 0, &mut |piece| {
            let _ = take(&piece[..piece.len() / 2]);
            ControlFlow::Break(())
        })?;
        Err(LinkError::Broken("cut".to_owned()))
    }
}

#[test]
fn a_link_without_ranges_sends_an_object_again() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let mut link = Rangeless(fleet.link(), 1);
    car.run(&mut link, T0 + 1).unwrap();
    assert_eq!((link.1, car.live()), (0, 1));
}

#[test]
fn an_object_is_not_sent_again_beyond_the_byte_budget() {
    let fleet = Fleet::new();
    let mut link = Rangeless(fleet.link(), 2);
    let limits = LinkLimits { bytes_max: 1, ..LinkLimits::default() };
    let error = Car::new(&fleet).run_timed(&mut link, T0 + 1, &Ticks::still(), limits);
    assert!(matches!(error, Err(UpdateError::ByteBudget { bytes_max: 1 })), "{error:?}");
    assert_eq!(link.1, 1, "the chunk began again");
}

/// Chunks that arrived before the end of a run survive a power cut. If one is damaged then, it is
/// fetched again.
#[test]
fn chunks_of_an_interrupted_fetch_are_durable_and_checked() {
    let fleet = Fleet::new();
    let limits = LinkLimits { bytes_max: 1, ..LinkLimits::default() };
    for seed in 0..8 {
        let car = Car::new(&fleet);
        let error = car.run_timed(&mut fleet.link(), T0 + 1, &Ticks::still(), limits).unwrap_err();
        assert!(matches!(error, UpdateError::ByteBudget { .. }), "{error:?}");
        car.disk.cut_after(0);
        car.disk.reboot(seed);
        let hex = hatchback::bundle::manifest::hex(&first_release().manifest);
        let part = car.sync.directory.join("staged").join(format!("{hex}.hatch.part"));
        let mut bytes = car.disk.read(&part, u64::MAX).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        assert!(bytes.len() > 100, "no chunk survived");
        car.disk.put(&part, bytes);
        car.run(&mut fleet.link(), T0 + 2).unwrap();
        assert_eq!(car.live(), 1);
    }
}
