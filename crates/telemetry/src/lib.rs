//! laneway-telemetry
