//! The wire: generated messages and services of `laneway.v1` and of Riva's protocol, the one table of error codes, strong ids, and
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
pub use deadline::{CALLER_PATIENCE, CALLER_PING, grpc_timeout};
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

/// Riva's speech synthesis, generated from `proto/riva`: what clients of that service already speak.
pub mod riva {
    #![allow(
        missing_docs,
        unreachable_pub,
        clippy::all,
        reason = "generated code follows prost's rules, not ours"
    )]
    tonic::include_proto!("nvidia.riva");

    /// `nvidia.riva.tts`.
    pub mod tts {
        tonic::include_proto!("nvidia.riva.tts");
    }
}

/// Encoded `FileDescriptorSet` of [`v1`] and [`riva`], for the reflection service.
pub const FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("descriptors");

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
        for wanted in [
            "laneway.v1.Speech",
            "laneway.v1.Models",
            "laneway.v1.Requests",
            "laneway.v1.Worker",
            "laneway.v1.EngineManager",
            "nvidia.riva.tts.RivaSpeechSynthesis",
        ] {
            assert!(
                services.iter().any(|service| service == wanted),
                "{wanted} is missing from {services:?}"
            );
        }
    }

    #[test]
    fn enums_start_at_unspecified() {
        let set = prost_types::FileDescriptorSet::decode(super::FILE_DESCRIPTOR_SET).unwrap();
        let ours = set.file.iter().filter(|file| file.package() == "laneway.v1");
        let enums: Vec<_> = ours.flat_map(|file| &file.enum_type).collect();
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
