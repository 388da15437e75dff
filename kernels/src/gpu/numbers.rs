//! The numbers that kernels and host share: of enums in `kernels/cuda/{lookup.cuh,dense.cu}`.
//! A test below reads the sources and compares every name and number. Never launches anything.

use crate::cache::codec::Codec;
use crate::dense::graph::functions::{Map, Zip};
use crate::lookup::Pooling;

/// Returns the number of `codec` in `Codec` of `lookup.cuh`.
pub(crate) fn codec_number(codec: Codec) -> u32 {
    match codec {
        Codec::F32 => 0,
        Codec::F16 => 1,
        Codec::U8 => 2,
        Codec::U4 => 3,
    }
}

/// Returns the number of `pooling` in `Pooling` of `lookup.cuh`.
pub(crate) fn pooling_number(pooling: Pooling) -> u32 {
    match pooling {
        Pooling::Sum => 0,
        Pooling::Mean => 1,
        Pooling::None => 2,
        Pooling::Sqrtn => 3,
        Pooling::Max => 4,
    }
}

/// `Storage` of `lookup.cuh`: the place of a table's rows.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StorageNumber {
    Cached,
    Resident,
    ResidentHashed,
}

/// `Alignment` of `lookup.cuh`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alignment {
    Unaligned,
    AlignedRows,
    AlignedF32,
    AlignedF16,
}

/// `EntryKind` of `lookup.cuh`: the result of one lookup of an open bag.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    Missing,
    Absent,
    Hit,
}

impl EntryKind {
    /// Returns the kind with this number. Only the kernel writes these numbers.
    pub fn of(number: u32) -> Self {
        const MISSING: u32 = EntryKind::Missing as u32;
        const ABSENT: u32 = EntryKind::Absent as u32;
        match number {
            MISSING => Self::Missing,
            ABSENT => Self::Absent,
            _ => Self::Hit,
        }
    }
}

/// `StepFunction` of `dense.cu`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepNumber {
    Relu,
    Sigmoid,
    Tanh,
    /// The sigmoid of a finite logit; NaN of another.
    Score,
    Add,
    Subtract,
    Multiply,
    Divide,
    Sum,
    Copy,
}

impl StepNumber {
    /// Returns the number of `map`; `None` if the kernels do not have it.
    pub fn of_map(map: Map) -> Option<Self> {
        match map {
            Map::Relu => Some(Self::Relu),
            Map::Sigmoid => Some(Self::Sigmoid),
            Map::Tanh => Some(Self::Tanh),
            _ => None,
        }
    }

    /// Returns the number of `zip`; `None` if the kernels do not have it.
    pub fn of_zip(zip: Zip) -> Option<Self> {
        match zip {
            Zip::Add => Some(Self::Add),
            Zip::Sub => Some(Self::Subtract),
            Zip::Mul => Some(Self::Multiply),
            Zip::Div => Some(Self::Divide),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Debug;

    /// Returns the members of `enum NAME { A, B };` in upper case without underscores.
    fn members(source: &str, name: &str) -> Vec<String> {
        let start = source.find(&format!("enum {name} {{")).unwrap_or_else(|| panic!("no {name}"));
        let list = source[start..].split(['{', '}']).nth(1).unwrap_or_default();
        assert!(!list.contains('='), "{name} numbers its members by hand");
        list.split(',').map(|member| member.trim().replace('_', "")).collect()
    }

    fn assert_same<T: Debug>(source: &str, name: &str, ours: &[(T, u32)]) {
        let theirs = members(source, name);
        assert_eq!(theirs.len(), ours.len(), "{name}");
        for (member, number) in ours {
            assert_eq!(theirs[*number as usize], format!("{member:?}").to_uppercase(), "{name}");
        }
    }

    #[test]
    fn the_kernels_have_the_same_numbers() {
        let lookup = include_str!("../../cuda/lookup.cuh");
        let dense = include_str!("../../cuda/dense.cu");
        use {Codec as C, Pooling as P, StepNumber as N, StorageNumber as S};
        assert_same(lookup, "Codec", &[C::F32, C::F16, C::U8, C::U4].map(|c| (c, codec_number(c))));
        let poolings = [P::Sum, P::Mean, P::None, P::Sqrtn, P::Max];
        assert_same(lookup, "Pooling", &poolings.map(|p| (p, pooling_number(p))));
        let storages = [S::Cached, S::Resident, S::ResidentHashed];
        assert_same(lookup, "Storage", &storages.map(|s| (s, s as u32)));
        use Alignment::{AlignedF16, AlignedF32, AlignedRows, Unaligned};
        let alignments = [Unaligned, AlignedRows, AlignedF32, AlignedF16];
        assert_same(lookup, "Alignment", &alignments.map(|a| (a, a as u32)));
        let kinds = [EntryKind::Missing, EntryKind::Absent, EntryKind::Hit];
        assert_same(lookup, "EntryKind", &kinds.map(|k| (k, k as u32)));
        assert!(kinds.iter().all(|&kind| EntryKind::of(kind as u32) == kind));
        let maps = [N::Relu, N::Sigmoid, N::Tanh, N::Score];
        let zips = [N::Add, N::Subtract, N::Multiply, N::Divide];
        let steps: Vec<N> = maps.into_iter().chain(zips).chain([N::Sum, N::Copy]).collect();
        let steps: Vec<(N, u32)> = steps.into_iter().map(|n| (n, n as u32)).collect();
        assert_same(dense, "StepFunction", &steps);
    }
}
