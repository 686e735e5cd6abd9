//! The kernels: their sources, how they become machine code, and the functions of one device by name.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;

use cudarc::driver::sys;
use laneway_device::{DeviceError, Result};

use crate::cache::{self, KernelCache};
use crate::context::{Context, Garbage, Handle, Stream, version_text};
use crate::cubin;
use crate::launch::Launch;
use crate::nvrtc::{Compiled, Nvrtc};

/// Stands in front of every source.
const COMMON: &str = include_str!("../kernels/common.cuh");

/// One module each, on every architecture.
pub(crate) const SOURCES: &[(&str, &str)] = &[
    (
        "gemm",
        concat!(
            include_str!("../kernels/product.cuh"),
            "#line 1 \"gemm.cu\"\n",
            include_str!("../kernels/gemm.cu")
        ),
    ),
    (
        "gemm_many",
        concat!(
            include_str!("../kernels/product.cuh"),
            "#line 1 \"block.cuh\"\n",
            include_str!("../kernels/block.cuh"),
            "#line 1 \"gemm_many.cu\"\n",
            include_str!("../kernels/gemm_many.cu")
        ),
    ),
    ("rows", include_str!("../kernels/rows.cu")),
    (
        "sequence",
        concat!(
            include_str!("../kernels/cache.cuh"),
            "#line 1 \"sequence.cu\"\n",
            include_str!("../kernels/sequence.cu")
        ),
    ),
    (
        "attention",
        concat!(
            include_str!("../kernels/cache.cuh"),
            "#line 1 \"attention.cu\"\n",
            include_str!("../kernels/attention.cu")
        ),
    ),
    (
        "attention_short",
        concat!(
            include_str!("../kernels/cache.cuh"),
            "#line 1 \"attention_short.cu\"\n",
            include_str!("../kernels/attention_short.cu")
        ),
    ),
    ("sample", include_str!("../kernels/sample.cu")),
    (
        "codec",
        concat!(
            include_str!("../kernels/streams.cuh"),
            "#line 1 \"codec.cu\"\n",
            include_str!("../kernels/codec.cu")
        ),
    ),
    (
        "codec_any",
        concat!(
            include_str!("../kernels/streams.cuh"),
            "#line 1 \"codec_any.cu\"\n",
            include_str!("../kernels/codec_any.cu")
        ),
    ),
    ("clip", include_str!("../kernels/clip.cu")),
];

/// As [`SOURCES`], of instructions that only 9.0 has.
const SOURCES_OF_HOPPER: &[(&str, &str)] = &[
    (
        "gemm_wgmma",
        concat!(
            include_str!("../kernels/product.cuh"),
            "#line 1 \"block.cuh\"\n",
            include_str!("../kernels/block.cuh"),
            include_str!("../kernels/wgmma.cuh"),
            "#line 1 \"gemm_wgmma.cu\"\n",
            include_str!("../kernels/gemm_wgmma.cu")
        ),
    ),
    (
        "codec_wgmma",
        concat!(
            include_str!("../kernels/streams.cuh"),
            include_str!("../kernels/wgmma.cuh"),
            "#line 1 \"codec_wgmma.cu\"\n",
            include_str!("../kernels/codec_wgmma.cu")
        ),
    ),
    (
        "codec_unit",
        concat!(
            include_str!("../kernels/streams.cuh"),
            include_str!("../kernels/wgmma.cuh"),
            "#line 1 \"codec_unit.cu\"\n",
            include_str!("../kernels/codec_unit.cu")
        ),
    ),
    (
        "codec_staged",
        concat!(
            include_str!("../kernels/streams.cuh"),
            include_str!("../kernels/wgmma.cuh"),
            "#line 1 \"codec_staged.cu\"\n",
            include_str!("../kernels/codec_staged.cu")
        ),
    ),
    (
        "codec_ring",
        concat!(
            include_str!("../kernels/streams.cuh"),
            include_str!("../kernels/wgmma.cuh"),
            "#line 1 \"codec_ring.cu\"\n",
            include_str!("../kernels/codec_ring.cu")
        ),
    ),
];

