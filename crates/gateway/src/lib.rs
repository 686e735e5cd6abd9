//! laneway-gateway
