//! The wire: generated messages and services of `laneway.v1`, the one table of error codes, strong ids, and
//! the conversions that every service needs.
//!
//! Must not know: how any service does its work. Wire types stop at the edge of the crate that receives them.

mod convert;
mod deadline;
mod error_code;
mod failure;
mod id;
pub mod plan;

pub use convert::{
    PayloadError, frames_from_rows, micros, rows_from_frames, samples_from_bytes, samples_to_bytes,
};
pub use deadline::grpc_timeout;
pub use error_code::{ERROR_CODES, ErrorCode, ErrorCodeRow};
pub use failure::{ERROR_DOMAIN, Failure, Violation};
pub use id::{InvalidId, RequestId, WorkerId};

/// Generated from `proto/laneway/v1`.
pub mod v1 {
    #![allow(
        missing_docs,
        unreachable_pub,
        clippy::all,
        reason = "generated code follows prost's rules, not ours"
    )]
    tonic::include_proto!("laneway.v1");
}

/// Encoded `FileDescriptorSet` of [`v1`], for the reflection service.
pub const FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("laneway.v1");

#[cfg(test)]
mod tests {
    use prost::Message;

    #[test]
    fn descriptor_set_decodes_and_holds_every_service() {
        let set = prost_types::FileDescriptorSet::decode(super::FILE_DESCRIPTOR_SET).unwrap();
        let services: Vec<String> = set
            .file
            .iter()
            .flat_map(|file| {
                file.service
                    .iter()
                    .map(move |service| format!("{}.{}", file.package(), service.name()))
            })
            .collect();
        for wanted in ["Speech", "Models", "Requests", "Worker", "EngineManager"] {
            assert!(
                services.contains(&format!("laneway.v1.{wanted}")),
                "{wanted} is missing from {services:?}"
            );
        }
    }

    #[test]
    fn enums_start_at_unspecified() {
        let set = prost_types::FileDescriptorSet::decode(super::FILE_DESCRIPTOR_SET).unwrap();
        let enums: Vec<_> = set.file.iter().flat_map(|file| &file.enum_type).collect();
        assert!(!enums.is_empty());
        for each in enums {
            assert_eq!(each.value[0].number(), 0);
            assert!(
                each.value[0].name().ends_with("_UNSPECIFIED"),
                "{}",
                each.value[0].name()
            );
        }
    }
}
