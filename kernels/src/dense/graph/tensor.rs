//! The tensors of a network while its graph is built. A tensor is computed for each sample, or
//! known when the file is loaded. One axis may be that of the batch, at any place. A sample's
//! values always lie together, so the batch can move to another axis without a copy. This file has
//! the arithmetic of shapes and positions. It knows no operator.

use crate::dense::weights::Weights;
use std::fmt;
use std::rc::Rc;

/// Axes of a tensor, at most.
pub(crate) const RANK_MAX: usize = 32;
/// Product of the other axes of an empty tensor, at most.
const LANES_MAX: usize = 1 << 24;

/// The number of a value that is computed for each sample, in `Graph::widths`.
pub(crate) type Id = usize;

/// The type of a tensor's values. Computed values are stored as f32, whatever they are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// f32, and double, which is computed as f32.
    Float,
    /// Stored as f32, and no operator but a cast may use it.
    Half,
    Int64,
    Int32,
    /// 0 or 1.
    Bool,
}

/// A number of shape arithmetic: `fixed + batches * batch`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub fixed: i64,
    pub batches: i64,
}

/// Known values: floats, or integers and truth values.
#[derive(Debug)]
pub(crate) enum Values {
    Floats(Vec<f32>),
    Ints(Vec<Size>),
}

/// The axis of the batch. Element `(i * batch + sample) * inner + j` of it is element
/// `i * inner + j` of the sample, where `i` is below `outer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub axis: usize,
    pub outer: usize,
}

/// Where the values of a tensor come from.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    Computed(Id),
    /// Equal for each sample.
    Known(Rc<Values>),
}

/// A tensor.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub kind: Kind,
    /// The sizes of the axes, for one sample.
    pub shape: Vec<usize>,
    /// The axis of the batch; a computed tensor has one.
    pub batch: Option<Batch>,
    pub data: Data,
    /// The form in which the file has these known values. A matrix of them is packed so. A view
    /// keeps the form; arithmetic gives f32.
    pub weights: Weights,
}

impl Kind {
    pub fn is_int(self) -> bool {
        matches!(self, Self::Int64 | Self::Int32)
    }
}

impl Size {
    /// The number of the sample itself, as an index on the axis of the batch. No arithmetic uses
    /// it.
    pub const SAMPLE: Self = Self { fixed: 0, batches: i64::MIN };

    pub fn fixed(fixed: i64) -> Self {
        Self { fixed, batches: 0 }
    }

    /// Returns the number; `None` if it depends on the batch.
    pub fn constant(self) -> Option<i64> {
        (self.batches == 0).then_some(self.fixed)
    }

    /// Returns the number as a value of type `kind`, in whose range ONNX wraps it around.
    pub fn wrapped(self, kind: Kind) -> Self {
        match (kind, self.constant()) {
            (Kind::Int32, Some(n)) => Self::fixed(i64::from(n as i32)),
            _ => self,
        }
    }

    /// Returns whether the number is below 0 for every batch; `None` if the batch decides.
    pub fn is_negative(self) -> Option<bool> {
        let least = self.fixed.checked_add(self.batches)?;
        if self.batches >= 0 && least >= 0 {
            Some(false)
        } else {
            (self.batches <= 0 && least < 0).then_some(true)
        }
    }

    /// Returns whether the number is 0 for every batch; `None` if the batch decides.
    pub fn is_zero(self) -> Option<bool> {
        if self.batches == 0 {
            return Some(self.fixed == 0);
        }
        let batch = self.fixed.checked_neg()?.checked_div(self.batches)?;
        let decides = batch >= 1 && batch.checked_mul(self.batches)? == -self.fixed;
        (!decides).then_some(false)
    }
}

// Errors show types as ONNX names them, and lists of sizes as `[batch, 4]`.
impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Float => "FLOAT",
            Self::Half => "FLOAT16",
            Self::Int64 => "INT64",
            Self::Int32 => "INT32",
            Self::Bool => "BOOL",
        })
    }
}

impl fmt::Debug for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.fixed, self.batches) {
            _ if *self == Self::SAMPLE => write!(f, "sample"),
            (fixed, 0) => write!(f, "{fixed}"),
            (0, 1) => write!(f, "batch"),
            (0, batches) => write!(f, "{batches} * batch"),
            (fixed, batches) => write!(f, "{batches} * batch + {fixed}"),
        }
    }
}

