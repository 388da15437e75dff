//! The progress of the lookup of a batch.

/// Result of one pass of a lookup: whether bags are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Every bag is pooled or waits in the miss list.
    Complete,
    /// Bags are left for which the miss list had no room. The lookup continues after the list is
    /// resolved. On a GPU, bags whose rows changed during the lookup are left too.
    MissListFull,
}