/// The sources of an architecture.
pub(crate) fn sources(arch: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let more = if arch == "sm_90a" { SOURCES_OF_HOPPER } else { &[] };
    SOURCES.iter().chain(more).copied()
}

/// What one source is compiled from: the text, and the compiler's options.
pub(crate) struct Unit {
    pub(crate) name: &'static str,
    source: String,
    options: Vec<String>,
}

impl Unit {
    /// `arch`: e.g. `sm_90a`. `shuffle_blocks` numbers the blocks of a grid in another order.
    pub(crate) fn new(name: &'static str, text: &str, arch: &str, shuffle_blocks: bool) -> Self {
        let mut options: Vec<String> = vec![
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ];
        if shuffle_blocks {
            options.push("-DSHUFFLE_BLOCKS".to_owned());
        }
        Self {
            name,
            source: format!("{COMMON}\n#line 1 \"{name}.cu\"\n{text}"),
            options,
        }
    }

    pub(crate) fn compile(&self, nvrtc: &Nvrtc) -> Result<Compiled, String> {
        nvrtc.compile(&format!("{}.cu", self.name), &self.source, &self.options)
    }

    fn key(&self) -> u64 {
        cache::key(std::iter::once(self.source.as_str()).chain(self.options.iter().map(String::as_str)))
    }
}

/// Architecture to compile for. Only 9.0 has instructions that need the `a` and that are used here.
pub(crate) fn arch_name(major: u32, minor: u32) -> String {
    match (major, minor) {
        (9, 0) => "sm_90a".to_owned(),
        _ => format!("sm_{major}{minor}"),
    }
}

/// A kernel on the device.
struct Function {
    kernel: Handle<sys::CUkern_st>,
    described: cubin::Kernel,
    /// Dynamic shared memory that a launch may ask for.
    max_shared: u32,
}

/// All kernels of one device.
pub(crate) struct Kernels {
    context: Arc<Context>,
    functions: BTreeMap<String, Function>,
    libraries: Vec<Handle<sys::CUlib_st>>,
}

impl Kernels {
    /// Compile what the cache lacks, and load everything.
    pub(crate) fn load(
        context: &Arc<Context>,
        cache: Option<&KernelCache>,
        shuffle_blocks: bool,
    ) -> Result<Self> {
        let arch = arch_name(context.properties.major, context.properties.minor);
        let units: Vec<_> = sources(&arch)
            .map(|(name, text)| Unit::new(name, text, &arch, shuffle_blocks))
            .collect();
        // Compiling takes seconds a file, and no file needs another.
        let cubins = thread::scope(|scope| {
            let jobs: Vec<_> = units
                .iter()
                .map(|unit| scope.spawn(move || obtain(unit, cache, context)))
                .collect();
            jobs.into_iter()
                .map(|job| job.join().expect("compiling does not panic"))
                .collect::<Result<Vec<_>>>()
        })?;
        let mut kernels = Self {
            context: Arc::clone(context),
            functions: BTreeMap::new(),
            libraries: Vec::new(),
        };
        for (unit, cubin) in units.iter().zip(cubins) {
            let loaded = match kernels.load_library(unit.name, &cubin.bytes) {
                // Another driver than the one that the cache was filled under.
                Err(error) if cubin.from_cache => {
                    tracing::warn!(%error, unit = unit.name, "cached kernels do not load: compiling again");
                    kernels.load_library(unit.name, &compile(unit, cache, context)?)
                }
                loaded => loaded,
            };
            loaded?;
        }
        Ok(kernels)
    }

