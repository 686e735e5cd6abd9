//! What the tests of this model share: golden tensors, checkpoints, a device with a stream, comparisons.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use laneway_device::op::Copy;
use laneway_device::sanitize::Sanitizer;
use laneway_device::{
    Buffer, BufferSpec, DType, Device, Launcher, Place, Priority, Stream, StreamConfig, Touches, View,
    testing,
};
use laneway_models_decl::{Sizing, declare, qwen3_tts};
use laneway_plan::declaration::{ModelDeclaration, NodeDecl};
use laneway_plan::deployment::{DeviceKind, ModelConfig};
use safetensors::{Dtype, SafeTensors};

use crate::checkpoint::{Checkpoint, WeightsSource};

/// No operation of a test takes longer, even on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(120);

fn manifest_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn golden_dir() -> PathBuf {
    manifest_dir().join("../../integration-tests/golden")
}

/// The generated checkpoint that a golden directory was made with.
pub(crate) fn generated(config_dir: &Path, seed: u64) -> Checkpoint {
    Checkpoint::open(&WeightsSource::Random { seed }, Some(config_dir)).unwrap()
}

/// The tiny checkpoint of a model type, `base` say.
pub(crate) fn tiny(kind: &str) -> Checkpoint {
    generated(&golden_dir().join(format!("tiny/model-{kind}")), 7)
}

/// The true-size checkpoint of a preset, `0.6b-base` say, with generated weights.
pub(crate) fn true_size(preset: &str) -> Checkpoint {
    generated(&manifest_dir().join("../models-decl/presets").join(preset), 7)
}

/// The trained demo checkpoint.
pub(crate) fn nano() -> Checkpoint {
    Checkpoint::open(&WeightsSource::Path(manifest_dir().join("demo/nano")), None).unwrap()
}

/// What a configuration declares on the CPU device.
pub(crate) struct DeclaredModel(ModelDeclaration);

impl DeclaredModel {
    /// The declaration of a checkpoint directory.
    pub(crate) fn of(dir: &Path) -> Self {
        let config = ModelConfig::Directory(dir.to_owned());
        let sizing = Sizing {
            device: DeviceKind::Cpu,
            precision: DeviceKind::Cpu.default_precision(),
            page_size: 16,
            max_prefill_tokens: 256,
        };
        let declared = declare(qwen3_tts::MODEL, &config, &sizing).unwrap();
        Self(declared.declaration)
    }

    pub(crate) fn node(&self, name: &str) -> &NodeDecl {
        self.0.nodes.iter().find(|node| node.name == name).unwrap()
    }

    pub(crate) fn bytes_per_slot(&self, resource: &str) -> u64 {
        let declared = self.0.resources.iter().find(|r| r.key == resource);
        declared.unwrap().report.bytes_per_slot
    }
}

/// One golden file.
pub(crate) struct Golden(Vec<u8>);

impl Golden {
    /// `tiny/codec`, say.
    pub(crate) fn open(name: &str) -> Self {
        Self(std::fs::read(golden_dir().join(format!("{name}.safetensors"))).unwrap())
    }

    pub(crate) fn shape(&self, name: &str) -> Vec<usize> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap().shape().to_vec()
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).is_ok()
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
        tensor
            .data()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect()
    }

    /// A `[channels, time]` tensor as `[time, channels]`.
    pub(crate) fn time_major(&self, name: &str) -> Vec<f32> {
        let shape = self.shape(name);
        let (channels, time) = (shape[0], shape[1]);
        let values = self.floats(name);
        (0..time * channels)
            .map(|i| values[i % channels * time + i / channels])
            .collect()
    }

    /// Code frames `[frames, 16]`.
    pub(crate) fn codes(&self, name: &str) -> Vec<Arc<[i32]>> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::I64, "{name}");
        let values = tensor.data().as_chunks::<8>().0;
        values
            .chunks_exact(tensor.shape()[1])
            .map(|frame| {
                frame
                    .iter()
                    .map(|code| i64::from_le_bytes(*code) as i32)
                    .collect()
            })
            .collect()
    }
}

/// Compare, and say where the two differ most.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let worst = got
        .iter()
        .zip(want)
        .map(|(g, w)| (g - w).abs())
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((at, difference)) = worst {
        assert!(
            difference <= tolerance,
            "{what}: element {at} is {} and should be {}: off by {difference}, tolerance {tolerance}",
            got[at],
            want[at]
        );
    }
}

/// A CPU device under the sanitizer, with one stream.
pub(crate) struct Machine {
    pub(crate) device: Arc<dyn Device>,
    sanitizer: Sanitizer,
    pub(crate) stream: Arc<dyn Stream>,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self::on(testing::cpu())
    }

    /// A stream `test` on this device.
    pub(crate) fn on((device, sanitizer): (Arc<dyn Device>, Sanitizer)) -> Self {
        let stream = device
            .create_stream(StreamConfig {
                name: "test".into(),
                priority: Priority::Normal,
                partition_sms: None,
            })
            .unwrap();
        Self {
            device,
            sanitizer,
            stream,
        }
    }

    pub(crate) fn alloc(&self, name: &str, dtype: DType, len: usize, place: Place) -> Buffer {
        let name = name.to_owned();
        self.device
            .alloc(BufferSpec {
                name,
                dtype,
                len,
                place,
            })
            .unwrap()
    }

    /// Device memory with these contents.
    pub(crate) fn upload<T: bytemuck::Pod>(&self, dtype: DType, values: &[T]) -> View {
        let spec = BufferSpec {
            name: "input".into(),
            dtype,
            len: values.len(),
            place: Place::Device,
        };
        self.device
            .alloc_with(spec, bytemuck::cast_slice(values))
            .unwrap()
            .view()
    }

    pub(crate) fn launch(
        &self,
        touches: &Touches,
        run: impl FnOnce(&Launcher<'_>) -> laneway_device::Result<()>,
    ) {
        run(&Launcher {
            stream: &*self.stream,
            touches,
        })
        .unwrap();
    }

    /// Wait for everything launched.
    pub(crate) fn finish(&self) {
        self.stream.record().unwrap().synchronize(DEADLINE).unwrap();
        self.sanitizer.assert_clean();
    }

    /// Contents of device memory once everything launched has run.
    pub(crate) fn fetch<T: bytemuck::Pod>(&self, view: &View) -> Vec<T> {
        let host = self.alloc("fetched", view.buffer.dtype(), view.len, Place::Pinned);
        self.launch(&Touches::none(), |launcher| {
            launcher.run(Copy {
                src: view.clone(),
                dst: host.view(),
            })
        });
        self.finish();
        let mut values = vec![T::zeroed(); view.len];
        self.device
            .host_read(&host.view(), bytemuck::cast_slice_mut(&mut values))
            .unwrap();
        values
    }
}
