//! Functions of one value in plain arithmetic, with the same bits on every instruction set. This
//! file never calls libm.

/// Returns `e^x` for `x` in -87..=87, within 2 units in the last place. A value outside that range
/// is clamped first. NaN stays NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Its addition rounds to the nearest integer, whose bits are then the lowest of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 87.0);
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
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
    let e = p.mul_add(r * r, r) + 1.0;
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    e * f32::from_bits(power)
}

/// Returns `1 / (1 + e^-x)`, within 1.2e-7.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns every 257th of all floats from -100 to 100.
    fn all() -> impl Iterator<Item = f32> {
        (0..=100f32.to_bits())
            .step_by(257)
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
}
