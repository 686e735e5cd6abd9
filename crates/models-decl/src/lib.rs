//! laneway-models-decl
