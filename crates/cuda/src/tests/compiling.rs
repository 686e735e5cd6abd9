//! Every kernel compiles for every architecture, within its budget on the one that runs it.

use super::compiled::{compile, nvrtc};
use crate::kernels::{SOURCES, Unit, sources};

/// Registers that a kernel of each file may take on sm_90a. More would cost blocks on a multiprocessor: raise a budget
/// only with a measurement.
const REGISTERS: &[(&str, usize)] = &[
    ("gemm", 136),
    ("gemm_many", 168),
    // Two blocks of 64 outputs, or one of 128, on a multiprocessor.
    ("gemm_wgmma", 128),
    ("rows", 80),
    ("sequence", 128),
    // Of heads that share no keys; the launch bounds of the others see to 128.
    ("attention", 184),
    ("attention_short", 64),
    ("sample", 64),
    ("codec", 168),
    ("codec_any", 96),
    // What a block begins with; its warpgroups then divide a multiprocessor's registers among themselves.
    ("codec_wgmma", 128),
    ("codec_unit", 128),
    ("codec_ring", 128),
    ("codec_staged", 168),
    ("clip", 96),
];

/// Machine code of the smallest kernel: one of no work (an architecture for which a body was left out) is a
/// few instructions of 16 bytes, padded to 128 or 256.
const MIN_CODE_BYTES: usize = 384;

fn compiles(arch: &'static str) {
    let empty: Vec<_> = compile(arch)
        .iter()
        .filter(|(_, built)| built.kernel.code_bytes < MIN_CODE_BYTES)
        .map(|(name, built)| format!("{}: {name}: {} bytes", built.unit, built.kernel.code_bytes))
        .collect();
    assert!(empty.is_empty(), "kernels without a body for {arch}: {empty:#?}");
}

#[test]
fn every_kernel_has_a_body_for_sm_80() {
    compiles("sm_80");
}

#[test]
fn every_kernel_has_a_body_for_sm_89() {
    compiles("sm_89");
}

#[test]
fn every_kernel_has_a_body_for_sm_90a() {
    compiles("sm_90a");
}

#[test]
fn every_kernel_has_a_body_for_sm_100() {
    compiles("sm_100");
}

#[test]
fn no_kernel_of_sm_90a_spills_or_is_over_its_budget() {
    let mut over = Vec::new();
    for (name, built) in compile("sm_90a").iter() {
        let budget = REGISTERS.iter().find(|(unit, _)| *unit == built.unit).unwrap().1;
        let usage = &built.usage;
        if usage.stack_bytes + usage.spill_bytes > 0 || usage.registers > budget {
            over.push(format!(
                "{}: {name}: {usage:?}, of {budget} registers",
                built.unit
            ));
        }
    }
    assert!(over.is_empty(), "{over:#?}");
}

#[test]
fn an_empty_body_and_a_spill_would_be_noticed() {
    let nvrtc = nvrtc();
    let build = |text: &str| Unit::new("probe", text, "sm_90a", false).compile(nvrtc);
    let code = |text: &str| {
        let cubin = build(text).unwrap().cubin;
        crate::cubin::kernels(&cubin).unwrap()["probe"].clone()
    };
    let empty = code("extern \"C\" __global__ void probe(float* x, int n, i64 m) {}");
    assert!(empty.code_bytes < MIN_CODE_BYTES, "{empty:?}");
    assert_eq!(empty.parameters, [8, 4, 8]);
    assert_eq!(empty.max_threads, None);
    let bounded = code("extern \"C\" __global__ void __launch_bounds__(96) probe() {}");
    assert_eq!((bounded.parameters.len(), bounded.max_threads), (0, Some(96)));
    let error = build("extern \"C\" __global__ void probe() { nonsense; }")
        .err()
        .unwrap();
    assert!(error.contains("probe.cu(1)"), "{error}");
}

#[test]
fn the_checking_build_is_another_program() {
    let nvrtc = nvrtc();
    let (name, text) = SOURCES[0];
    let cubin = |shuffle| {
        Unit::new(name, text, "sm_90a", shuffle)
            .compile(nvrtc)
            .unwrap()
            .cubin
    };
    assert!(cubin(false) != cubin(true), "SHUFFLE_BLOCKS changes nothing");
}

/// A kernel begins while the one ahead of it still writes. What a parameter promises to be read-only for a kernel's whole
/// life may come from a cache that was filled before.
#[test]
fn no_kernel_promises_that_its_operands_are_read_only() {
    for (name, text) in sources("sm_90a") {
        assert!(
            !text.contains("__restrict__"),
            "{name}: a parameter is __restrict__"
        );
    }
}
