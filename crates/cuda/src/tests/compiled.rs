//! The kernels of one architecture as the compiler leaves them.

use std::collections::BTreeMap;
use std::env;
use std::sync::{Arc, Mutex, OnceLock};

use crate::cubin::{self, Kernel};
use crate::kernels::{Unit, sources};
use crate::nvrtc::{NVRTC_DIR_VARIABLE, Nvrtc};

/// What the assembler reports about a kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) registers: usize,
    pub(super) stack_bytes: usize,
    pub(super) spill_bytes: usize,
    pub(super) shared_bytes: usize,
}

#[derive(Debug, Clone)]
pub(super) struct Built {
    /// Name of the file without its ending.
    pub(super) unit: &'static str,
    pub(super) kernel: Kernel,
    pub(super) usage: Usage,
}

/// The compiler that `make test` installs.
///
/// # Panics
/// When the variable does not name it: a kernel that was not compiled was not tested.
pub(super) fn nvrtc() -> &'static Nvrtc {
    assert!(
        env::var_os(NVRTC_DIR_VARIABLE).is_some(),
        "{NVRTC_DIR_VARIABLE} must name the directory with libnvrtc.so.13 and its builtins: run `make test`, which \
         installs them and sets it"
    );
    Nvrtc::get().unwrap()
}

/// Kernels by name.
pub(super) type Kernels = Arc<BTreeMap<String, Built>>;

/// All kernels for `arch`; compiled by the first test that asks.
pub(super) fn compile(arch: &'static str) -> Kernels {
    static BUILT: Mutex<BTreeMap<&str, Arc<OnceLock<Kernels>>>> = Mutex::new(BTreeMap::new());
    let built = Arc::clone(BUILT.lock().unwrap().entry(arch).or_default());
    Arc::clone(built.get_or_init(|| Arc::new(compile_all(arch))))
}

fn compile_all(arch: &str) -> BTreeMap<String, Built> {
    let mut all = BTreeMap::new();
    for (unit, text) in sources(arch) {
        let compiled = Unit::new(unit, text, arch, false).compile(nvrtc()).unwrap();
        let mut usage = usages(&compiled.log);
        for (name, kernel) in cubin::kernels(&compiled.cubin).unwrap() {
            let usage = usage.remove(&name).unwrap_or_else(|| {
                panic!(
                    "{unit}: the assembler reports nothing about {name}:\n{}",
                    compiled.log
                )
            });
            let built = Built { unit, kernel, usage };
            assert!(
                all.insert(name.clone(), built).is_none(),
                "two kernels called {name}"
            );
        }
        assert!(
            usage.is_empty(),
            "{unit}: entry functions without code: {usage:?}"
        );
    }
    all
}

/// The assembler's report (`--ptxas-options=-v`), by kernel.
fn usages(log: &str) -> BTreeMap<String, Usage> {
    let mut all = BTreeMap::<String, Usage>::new();
    let mut name = String::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            name = rest.split('\'').next().unwrap().to_owned();
            all.entry(name.clone()).or_default();
        } else if let Some(usage) = all.get_mut(&name) {
            let number = |unit: &str| {
                let (before, _) = line.split_once(unit)?;
                before.split_whitespace().next_back()?.parse::<usize>().ok()
            };
            usage.registers = number(" registers").unwrap_or(usage.registers);
            usage.stack_bytes = number(" bytes stack frame").unwrap_or(usage.stack_bytes);
            usage.spill_bytes += number(" bytes spill stores").unwrap_or(0);
            usage.spill_bytes += number(" bytes spill loads").unwrap_or(0);
            usage.shared_bytes = number(" bytes smem").unwrap_or(usage.shared_bytes);
        }
    }
    all
}

#[test]
fn reads_the_assemblers_report() {
    let log = "ptxas info    : 24 bytes gmem\n\
               ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
               ptxas info    : Function properties for a\n\
               ptxas         .     16 bytes stack frame, 32 bytes spill stores, 8 bytes spill loads\n\
               ptxas info    : Used 48 registers, used 1 barriers, 160 bytes smem\n\
               ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
               ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
               ptxas info    : Used 9 registers, used 0 barriers\n";
    let all = usages(log);
    let usage = |registers, stack_bytes, spill_bytes, shared_bytes| Usage {
        registers,
        stack_bytes,
        spill_bytes,
        shared_bytes,
    };
    assert_eq!(all["a"], usage(48, 16, 40, 160));
    assert_eq!(all["b"], usage(9, 0, 0, 0));
    assert_eq!(all.len(), 2);
}