impl Values {
    pub fn len(&self) -> usize {
        match self {
            Self::Floats(v) => v.len(),
            Self::Ints(v) => v.len(),
        }
    }

    /// Returns the values at `picks`.
    pub fn pick(&self, picks: &[u32]) -> Self {
        match self {
            Self::Floats(v) => Self::Floats(picks.iter().map(|&i| v[i as usize]).collect()),
            Self::Ints(v) => Self::Ints(picks.iter().map(|&i| v[i as usize]).collect()),
        }
    }

    /// Returns the values as floats; `None` if one depends on the batch or is no float.
    pub fn floats(&self) -> Option<Vec<f32>> {
        const EXACT: i64 = 1 << 24;
        let float =
            |s: &Size| s.constant().filter(|n| (-EXACT..=EXACT).contains(n)).map(|n| n as f32);
        match self {
            Self::Floats(v) => Some(v.clone()),
            Self::Ints(v) => v.iter().map(float).collect(),
        }
    }
}

impl Tensor {
    /// Returns a known tensor, equal for every batch.
    pub fn known(kind: Kind, shape: Vec<usize>, values: Values) -> Self {
        debug_assert_eq!(shape.iter().product::<usize>(), values.len());
        let data = Data::Known(Rc::new(values));
        Self { kind, shape, batch: None, data, weights: Weights::F32 }
    }

    /// Returns a known list of integers.
    pub fn ints(sizes: Vec<Size>) -> Self {
        Self::known(Kind::Int64, vec![sizes.len()], Values::Ints(sizes))
    }

    pub fn known_values(&self) -> Option<&Rc<Values>> {
        if let Data::Known(values) = &self.data { Some(values) } else { None }
    }

    /// Returns the values of one sample.
    pub fn width(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether `axis` is that of the batch.
    pub fn is_batch(&self, axis: usize) -> bool {
        self.batch.is_some_and(|b| b.axis == axis)
    }

    /// Returns the shape with the batch in it.
    pub fn sizes(&self) -> Vec<Size> {
        let size = |(axis, &n): (usize, &usize)| match self.is_batch(axis) {
            true => Size { fixed: 0, batches: n as i64 },
            false => Size::fixed(n as i64),
        };
        self.shape.iter().enumerate().map(size).collect()
    }

    /// Returns a known tensor of one sample without its batch; `None` unless the batch is an axis
    /// of its own.
    pub fn without_batch(&self) -> Option<Self> {
        match self.batch {
            Some(b) if self.shape[b.axis] != 1 || self.known_values().is_none() => None,
            _ => Some(Self { batch: None, ..self.clone() }),
        }
    }

    /// Returns the tensor with the axes in the order `perm`, and for each of its values the
    /// position of that value here. The data is not moved.
    pub fn permuted(&self, perm: &[usize]) -> Layout {
        let shape: Vec<usize> = perm.iter().map(|&a| self.shape[a]).collect();
        let own = strides(&self.shape);
        let strides = perm.iter().map(|&a| own[a]).collect();
        let axis = |b: Batch| perm.iter().position(|&a| a == b.axis).unwrap_or(b.axis);
        let batch = self.batch.map(|b| Batch { axis: axis(b), ..b });
        Layout { shape, batch, strides, first: 0 }
    }

    /// Returns the shape and the axis of the batch after a reshape to `target`, where `None` is an
    /// open size. Returns `None` if the target does not fit, or if it divides the batch.
    pub fn reshaped(&self, target: &[Option<Size>]) -> Option<(Vec<usize>, Option<Batch>)> {
        if self.width() == 0 || target.len() > RANK_MAX {
            return None;
        }
        let open = target.iter().filter(|s| s.is_none()).count();
        let fixed = |s: &Size| match (self.batch, *s) {
            (_, Size { fixed, batches: 0 }) => usize::try_from(fixed).ok(),
            (Some(_), Size { fixed: 0, batches }) => usize::try_from(batches).ok(),
            _ => None,
        };
        let sizes = target.iter().flatten().map(fixed).collect::<Option<Vec<_>>>()?;
        let known = product(&sizes)?;
        let rest = self.width().checked_div(known);
        if open > 1 || rest.is_none_or(|r| r * known != self.width() || (open == 0 && r != 1)) {
            return None;
        }

        let mut sizes = sizes.into_iter();
        let shape: Vec<usize> = target
            .iter()
            .map(|s| if s.is_some() { sizes.next() } else { rest })
            .collect::<Option<_>>()?;
        let Some(batch) = self.batch else { return Some((shape, None)) };

        let is_batch = |s: &Option<Size>| s.is_some_and(|s| s.batches != 0);
        let axis = match target.iter().filter(|s| is_batch(s)).count() {
            0 => target.iter().position(Option::is_none)?,
            1 => target.iter().position(is_batch)?,
            _ => return None,
        };
        // The samples are `after` values apart, in this shape and in that one.
        let after: usize = self.shape[batch.axis] / batch.outer
            * self.shape[batch.axis + 1..].iter().product::<usize>();
        let inner = exact(after, shape[axis + 1..].iter().product())?;
        let outer = exact(self.width() / after, shape[..axis].iter().product())?;
        (inner * outer == shape[axis]).then_some((shape, Some(Batch { axis, outer })))
    }
}

fn exact(n: usize, divisor: usize) -> Option<usize> {
    (divisor != 0 && n.is_multiple_of(divisor)).then(|| n / divisor)
}

/// A shape, and the positions of its values in another tensor.
pub(crate) struct Layout {
    pub shape: Vec<usize>,
    pub batch: Option<Batch>,
    pub strides: Vec<usize>,
    /// The position of the first value.
    pub first: usize,
}

impl Layout {
    /// Returns the position of each value, in order.
    pub fn picks(&self) -> Vec<u32> {
        // The axes before an empty one may have any size.
        if self.shape.contains(&0) {
            return Vec::new();
        }
        let mut picks = vec![self.first as u32];
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            let mut next = Vec::with_capacity(picks.len() * n);
            for &at in &picks {
                next.extend((0..n).map(|i| at + (i * stride) as u32));
            }
            picks = next;
        }
        picks
    }
}

