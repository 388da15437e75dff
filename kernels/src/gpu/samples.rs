//! The samples of a batch, the requests that they belong to, and the sizes of launches. Plain data.

/// The samples of a batch, and the requests that they belong to.
#[derive(Clone, Copy, Debug)]
pub struct Samples<'a> {
    /// The number of samples.
    pub count: usize,
    /// The end of the samples of each request. None is empty. Without ends each sample is a request
    /// of its own.
    pub ends: &'a [usize],
}

impl From<usize> for Samples<'_> {
    fn from(count: usize) -> Self {
        Self { count, ends: &[] }
    }
}

/// The numbers of samples and of requests for which a launch is made. A batch may have fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSize {
    /// Samples.
    pub samples: usize,
    /// Requests: each has one bag of a shared feature.
    pub requests: usize,
}

impl From<usize> for RequestSize {
    fn from(samples: usize) -> Self {
        Self { samples, requests: samples }
    }
}
