//! The wire: generated messages and services of `laneway.v1`.
//!
//! Must not know: how any service does its work. Wire types stop at the edge of the crate that receives them.

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
