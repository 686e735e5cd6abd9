//! What an operation becomes: kernel launches as plain data, so that lowering runs and is tested with no GPU.

use laneway_device::View;

/// One kernel launch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Launch {
    /// Name of the `extern "C" __global__` function in one of `kernels/*.cu`.
    pub(crate) kernel: &'static str,
    /// Blocks.
    pub(crate) grid: [u32; 3],
    /// Threads of a block; always one-dimensional.
    pub(crate) block: u32,
    /// Dynamic shared memory in bytes.
    pub(crate) shared: u32,
    /// Blocks along x of a cluster (sm_90 kernels only); 1: none.
    pub(crate) cluster: u32,
    /// Arguments, in the kernel's order.
    pub(crate) args: Args,
}

/// Kernel arguments as the driver wants them: values in order, each at its natural alignment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Args {
    bytes: Vec<u8>,
    /// Offset and size of each argument in `bytes`.
    fields: Vec<(usize, usize)>,
}

impl Args {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn push(mut self, value: &[u8]) -> Self {
        let offset = self.bytes.len().next_multiple_of(value.len());
        self.bytes.resize(offset, 0);
        self.bytes.extend_from_slice(value);
        self.fields.push((offset, value.len()));
        self
    }

    /// Address of the view's first element.
    pub(crate) fn view(self, view: &View) -> Self {
        let address = crate::lower::address(view);
        self.push(&address.to_ne_bytes())
    }

    /// As [`Args::view`]; null when there is none.
    pub(crate) fn optional(self, view: Option<&View>) -> Self {
        match view {
            Some(view) => self.view(view),
            None => self.push(&0u64.to_ne_bytes()),
        }
    }

    /// A device address that was computed already.
    pub(crate) fn address(self, address: u64) -> Self {
        self.push(&address.to_ne_bytes())
    }

    /// `int` (sizes, counts, strides below 2^31).
    pub(crate) fn int(self, value: usize) -> Self {
        let value =
            i32::try_from(value).expect("kernel sizes are below 2^31: the device checked the buffers");
        self.push(&value.to_ne_bytes())
    }

    /// `int` that may be negative.
    pub(crate) fn signed(self, value: i32) -> Self {
        self.push(&value.to_ne_bytes())
    }

    /// `long long` (element offsets into pools).
    pub(crate) fn long(self, value: usize) -> Self {
        self.push(&(value as i64).to_ne_bytes())
    }

    /// `float`.
    pub(crate) fn float(self, value: f32) -> Self {
        self.push(&value.to_ne_bytes())
    }

    /// Offset and size of each argument.
    pub(crate) fn fields(&self) -> &[(usize, usize)] {
        &self.fields
    }

    /// The arguments' storage; `fields` says where each lies.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}
