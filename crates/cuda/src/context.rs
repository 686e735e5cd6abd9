//! The driver, the device's primary context, and what must outlive everything made in it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::sys;
use laneway_device::{DeviceError, Result};
use parking_lot::Mutex;

use crate::error;

/// The oldest driver that has every call made here: CUDA 12.8.
const MIN_DRIVER: i32 = 12_080;

/// A handle of the driver's, or an address of memory that it owns.
pub(crate) struct Handle<T>(pub(crate) *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: a handle is a number to this process; the driver may be called with it from any thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

pub(crate) type Stream = Handle<sys::CUstream_st>;
pub(crate) type RawEvent = Handle<sys::CUevent_st>;

/// Fixed properties of the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties {
    /// Streaming multiprocessors.
    pub(crate) sms: u32,
    /// Compute capability.
    pub(crate) major: u32,
    pub(crate) minor: u32,
    /// Shared memory that a block may have when it asks for it, in bytes.
    pub(crate) shared_bytes: u32,
}

/// What may only be given back once the device has finished with it.
pub(crate) enum Garbage {
    Device(u64),
    Pinned(Handle<c_void>),
    Graph(Handle<sys::CUgraphExec_st>),
    GreenContext(Handle<sys::CUgreenCtx_st>),
    Library(Handle<sys::CUlib_st>),
}

#[derive(Default)]
struct Captures {
    active: usize,
    garbage: Vec<Garbage>,
}

/// The primary context of one device. Everything made in it holds an `Arc` of this.
pub(crate) struct Context {
    /// `cuda:0`.
    pub(crate) name: String,
    /// CUDA version of the driver, e.g. 13000.
    pub(crate) driver_version: i32,
    pub(crate) device: sys::CUdevice,
    pub(crate) properties: Properties,
    raw: Handle<sys::CUctx_st>,
    /// Never reused, unlike the handle.
    id: u64,
    captures: Mutex<Captures>,
    /// Events without timing, for reuse: making one costs more than recording it.
    events: Mutex<Vec<RawEvent>>,
    /// The same, of those that tell the time.
    timed_events: Mutex<Vec<RawEvent>>,
    /// For fills and uploads of the device itself. The lock is held while they run.
    service: Mutex<Stream>,
}

thread_local! {
    /// Id of the context bound to this thread.
    static BOUND: Cell<u64> = const { Cell::new(0) };
}

