//! laneway-proto
