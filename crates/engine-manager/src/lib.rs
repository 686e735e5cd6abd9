//! laneway-engine-manager
