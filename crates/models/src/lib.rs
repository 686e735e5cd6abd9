//! laneway-models
