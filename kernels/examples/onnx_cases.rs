//! Runs networks and compares their outputs with those that ONNX Runtime gave. `tests/onnx/*.py`
//! write the files. Prints one line a case that is wrong or runs on the fallback, and the counts.
//!
//!     cargo run --release -p hatchback-kernels --example onnx_cases -- FILE...

#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../tests/cases/mod.rs"]
mod cases;

fn main() -> std::process::ExitCode {
    let (mut all, mut wrong, mut own, mut furthest) = (0, 0, 0, 0.0f32);
    for path in std::env::args().skip(1) {
        for case in cases::read(&std::fs::read(&path).unwrap()) {
            let outcome = case.run();
            all += 1;
            let engine = outcome
                .fallback
                .as_deref()
                .map_or("own".to_owned(), |why| format!("rten for {why}"));
            own += usize::from(outcome.fallback.is_none());
            match outcome.difference {
                Err(problem) => {
                    wrong += 1;
                    println!("{}: WRONG: {problem} ({engine})", case.name);
                }
                Ok(difference) => {
                    furthest = furthest.max(difference);
                    println!("{}: {difference:.1e} {engine}", case.name);
                }
            }
        }
    }
    println!("{all} cases, {wrong} wrong, {own} on our engine, difference at most {furthest:.1e}");
    std::process::ExitCode::from(u8::from(wrong > 0))
}
