//! Functions of one, two or three values, value by value, compiled for each instruction set. An
//! operand is a value of the network, such a value read by an index table, or a constant.

use crate::dense::graph::functions::{Map, Zip};
use crate::dense::run::moves::Pattern;
use crate::simd::isa::Isa;
use crate::simd::{Job, Simd, dispatch};

/// The values of one operand in a run.
#[derive(Clone, Copy)]
pub(in crate::dense) enum Side<'a> {
    Values(&'a [f32]),
    /// Of each sample, those at the positions of the table.
    Picked(&'a [f32], &'a [u32], Pattern),
    /// Equal for each sample.
    Constant(&'a [f32]),
}

impl Side<'_> {
    /// Returns one sample's values as those of all samples.
    pub fn constant(self) -> Self {
        if let Self::Values(values) = self { Self::Constant(values) } else { self }
    }

    /// Returns the values that a table reads, or all.
    fn values(&self) -> &[f32] {
        match self {
            Self::Values(values) | Self::Picked(values, ..) | Self::Constant(values) => values,
        }
    }

    /// Returns value `i` of sample `sample` of `n`. A sample's result has `width` values.
    #[inline(always)]
    fn at(&self, sample: usize, n: usize, width: usize, i: usize) -> f32 {
        match self {
            Self::Values(values) => values[sample * width + i],
            Self::Picked(values, picks, _) => {
                values[sample * (values.len() / n) + picks[i] as usize]
            }
            Self::Constant(values) => values[i],
        }
    }
}

/// Replaces each value `x` by `map(x)`.
pub(in crate::dense) fn map(isa: Isa, map: Map, values: &mut [f32]) {
    dispatch(isa, Each { map, values });
}

/// A function of each value. Each function has a loop of its own, without closures: a closure is
/// compiled without the family's instructions if the compiler does not inline it.
struct Each<'a> {
    map: Map,
    values: &'a mut [f32],
}

impl Job for Each<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        macro_rules! each {
            ($map:expr) => {
                for x in self.values {
                    *x = $map.apply(*x);
                }
            };
        }
        match self.map {
            Map::Relu => each!(Map::Relu),
            Map::Sigmoid => each!(Map::Sigmoid),
            Map::Silu => each!(Map::Silu),
            Map::Tanh => each!(Map::Tanh),
            Map::Abs => each!(Map::Abs),
            Map::Neg => each!(Map::Neg),
            Map::Exp => each!(Map::Exp),
            Map::Ln => each!(Map::Ln),
            Map::Sqrt => each!(Map::Sqrt),
            Map::Erf => each!(Map::Erf),
            Map::Floor => each!(Map::Floor),
            Map::Ceil => each!(Map::Ceil),
            Map::Round => each!(Map::Round),
            Map::Trunc => each!(Map::Trunc),
            Map::Half => each!(Map::Half),
            Map::Sign => each!(Map::Sign),
            Map::Sin => each!(Map::Sin),
            Map::Cos => each!(Map::Cos),
            Map::Tan => each!(Map::Tan),
            Map::Asin => each!(Map::Asin),
            Map::Acos => each!(Map::Acos),
            Map::Atan => each!(Map::Atan),
            Map::Sinh => each!(Map::Sinh),
            Map::Cosh => each!(Map::Cosh),
            Map::Asinh => each!(Map::Asinh),
            Map::Acosh => each!(Map::Acosh),
            Map::Atanh => each!(Map::Atanh),
            Map::Reciprocal => each!(Map::Reciprocal),
            Map::Softplus => each!(Map::Softplus),
            Map::Softsign => each!(Map::Softsign),
            Map::Mish => each!(Map::Mish),
            Map::Gelu => each!(Map::Gelu),
            Map::GeluTanh => each!(Map::GeluTanh),
            Map::HardSwish => each!(Map::HardSwish),
            Map::NotZero => each!(Map::NotZero),
            Map::IsZero => each!(Map::IsZero),
            Map::IsNan => each!(Map::IsNan),
            Map::Wrap(n) => each!(Map::Wrap(n)),
            Map::HardSigmoid { alpha, beta } => each!(Map::HardSigmoid { alpha, beta }),
            Map::LeakyRelu { alpha } => each!(Map::LeakyRelu { alpha }),
            Map::Elu { alpha, scale } => each!(Map::Elu { alpha, scale }),
            Map::Celu { alpha } => each!(Map::Celu { alpha }),
            Map::ThresholdedRelu { alpha } => each!(Map::ThresholdedRelu { alpha }),
            Map::Clip { low, high } => each!(Map::Clip { low, high }),
            Map::Pow(2.0) => each!(Map::Pow(2.0)),
            Map::Pow(3.0) => each!(Map::Pow(3.0)),
            Map::Pow(y) => each!(Map::Pow(y)),
        }
    }
}

