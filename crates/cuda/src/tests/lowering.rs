//! Every launch that lowering makes names a kernel that exists, with arguments, threads and memory that it takes.

use std::collections::BTreeSet;
use std::sync::Arc;

use laneway_device::{DType, Op};

use super::compiled::compile;
use super::fake::{FakeDevice, Seen};
use crate::check::{CheckConfig, Products, Sizes, check};
use crate::lower::Target;

/// Lower the cases of the kernel check whose line contains `filter`; nothing runs, so what the check compares
/// means nothing.
fn lower_cases(
    device: FakeDevice,
    arch: u32,
    products: Products,
    sizes: Sizes,
    filter: Option<&str>,
) -> Seen {
    let device = Arc::new(device);
    let config = CheckConfig {
        reference: device.clone(),
        subject: device.clone(),
        shuffled: None,
        arch,
        guards: None,
        products,
        caches: vec![DType::F32, DType::Bf16, DType::F16],
        states: vec![DType::F32, DType::Bf16],
        filter: filter.map(str::to_owned),
        seed: 1,
        sizes,
        threads: 1,
    };
    check(&config, &mut |_| {}).unwrap();
    device.take()
}

/// What `passes` (precision, multiprocessors, sizes, filter) make on one architecture.
fn lower_all(
    arch: &'static str,
    number: u32,
    shared_kib: usize,
    passes: &[(Products, u32, Sizes, Option<&str>)],
) -> Seen {
    let mut all = Seen::default();
    for &(products, sms, sizes, filter) in passes {
        let weights = match products {
            Products::F32 => DType::F32,
            _ => DType::Bf16,
        };
        let target = Target { sms, arch: number };
        let device = FakeDevice::new(compile(arch), target, shared_kib << 10, weights);
        let seen = lower_cases(device, number, products, sizes, filter);
        all.ops.extend(seen.ops);
        all.kernels.extend(seen.kernels);
        all.problems.extend(seen.problems);
    }
    all
}

#[test]
fn every_operation_lowers_to_launches_that_the_kernels_of_sm_90a_take() {
    let passes = [
        (Products::Bf16, 132, Sizes::True, None),
        (Products::F32, 132, Sizes::Small, None),
        // A small partition.
        (Products::Bf16, 8, Sizes::True, Some("Gemm")),
        (Products::Bf16, 8, Sizes::True, Some("Conv")),
    ];
    let seen = lower_all("sm_90a", 90, 227, &passes);
    assert!(seen.problems.is_empty(), "{:#?}", seen.problems);
    for name in Op::NAMES.iter().filter(|name| !["Copy", "Zero"].contains(name)) {
        assert!(seen.ops.contains(name), "no case of {name}");
    }
    let kernels = compile("sm_90a");
    let idle: Vec<_> = kernels
        .keys()
        .filter(|name| !seen.kernels.contains(name.as_str()))
        .filter(|name| !without_clusters(name) && !without_warpgroups(name))
        .collect();
    assert!(idle.is_empty(), "kernels that no operation launches: {idle:?}");
}

/// A product whose block has all segments: for devices that have no clusters.
fn without_clusters(kernel: &str) -> bool {
    let mut parts = kernel.split('_').rev();
    kernel.starts_with("gemm_") && !kernel.starts_with("gemm_warpgroup_") && parts.nth(1) == Some("1")
}

/// A convolution of f16 weights: for devices without warpgroup products.
fn without_warpgroups(kernel: &str) -> bool {
    kernel.starts_with("conv_mma_f16_")
}

#[test]
fn every_operation_lowers_to_launches_that_the_kernels_of_older_architectures_take() {
    let passes = |sms| [(Products::Bf16, sms, Sizes::True, None)];
    let mut launched = BTreeSet::new();
    for (arch, number, sms, shared_kib) in [("sm_80", 80, 108, 163), ("sm_89", 89, 142, 99)] {
        let seen = lower_all(arch, number, shared_kib, &passes(sms));
        assert!(seen.problems.is_empty(), "{arch}: {:#?}", seen.problems);
        launched.extend(seen.kernels);
    }
    let kernels = compile("sm_80");
    let idle: Vec<_> = kernels
        .keys()
        .filter(|name| without_clusters(name) || without_warpgroups(name))
        .filter(|name| !launched.contains(name.as_str()))
        .collect();
    assert!(idle.is_empty(), "kernels that no operation launches: {idle:?}");
}
