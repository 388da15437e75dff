//! The link of the simulated car: what the repository shows at this moment, with the faults of a
//! bad network and of bad servers.

use crate::random::Random;
use crate::whole_car::repository::Contents;
use hatchback::update::link::{Link, LinkError, Take};
use std::rc::Rc;
use std::sync::Arc;

/// Bytes that arrive together.
const PIECE_BYTES: usize = 8 << 10;
/// Bytes after which even an endless object ends.
const ENDLESS_BYTES: usize = 8 << 20;

/// How a server answers one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Whole,
    BreaksOff,
    Refused,
    Missing,
    Garbage,
    Short,
    Endless,
    Stalls,
    OtherObject,
    NoRanges,
}

/// Chooses what a link does.
pub trait Server {
    /// Returns what the repository shows now.
    fn contents(&self) -> Rc<Contents>;
    /// Returns the random numbers of the next answer; `None` for an answer without a fault.
    fn fault(&self) -> Option<Random>;
    /// Called between two pieces; other actors may run. A stall passes `is_stalled`.
    fn pause(&self, is_stalled: bool);
    /// Counts an answer.
    fn count(&self, what: &'static str);
}

/// A link to the simulated repository.
pub struct SimLink<'a> {
    /// The server at its other end.
    pub server: &'a dyn Server,
}

impl Answer {
    fn draw(random: &mut Random) -> Self {
        *random.pick(&[
            Self::BreaksOff,
            Self::Refused,
            Self::Missing,
            Self::Garbage,
            Self::Short,
            Self::Endless,
            Self::Stalls,
            Self::OtherObject,
            Self::NoRanges,
        ])
    }
}

impl Link for SimLink<'_> {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        self.server.pause(false);
        let mut fault = self.server.fault();
        let answer = fault.as_mut().map_or(Answer::Whole, Answer::draw);
        let random = &mut fault.unwrap_or_else(|| Random::new(0));
        if answer != Answer::Whole {
            self.server.count("link fault");
        }

        let contents = self.server.contents();
        let mut object = contents.get(path).cloned();
        match answer {
            Answer::Missing => object = None,
            Answer::Refused => return Err(LinkError::Broken("500".to_owned())),
            Answer::NoRanges if from > 0 => return Err(LinkError::NoRanges),
            Answer::Garbage => object = Some(Arc::new(b"<html>log in</html>".to_vec())),
            Answer::OtherObject => {
                let at = random.below(contents.len() as u64) as usize;
                object = contents.values().nth(at).cloned();
            }
            _ => {}
        }

        let object = object.ok_or(LinkError::NotFound)?;
        let rest = object.get(from as usize..).unwrap_or_default();
        self.send(answer, rest, random, take)
    }
}

impl SimLink<'_> {
    fn send(
        &self,
        answer: Answer,
        rest: &[u8],
        random: &mut Random,
        take: Take<'_>,
    ) -> Result<(), LinkError> {
        let is_cut = matches!(answer, Answer::BreaksOff | Answer::Short);
        let end = if is_cut { random.below(rest.len() as u64 + 1) as usize } else { rest.len() };
        for piece in rest[..end].chunks(PIECE_BYTES) {
            self.server.pause(answer == Answer::Stalls);
            if take(piece).is_break() {
                return Ok(());
            }
        }

        if answer == Answer::Endless {
            let page = [b' '; 64 << 10];
            for _ in 0..ENDLESS_BYTES / page.len() {
                if take(&page).is_break() {
                    return Ok(());
                }
            }
        }
        let is_broken = answer == Answer::BreaksOff;
        if is_broken { Err(LinkError::Broken("cut".to_owned())) } else { Ok(()) }
    }
}