    fn load_library(&mut self, unit: &str, cubin: &[u8]) -> Result<()> {
        let context = &self.context;
        context.bind()?;
        let described = cubin::kernels(cubin).map_err(|problem| failed(context, unit, problem))?;
        let mut library = null_mut();
        // SAFETY: the driver copies the cubin; there are no options.
        let result = unsafe {
            let (options, values) = (null_mut(), null_mut());
            sys::cuLibraryLoadData(
                &mut library,
                cubin.as_ptr().cast(),
                options,
                values,
                0,
                null_mut(),
                null_mut(),
                0,
            )
        };
        context.check(&format!("cuLibraryLoadData of {unit}"), result)?;
        self.libraries.push(Handle(library));
        for (name, kernel) in described {
            let function = Function::get(context, library, &name, kernel)?;
            if self.functions.insert(name.clone(), function).is_some() {
                return Err(failed(
                    context,
                    unit,
                    format!("{name} exists in another file too"),
                ));
            }
        }
        Ok(())
    }

    /// Queue one launch. With `overlap` it may start while the kernel ahead of it still runs (it waits itself).
    pub(crate) fn launch(&self, stream: Stream, launch: &Launch, overlap: bool) -> Result<(), String> {
        let function = self
            .functions
            .get(launch.kernel)
            .ok_or_else(|| format!("there is no kernel {}", launch.kernel))?;
        if let Some(problem) = launch_problem(launch, &function.described, function.max_shared) {
            return Err(format!("{}: {problem}", launch.kernel));
        }
        if launch.grid.contains(&0) {
            // No blocks, no work; the driver calls it an error.
            return Ok(());
        }
        // Words, so that every argument is aligned as its type wants.
        let mut words = vec![0u64; launch.args.bytes().len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..launch.args.bytes().len()]
            .copy_from_slice(launch.args.bytes());
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let first = bytes.as_mut_ptr();
        let mut arguments: Vec<*mut c_void> = launch
            .args
            .fields()
            .iter()
            .map(|&(offset, _)| first.wrapping_add(offset).cast())
            .collect();
        let mut attributes = Vec::with_capacity(2);
        if overlap {
            attributes.push(attribute(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue {
                    programmaticStreamSerializationAllowed: 1,
                },
            ));
        }
        if launch.cluster > 1 {
            attributes.push(attribute(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                sys::CUlaunchAttributeValue {
                    clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                        x: launch.cluster,
                        y: 1,
                        z: 1,
                    },
                },
            ));
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: stream.0,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        self.context.bind().map_err(|error| error.to_string())?;
        // A launch takes a kernel in place of a function, and finds the function of the stream's context.
        let kernel = function.kernel.0.cast::<sys::CUfunc_st>();
        // SAFETY: kernel and stream are live; the arguments are as many and as long as the kernel's parameters; what
        // they point to is kept by the buffers of the operation (see `Context::discard`).
        let result = unsafe { sys::cuLaunchKernelEx(&config, kernel, arguments.as_mut_ptr(), null_mut()) };
        match result {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            failure => Err(format!(
                "{} (grid {:?}, block {}, shared {} bytes, cluster {}): {}",
                launch.kernel,
                launch.grid,
                launch.block,
                launch.shared,
                launch.cluster,
                crate::error::text(failure)
            )),
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        for library in self.libraries.drain(..) {
            self.context.discard(Garbage::Library(library));
        }
    }
}

impl Function {
    fn get(context: &Context, library: sys::CUlibrary, name: &str, described: cubin::Kernel) -> Result<Self> {
        use sys::CUfunction_attribute as Attribute;
        let text =
            CString::new(name).map_err(|_| failed(context, name, "a name with a zero byte".to_owned()))?;
        let mut kernel = null_mut();
        // SAFETY: the library is loaded; the name ends with zero.
        let result = unsafe { sys::cuLibraryGetKernel(&mut kernel, library, text.as_ptr()) };
        context.check(&format!("cuLibraryGetKernel of {name}"), result)?;
        let mut fixed = 0;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: kernel and device exist; the address is valid for a write.
        let result = unsafe { sys::cuKernelGetAttribute(&mut fixed, attribute, kernel, context.device) };
        context.check(&format!("cuKernelGetAttribute of {name}"), result)?;
        let max_shared = context
            .properties
            .shared_bytes
            .saturating_sub(fixed.unsigned_abs());
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: kernel and device exist.
        let result =
            unsafe { sys::cuKernelSetAttribute(attribute, max_shared as i32, kernel, context.device) };
        context.check(&format!("cuKernelSetAttribute of {name}"), result)?;
        // Load the code now: the driver would do so at the first launch, which may be inside a capture.
        let mut function = null_mut();
        // SAFETY: the kernel exists and a context is bound; the address is valid for a write.
        let result = unsafe { sys::cuKernelGetFunction(&mut function, kernel) };
        context.check(&format!("cuKernelGetFunction of {name}"), result)?;
        // SAFETY: the function exists.
        context.check(&format!("cuFuncLoad of {name}"), unsafe {
            sys::cuFuncLoad(function)
        })?;
        Ok(Self {
            kernel: Handle(kernel),
            described,
            max_shared,
        })
    }
}

fn attribute(id: sys::CUlaunchAttributeID, value: sys::CUlaunchAttributeValue) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id,
        pad: [0; 4],
        value,
    }
}

