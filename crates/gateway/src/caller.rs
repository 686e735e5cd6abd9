//! Who makes a request, and what it said beside it.

use std::sync::Arc;

use tonic::metadata::MetadataMap;

/// Name of the API key that a call was let in with, which is what logs and metrics know a caller by. Empty where no
/// key is asked for. The names are those of the file of keys, so there are as many as it has lines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KeyName(Arc<str>);

impl KeyName {
    pub(crate) fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// As metrics have it.
    pub(crate) fn label(&self) -> metrics::SharedString {
        self.0.clone().into()
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// One caller of [`crate::api::Api`].
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    /// `grpc-timeout` is the deadline of the whole stream, and the trace context goes on to the worker.
    pub(crate) metadata: MetadataMap,
    pub(crate) key: KeyName,
}

impl Caller {
    /// Who calls over gRPC, and what.
    pub(crate) fn of<M>(request: tonic::Request<M>) -> (Self, M) {
        let (metadata, mut extensions, message) = request.into_parts();
        let key = extensions.remove::<KeyName>().unwrap_or_default();
        (Self { metadata, key }, message)
    }
}
