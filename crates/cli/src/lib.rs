//! laneway-cli
