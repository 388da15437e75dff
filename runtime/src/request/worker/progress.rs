//! How far the lookup of a batch is.

/// Whether a lookup needs the miss list again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Every bag is pooled or waits in the miss list.
    Complete,
    /// Bags are left for which the miss list had no room. The lookup continues after the list is
    /// resolved. On a GPU, bags whose rows changed during the lookup are left too.
    MissListFull,
}