/// Computes `zip` of each pair of values. A sample's result has `width` values.
pub(in crate::dense) fn zip(isa: Isa, zip: Zip, sides: [Side; 2], width: usize, out: &mut [f32]) {
    match zip {
        Zip::Add => pairs(isa, sides, width, out, |a, b| a + b),
        Zip::Sub => pairs(isa, sides, width, out, |a, b| a - b),
        Zip::Mul => pairs(isa, sides, width, out, |a, b| a * b),
        Zip::Div => pairs(isa, sides, width, out, |a, b| a / b),
        Zip::Pow => pairs(isa, sides, width, out, |a, b| Zip::Pow.apply(a, b)),
        Zip::Min => pairs(isa, sides, width, out, |a, b| Zip::Min.apply(a, b)),
        Zip::Max => pairs(isa, sides, width, out, |a, b| Zip::Max.apply(a, b)),
        Zip::PRelu => pairs(isa, sides, width, out, |a, b| Zip::PRelu.apply(a, b)),
        Zip::Equal => pairs(isa, sides, width, out, |a, b| Zip::Equal.apply(a, b)),
        Zip::Less => pairs(isa, sides, width, out, |a, b| Zip::Less.apply(a, b)),
        Zip::LessEqual => pairs(isa, sides, width, out, |a, b| Zip::LessEqual.apply(a, b)),
        Zip::Quotient => pairs(isa, sides, width, out, |a, b| Zip::Quotient.apply(a, b)),
        Zip::Modulo => pairs(isa, sides, width, out, |a, b| Zip::Modulo.apply(a, b)),
        Zip::Remainder => pairs(isa, sides, width, out, |a, b| Zip::Remainder.apply(a, b)),
    }
}

fn pairs(
    isa: Isa,
    sides: [Side; 2],
    width: usize,
    out: &mut [f32],
    function: impl Fn(f32, f32) -> f32,
) {
    let n = out.len() / width;
    let sides = match sides {
        // A row that is repeated needs no copy.
        [Side::Picked(.., Pattern::Rows(_)), Side::Values(_) | Side::Constant(_)]
        | [Side::Values(_) | Side::Constant(_), Side::Picked(.., Pattern::Rows(_))] => {
            sides.map(Some)
        }
        // A table is read into the result first, which then stands for the operand.
        [left @ Side::Values(_), Side::Picked(values, picks, pattern)] => {
            pattern.copy(picks, values, values.len() / n, out);
            [Some(left), None]
        }
        [Side::Picked(values, picks, pattern), right @ (Side::Values(_) | Side::Constant(_))] => {
            pattern.copy(picks, values, values.len() / n, out);
            [None, Some(right)]
        }
        [left, right] => [Some(left), Some(right)],
    };
    dispatch(isa, Pairs { sides, width, out, function: |a, b, _| function(a, b) });
}

/// A function of each pair of values, and of the value that the result had. A missing side stands
/// in `out`.
struct Pairs<'a, F> {
    sides: [Option<Side<'a>>; 2],
    width: usize,
    out: &'a mut [f32],
    function: F,
}

