//! Functions of one value in plain arithmetic, with the same bits on every instruction set. This
//! file never calls libm.

use std::f32::consts::FRAC_2_SQRT_PI;

/// Its addition rounds to the nearest integer, whose bits are then the lowest of the mantissa.
const ROUND: f32 = 12_582_912.0;

/// Returns `e^x` for `x` in -87..=87, within 2 units in the last place. A value outside that range
/// is clamped first. NaN stays NaN.
#[inline(always)]
fn exp_clamped(x: f32) -> f32 {
    let x = x.clamp(-87.0, 87.0);
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    exp_remainder(x, rounded - ROUND) * f32::from_bits(power)
}

/// Returns `e^x`, within 2 units in the last place: infinite from 88.8 on, and 0 below -104.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = x.clamp(-104.5, 89.0);
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    // 2^n in two factors, because it may be too large or too small for one.
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    exp_remainder(x, rounded - ROUND) * power(n >> 1) * power(n.wrapping_sub(n >> 1))
}

/// Returns `e^(x - n ln 2)`, where `n` is `x / ln 2` rounded to an integer.
#[inline(always)]
fn exp_remainder(x: f32, n: f32) -> f32 {
    // ln 2 in two parts. The first has so few bits that its product with `n` is exact.
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    // Cephes' polynomial for e^r, |r| <= ln 2 / 2.
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 0.166_666_65);
    let p = p.mul_add(r, 0.5);
    p.mul_add(r * r, r) + 1.0
}

/// Returns `1 / (1 + e^-x)`, within 1.2e-7.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp_clamped(-x))
}

/// Returns the sigmoid of a finite `x`, and NaN for any other: such a logit is no score.
#[inline(always)]
pub(crate) fn finite_sigmoid(x: f32) -> f32 {
    // An infinite `x` times 0 is NaN.
    x.mul_add(0.0, sigmoid(x))
}

/// Returns the hyperbolic tangent, within 2.4e-7.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    2.0f32.mul_add(sigmoid(x + x), -1.0)
}

/// Returns 0 for a negative `x`, else `x`. NaN stays NaN.
#[inline(always)]
pub(crate) fn relu(x: f32) -> f32 {
    if 0.0 > x { 0.0 } else { x }
}

/// Returns the natural logarithm of a positive `x` that is not subnormal, within 1e-12 of it.
#[inline(always)]
fn ln_wide(x: f64) -> f64 {
    let bits = x.to_bits();
    // `x = m 2^n` with `m` from `sqrt(1/2)` to `sqrt(2)`.
    let shifted = bits.wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits());
    let n = ((shifted as i64) >> 52) as f64;
    let m = f64::from_bits(bits.wrapping_sub(shifted & 0xfff0_0000_0000_0000));
    // ln m = 2 (s + s^3/3 + s^5/5 + ..), |s| < 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut p = 1.0 / 15.0;
    for factor in [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        p = p * square + factor;
    }
    n * std::f64::consts::LN_2 + 2.0 * s * p
}

/// Returns `e^x` for `x` in -700..=700, within 1e-12 of it.
#[inline(always)]
fn exp_wide(x: f64) -> f64 {
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let x = x.clamp(-700.0, 700.0);
    let rounded = x * std::f64::consts::LOG2_E + ROUND;
    let r = x - (rounded - ROUND) * std::f64::consts::LN_2;
    // The series of e^r: 1 / n!.
    let mut p = 1.0 / 39_916_800.0;
    for factor in [
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = p * r + factor;
    }
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(1023) << 52;
    p * f64::from_bits(power)
}

/// Returns the natural logarithm: minus infinity for 0, NaN for a negative `x`.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    let result = ln_wide(f64::from(x)) as f32;
    if x > 0.0 && x < f32::INFINITY {
        result
    } else if x == 0.0 {
        f32::NEG_INFINITY
    } else if x > 0.0 {
        x
    } else {
        f32::NAN
    }
}

/// Returns `x^y`. A negative `x` has integer powers only; the others are NaN.
#[inline(always)]
pub(crate) fn pow(x: f32, y: f32) -> f32 {
    if y == 0.0 || x == 1.0 {
        return 1.0;
    }
    let magnitude = f64::from(x.abs());
    let power = if y.is_infinite() {
        match (magnitude == 1.0, (magnitude > 1.0) == (y > 0.0)) {
            (true, _) => 1.0,
            (false, true) => f64::INFINITY,
            (false, false) => 0.0,
        }
    } else if magnitude == 0.0 || magnitude == f64::INFINITY {
        if (magnitude == 0.0) == (y > 0.0) { 0.0 } else { f64::INFINITY }
    } else {
        exp_wide(f64::from(y) * ln_wide(magnitude))
    };

    let is_integer = y.trunc() == y;
    let is_odd = is_integer && (y * 0.5).trunc() != y * 0.5;
    if x.is_nan() || y.is_nan() || (x < 0.0 && !is_integer && x > f32::NEG_INFINITY) {
        f32::NAN
    } else if is_odd && x.is_sign_negative() {
        -power as f32
    } else {
        power as f32
    }
}

