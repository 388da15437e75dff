//! The functions of one value and of two values that the nodes of a network compute. A constant is
//! folded by the same functions, so it has the bits that a run would give.

use crate::dense::matrix::math;
use half::f16;
use std::f32::consts::FRAC_1_SQRT_2;

/// A function of one value. A truth value is 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Map {
    Relu,
    Sigmoid,
    /// `x * sigmoid(x)`, also called Swish. Only the CPU's layout has this.
    Silu,
    Tanh,
    Abs,
    Neg,
    Exp,
    Ln,
    Sqrt,
    Erf,
    Floor,
    Ceil,
    Round,
    /// Drops the fraction. The result is never `-0`, because it stands for an integer.
    Trunc,
    /// Rounded to f16.
    Half,
    Sign,
    Sin,
    Cos,
    Tan,
    Asin,
    Acos,
    Atan,
    Sinh,
    Cosh,
    Asinh,
    Acosh,
    Atanh,
    Reciprocal,
    Softplus,
    Softsign,
    /// `x * tanh(softplus(x))`.
    Mish,
    /// `x * (1 + erf(x / sqrt 2)) / 2`.
    Gelu,
    /// `x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`.
    GeluTanh,
    HardSigmoid {
        alpha: f32,
        beta: f32,
    },
    HardSwish,
    LeakyRelu {
        alpha: f32,
    },
    /// `scale * x`, or `scale * alpha * (e^x - 1)` for a negative `x`: Elu and Selu.
    Elu {
        alpha: f32,
        scale: f32,
    },
    /// `max(x, 0) + min(alpha * (e^(x / alpha) - 1), 0)`.
    Celu {
        alpha: f32,
    },
    ThresholdedRelu {
        alpha: f32,
    },
    Clip {
        low: f32,
        high: f32,
    },
    /// `x` to this power.
    Pow(f32),
    /// 1 for a value other than 0, else 0.
    NotZero,
    /// 1 for 0, else 0.
    IsZero,
    IsNan,
    /// `x + n` for a negative `x`: an index that counts from the end of an axis of `n` values.
    Wrap(f32),
}

/// A function of two values. A truth value is 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Zip {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Min,
    Max,
    /// `x`, or `slope * x` for a negative `x`.
    PRelu,
    Equal,
    Less,
    LessEqual,
    /// The quotient of two integers without its fraction, never `-0`.
    Quotient,
    /// The remainder with the sign of the divisor.
    Modulo,
    /// The remainder with the sign of the dividend.
    Remainder,
}

#[inline(always)]
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + math::erf(x * FRAC_1_SQRT_2))
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    let inner = 0.797_884_6 * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + math::tanh(inner))
}

#[inline(always)]
fn truth(holds: bool) -> f32 {
    f32::from(u8::from(holds))
}

impl Map {
    /// Returns the function's value for `x`.
    #[inline(always)]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Relu => math::relu(x),
            Self::Sigmoid => math::sigmoid(x),
            Self::Silu => x * math::sigmoid(x),
            Self::Tanh => math::tanh(x),
            Self::Abs => x.abs(),
            Self::Neg => -x,
            Self::Exp => math::exp(x),
            Self::Ln => math::ln(x),
            Self::Sqrt => x.sqrt(),
            Self::Erf => math::erf(x),
            Self::Floor => x.floor(),
            Self::Ceil => x.ceil(),
            Self::Round => x.round_ties_even(),
            Self::Trunc => x.trunc() + 0.0,
            Self::Half => f16::from_f32(x).to_f32(),
            Self::Sign if x.is_nan() => x,
            Self::Sign => truth(x > 0.0) - truth(x < 0.0),
            // The crate `libm` is plain Rust: the same bits everywhere, unlike the system's libm.
            Self::Sin => libm::sinf(x),
            Self::Cos => libm::cosf(x),
            Self::Tan => libm::tanf(x),
            Self::Asin => libm::asinf(x),
            Self::Acos => libm::acosf(x),
            Self::Atan => libm::atanf(x),
            Self::Sinh => libm::sinhf(x),
            Self::Cosh => libm::coshf(x),
            Self::Asinh => libm::asinhf(x),
            // The crate's function looks at the magnitude of large values alone.
            Self::Acosh => {
                if x < 1.0 {
                    f32::NAN
                } else {
                    libm::acoshf(x)
                }
            }
            Self::Atanh => libm::atanhf(x),
            Self::Reciprocal => 1.0 / x,
            Self::Softplus => math::softplus(x),
            Self::Softsign => x / (1.0 + x.abs()),
            Self::Mish => x * math::tanh(math::softplus(x)),
            Self::Gelu => gelu(x),
            Self::GeluTanh => gelu_tanh(x),
            Self::HardSigmoid { alpha, beta } => clip(alpha * x + beta, 0.0, 1.0),
            Self::HardSwish => x * clip(x / 6.0 + 0.5, 0.0, 1.0),
            Self::LeakyRelu { alpha } => Zip::PRelu.apply(x, alpha),
            Self::Elu { alpha, scale } => {
                if x < 0.0 {
                    scale * (alpha * (math::exp(x) - 1.0))
                } else {
                    scale * x
                }
            }
            Self::Celu { alpha } if x < 0.0 => alpha * (math::exp(x / alpha) - 1.0),
            Self::Celu { .. } => x,
            Self::ThresholdedRelu { alpha } if x > alpha || x.is_nan() => x,
            Self::ThresholdedRelu { .. } => 0.0,
            Self::Clip { low, high } => clip(x, low, high),
            Self::Pow(y) => power(x, y),
            Self::NotZero => truth(x != 0.0),
            Self::IsZero => truth(x == 0.0),
            Self::IsNan => truth(x.is_nan()),
            Self::Wrap(n) => {
                if x < 0.0 {
                    x + n
                } else {
                    x
                }
            }
        }
    }
}

/// Returns `x` limited to `low..=high`; `high` where they contradict each other. NaN stays NaN.
#[inline(always)]
fn clip(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// Returns `x^y`. Frequent powers are products and roots.
#[inline(always)]
fn power(x: f32, y: f32) -> f32 {
    if y == 2.0 {
        x * x
    } else if y == 3.0 {
        x * x * x
    } else if y == 0.5 && x > f32::NEG_INFINITY {
        x.sqrt() + 0.0
    } else if y == 1.0 {
        x
    } else if y == -1.0 {
        1.0 / x
    } else {
        math::pow(x, y)
    }
}

impl Zip {
    /// Returns the function's value for `a` and `b`.
    #[inline(always)]
    pub fn apply(self, a: f32, b: f32) -> f32 {
        match self {
            Self::Add => a + b,
            Self::Sub => a - b,
            Self::Mul => a * b,
            Self::Div => a / b,
            Self::Pow => power(a, b),
            Self::Min if a < b || a.is_nan() => a,
            Self::Max if a > b || a.is_nan() => a,
            Self::Min | Self::Max => b,
            Self::PRelu if a < 0.0 => a * b,
            Self::PRelu => a,
            Self::Equal => truth(a == b),
            Self::Less => truth(a < b),
            Self::LessEqual => truth(a <= b),
            // f32 could round a quotient up to the next integer.
            Self::Quotient => (f64::from(a) / f64::from(b)).trunc() as f32 + 0.0,
            Self::Modulo => {
                let rest = a % b;
                if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
            }
            Self::Remainder => a % b,
        }
    }
}
