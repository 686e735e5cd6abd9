//! laneway-worker
