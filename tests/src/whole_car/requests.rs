//! The callers of the simulated daemon, and the check of every answer: a score is exactly that of
//! one generation, and its status counts exactly what is behind it.

use crate::whole_car::model::{DIMS, LINEAGE};
use crate::whole_car::world::World;
use hatchback::LookupStatus;
use hatchback::request::pipeline::Ticket;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use std::sync::Arc;

/// Requests that callers have under way.
const PENDING_MAX: usize = 3;

/// Answers that hostile callers hold. The other slots are left to callers that take theirs.
const HELD_MAX: usize = 2;
/// One step in so many lets go an answer that was held.
const LET_GO_ONE_IN: u64 = 30;

/// A request that waits for its answer, or an answer that was not taken.
pub struct Pending {
    ticket: Ticket,
    sample: Sample,
}

impl World {
    /// Submits a request, or scores one. Scoring is one step.
    pub fn step_requests(&self) -> String {
        let Some(serving) = self.serving.borrow().clone() else { return "no daemon".to_owned() };
        let Some(served) = serving.get(LINEAGE) else { return "nothing is served".to_owned() };
        let schema = Arc::clone(served.model().expect("a listed model is served").schema());
        self.step_hostile_callers();

        if self.pending.borrow().len() < PENDING_MAX && !self.one_in(3) {
            let sample = self.random(|random| self.prepared.generations.sample(random));
            let mut batch = Batch::new(&schema, 1);
            // The callers never learn of a third feature.
            let mut sent = sample.clone();
            sent.sparse.resize(schema.features.len(), Vec::new());
            if let Err(e) = batch.push(&schema, &sent) {
                self.fail(format!("a sample does not fit the schema: {e}"));
            }
            match served.submit(&batch, None) {
                Ok(ticket) => self.pending.borrow_mut().push(Pending { ticket, sample }),
                Err(_) => self.count("refused requests"),
            }
            return "submitted".to_owned();
        }

        self.atomically(|| served.step());
        drop((served, serving));
        self.take_answers()
    }

    /// Checks the requests that were answered. A swap answers some itself.
    fn take_answers(&self) -> String {
        let taken = std::mem::take(&mut *self.pending.borrow_mut());
        let (done, waiting): (Vec<_>, Vec<_>) = taken.into_iter().partition(|p| p.ticket.is_done());
        self.pending.borrow_mut().extend(waiting);
        let number = done.len();
        for pending in done {
            let is_held = self.has_hostile_callers() && self.one_in(2);
            if is_held && self.held.borrow().len() < HELD_MAX {
                self.count("held answers");
                self.held.borrow_mut().push(pending);
            } else {
                self.take(&pending);
            }
        }
        format!("{number} answers")
    }

    fn has_hostile_callers(&self) -> bool {
        self.callers_until.get() > self.step_number()
    }

    /// Lets a caller leave before its answer, and lets go an answer that was held: it must still be
    /// that of its generation, whatever was swapped meanwhile.
    fn step_hostile_callers(&self) {
        if self.has_hostile_callers() && self.one_in(4) && self.pending.borrow_mut().pop().is_some()
        {
            self.count("callers that left");
        }
        let lets_go = !self.is_healing.get() && self.one_in(LET_GO_ONE_IN);
        let held = if lets_go { self.held.borrow_mut().pop() } else { None };
        held.iter().for_each(|held| self.take(held));
    }

    /// Takes an answer and checks it.
    fn take(&self, Pending { ticket, sample }: &Pending) {
        let answered = ticket.wait().map(|answer| {
            let scores = answer.scores();
            let (values, status) = (scores.values.to_vec(), scores.statuses[0]);
            Answer { sequence: answer.generation().sequence, values, status }
        });
        match answered {
            Ok(answer) => {
                self.count("answers");
                if let Err(what) = self.check_answer(sample, &answer) {
                    let sequence = answer.sequence;
                    self.fail(format!("a wrong answer of generation {sequence}: {what}"));
                }
            }
            Err(_) => self.count("failed requests"),
        }
    }

    fn check_answer(&self, sample: &Sample, answer: &Answer) -> Result<(), String> {
        let Answer { sequence, values, status } = answer;
        let (mut at, mut present, mut wrong) = (0, 0, 0);
        for (t, keys) in sample.sparse.iter().enumerate() {
            let part = &values[at..at + DIMS[t]];
            at += DIMS[t];
            let content = self.history().content(*sequence);
            let expected = self.prepared.generations.row(content, t, keys[0]);
            present += u32::from(expected.is_some());
            let zeros = vec![0.0; DIMS[t]];
            let is_right = part == expected.unwrap_or(&zeros);
            wrong += u32::from(!is_right);
            if !is_right && part != zeros {
                return Err(format!("feature {t}: {part:?} instead of {expected:?}; {status:?}"));
            }
        }

        let LookupStatus { fresh, defaulted, absent, damaged, late } = *status;
        if damaged > 0 {
            self.count("damaged answers");
        } else if (fresh, absent) == (present, 2 - present) {
            self.checks.borrow_mut().fresh_answers += 1;
        }
        let is_exact = damaged > 0 || (fresh, absent) == (present, 2 - present);
        let is_whole = fresh + defaulted + absent + damaged == 2 && defaulted == 0 && !late;
        if is_exact && is_whole && wrong <= damaged {
            return Ok(());
        }
        Err(format!("{wrong} default rows, {present} keys present, status {status:?}"))
    }

    /// Returns the sequence that the daemon serves.
    pub fn served(&self) -> Option<u64> {
        let serving = self.serving.borrow().as_ref().map(Arc::clone)?;
        serving.model(LINEAGE).map(|model| model.generation().sequence)
    }
}

/// An answer, copied out of its slot.
struct Answer {
    sequence: u64,
    values: Vec<f32>,
    status: LookupStatus,
}
