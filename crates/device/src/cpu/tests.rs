//! The CPU device through its traits.

use std::time::Duration;

use super::*;
use crate::op::{Copy, GatherRows, ScatterRows, Zero};
use crate::{DType, Touches};

const LONG: Duration = Duration::from_secs(60);

fn device(memory_bytes: u64) -> Arc<dyn Device> {
    open_cpu(CpuConfig {
        memory_bytes: Some(memory_bytes),
    })
    .unwrap()
}

fn stream(device: &Arc<dyn Device>, name: &str) -> Arc<dyn Stream> {
    device
        .create_stream(StreamConfig {
            name: name.to_owned(),
            priority: Default::default(),
            partition_sms: None,
        })
        .unwrap()
}

fn ints(device: &Arc<dyn Device>, name: &str, len: usize, place: Place) -> Buffer {
    device
        .alloc(BufferSpec {
            name: name.to_owned(),
            dtype: DType::I32,
            len,
            place,
        })
        .unwrap()
}

fn write(device: &Arc<dyn Device>, view: &View, values: &[i32]) {
    device.host_write(view, bytemuck::cast_slice(values)).unwrap();
}

fn read(device: &Arc<dyn Device>, view: &View) -> Vec<i32> {
    let mut values = vec![0; view.len];
    device
        .host_read(view, bytemuck::cast_slice_mut(&mut values))
        .unwrap();
    values
}

fn launch(stream: &Arc<dyn Stream>, op: impl Into<crate::Op>) {
    stream.launch(&op.into(), &Touches::none()).unwrap();
}

#[test]
fn rows_go_out_and_back() {
    let device = device(1 << 20);
    let stream = stream(&device, "chain");
    let [host, index] = ["host", "index"].map(|name| ints(&device, name, 6, Place::Pinned));
    let [rows, pool] = ["rows", "pool"].map(|name| ints(&device, name, 6, Place::Device));
    write(&device, &host.view(), &[1, 2, 3, 4, 5, 6]);
    write(&device, &index.view(), &[2, -1, 0, 0, -1, 2]);
    launch(
        &stream,
        Copy {
            src: host.view(),
            dst: rows.view(),
        },
    );
    launch(
        &stream,
        ScatterRows {
            src: rows.view(),
            index: index.slice(0, 3),
            rows: 3,
            width: 2,
            dst: pool.view(),
        },
    );
    launch(
        &stream,
        GatherRows {
            src: pool.view(),
            indirect: true,
            index: index.slice(3, 3),
            rows: 3,
            width: 2,
            out: rows.view(),
        },
    );
    launch(
        &stream,
        Zero {
            dst: rows.slice(5, 1),
        },
    );
    launch(
        &stream,
        Copy {
            src: rows.view(),
            dst: host.view(),
        },
    );
    stream.record().unwrap().synchronize(LONG).unwrap();
    assert_eq!(read(&device, &host.view()), [5, 6, 0, 0, 1, 0]);
}
