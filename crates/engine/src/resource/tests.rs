use std::time::Duration;

use laneway_device::{Launcher, Priority, StreamConfig, testing};

use super::*;

const SLOTS: u32 = 3;
/// Odd, so that a slot of 2-byte elements is no whole number of words.
const ELEMENTS: usize = 5;

/// A released slot is zero in all its elements, and its neighbours are as they were.
fn check(element: Element) {
    let (device, sanitizer) = testing::cpu();
    let stream = device
        .create_stream(StreamConfig {
            name: "chain".into(),
            priority: Priority::Normal,
            partition_sms: None,
        })
        .unwrap();
    let info = PoolInfo {
        key: "state".into(),
        lane: 0,
        slots: SLOTS,
        element,
        slot_elements: ELEMENTS,
        page_size: 0,
        zero_on_release: true,
        keeps_prefixes: false,
    };
    let bound = bind(&*device, &info).unwrap();
    let dtype = bound.pool.dtype();
    assert_eq!(dtype.size() as u64, element.bytes());
    let len = SLOTS as usize * ELEMENTS;
    let host = |name: &str| {
        let (name, place) = (name.into(), Place::Pinned);
        device
            .alloc(BufferSpec {
                name,
                dtype,
                len,
                place,
            })
            .unwrap()
    };
    let (ones, after) = (host("ones"), host("after"));
    device
        .host_write(&ones.view(), &vec![1; len * dtype.size()])
        .unwrap();
    let mut touches = Touches::none();
    touches.write(bound.pool.view());
    let launcher = Launcher {
        stream: &*stream,
        touches: &touches,
    };
    let copy = |src: &Buffer, dst: &Buffer| op::Copy {
        src: src.view(),
        dst: dst.view(),
    };
    launcher.run(copy(&ones, &bound.pool)).unwrap();
    let zeroing = Zeroing {
        buffer: bound.pool.clone(),
        slot_elements: bound.slot_elements,
        lane: 0,
        stream: stream.clone(),
    };
    zeroing.launch(1).unwrap();
    launcher.run(copy(&bound.pool, &after)).unwrap();
    let landed = stream.record().unwrap();
    landed.synchronize(Duration::from_secs(60)).unwrap();
    let mut bytes = vec![0u8; len * dtype.size()];
    device.host_read(&after.view(), &mut bytes).unwrap();
    let slots: Vec<&[u8]> = bytes.chunks(ELEMENTS * dtype.size()).collect();
    let all = |slot: usize, byte| slots[slot].iter().all(|b| *b == byte);
    assert!(all(0, 1) && all(1, 0) && all(2, 1), "{bytes:?}");
    sanitizer.assert_clean();
}

#[test]
fn a_released_slot_is_zeroed_whatever_its_elements_are() {
    check(Element::F32);
    check(Element::Bf16);
}
