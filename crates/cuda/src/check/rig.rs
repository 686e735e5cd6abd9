//! A device with one stream, used synchronously: operands up, operations, operands down.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use laneway_device::op::Copy;
use laneway_device::{
    Buffer, BufferSpec, DType, Device, Matrix, MatrixSpec, Op, Place, Priority, Result, Stream, StreamConfig,
    Touches, View,
};
use parking_lot::Mutex;

use super::data::Data;

/// No single case runs longer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// See the module.
pub(crate) struct Rig {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) stream: Arc<dyn Stream>,
    /// Compute capability, which decides how 16-bit inputs of products lie; 0: by rows.
    pub(crate) arch: u32,
    /// Pinned memory by type: page-locking is slow, so it is kept.
    staging: Mutex<HashMap<DType, Buffer>>,
}

impl Rig {
    pub(crate) fn new(device: Arc<dyn Device>, arch: u32) -> Result<Self> {
        let stream = device.create_stream(StreamConfig {
            name: "check".to_owned(),
            priority: Priority::Normal,
            partition_sms: None,
        })?;
        Ok(Self {
            device,
            stream,
            arch,
            staging: Mutex::default(),
        })
    }

    pub(crate) fn alloc(&self, name: &str, dtype: DType, len: usize) -> Result<View> {
        let spec = BufferSpec {
            name: name.to_owned(),
            dtype,
            len,
            place: Place::Device,
        };
        Ok(self.device.alloc(spec)?.view())
    }

    pub(crate) fn upload(&self, name: &str, data: &Data) -> Result<View> {
        let view = self.alloc(name, data.dtype, data.len())?;
        self.fill(&view, data)?;
        Ok(view)
    }

    pub(crate) fn fill(&self, view: &View, data: &Data) -> Result<()> {
        let staging = self.staging(data.dtype, data.len())?;
        self.device.host_write(&staging, &data.bytes)?;
        let copy = Copy {
            src: staging,
            dst: view.clone(),
        };
        self.run(&[copy.into()], &Touches::none())
    }

    pub(crate) fn download(&self, view: &View) -> Result<Data> {
        let dtype = view.buffer.dtype();
        let staging = self.staging(dtype, view.len)?;
        let copy = Copy {
            src: view.clone(),
            dst: staging.clone(),
        };
        self.run(&[copy.into()], &Touches::none())?;
        let mut bytes = vec![0; view.len * dtype.size()];
        self.device.host_read(&staging, &mut bytes)?;
        Ok(Data::new(dtype, bytes))
    }

    pub(crate) fn matrix(&self, name: &str, n: usize, k: usize, data: &Data) -> Result<Matrix> {
        self.device.pack_matrix(MatrixSpec {
            name,
            n,
            k,
            dtype: data.dtype,
            data: &data.bytes,
        })
    }

    /// Run operations and wait for them.
    pub(crate) fn run(&self, ops: &[Op], touches: &Touches) -> Result<()> {
        for op in ops {
            self.stream.launch(op, touches)?;
        }
        self.stream.record()?.synchronize(DEADLINE)
    }

    /// Run operations as a captured graph and wait for them.
    pub(crate) fn run_captured(&self, ops: &[Op], touches: &Touches) -> Result<()> {
        let graph = self
            .stream
            .capture(&mut |stand_in| ops.iter().try_for_each(|op| stand_in.launch(op, touches)))?;
        self.stream.replay(&graph, touches)?;
        self.stream.record()?.synchronize(DEADLINE)
    }

    fn staging(&self, dtype: DType, len: usize) -> Result<View> {
        let mut all = self.staging.lock();
        if let Some(buffer) = all.get(&dtype)
            && buffer.len() >= len
        {
            return Ok(buffer.slice(0, len));
        }
        let buffer = self.device.alloc(BufferSpec {
            name: format!("check.staging.{dtype:?}"),
            dtype,
            len: len.next_power_of_two().max(1 << 20),
            place: Place::Pinned,
        })?;
        let view = buffer.slice(0, len);
        all.insert(dtype, buffer);
        Ok(view)
    }
}
