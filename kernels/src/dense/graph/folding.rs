//! Arithmetic on known integers, which may contain the batch as a symbol. A result that depends on
//! the batch in any other way does not exist.

use crate::dense::graph::functions::Zip;
use crate::dense::graph::tensor::{Size, Values};

/// Returns the second values where the first are true, else the third.
pub(crate) fn choose_known(parts: [&Values; 3]) -> Option<Values> {
    fn each<T: Copy>(condition: &[Size], sides: [&[T]; 2]) -> Vec<T> {
        let side = |(i, c): (usize, &Size)| sides[usize::from(*c == Size::fixed(0))][i];
        condition.iter().enumerate().map(side).collect()
    }
    match parts {
        [Values::Ints(c), Values::Floats(a), Values::Floats(b)] => {
            Some(Values::Floats(each(c, [a, b])))
        }
        [Values::Ints(c), Values::Ints(a), Values::Ints(b)] => Some(Values::Ints(each(c, [a, b]))),
        _ => None,
    }
}

/// Returns a function of two integers; `None` if it depends on the batch or is not an integer.
pub(crate) fn zip_sizes(zip: Zip, [a, b]: [Size; 2]) -> Option<Size> {
    if [a, b].contains(&Size::SAMPLE) {
        return None;
    }
    let difference = || {
        let fixed = a.fixed.checked_sub(b.fixed)?;
        Some(Size { fixed, batches: a.batches.checked_sub(b.batches)? })
    };
    let truth = |holds: bool| Size::fixed(i64::from(holds));
    let scaled = |a: Size, n: i64| {
        Some(Size { fixed: a.fixed.checked_mul(n)?, batches: a.batches.checked_mul(n)? })
    };
    match zip {
        Zip::Add => Some(Size {
            fixed: a.fixed.checked_add(b.fixed)?,
            batches: a.batches.checked_add(b.batches)?,
        }),
        Zip::Sub => difference(),
        Zip::Mul => match (a.constant(), b.constant()) {
            (_, Some(n)) => scaled(a, n),
            (Some(n), None) => scaled(b, n),
            (None, None) => None,
        },
        Zip::Div => {
            let n = b.constant().filter(|n| *n != 0)?;
            let is_exact = a.fixed.checked_rem(n)? == 0 && a.batches.checked_rem(n)? == 0;
            (a.batches == 0 || is_exact)
                .then(|| Some(Size { fixed: a.fixed.checked_div(n)?, batches: a.batches / n }))?
        }
        Zip::Pow => {
            let power = u32::try_from(b.constant()?).ok()?;
            Some(Size::fixed(a.constant()?.checked_pow(power)?))
        }
        Zip::Min => Some(if difference()?.is_negative()? { a } else { b }),
        Zip::Max => Some(if difference()?.is_negative()? { b } else { a }),
        Zip::PRelu | Zip::Quotient => None,
        Zip::Modulo | Zip::Remainder => {
            let divisor = b.constant().filter(|n| *n != 0)?;
            let rest = a.fixed.checked_rem(divisor)?;
            let is_other = zip == Zip::Modulo && rest != 0 && (rest < 0) != (divisor < 0);
            let rest = if is_other { rest + divisor } else { rest };
            // A truncated remainder has the sign of the whole, which may be another one.
            let follows = zip == Zip::Modulo || rest.signum() * a.batches.signum() >= 0;
            (a.batches.checked_rem(divisor)? == 0 && follows).then(|| Size::fixed(rest))
        }
        Zip::Equal => Some(truth(difference()?.is_zero()?)),
        Zip::Less => Some(truth(difference()?.is_negative()?)),
        Zip::LessEqual => {
            let d = difference()?;
            Some(truth(Size { fixed: d.fixed.checked_sub(1)?, ..d }.is_negative()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remainder_whose_sign_the_batch_decides_does_not_exist() {
        let four = Size::fixed(4);
        let rest = |zip, fixed, batches| zip_sizes(zip, [Size { fixed, batches }, four]);
        assert_eq!(rest(Zip::Remainder, -1, 4), None);
        assert_eq!(rest(Zip::Remainder, 1, 4), Some(Size::fixed(1)));
        assert_eq!(rest(Zip::Remainder, -1, 0), Some(Size::fixed(-1)));
        assert_eq!(rest(Zip::Modulo, -1, 4), Some(Size::fixed(3)));
    }
}
