//! Resources: pools of equal slots, who holds which, and the zeroing of what was released.
//!
//! [`Resources`] belongs to the engine thread. A [`Lease`] may be dropped on any thread: it leaves its slots
//! in the return bin, and the engine thread zeroes them on their owner's stream before they are free again.

mod free_list;
mod lease;
mod pool;
mod prefix;

use std::sync::Arc;

use laneway_device::{Buffer, BufferSpec, DType, Device, DeviceError, Place, Stream, Touches, op};
use laneway_plan::declaration::Element;

pub(crate) use lease::Lease;
pub(crate) use pool::Ask;

use crate::control::Waker;
use crate::node::{BoundResource, Grant};
use crate::topology::{PoolInfo, Topology};

use lease::{ReturnBin, Source};
use pool::Pool;

/// One pool and how its slots come back.
struct Managed {
    key: Arc<str>,
    pool: Pool,
    /// What is zeroed when a slot comes back, and on which stream; `None`: released as it is.
    zero: Option<Zeroing>,
}

struct Zeroing {
    buffer: Buffer,
    slot_elements: usize,
    lane: usize,
    stream: Arc<dyn Stream>,
}

impl Zeroing {
    fn launch(&self, slot: u32) -> laneway_device::Result<()> {
        let dst = self
            .buffer
            .slice(slot as usize * self.slot_elements, self.slot_elements);
        self.stream.launch(&op::Zero { dst }.into(), &Touches::none())
    }
}

/// Every pool of a worker: its resources first, in the topology's order, then the rings of its edges.
pub(crate) struct Resources {
    pools: Vec<Managed>,
    bin: Arc<ReturnBin>,
}

impl Resources {
    /// `bound` are the topology's pools, `rings` the slots of each edge's ring (0: it has none).
    pub(crate) fn new(
        topology: &Topology,
        bound: &[BoundResource],
        rings: &[u32],
        streams: &[Arc<dyn Stream>],
        waker: Waker,
    ) -> Self {
        let resources = topology.pools.iter().zip(bound).map(|(info, bound)| Managed {
            key: info.key.clone(),
            pool: Pool::new(info.slots, info.keeps_prefixes),
            zero: info.zero_on_release.then(|| Zeroing {
                buffer: bound.pool.clone(),
                slot_elements: bound.slot_elements,
                lane: info.lane,
                stream: streams[info.lane].clone(),
            }),
        });
        let rings = topology.edges.iter().zip(rings).map(|(edge, &slots)| Managed {
            key: edge.name.clone(),
            pool: Pool::new(slots, false),
            zero: None,
        });
        Self {
            pools: resources.chain(rings).collect(),
            bin: Arc::new(ReturnBin::new(waker)),
        }
    }

    /// Whether [`Self::reserve`] would succeed.
    pub(crate) fn available(&self, asks: &[Ask]) -> bool {
        asks.iter()
            .all(|ask| self.pools[ask.pool].pool.has(ask.slots, &ask.prefix))
    }

    /// All that is asked for (each pool once), or nothing.
    pub(crate) fn reserve(&mut self, asks: &[Ask]) -> Option<Arc<Lease>> {
        if !self.available(asks) {
            return None;
        }
        let (mut grants, mut sources) = (Vec::new(), Vec::new());
        for ask in asks {
            let managed = &mut self.pools[ask.pool];
            let (slots, cached) = managed.pool.take(ask.slots, &ask.prefix);
            grants.push(Grant {
                resource: managed.key.to_string(),
                slots,
                cached: cached as u32,
            });
            sources.push(Source {
                pool: ask.pool,
                prefix: ask.prefix.clone(),
            });
        }
        Some(Arc::new(Lease::new(grants, sources, self.bin.clone())))
    }

    /// Take back what was dropped: queue the zeroing on the owner's stream, then offer the slots again. Any
    /// step that is launched on that stream from here on runs behind the zero. Returns the lane whose stream
    /// refused, which must not run another step: its slots are not clean.
    pub(crate) fn collect(&mut self) -> Option<(usize, DeviceError)> {
        let mut refused = None;
        for taken in self.bin.take() {
            let managed = &mut self.pools[taken.pool];
            if let Some(zero) = &managed.zero {
                for &slot in &taken.slots {
                    if let Err(error) = zero.launch(slot) {
                        refused = Some((zero.lane, error));
                    }
                }
            }
            managed.pool.give_back(taken);
        }
        refused
    }

    /// The pool's owner runs on another stream from here on, which is behind the one before: so are the zeroes.
    pub(crate) fn zero_on(&mut self, pool: usize, lane: usize, stream: Arc<dyn Stream>) {
        if let Some(zero) = &mut self.pools[pool].zero {
            (zero.lane, zero.stream) = (lane, stream);
        }
    }

    /// Slots in use of pool `index`, those of steps in flight included.
    pub(crate) fn used(&self, index: usize) -> u32 {
        self.pools[index].pool.used()
    }
}

/// Allocate a resource's pool.
pub(crate) fn bind(device: &dyn Device, info: &PoolInfo) -> laneway_device::Result<BoundResource> {
    let pool = device.alloc(BufferSpec {
        name: info.key.to_string(),
        dtype: match info.element {
            Element::F32 => DType::F32,
            Element::Bf16 => DType::Bf16,
        },
        // A resource of no bytes (machinery, not state) still gets a buffer to name.
        len: (info.slots as usize * info.slot_elements).max(1),
        place: Place::Device,
    })?;
    Ok(BoundResource {
        key: info.key.to_string(),
        pool,
        slots: info.slots,
        slot_elements: info.slot_elements,
        page_size: info.page_size,
    })
}

#[cfg(test)]
mod tests;