/// Returns the error function, within 2e-7.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let (t, square) = (x.abs(), x * x);
    // Least squares of erf(x)/x in x^2 on 0..=1 and of ln(1 - erf(x)) on 1..=4.
    let mut near = 7.882_497_4e-5f32;
    for c in
        [-8.018_855e-4, 5.189_312e-3, -2.685_432_9e-2, 0.112_835_97, -0.376_126_26, FRAC_2_SQRT_PI]
    {
        near = near.mul_add(square, c);
    }
    let bounded = t.min(4.0);
    let mut far = 1.614_061_6e-6f32;
    for c in [-4.559_062e-5, 5.927_695e-4, -4.740_222_5e-3, 2.636_471_8e-2, -0.109_978_24] {
        far = far.mul_add(bounded, c);
    }
    for c in [-0.631_937_1, -1.130_166_6, 3.032_129_6e-4] {
        far = far.mul_add(bounded, c);
    }
    let far = (1.0 - exp_clamped(far)).copysign(x);
    if t <= 1.0 || t.is_nan() { near * x } else { far }
}

/// Returns `ln(1 + e^x)`.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    let small = ln_wide(1.0 + f64::from(exp_clamped(-x.abs()))) as f32;
    if x > 0.0 {
        x + small
    } else if x.is_nan() {
        x
    } else {
        small
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One in so many floats is tested. The tests for AArch64 run on an emulator.
    const STEP: usize = if cfg!(target_arch = "aarch64") { 16_411 } else { 257 };

    /// Returns every `STEP`th of all floats from -100 to 100.
    fn all() -> impl Iterator<Item = f32> {
        (0..=100f32.to_bits())
            .step_by(STEP)
            .flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)])
    }

    #[test]
    fn within_the_stated_bounds() {
        let (mut error_sigmoid, mut error_tanh, mut error_exp) = (0.0f64, 0.0f64, 0.0f64);
        for x in all() {
            let wide = f64::from(x);
            error_sigmoid =
                error_sigmoid.max((f64::from(sigmoid(x)) - 1.0 / (1.0 + (-wide).exp())).abs());
            error_tanh = error_tanh.max((f64::from(tanh(x)) - wide.tanh()).abs());
            if x.abs() <= 87.0 {
                error_exp = error_exp.max((f64::from(exp(x)) / wide.exp() - 1.0).abs());
                assert_eq!(exp(x).to_bits(), exp_clamped(x).to_bits());
            }
        }
        println!(
            "sigmoid {error_sigmoid:.2e}, tanh {error_tanh:.2e}, exp {error_exp:.2e} (relative)"
        );
        assert!(error_sigmoid <= 1.2e-7 && error_tanh <= 2.4e-7 && error_exp <= 2.4e-7);
        assert!(sigmoid(f32::NAN).is_nan() && tanh(f32::NAN).is_nan() && relu(f32::NAN).is_nan());
        assert_eq!((sigmoid(0.0), tanh(0.0), relu(-1.0), relu(2.0)), (0.5, 0.0, 0.0, 2.0));
        assert!(sigmoid(f32::INFINITY) == 1.0 && sigmoid(f32::NEG_INFINITY) < 1e-37);
    }

    /// Returns the error function by its series.
    fn erf_wide(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    }

    #[test]
    fn exponentials_logarithms_and_powers_have_their_limits() {
        let relative = |ours: f32, exact: f64| (f64::from(ours) / exact - 1.0).abs();
        let absolute = |ours: f32, exact: f64| (f64::from(ours) - exact).abs();
        for x in all() {
            let wide = f64::from(x);
            if x > 1e-37 {
                assert!(absolute(ln(x), wide.ln()) <= 1e-7 * wide.ln().abs().max(1e-3), "ln {x}");
            }
            if x.abs() <= 4.0 {
                assert!(absolute(erf(x), erf_wide(wide)) <= 2.0e-7, "erf {x}");
                for y in [0.5, -1.5, 2.25, 3.0, -2.0, 7.0] {
                    let exact = f64::from(x).powf(f64::from(y));
                    let ours = pow(x, y);
                    if (exact as f32).is_normal() {
                        assert!(relative(ours, exact) <= 1.2e-7, "{x} to {y}: {ours}, {exact}");
                    }
                    assert_eq!(ours.is_nan(), exact.is_nan(), "{x} to {y}");
                }
            }
            let exact = wide.max(0.0) + (-wide.abs()).exp().ln_1p();
            assert!(absolute(softplus(x), exact) <= 2.4e-7 * exact.max(1.0), "softplus {x}");
        }
        assert_eq!((exp(f32::NEG_INFINITY), exp(-104.6), exp(88.8)), (0.0, 0.0, f32::INFINITY));
        assert!(exp(-100.0) > 0.0 && exp(f32::NAN).is_nan() && erf(f32::NAN).is_nan());
        assert_eq!((ln(0.0), ln(f32::INFINITY)), (f32::NEG_INFINITY, f32::INFINITY));
        assert!(ln(-1.0).is_nan() && ln(f32::NAN).is_nan() && softplus(f32::NAN).is_nan());
        assert_eq!((erf(9.0), erf(-9.0), softplus(f32::INFINITY)), (1.0, -1.0, f32::INFINITY));
        assert_eq!((pow(0.0, 0.0), pow(0.0, -1.0), pow(-2.0, 3.0)), (1.0, f32::INFINITY, -8.0));
        assert_eq!((pow(f32::INFINITY, 0.5), pow(2.0, f32::NEG_INFINITY)), (f32::INFINITY, 0.0));
    }
}
