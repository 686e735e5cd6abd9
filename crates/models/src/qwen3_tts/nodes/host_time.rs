//! What a step of the model costs the host: 64 requests on a device that computes nothing and has real pinned
//! memory. Nothing to hold, only to print: `make bench` runs it.

use std::sync::Arc;
use std::time::Duration;

use laneway_device::sanitize::Sanitizer;
use laneway_device::testing::{self, IdleStream};
use laneway_device::{
    Buffer, BufferSpec, DType, Device, DeviceFacts, Matrix, MatrixSpec, Result, Stream, StreamConfig, View,
};
use laneway_models_decl::qwen3_tts::{CODEC, TALKER};

use crate::qwen3_tts::prompt::TextLayout;
use crate::qwen3_tts::request::SpeechInput;
use crate::qwen3_tts::test_engine::{Running, tiny};

const ROWS: usize = 64;
const FRAMES: u32 = 200;
/// So long that the engine thread blocks between steps, as it does behind a GPU's.
const DEVICE_STEP: Duration = Duration::from_micros(500);

/// Runs nothing; what its host memory holds is the CPU device's.
#[derive(Debug)]
struct NullDevice(Arc<dyn Device>);

impl Device for NullDevice {
    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            exact_buckets: false,
            ..self.0.facts()
        }
    }

    fn alloc(&self, spec: BufferSpec) -> Result<Buffer> {
        self.0.alloc(spec)
    }

    fn alloc_with(&self, spec: BufferSpec, data: &[u8]) -> Result<Buffer> {
        self.0.alloc_with(spec, data)
    }

    fn pack_matrix(&self, spec: MatrixSpec<'_>) -> Result<Matrix> {
        self.0.pack_matrix(spec)
    }

    fn activation_dtype(&self, weights: &Matrix) -> DType {
        self.0.activation_dtype(weights)
    }

    fn create_stream(&self, config: StreamConfig) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(IdleStream::new(config, DEVICE_STEP)))
    }

    fn host_write(&self, view: &View, bytes: &[u8]) -> Result<()> {
        self.0.host_write(view, bytes)
    }

    fn host_read(&self, view: &View, bytes: &mut [u8]) -> Result<()> {
        self.0.host_read(view, bytes)
    }
}

#[test]
#[ignore = "prints times, for `make bench`"]
fn host_time_of_steps() {
    let device = laneway_device::open_cpu(laneway_device::CpuConfig { memory_bytes: None }).unwrap();
    let (_, sanitizer): (Arc<dyn Device>, Sanitizer) = testing::cpu();
    let device = (Arc::new(NullDevice(device)) as Arc<dyn Device>, sanitizer);
    let model = tiny("custom_voice");
    let running = Running::on(device, model.clone(), &[(TALKER, 0), (CODEC, 0)], ROWS);
    let requests = (0..ROWS).map(|i| {
        let input = SpeechInput {
            text: "One, two, three!".into(),
            voice: Some("vivian".into()),
            layout: Some(TextLayout::Whole),
            seed: i as u64,
            max_frames: Some(FRAMES + i as u32),
            min_frames: Some(FRAMES),
            ..SpeechInput::default()
        };
        model.requests().build(&input).unwrap()
    });
    let mut streams: Vec<_> = requests
        .enumerate()
        .map(|(i, request)| running.submit(&format!("row {i}"), request, None))
        .collect();
    // One listener that mostly sleeps, so that the engine thread has a core to itself.
    while !streams.is_empty() {
        streams.retain_mut(|stream| {
            let mut events = std::iter::from_fn(|| stream.try_recv());
            !events.any(|event| event.is_terminal())
        });
        std::thread::sleep(Duration::from_millis(1));
    }
    for walk in running.handle.stats().walks {
        let steps = walk.steps.max(1) as f64;
        println!(
            "{:<16} {:>5} steps of {:>5.1} rows: {:>7.1} us of the host",
            walk.walk,
            walk.steps,
            walk.rows as f64 / steps,
            walk.host_time.as_secs_f64() * 1e6 / steps,
        );
    }
}
