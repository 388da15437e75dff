//! Translates the operators on windows: `Conv` and the poolings, over any number of axes. The
//! values of every window are gathered by one index table, so a convolution is a matrix product and
//! a pooling is a reduction. No window reaches into another sample.

use crate::dense::graph::functions::Zip;
use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Fold, Stop, malformed, unsupported};
use crate::dense::graph::products::in_operator;
use crate::dense::graph::reductions::Reduction;
use crate::dense::graph::tensor::{Batch, Data, Kind, Tensor, Values, product, strides};

/// How a window moves along an axis of `n` values.
struct Axis {
    n: usize,
    /// Values of the window.
    size: usize,
    stride: i64,
    dilation: i64,
    before: i64,
    after: i64,
    /// The number of windows.
    count: usize,
}

impl Axis {
    /// Returns the position of value `tap` of window `at`. It may lie in the padding.
    fn position(&self, at: usize, tap: usize) -> i64 {
        at as i64 * self.stride + tap as i64 * self.dilation - self.before
    }

    /// Returns the window of axis `i`, and `None` if the attributes describe none.
    fn new(node: &NodeProto, i: usize, n: usize, sizes: &[usize]) -> Option<Self> {
        // Far beyond any tensor, and far from an overflow.
        const MOST: i64 = 1 << 24;
        let at = |name: &str, i: usize, default: i64| {
            let value = node.ints(name).map_or(Some(default), |list| list.get(i).copied())?;
            (0..=MOST).contains(&value).then_some(value)
        };
        let (stride, dilation) = (at("strides", i, 1)?, at("dilations", i, 1)?);
        let size = Some(sizes[i]).filter(|size| (1..=MOST as usize).contains(size))?;
        if stride == 0 || dilation == 0 {
            return None;
        }
        let (len, span) = (n as i64, (size as i64 - 1) * dilation + 1);
        let same = |most_last: bool| {
            let all = (((len - 1) / stride) * stride + span - len).max(0);
            let half = all / 2;
            if most_last { [half, all - half] } else { [all - half, half] }
        };
        let [before, after] = match node.text("auto_pad") {
            "SAME_UPPER" => same(true),
            "SAME_LOWER" => same(false),
            "VALID" => [0, 0],
            "" | "NOTSET" => [at("pads", i, 0)?, at("pads", sizes.len() + i, 0)?],
            _ => return None,
        };
        let room = Some(len + before + after - span).filter(|room| *room >= 0)?;
        let mut count = room / stride + 1;
        // The last window of `ceil_mode` starts in the tensor, or before it.
        if node.int("ceil_mode", 0) != 0 && room % stride != 0 && count * stride < len + before {
            count += 1;
        }
        let count = count as usize;
        Some(Self { n, size, stride, dilation, before, after, count })
    }
}