/// Returns the product of `sizes`; `None` if it is out of range. The other axes of an empty tensor
/// count too: its strides are their products, and no data of the file stands for them.
pub(crate) fn product(sizes: &[usize]) -> Option<usize> {
    let mut others = sizes.iter().filter(|&&size| size != 0);
    let lanes = others.try_fold(1usize, |product, size| product.checked_mul(*size))?;
    match sizes.contains(&0) {
        true => (lanes <= LANES_MAX).then_some(0),
        false => Some(lanes),
    }
}

/// Returns the distance between neighbours along each axis.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|a| shape[a + 1..].iter().product()).collect()
}

/// Returns the shape and the batch to which tensors broadcast. Returns `None` if their sizes
/// disagree, or if they would meet the samples of one with those of another.
pub(crate) fn broadcast(tensors: &[&Tensor]) -> Option<(Vec<usize>, Option<Batch>)> {
    let rank = tensors.iter().map(|t| t.shape.len()).max()?;
    let mut shape = vec![1; rank];
    let mut batch: Option<Batch> = None;
    for tensor in tensors {
        let Some(own) = tensor.batch else { continue };
        let aligned = Batch { axis: own.axis + rank - tensor.shape.len(), ..own };
        let n = tensor.shape[own.axis];
        if batch.is_some_and(|b| b != aligned || shape[b.axis] != n) {
            return None;
        }
        shape[aligned.axis] = n;
        batch = Some(aligned);
    }

    for tensor in tensors {
        let shift = rank - tensor.shape.len();
        for (axis, &n) in tensor.shape.iter().enumerate() {
            let all = &mut shape[axis + shift];
            let is_batch = batch.is_some_and(|b| b.axis == axis + shift);
            match (*all, n) {
                (_, 1) => {}
                (a, n) if a == n && (!is_batch || tensor.batch.is_some()) => {}
                (1, n) if !is_batch => *all = n,
                _ => return None,
            }
        }
    }
    product(&shape)?;
    Some((shape, batch))
}

/// Returns where the values of `tensor` are in the broadcast shape; `None` if they are in place.
pub(crate) fn broadcast_layout(tensor: &Tensor, shape: &[usize]) -> Option<Layout> {
    if tensor.width() == shape.iter().product::<usize>() {
        return None;
    }
    let shift = shape.len() - tensor.shape.len();
    let own = strides(&tensor.shape);
    let stride = |axis: usize| {
        let axis = axis.checked_sub(shift)?;
        (tensor.shape[axis] != 1).then(|| own[axis])
    };
    let strides = (0..shape.len()).map(|a| stride(a).unwrap_or(0)).collect();
    Some(Layout { shape: shape.to_vec(), batch: tensor.batch, strides, first: 0 })
}