impl Context {
    /// The process's context of the device: every opening of it shares one, because what one of them captures,
    /// frees or waits for concerns the others too.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>> {
        static OPEN: Mutex<BTreeMap<usize, Weak<Context>>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock();
        if let Some(context) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(context);
        }
        let context = Arc::new(Self::retain(ordinal)?);
        open.insert(ordinal, Arc::downgrade(&context));
        Ok(context)
    }

    fn retain(ordinal: usize) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let name = format!("cuda:{ordinal}");
        let driver_version = load_driver(&name)?;
        let device = find_device(&name, ordinal)?;
        let properties = Properties::read(&name, device)?;
        let mut raw = null_mut();
        // SAFETY: the device exists.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) };
        error::check(&name, "cuDevicePrimaryCtxRetain", retained)?;
        let context = Self {
            name,
            driver_version,
            device,
            properties,
            raw: Handle(raw),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            captures: Mutex::default(),
            events: Mutex::default(),
            timed_events: Mutex::default(),
            service: Mutex::new(Handle(null_mut())),
        };
        context.bind()?;
        *context.service.lock() = context.create_stream(0)?;
        Ok(context)
    }

    /// Check the answer of a call outside any stream.
    pub(crate) fn check(&self, call: &str, result: sys::CUresult) -> Result<()> {
        error::check(&self.name, call, result)
    }

    /// Make the context current on the calling thread. Nothing else in this process binds contexts.
    pub(crate) fn bind(&self) -> Result<()> {
        if BOUND.get() != self.id {
            // SAFETY: the context is retained until `self` is dropped.
            self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw.0) })?;
            BOUND.set(self.id);
        }
        Ok(())
    }

    /// Wait for all work on the device.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: a context is bound. Green contexts of the device are waited for as well.
        self.check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Free and total bytes of device memory.
    pub(crate) fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both addresses are valid for a write.
        self.check("cuMemGetInfo", unsafe {
            sys::cuMemGetInfo_v2(&mut free, &mut total)
        })?;
        Ok((free as u64, total as u64))
    }

    /// Lowest and highest stream priority; the highest is the smaller number.
    pub(crate) fn priorities(&self) -> Result<(i32, i32)> {
        self.bind()?;
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: both addresses are valid for a write.
        let result = unsafe { sys::cuCtxGetStreamPriorityRange(&mut lowest, &mut highest) };
        self.check("cuCtxGetStreamPriorityRange", result)?;
        Ok((lowest, highest))
    }

    /// A stream that no other stream waits for implicitly. The caller destroys it.
    pub(crate) fn create_stream(&self, priority: i32) -> Result<Stream> {
        self.bind()?;
        let mut stream = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is bound; the address is valid for a write.
        let result = unsafe { sys::cuStreamCreateWithPriority(&mut stream, flags, priority) };
        self.check("cuStreamCreateWithPriority", result)?;
        Ok(Handle(stream))
    }

    /// Destroy a stream; work on it still runs to its end.
    pub(crate) fn destroy_stream(&self, stream: Stream) {
        if self.bind().is_ok() {
            // SAFETY: the stream is the caller's, who does not use it again.
            let result = unsafe { sys::cuStreamDestroy_v2(stream.0) };
            self.log_failure("cuStreamDestroy", result);
        }
    }

    /// Run `work` on the device's own stream and wait for it.
    pub(crate) fn serve<T>(&self, work: impl FnOnce(Stream) -> Result<T>) -> Result<T> {
        let service = self.service.lock();
        self.bind()?;
        let done = work(*service);
        // SAFETY: the stream lives as long as the context.
        let synchronized = unsafe { sys::cuStreamSynchronize(service.0) };
        let done = done?;
        self.check("cuStreamSynchronize", synchronized)?;
        Ok(done)
    }

    /// An event, with timing if asked for; it goes back through [`Context::recycle_event`].
    pub(crate) fn take_event(&self, timed: bool) -> Result<RawEvent> {
        if let Some(event) = self.spare_events(timed).lock().pop() {
            return Ok(event);
        }
        self.create_event(if timed {
            sys::CUevent_flags_enum::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING
        })
    }

    fn spare_events(&self, timed: bool) -> &Mutex<Vec<RawEvent>> {
        if timed { &self.timed_events } else { &self.events }
    }

    /// A stream that waits for the event keeps the work that it was recorded behind, so the event itself may be
    /// recorded anew at once.
    pub(crate) fn recycle_event(&self, event: RawEvent, timed: bool) {
        self.spare_events(timed).lock().push(event);
    }

    pub(crate) fn create_event(&self, flags: sys::CUevent_flags_enum) -> Result<RawEvent> {
        self.bind()?;
        let mut event = null_mut();
        // SAFETY: a context is bound; the address is valid for a write.
        self.check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, flags as u32)
        })?;
        Ok(Handle(event))
    }

    pub(crate) fn destroy_event(&self, event: RawEvent) {
        if self.bind().is_ok() {
            // SAFETY: the event is the caller's, who does not use it again.
            self.log_failure("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event.0) });
        }
    }

    /// Give something back once nothing on the device can use it any more.
    ///
    /// The whole device is waited for first. An operation in flight holds no clone of its buffers: that would be a
    /// clone and a drop for every operand of every launch, to serve the moments of start and end at
    /// which memory is given back at all.
    pub(crate) fn discard(&self, garbage: Garbage) {
        let mut captures = self.captures.lock();
        captures.garbage.push(garbage);
        // The driver refuses to wait for a device while a stream records: the last capture collects then.
        if captures.active == 0 {
            self.collect(&mut captures.garbage);
        }
    }

    /// While the guard lives a stream may record.
    pub(crate) fn begin_capture(self: &Arc<Self>) -> CaptureGuard {
        self.captures.lock().active += 1;
        CaptureGuard(Arc::clone(self))
    }

    fn collect(&self, garbage: &mut Vec<Garbage>) {
        if garbage.is_empty() {
            return;
        }
        if let Err(error) = self.synchronize() {
            // A context with an error runs nothing any more, so nothing uses what is freed.
            tracing::warn!(%error, "device failed before memory was given back");
        }
        for piece in garbage.drain(..) {
            // SAFETY: each piece was made by the call that belongs to it, is given back once, and the device has
            // finished with it.
            let (call, result) = unsafe {
                match piece {
                    Garbage::Device(address) => ("cuMemFree", sys::cuMemFree_v2(address)),
                    Garbage::Pinned(memory) => ("cuMemFreeHost", sys::cuMemFreeHost(memory.0)),
                    Garbage::Graph(exec) => ("cuGraphExecDestroy", sys::cuGraphExecDestroy(exec.0)),
                    Garbage::GreenContext(green) => ("cuGreenCtxDestroy", sys::cuGreenCtxDestroy(green.0)),
                    Garbage::Library(library) => ("cuLibraryUnload", sys::cuLibraryUnload(library.0)),
                }
            };
            self.log_failure(call, result);
        }
    }

    fn log_failure(&self, call: &str, result: sys::CUresult) {
        if result != sys::CUresult::CUDA_SUCCESS {
            tracing::warn!(
                device = self.name,
                call,
                problem = error::text(result),
                "clean-up failed"
            );
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let mut events = std::mem::take(&mut *self.events.lock());
        events.append(&mut self.timed_events.lock());
        for event in events {
            self.destroy_event(event);
        }
        let mut garbage = std::mem::take(&mut self.captures.lock().garbage);
        self.collect(&mut garbage);
        let service = *self.service.lock();
        if !service.0.is_null() {
            self.destroy_stream(service);
        }
        // SAFETY: retained once in `open`; everything made in the context is gone.
        let released = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        self.log_failure("cuDevicePrimaryCtxRelease", released);
    }
}

/// See [`Context::begin_capture`].
pub(crate) struct CaptureGuard(Arc<Context>);

impl Drop for CaptureGuard {
    fn drop(&mut self) {
        let mut captures = self.0.captures.lock();
        captures.active -= 1;
        if captures.active == 0 {
            self.0.collect(&mut captures.garbage);
        }
    }
}

impl Properties {
    fn read(name: &str, device: sys::CUdevice) -> Result<Self> {
        use sys::CUdevice_attribute as Attribute;
        let read = |attribute| {
            let mut value = 0;
            // SAFETY: the device exists; the address is valid for a write.
            let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
            error::check(name, "cuDeviceGetAttribute", result)?;
            Ok::<_, DeviceError>(u32::try_from(value).unwrap_or(0))
        };
        Ok(Self {
            sms: read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            major: read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            shared_bytes: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        })
    }

    /// Compute capability as one number, e.g. 90.
    pub(crate) fn arch(&self) -> u32 {
        self.major * 10 + self.minor
    }
}

/// A device address that the host can use too (pinned memory).
pub(crate) fn host_pointer(address: u64) -> *mut u8 {
    with_exposed_provenance_mut(address as usize)
}

/// Load and start the driver; its CUDA version.
fn load_driver(name: &str) -> Result<i32> {
    let unavailable = |problem: String, remedy: &str| DeviceError::Unavailable {
        device: name.to_owned(),
        problem,
        remedy: remedy.to_owned(),
    };
    // SAFETY: loading the driver runs its initialisers, as it does in every CUDA program. From here on the
    // bindings load it themselves; without this question they would panic on a machine that has none.
    if !unsafe { sys::is_culib_present() } {
        return Err(unavailable(
            "no NVIDIA driver: libcuda.so.1 does not load".to_owned(),
            "install the NVIDIA driver, and in a container pass the GPU in; or run on the CPU device",
        ));
    }
    let mut version = 0;
    // SAFETY: the address is valid for a write; the call needs no initialisation.
    error::check(name, "cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&mut version)
    })?;
    if version < MIN_DRIVER {
        return Err(unavailable(
            format!("the NVIDIA driver is of CUDA {}", version_text(version)),
            &format!("install a driver of CUDA {} or newer", version_text(MIN_DRIVER)),
        ));
    }
    // SAFETY: the flags must be 0.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_SUCCESS => Ok(version),
        failure => Err(unavailable(
            format!("the NVIDIA driver does not start: {}", error::text(failure)),
            "look at what nvidia-smi says, and at CUDA_VISIBLE_DEVICES; or run on the CPU device",
        )),
    }
}

/// `12.8` for 12080.
pub(crate) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn find_device(name: &str, ordinal: usize) -> Result<sys::CUdevice> {
    let mut count = 0;
    // SAFETY: the driver is initialised; the address is valid for a write.
    error::check(name, "cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&mut count)
    })?;
    let Some(ordinal) = i32::try_from(ordinal).ok().filter(|&ordinal| ordinal < count) else {
        return Err(DeviceError::Unavailable {
            device: name.to_owned(),
            problem: format!("the machine has {count} CUDA devices"),
            remedy: "name one from 0 up, and look at CUDA_VISIBLE_DEVICES".to_owned(),
        });
    };
    let mut device = 0;
    // SAFETY: the ordinal exists; the address is valid for a write.
    error::check(name, "cuDeviceGet", unsafe {
        sys::cuDeviceGet(&mut device, ordinal)
    })?;
    Ok(device)
}
