//! Every launch that lowering makes names a kernel that exists, with arguments, threads and memory that it takes.

use std::collections::BTreeSet;
use std::sync::Arc;

use laneway_device::{DType, Op};

use super::compiled::compile;
use super::fake::{FakeDevice, Seen};
use crate::check::{CheckConfig, Products, Sizes, check};
use crate::lower::Target;

/// Kernels that the device launches itself.
const INTERNAL: &[&str] = &["pack_bf16", "pack_f32"];

/// Lower every case of the kernel check for one architecture; nothing runs, so what the check compares means nothing.
fn lower_all(arch: &'static str, target: Target, shared_kib: usize) -> (Seen, BTreeSet<String>) {
    let kernels = compile(arch);
    let names = kernels.keys().cloned().collect();
    let mut all = Seen::default();
    for (weights, products, sizes) in [
        (DType::Bf16, Products::Bf16, Sizes::True),
        (DType::F32, Products::F32, Sizes::Small),
    ] {
        let device = Arc::new(FakeDevice::new(
            kernels.clone(),
            target,
            shared_kib << 10,
            weights,
        ));
        let config = CheckConfig {
            reference: device.clone(),
            subject: device.clone(),
            shuffled: None,
            guards: None,
            products,
            caches: vec![DType::F32, DType::Bf16],
            states: vec![DType::F32],
            filter: None,
            seed: 1,
            sizes,
            threads: 1,
        };
        check(&config, &mut |_| {}).unwrap();
        let seen = device.take();
        all.ops.extend(seen.ops);
        all.kernels.extend(seen.kernels);
        all.problems.extend(seen.problems);
    }
    (all, names)
}

#[test]
fn every_operation_lowers_to_launches_that_the_kernels_of_sm_90a_take() {
    let (seen, names) = lower_all("sm_90a", Target { sms: 132, arch: 90 }, 227);
    assert!(seen.problems.is_empty(), "{:#?}", seen.problems);
    for name in Op::NAMES.iter().filter(|name| !["Copy", "Zero"].contains(name)) {
        assert!(seen.ops.contains(name), "no case of {name}");
    }
    let idle: Vec<_> = names
        .iter()
        .filter(|name| !seen.kernels.contains(name.as_str()) && !INTERNAL.contains(&name.as_str()))
        .collect();
    assert!(idle.is_empty(), "kernels that no operation launches: {idle:?}");
    for name in INTERNAL {
        assert!(names.contains(*name), "there is no kernel {name}");
    }
}

#[test]
fn every_operation_lowers_to_launches_that_the_kernels_of_sm_80_take() {
    let (seen, _) = lower_all("sm_80", Target { sms: 108, arch: 80 }, 163);
    assert!(seen.problems.is_empty(), "{:#?}", seen.problems);
}