impl Builder<'_> {
    /// Returns the windows of `sizes` over the axes of `x` after the first two.
    fn axes(&self, node: &NodeProto, x: &Tensor, sizes: &[usize]) -> Result<Vec<Axis>, Stop> {
        let rank = x.shape.len();
        if rank < 3 || sizes.len() != rank - 2 || x.kind != Kind::Float || x.width() == 0 {
            return Err(unsupported(node, "of such operands"));
        }
        if x.batch.is_none_or(|b| b.axis > 1) {
            return Err(unsupported(node, "over the batch"));
        }
        let axis = |i: usize| {
            let axis = Axis::new(node, i, x.shape[2 + i], sizes);
            axis.ok_or_else(|| unsupported(node, &format!("of such windows on axis {}", 2 + i)))
        };
        (0..sizes.len()).map(axis).collect()
    }

    /// Returns the values of all windows, `[x0, groups, windows, channels * taps]`. With
    /// `taps_first` the columns are `taps * channels`. Padding is `pad`.
    fn windows(
        &mut self,
        x: &Tensor,
        axes: &[Axis],
        groups: usize,
        taps_first: bool,
        pad: f32,
    ) -> Result<Tensor, Stop> {
        let counts: Vec<usize> = axes.iter().map(|a| a.count).collect();
        let sizes: Vec<usize> = axes.iter().map(|a| a.size).collect();
        let many = || malformed("windows of too many values");
        let (windows, taps) =
            (product(&counts).ok_or_else(many)?, product(&sizes).ok_or_else(many)?);
        let channels = x.shape[1] / groups;
        let shape = [x.shape[0], groups, windows, channels.checked_mul(taps).ok_or_else(many)?];
        // Counted before the table exists.
        self.spend(product(&shape).unwrap_or(usize::MAX))?;

        // The windows of a selection are taken from its source, in one copy.
        let first = Some(Batch { axis: 0, outer: 1 });
        let mut line = Tensor { shape: vec![1, x.width()], batch: first, ..x.clone() };
        let selection = self.reordered(x);
        if let Some((from, _)) = selection {
            (line.shape, line.data) = (vec![1, self.widths[from]], Data::Computed(from));
        }
        // Padding is behind the values of the sample: one for each channel, so that a copy of
        // neighbours also copies neighbours there.
        let outside = line.width();
        let (own, by_count, by_size) = (strides(&x.shape), strides(&counts), strides(&sizes));
        let source = |lead: usize, channel: usize, window: usize, tap: usize| {
            let mut at = (lead * channels + channel) * own[1];
            for (i, axis) in axes.iter().enumerate() {
                let (window, tap) =
                    (window / by_count[i] % axis.count, tap / by_size[i] % axis.size);
                match usize::try_from(axis.position(window, tap)) {
                    Ok(position) if position < axis.n => at += position * own[2 + i],
                    _ => return (outside + channel) as u32,
                }
            }
            selection.map_or(at as u32, |(_, order)| order[at])
        };
        let mut picks = Vec::with_capacity(product(&shape).unwrap_or(0));
        for lead in 0..shape[0] * groups {
            for window in 0..windows {
                picks.extend((0..channels * taps).map(|column| match taps_first {
                    true => source(lead, column % channels, window, column / channels),
                    false => source(lead, column / taps, window, column % taps),
                }));
            }
        }

        if picks.iter().all(|&pick| (pick as usize) < outside) {
            return self.pick_all(&line, &shape, x.batch, picks);
        }
        let pads = Values::Floats(vec![pad; channels]);
        let pads = Tensor { batch: first, ..Tensor::known(Kind::Float, vec![1, channels], pads) };
        let padded = self.join(&[line, pads], 1)?;
        self.pick_all(&padded, &shape, x.batch, picks)
    }

    /// Translates `Conv`: a product for each window.
    pub fn convolution(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, w) = (self.input(node, 0)?, self.input(node, 1)?);
        let groups = usize::try_from(node.int("group", 1)).unwrap_or(0);
        if w.known_values().is_none() || w.kind != Kind::Float || w.batch.is_some() {
            return Err(unsupported(node, "by computed weights"));
        }
        if w.shape.len() != x.shape.len() || x.is_batch(1) {
            return Err(unsupported(node, "of such operands"));
        }
        let axes = self.axes(node, &x, w.shape.get(2..).unwrap_or_default())?;
        let (outputs, inputs) = (w.shape[0], w.shape[1]);
        if groups == 0 || inputs.checked_mul(groups) != Some(x.shape[1]) || outputs % groups != 0 {
            return Err(malformed(&format!("Conv of {:?} by weights {:?}", x.shape, w.shape)));
        }

        // Another convolution wrote the channels of a position beside each other.
        let stride = strides(&x.shape)[1];
        let is_beside = |order: &[u32]| inputs > 1 && order[stride] == order[0] + 1;
        let taps_first = self.reordered(&x).is_some_and(|(_, order)| is_beside(order));
        let windows = self.windows(&x, &axes, groups, taps_first, 0.0)?;
        let (each, taps) = (outputs / groups, windows.shape[3] / inputs);
        let weights = Tensor { shape: vec![groups, each, inputs, taps], ..w };
        let order = if taps_first { [0, 3, 2, 1] } else { [0, 2, 3, 1] };
        let weights = self.transpose(&weights, &order)?;
        let weights = Tensor { shape: vec![groups, windows.shape[3], each], ..weights };
        let named = |stop| in_operator(node, stop);
        let mut y = self.matmul(&windows, &weights).map_err(named)?;
        if let Some(bias) = self.maybe(node, 2)? {
            if bias.shape != [outputs] {
                return Err(malformed(&format!("Conv with a bias {:?}", bias.shape)));
            }
            let bias = Tensor { shape: vec![groups, 1, each], ..bias };
            y = self.zip(Zip::Add, [&y, &bias]).map_err(named)?;
        }
        let y = self.transpose(&y, &[0, 1, 3, 2])?;
        let counts = axes.iter().map(|a| a.count);
        let shape = [x.shape[0], outputs].into_iter().chain(counts).collect::<Vec<_>>();
        Ok(Tensor { shape, ..y })
    }

    /// Translates `MaxPool` and `AveragePool`.
    pub fn pooling(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let sizes = node.ints("kernel_shape").unwrap_or_default();
        let sizes: Vec<usize> = sizes.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
        let axes = self.axes(node, &x, &sizes)?;
        let is_max = node.op_type() == "MaxPool";
        let pad = if is_max { f32::NEG_INFINITY } else { 0.0 };
        let windows = self.windows(&x, &axes, x.shape[1], false, pad)?;
        let by = if is_max { Reduction::Fold(Fold::Max) } else { Reduction::Sum };
        let y = self.reduce_axes(&windows, &[3], by)?;
        let counts: Vec<usize> = axes.iter().map(|a| a.count).collect();
        let shape = [&x.shape[..2], &counts].concat();
        let y = Tensor { shape, ..y };
        if is_max {
            return Ok(y);
        }

        // What a window has on an axis: its values of the tensor, or also those of the pads.
        let counted = node.int("count_include_pad", 0) != 0;
        let in_window = |axis: &Axis, at: usize| {
            let (least, most) = if counted { (axis.before, axis.after) } else { (0, 0) };
            let range = -least..axis.n as i64 + most;
            (0..axis.size).filter(|&tap| range.contains(&axis.position(at, tap))).count()
        };
        let mut divisors = vec![1.0f32];
        for axis in &axes {
            let each: Vec<usize> = (0..axis.count).map(|at| in_window(axis, at)).collect();
            divisors =
                divisors.iter().flat_map(|d| each.iter().map(move |&n| d * n as f32)).collect();
        }
        let divisors = Tensor::known(Kind::Float, counts, Values::Floats(divisors));
        self.zip(Zip::Div, [&y, &divisors]).map_err(|stop| in_operator(node, stop))
    }

    /// Translates `GlobalMaxPool` and `GlobalAveragePool`.
    pub fn global_pooling(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let axes: Vec<usize> = (2..x.shape.len()).collect();
        let is_max = node.op_type() == "GlobalMaxPool";
        let by = if is_max { Reduction::Fold(Fold::Max) } else { Reduction::Mean };
        self.reduce_axes(&x, &axes, by).map_err(|stop| in_operator(node, stop))
    }
}
