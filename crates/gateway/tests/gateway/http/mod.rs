//! The same gateway over HTTP.

pub(crate) mod client;
mod hostile;
mod requests;
mod rows;
mod web;
