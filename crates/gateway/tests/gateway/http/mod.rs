//! The same gateway over HTTP.

mod client;
mod hostile;
mod requests;
mod rows;
mod web;