impl<F: Fn(f32, f32, f32) -> f32> Job for Pairs<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { sides, width, out, function: f } = self;
        match sides {
            [Some(Side::Values(left)), Some(Side::Values(right))] => {
                let pairs = left.iter().zip(right);
                out.iter_mut().zip(pairs).for_each(|(out, (a, b))| *out = f(*a, *b, *out));
            }
            [Some(Side::Values(left)), None] => {
                out.iter_mut().zip(left).for_each(|(out, a)| *out = f(*a, *out, *out));
            }
            [None, Some(Side::Values(right))] => {
                out.iter_mut().zip(right).for_each(|(out, b)| *out = f(*out, *b, *out));
            }
            [Some(Side::Values(left)), Some(Side::Constant(right))] => {
                for (out, left) in out.chunks_exact_mut(width).zip(left.chunks_exact(width)) {
                    let pairs = left.iter().zip(right);
                    out.iter_mut().zip(pairs).for_each(|(out, (a, b))| *out = f(*a, *b, *out));
                }
            }
            [Some(Side::Constant(left)), Some(Side::Values(right))] => {
                for (out, right) in out.chunks_exact_mut(width).zip(right.chunks_exact(width)) {
                    let pairs = left.iter().zip(right);
                    out.iter_mut().zip(pairs).for_each(|(out, (a, b))| *out = f(*a, *b, *out));
                }
            }
            [None, Some(Side::Constant(right))] => {
                for out in out.chunks_exact_mut(width) {
                    out.iter_mut().zip(right).for_each(|(out, b)| *out = f(*out, *b, *out));
                }
            }
            [Some(Side::Picked(rows, _, Pattern::Rows(row))), Some(right)]
                if !matches!(right, Side::Picked(..)) =>
            {
                each_row([rows, right.values()], row, width, out, f);
            }
            [Some(left), Some(Side::Picked(rows, _, Pattern::Rows(row)))]
                if !matches!(left, Side::Picked(..)) =>
            {
                each_row([rows, left.values()], row, width, out, |b, a, old| f(a, b, old));
            }
            [Some(left), Some(right)] => {
                let n = out.len() / width;
                for (sample, out) in out.chunks_exact_mut(width).enumerate() {
                    for (i, out) in out.iter_mut().enumerate() {
                        let right = right.at(sample, n, width, i);
                        *out = f(left.at(sample, n, width, i), right, *out);
                    }
                }
            }
            _ => unreachable!("only a side beside values stands in the result"),
        }
    }
}

/// Computes `function` of the first `row` values of each sample of `rows`, again and again, and of
/// `others`: the values of each sample, or those that all samples have.
#[inline(always)]
fn each_row(
    [rows, others]: [&[f32]; 2],
    row: usize,
    width: usize,
    out: &mut [f32],
    function: impl Fn(f32, f32, f32) -> f32,
) {
    let stride = rows.len() / (out.len() / width);
    let others = others.chunks_exact(width).cycle();
    for ((out, rows), others) in
        out.chunks_exact_mut(width).zip(rows.chunks_exact(stride)).zip(others)
    {
        for (out, others) in out.chunks_exact_mut(row).zip(others.chunks_exact(row)) {
            let pairs = rows[..row].iter().zip(others);
            out.iter_mut().zip(pairs).for_each(|(out, (a, b))| *out = function(*a, *b, *out));
        }
    }
}

/// Takes value `base + positions[at]` of the data of each of `n` samples. `picks` are pairs of base
/// and position.
pub(in crate::dense) fn lookup(
    data: Side,
    positions: &[f32],
    picks: &[[u32; 2]],
    n: usize,
    out: &mut [f32],
) {
    let positions = positions.chunks_exact(positions.len() / n);
    for (sample, (out, positions)) in out.chunks_exact_mut(picks.len()).zip(positions).enumerate() {
        let own = match data {
            Side::Values(all) | Side::Picked(all, ..) => {
                &all[sample * (all.len() / n)..][..all.len() / n]
            }
            Side::Constant(all) => all,
        };
        for (out, [base, at]) in out.iter_mut().zip(picks) {
            // A position out of range marked its sample before, so its value does not matter.
            let position = (*base as usize).saturating_add(positions[*at as usize] as usize);
            *out = own.get(position).copied().unwrap_or(f32::NAN);
        }
    }
}

/// Takes the second side where the first is not 0, else the third.
pub(in crate::dense) fn select(isa: Isa, sides: [Side; 3], width: usize, out: &mut [f32]) {
    let [condition, yes, no] = sides;
    // The condition is read into the result first, so that whole slices are read and chosen from.
    if let Side::Picked(values, picks, pattern) = condition {
        pattern.copy(picks, values, values.len() / (out.len() / width), out);
    } else {
        pairs(isa, [condition; 2], width, out, |condition, _| condition);
    }
    let function = |yes: f32, no: f32, condition: f32| if condition != 0.0 { yes } else { no };
    dispatch(isa, Pairs { sides: [Some(yes), Some(no)], width, out, function });
}