/// Why `launch` does not fit the kernel that it names.
pub(crate) fn launch_problem(launch: &Launch, kernel: &cubin::Kernel, max_shared: u32) -> Option<String> {
    let given: Vec<_> = launch.args.fields().iter().map(|&(_, size)| size).collect();
    if given != kernel.parameters {
        return Some(format!(
            "arguments of {given:?} bytes for parameters of {:?} bytes",
            kernel.parameters
        ));
    }
    let max_threads = kernel.max_threads.unwrap_or(1024);
    if launch.block as usize > max_threads {
        return Some(format!(
            "{} threads a block, of at most {max_threads}",
            launch.block
        ));
    }
    if launch.shared > max_shared {
        return Some(format!(
            "{} bytes of shared memory, of at most {max_shared}",
            launch.shared
        ));
    }
    None
}

struct Cubin {
    bytes: Vec<u8>,
    from_cache: bool,
}

/// From the cache, else from the compiler.
fn obtain(unit: &Unit, cache: Option<&KernelCache>, context: &Context) -> Result<Cubin> {
    let cached = cache.and_then(|cache| cache.load(unit.name, unit.key()));
    Ok(match cached {
        Some(bytes) => Cubin {
            bytes,
            from_cache: true,
        },
        None => Cubin {
            bytes: compile(unit, cache, context)?,
            from_cache: false,
        },
    })
}

/// Compile and keep.
fn compile(unit: &Unit, cache: Option<&KernelCache>, context: &Context) -> Result<Vec<u8>> {
    let start = std::time::Instant::now();
    let unavailable = |problem: String| DeviceError::Unavailable {
        device: context.name.clone(),
        problem: "kernels cannot be compiled".to_owned(),
        remedy: problem,
    };
    let nvrtc = Nvrtc::get().map_err(unavailable)?;
    let version = nvrtc.version().map_err(unavailable)?;
    // Within a major release any driver runs what any compiler made, across them it does not.
    if version / 1000 > context.driver_version / 1000 {
        return Err(unavailable(format!(
            "NVRTC is of CUDA {}, the driver of CUDA {}: install a newer driver or an older NVRTC",
            version_text(version),
            version_text(context.driver_version)
        )));
    }
    let compiled = unit
        .compile(nvrtc)
        .map_err(|problem| failed(context, unit.name, problem))?;
    tracing::info!(
        unit = unit.name,
        seconds = start.elapsed().as_secs_f32(),
        bytes = compiled.cubin.len(),
        "compiled kernels"
    );
    tracing::debug!(unit = unit.name, log = compiled.log, "the assembler's report");
    if let Some(cache) = cache
        && let Err(error) = cache.store(unit.name, unit.key(), &compiled.cubin)
    {
        tracing::warn!(%error, dir = %cache.dir().display(), "kernel cache cannot be written: every start compiles");
    }
    Ok(compiled.cubin)
}

fn failed(context: &Context, unit: &str, problem: String) -> DeviceError {
    DeviceError::Driver {
        device: context.name.clone(),
        call: format!("loading kernels of {unit}"),
        problem,
    }
}
