//! laneway-audio
