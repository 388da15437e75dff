//! Charts as SVG: panels of lines, one above the other, with linear or logarithmic axes. Draws the
//! points of its caller and writes one file; never measures.

use crate::limits::PLOT_DOTS_MAX;
use crate::report::metrics::Percentiles;
use crate::report::temporary::write_file;
use anyhow::{Result, anyhow};
use hatchback::request::worker::Counters;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Serialize;
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

const WIDTH: u32 = 960;
const HEIGHT: u32 = 600;
/// Width of the legend, the column on the right, in pixels.
const LEGEND_WIDTH: i32 = 240;
const FONT: &str = "Helvetica, Arial, DejaVu Sans, sans-serif";
const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(224, 224, 224);
/// The colours of Okabe and Ito, which colour-blind readers can distinguish, darkest first.
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// Latency and hit rate of one slice of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimeSlice {
    /// End of the slice, in seconds since the start of the run.
    pub seconds: f64,
    /// Median latency of its requests, µs.
    pub p50_us: f64,
    /// 99th percentile of their latency, µs.
    pub p99_us: f64,
    /// Share of the lookups in cached tables that were cache hits, `0..=1`.
    pub hit_rate: f64,
}

impl TimeSlice {
    /// Returns the slice that ended `seconds` after the start.
    pub fn new(seconds: f64, latency: &Percentiles, counters: &Counters) -> Self {
        Self {
            seconds,
            p50_us: latency.p50_us,
            p99_us: latency.p99_us,
            hit_rate: counters.hit_rate(),
        }
    }
}

/// An axis: its label, scale and ticks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axis {
    /// The quantity with its unit.
    pub label: String,
    /// Whether the axis is logarithmic. It then leaves out points that are not above 0.
    pub log: bool,
    /// Values that get a label. If empty, round values are chosen.
    pub ticks: Vec<f64>,
}

impl Axis {
    /// Returns a linear axis.
    pub fn linear(label: &str) -> Self {
        Self { label: label.to_owned(), ..Self::default() }
    }

    /// Returns a logarithmic axis.
    pub fn log(label: &str) -> Self {
        Self { log: true, ..Self::linear(label) }
    }

    /// Returns this axis with labels at `ticks`.
    pub fn at(self, ticks: &[f64]) -> Self {
        Self { ticks: ticks.to_vec(), ..self }
    }
}

/// One line of a chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Number of its colour. Lines that belong together share one.
    pub color: usize,
    /// Whether the line is dashed.
    pub dashed: bool,
    /// Points `(x, y)` by ascending x.
    pub points: Vec<(f64, f64)>,
}

/// One chart of a picture.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Panel {
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Lines, in the order of the legend.
    pub series: Vec<Series>,
}

/// Draws one chart of lines.
///
/// # Errors
/// The file cannot be written.
pub fn lines(path: &Path, title: &str, x: Axis, y: Axis, series: Vec<Series>) -> Result<()> {
    panels(path, title, &[Panel { x, y, series }])
}

/// Draws latency and, below it, hit rate over time.
///
/// # Errors
/// The file cannot be written.
pub fn over_time(path: &Path, title: &str, points: &[TimeSlice]) -> Result<()> {
    let line = |name: &str, color, dashed, y: fn(&TimeSlice) -> f64| Series {
        name: name.to_owned(),
        color,
        dashed,
        points: points.iter().map(|w| (w.seconds, y(w))).collect(),
    };
    let latency = vec![line("p50", 0, false, |w| w.p50_us), line("p99", 1, true, |w| w.p99_us)];
    let hits = vec![line("hit rate", 2, false, |w| 100.0 * w.hit_rate)];
    let time = Axis::linear("time, s");
    let panel = |y, series| Panel { x: time.clone(), y, series };
    let both = [panel(Axis::log("latency, µs"), latency), panel(Axis::linear("hit rate, %"), hits)];
    panels(path, title, &both)
}

/// Draws panels one above the other under one title.
///
/// # Errors
/// The file cannot be written.
pub fn panels(path: &Path, title: &str, panels: &[Panel]) -> Result<()> {
    write_file(path, svg(title, panels)?.as_bytes())
}

fn svg(title: &str, panels: &[Panel]) -> Result<String> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let (head, body) = root.split_vertically(52);
        let style = (FONT, 24).into_font().color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
        head.draw(&Text::new(title.to_owned(), (24, 30), style)).map_err(failed)?;
        for (area, panel) in body.split_evenly((panels.len().max(1), 1)).iter().zip(panels) {
            draw_panel(area, panel)?;
        }
        root.present().map_err(failed)?;
    }
    Ok(text)
}

