//! The streaming codec decoder: code frames in, 24 kHz samples out, state carried in a slot per stream.
//!
//! One pass decodes windows of any width of any number of streams. Windows lie one behind the other in
//! time-major buffers (`[frames * rate, channels]` at every depth), an index buffer says where each begins and
//! which state slot it continues, and the operations gather and scatter that state themselves. Every output
//! sample is reduced in one fixed order, so how a stream is cut into windows never changes a bit of it.

mod decoder;
mod state;
mod step;
mod weights;
mod workspace;

pub use decoder::{CodecDecoder, Pass};
pub use state::{BlockState, CodecStateLayout, LayerState};
pub use step::{CodecStep, StreamWindow};
