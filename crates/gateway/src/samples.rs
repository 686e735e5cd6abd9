//! A model's samples as a worker sent them. They are read where they lie: whoever needs them in another form writes
//! that form once, and who needs them as they are passes them on.

use bytes::Bytes;
use laneway_proto::PayloadError;

/// Bytes of a sample.
const WIDTH: usize = size_of::<f32>();

/// Whole little-endian floats. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Samples(Bytes);

impl Samples {
    /// What these bytes hold.
    ///
    /// # Errors
    /// They are not whole samples.
    pub(crate) fn new(bytes: Bytes) -> Result<Self, PayloadError> {
        match bytes.len().is_multiple_of(WIDTH) {
            true => Ok(Self(bytes)),
            false => Err(PayloadError::Samples(bytes.len())),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len() / WIDTH
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Each sample's bytes.
    pub(crate) fn little_endian(&self) -> &[[u8; WIDTH]] {
        self.0.as_chunks().0
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = f32> {
        self.little_endian()
            .iter()
            .map(|sample| f32::from_le_bytes(*sample))
    }

    /// Keep the first `n_samples`.
    pub(crate) fn truncate(&mut self, n_samples: usize) {
        self.0.truncate(n_samples.saturating_mul(WIDTH));
    }

    /// The bytes that it was made of.
    pub(crate) fn into_bytes(self) -> Bytes {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laneway_proto::samples_to_bytes;

    #[test]
    fn they_are_read_where_they_lie() {
        let bytes = samples_to_bytes(&[0.5, -1.0, 2.0]);
        let mut samples = Samples::new(bytes.clone()).unwrap();
        assert_eq!(samples.iter().collect::<Vec<_>>(), [0.5, -1.0, 2.0]);
        samples.truncate(2);
        assert_eq!((samples.len(), samples.is_empty()), (2, false));
        samples.truncate(usize::MAX);
        assert_eq!(samples.into_bytes().as_ptr(), bytes.as_ptr());
        let cut = Samples::new(bytes.slice(..7));
        assert_eq!(cut.unwrap_err(), PayloadError::Samples(7));
    }
}