fn failed(e: impl Display) -> anyhow::Error {
    anyhow!("the chart was not drawn: {e}")
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw_panel(area: &Area<'_>, panel: &Panel) -> Result<()> {
    let (left, right) = area.split_horizontally(WIDTH as i32 - LEGEND_WIDTH);
    let kept: Vec<Vec<(f64, f64)>> = panel.series.iter().map(|s| panel.shown(s)).collect();
    let all = || kept.iter().flatten();
    let x = Scale::new(&panel.x, all().map(|p| p.0), Fit::Tight);
    let y = Scale::new(&panel.y, all().map(|p| p.1), Fit::Round);

    let mut chart = ChartBuilder::on(&left)
        .margin(12)
        .x_label_area_size(52)
        .y_label_area_size(84)
        .build_cartesian_2d(x, y)
        .map_err(failed)?;

    chart
        .configure_mesh()
        .max_light_lines(0)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style((FONT, 18).into_font().color(&INK))
        .axis_desc_style((FONT, 19).into_font().color(&INK))
        .x_desc(panel.x.label.as_str())
        .y_desc(panel.y.label.as_str())
        .draw()
        .map_err(failed)?;

    for (series, points) in panel.series.iter().zip(kept) {
        let style = series.stroke();
        if points.len() <= PLOT_DOTS_MAX {
            let dots = points.iter().map(|&p| Circle::new(p, 4, style.filled()));
            chart.draw_series(dots).map_err(failed)?;
        }
        if series.dashed {
            chart.draw_series(DashedLineSeries::new(points, 8, 5, style)).map_err(failed)?;
        } else {
            chart.draw_series(LineSeries::new(points, style)).map_err(failed)?;
        }
    }

    panel.series.iter().enumerate().try_for_each(|(i, series)| draw_name(&right, i, series))
}

/// Draws line `number` of the legend.
fn draw_name(area: &Area<'_>, number: usize, series: &Series) -> Result<()> {
    let y = 24 + 21 * number as i32;
    let line = vec![(4, y), (40, y)];
    if series.dashed {
        area.draw(&DashedPathElement::new(line, 8, 5, series.stroke())).map_err(failed)?;
    } else {
        area.draw(&PathElement::new(line, series.stroke())).map_err(failed)?;
    }
    let style = (FONT, 16).into_font().color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw(&Text::new(series.name.clone(), (48, y), style)).map_err(failed)
}

impl Series {
    fn stroke(&self) -> ShapeStyle {
        COLORS[self.color % COLORS.len()].stroke_width(2)
    }
}

impl Panel {
    /// Returns the points of `series` that the axes can show.
    fn shown(&self, series: &Series) -> Vec<(f64, f64)> {
        let fits = |axis: &Axis, v: f64| v.is_finite() && (!axis.log || v > 0.0);
        series.points.iter().copied().filter(|p| fits(&self.x, p.0) && fits(&self.y, p.1)).collect()
    }
}

/// The values at which an axis begins and ends.
#[derive(Clone, Copy)]
enum Fit {
    /// The first and the last value.
    Tight,
    /// Round values that enclose all values.
    Round,
}

/// An axis with its final range and ticks.
struct Scale {
    log: bool,
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Scale {
    /// Fits an axis to `values`.
    fn new(axis: &Axis, values: impl Iterator<Item = f64>, fit: Fit) -> Self {
        let place = |v: f64| if axis.log { v.log10() } else { v };
        let (low, high) = values
            .map(place)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = widen(low, high);
        let all = if axis.log { ratio_ticks(low, high) } else { even_ticks(low, high) };

        let (low, high) = match (fit, axis.log) {
            (Fit::Tight, true) => (low - 0.04 * (high - low), high + 0.04 * (high - low)),
            // A plot over time starts at 0, not at the end of the first slice.
            (Fit::Tight, false) => (if low > 0.0 && low < high / 5.0 { 0.0 } else { low }, high),
            (Fit::Round, _) => (place(all[0]).min(low), place(all[all.len() - 1]).max(high)),
        };

        let wanted = if axis.ticks.is_empty() { all } else { axis.ticks.clone() };
        let inside = |v: &f64| (low - 1e-9..=high + 1e-9).contains(&place(*v));
        Self { log: axis.log, range: low..high, ticks: wanted.into_iter().filter(inside).collect() }
    }

    fn place(&self, v: f64) -> f64 {
        if self.log { v.log10() } else { v }
    }
}

/// Returns a range that is not empty, whatever the values were.
fn widen(low: f64, high: f64) -> (f64, f64) {
    if low > high {
        (0.0, 1.0)
    } else if high - low < 1e-9 * high.abs().max(1e-3) {
        let by = (0.05 * high.abs()).max(0.05);
        (low - by, high + by)
    } else {
        (low, high)
    }
}

/// Returns about six round values that enclose `low..=high`.
fn even_ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let unit = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|m| m * unit).into_iter().find(|s| *s >= rough).unwrap_or(rough);
    let first = (low / step + 1e-9).floor() as i64;
    let last = (high / step - 1e-9).ceil() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

/// Returns powers of ten that enclose `low..=high` (both logarithms). A short range also gets their
/// multiples by 2 and 5.
fn ratio_ticks(low: f64, high: f64) -> Vec<f64> {
    let between: &[f64] = if high - low > 3.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let decades = low.floor() as i32..=high.ceil() as i32;
    let all: Vec<f64> =
        decades.flat_map(|d| between.iter().map(move |m| m * 10f64.powi(d))).collect();
    let from = all.iter().rposition(|v| v.log10() <= low + 1e-9).unwrap_or(0);
    let to = all.iter().position(|v| v.log10() >= high - 1e-9).unwrap_or(all.len() - 1);
    all[from..=to].to_vec()
}

impl Ranged for Scale {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (self.place(*value) - self.range.start) / (self.range.end - self.range.start);
        from + (share * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        if self.log {
            10f64.powf(self.range.start)..10f64.powf(self.range.end)
        } else {
            self.range.clone()
        }
    }
}

impl ValueFormatter<f64> for Scale {
    fn format(value: &f64) -> String {
        let (scaled, unit) = match value.abs() {
            v if v >= 1e6 => (value / 1e6, " M"),
            v if v >= 1e4 => (value / 1e3, " k"),
            _ => (*value, ""),
        };
        let digits = format!("{scaled:.4}");
        format!("{}{unit}", digits.trim_end_matches('0').trim_end_matches('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Vec<TimeSlice> {
        let at = |i: u32| {
            let t = f64::from(i) / 2.0;
            TimeSlice {
                seconds: t,
                p50_us: 60.0 + 300.0 * (-t / 3.0).exp(),
                p99_us: 700.0 + 2000.0 * (-t / 4.0).exp(),
                hit_rate: 0.97 - 0.6 * (-t / 3.0).exp(),
            }
        };
        (1..=40).map(at).collect()
    }

    /// Every element that opens also closes, in order, and attributes are quoted.
    fn assert_well_formed(text: &str) {
        let mut open = Vec::new();
        for tag in text.split('<').skip(1).map(|t| t.split('>').next().unwrap_or_default()) {
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name.trim()));
            } else if !tag.ends_with('/') && !tag.starts_with(['?', '!']) {
                open.extend(tag.split_whitespace().next());
            }
        }
        assert!(open.is_empty(), "{open:?} not closed");
    }

    #[test]
    fn charts_name_their_series() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.svg");
        over_time(&path, "a < b & c", &run()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_well_formed(&text);
        for name in ["p50", "p99", "hit rate", "time, s", "latency, µs", "a &lt; b &amp; c"] {
            assert!(text.contains(name), "{name}");
        }
    }

    #[test]
    fn degenerate_data_is_drawn() {
        let series = |points: &[(f64, f64)]| {
            vec![Series { name: "line".into(), points: points.to_vec(), ..Series::default() }]
        };
        for points in
            [&[][..], &[(1.0, 5.0)], &[(1.0, 0.0), (0.0, f64::NAN)], &[(1.0, 7.0), (2.0, 7.0)]]
        {
            for axis in [Axis::linear("a"), Axis::log("a")] {
                let panel = Panel { x: axis.clone(), y: axis, series: series(points) };
                assert_well_formed(&svg("t", &[panel]).unwrap());
            }
        }
    }

    #[test]
    fn ticks_enclose_the_values() {
        assert_eq!(even_ticks(0.0, 97.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(
            ratio_ticks(30f64.log10(), 700f64.log10()),
            [20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
        );
        assert_eq!(ratio_ticks(0.0, 5.0), [1.0, 10.0, 100.0, 1e3, 1e4, 1e5]);
        assert_eq!(
            ["0.25", "1500", "20 k", "3 M"],
            [0.25, 1500.0, 2e4, 3e6].map(|v| Scale::format(&v))
        );
    }
}
