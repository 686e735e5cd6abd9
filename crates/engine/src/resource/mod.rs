//! Resources: pools of equal slots, who holds which, and the zeroing of what was released.
//!
//! [`Resources`] belongs to the engine thread. A [`Lease`] may be dropped on any thread: it leaves its slots
//! in the return bin, and the engine thread zeroes them on their owner's stream before they are free again.

mod free_list;
mod lease;

use std::sync::Arc;

use laneway_device::{Buffer, BufferSpec, DType, Device, DeviceError, Place, Stream, Touches, op};

pub(crate) use free_list::FreeList;
pub(crate) use lease::{Lease, ReturnBin};

use crate::control::Waker;
use crate::node::{BoundResource, Grant};
use crate::topology::{PoolInfo, Topology};

/// One pool.
struct Pool {
    key: Arc<str>,
    free: FreeList,
    /// What is zeroed when a slot comes back, and on which stream; `None`: released as it is.
    zero: Option<Zeroing>,
}

struct Zeroing {
    buffer: Buffer,
    slot_words: usize,
    lane: usize,
    stream: Arc<dyn Stream>,
}

impl Zeroing {
    fn launch(&self, slot: u32) -> laneway_device::Result<()> {
        let dst = self
            .buffer
            .slice(slot as usize * self.slot_words, self.slot_words);
        self.stream.launch(&op::Zero { dst }.into(), &Touches::none())
    }
}

/// Every pool of a worker: its resources first, in the topology's order, then the rings of its edges.
pub(crate) struct Resources {
    pools: Vec<Pool>,
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
        let resources = topology.pools.iter().zip(bound).map(|(info, bound)| Pool {
            key: info.key.clone(),
            free: FreeList::new(info.slots),
            zero: info.zero_on_release.then(|| Zeroing {
                buffer: bound.pool.clone(),
                slot_words: bound.slot_words,
                lane: info.lane,
                stream: streams[info.lane].clone(),
            }),
        });
        let rings = topology.edges.iter().zip(rings).map(|(edge, &slots)| Pool {
            key: edge.name.clone(),
            free: FreeList::new(slots),
            zero: None,
        });
        Self {
            pools: resources.chain(rings).collect(),
            bin: Arc::new(ReturnBin::new(waker)),
        }
    }

    /// Whether [`Self::reserve`] would succeed.
    pub(crate) fn available(&self, needs: &[(usize, u32)]) -> bool {
        needs
            .iter()
            .all(|&(pool, slots)| self.pools[pool].free.available() >= slots)
    }

    /// All of `needs` (pool, slots; each pool once), or nothing.
    pub(crate) fn reserve(&mut self, needs: &[(usize, u32)]) -> Option<Arc<Lease>> {
        if !self.available(needs) {
            return None;
        }
        let grants = needs
            .iter()
            .map(|&(pool, slots)| Grant {
                resource: self.pools[pool].key.to_string(),
                slots: self.pools[pool].free.take(slots),
            })
            .collect();
        let pools = needs.iter().map(|&(pool, _)| pool).collect();
        Some(Arc::new(Lease::new(grants, pools, self.bin.clone())))
    }

    /// Take back what was dropped: queue the zeroing on the owner's stream, then offer the slots again. Any
    /// step that is launched on that stream from here on runs behind the zero. Returns the lane whose stream
    /// refused, which must not run another step: its slots are not clean.
    pub(crate) fn collect(&mut self) -> Option<(usize, DeviceError)> {
        let mut refused = None;
        for (pool, slots) in self.bin.take() {
            let pool = &mut self.pools[pool];
            for slot in slots {
                if let Some(zero) = &pool.zero
                    && let Err(error) = zero.launch(slot)
                {
                    refused = Some((zero.lane, error));
                }
                pool.free.give_back(slot);
            }
        }
        refused
    }

    /// Slots in use of pool `index`, those of steps in flight included.
    pub(crate) fn used(&self, index: usize) -> u32 {
        self.pools[index].free.taken()
    }
}

/// Allocate a resource's pool.
pub(crate) fn bind(device: &dyn Device, info: &PoolInfo) -> laneway_device::Result<BoundResource> {
    let pool = device.alloc(BufferSpec {
        name: info.key.to_string(),
        dtype: DType::F32,
        // A resource of no bytes (machinery, not state) still gets a buffer to name.
        len: (info.slots as usize * info.slot_words).max(1),
        place: Place::Device,
    })?;
    Ok(BoundResource {
        key: info.key.to_string(),
        pool,
        slots: info.slots,
        slot_words: info.slot_words,
        page_size: info.page_size,
    })
}
