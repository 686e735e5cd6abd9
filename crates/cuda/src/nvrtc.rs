//! NVRTC: CUDA source to machine code. Loaded when the kernel cache lacks something, and only then.

use std::env;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Directory with `libnvrtc.so.13` and `libnvrtc-builtins.so.13.0`, when the loader's own path has none.
pub const NVRTC_DIR_VARIABLE: &str = "LANEWAY_NVRTC_DIR";

/// What is tried where no directory is named, in this order.
const NAMES: &[&str] = &[
    "libnvrtc.so.13",
    "libnvrtc.so",
    "/usr/local/cuda/lib64/libnvrtc.so.13",
    "/usr/local/cuda/lib64/libnvrtc.so",
    "libnvrtc.so.12",
];

type Program = *mut c_void;
type Answer = c_int;

/// The compiler's entry points; `_library` keeps them valid.
pub(crate) struct Nvrtc {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Answer,
    error_string: unsafe extern "C" fn(Answer) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Answer,
    destroy: unsafe extern "C" fn(*mut Program) -> Answer,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Answer,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Answer,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Answer,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Answer,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Answer,
    _library: Library,
}

/// Machine code of one source, and what the compiler said.
pub(crate) struct Compiled {
    pub(crate) cubin: Vec<u8>,
    /// With `--ptxas-options=-v`: registers, stack and spills of each kernel.
    pub(crate) log: String,
}

impl Nvrtc {
    /// The process's compiler.
    ///
    /// # Errors
    /// What does not load, and what to do.
    pub(crate) fn get() -> Result<&'static Self, String> {
        static LOADED: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        let dir = || env::var_os(NVRTC_DIR_VARIABLE).map(PathBuf::from);
        LOADED
            .get_or_init(|| Self::load(dir().as_deref()))
            .as_ref()
            .map_err(String::clone)
    }

    fn load(dir: Option<&Path>) -> Result<Self, String> {
        let library = open(dir)?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type of the field that takes it is the function's, which no CUDA release changed.
                *unsafe { library.get($name) }.map_err(|error| format!("NVRTC lacks a function: {error}"))?
            };
        }
        Ok(Self {
            version: symbol!(b"nvrtcVersion"),
            error_string: symbol!(b"nvrtcGetErrorString"),
            create: symbol!(b"nvrtcCreateProgram"),
            destroy: symbol!(b"nvrtcDestroyProgram"),
            compile: symbol!(b"nvrtcCompileProgram"),
            log_size: symbol!(b"nvrtcGetProgramLogSize"),
            log: symbol!(b"nvrtcGetProgramLog"),
            cubin_size: symbol!(b"nvrtcGetCUBINSize"),
            cubin: symbol!(b"nvrtcGetCUBIN"),
            _library: library,
        })
    }

    /// CUDA version, e.g. 13000.
    pub(crate) fn version(&self) -> Result<i32, String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both addresses are valid for a write.
        self.check("nvrtcVersion", unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok(major * 1000 + minor * 10)
    }

    /// Compile `source` to a cubin; `name` stands for it in messages. Any thread may call at any time.
    pub(crate) fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<Compiled, String> {
        let text = |text: &str| CString::new(text).map_err(|_| format!("{name}: holds a zero byte"));
        let (source, file) = (text(source)?, text(name)?);
        let options = options
            .iter()
            .map(|option| text(option))
            .collect::<Result<Vec<_>, _>>()?;
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = null_mut();
        // SAFETY: the texts end with zero and live until the program is destroyed; there are no headers.
        let created = unsafe {
            let none = std::ptr::null();
            (self.create)(&mut program, source.as_ptr(), file.as_ptr(), 0, none, none)
        };
        self.check("nvrtcCreateProgram", created)?;
        // SAFETY: the program is live, the options are `options.len()` texts.
        let compiled = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        let log = self.take(program, "nvrtcGetProgramLog", self.log_size, self.log);
        let cubin = match compiled {
            0 => self.take(program, "nvrtcGetCUBIN", self.cubin_size, self.cubin),
            _ => Ok(Vec::new()),
        };
        // SAFETY: the program is live and not used again.
        let destroyed = unsafe { (self.destroy)(&mut program) };
        let mut log = log?;
        log.retain(|&byte| byte != 0);
        let log = String::from_utf8_lossy(&log).into_owned();
        self.check("nvrtcCompileProgram", compiled)
            .map_err(|problem| format!("{name}: {problem}\n{log}"))?;
        self.check("nvrtcDestroyProgram", destroyed)?;
        Ok(Compiled { cubin: cubin?, log })
    }

    /// Bytes of a result whose length is asked for first.
    fn take(
        &self,
        program: Program,
        call: &str,
        size: unsafe extern "C" fn(Program, *mut usize) -> Answer,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> Answer,
    ) -> Result<Vec<u8>, String> {
        let mut len = 0;
        // SAFETY: the program is live; the address is valid for a write.
        self.check(call, unsafe { size(program, &mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the program is live; the buffer has the length that was asked for.
        self.check(call, unsafe { fill(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn check(&self, call: &str, answer: Answer) -> Result<(), String> {
        if answer == 0 {
            return Ok(());
        }
        // SAFETY: the function answers with a constant text for any number.
        let text = unsafe { std::ffi::CStr::from_ptr((self.error_string)(answer)) };
        Err(format!("{call}: {}", text.to_string_lossy()))
    }
}

fn open(dir: Option<&Path>) -> Result<Library, String> {
    // SAFETY: loading the compiler runs its initialisers, as in every program that links against it.
    let load = |path: &Path| unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    let Some(dir) = dir else {
        let mut problems = Vec::new();
        for name in NAMES {
            match load(Path::new(name)) {
                Ok(library) => return Ok(library),
                Err(error) => problems.push(error.to_string()),
            }
        }
        return Err(format!(
            "no NVRTC to compile kernels with: install the CUDA toolkit's NVRTC of CUDA 13.0, or set \
             {NVRTC_DIR_VARIABLE} to the directory that holds libnvrtc.so.13 (tried: {})",
            problems.join("; ")
        ));
    };
    let find = |stem: &str| {
        let entries = std::fs::read_dir(dir)
            .map_err(|error| format!("{NVRTC_DIR_VARIABLE}={}: {error}", dir.display()))?;
        let mut found: Vec<_> = entries
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(stem))
            })
            .collect();
        found.sort();
        found.into_iter().next().ok_or_else(|| {
            format!(
                "{NVRTC_DIR_VARIABLE}={}: there is no {stem}* in it",
                dir.display()
            )
        })
    };
    let load_named = |stem: &str| {
        let path = find(stem)?;
        load(&path).map_err(|error| format!("{NVRTC_DIR_VARIABLE}: {error}"))
    };
    // NVRTC asks for its builtins by bare name, so they must be there already. They stay for the process.
    std::mem::forget(load_named("libnvrtc-builtins.so")?);
    load_named("libnvrtc.so")
}
