//! Two threads on one lane's stream: one frees slots, the other runs steps of their next owners.
//!
//! As in an engine, where the loop zeroes a released slot and the lane's launch thread replays steps, each whenever it gets to
//! it. The stream's order is all that keeps a zero in front of the next owner's first write.

use std::sync::mpsc;

use laneway_device::op::Zero;
use laneway_device::{Graph, Op, Priority, Touches, View};

use super::{DEADLINE, Kit, LEN, Outcome, add, launch, stream, text};

/// Few, so that each is freed and taken again at once.
const SLOTS: usize = 8;
const SLOT: usize = LEN / SLOTS;
/// Owners of all slots together, one behind the other.
const OWNERS: usize = 2048;
/// Steps of an owner. Each adds one to what the slot holds.
const STEPS: usize = 3;

struct Slot {
    view: View,
    step: Graph,
    /// Adds what the slot holds to what its owners have found at their ends.
    end: Graph,
}

pub(super) fn reused(kit: &Kit) -> Outcome {
    let lane = stream(&kit.device, "runtime.lane", Priority::Low, None)?;
    let (pool, one, found) = (kit.buffer("pool")?, kit.filled("one", 1.0)?, kit.buffer("found")?);
    let filled = kit.stream.record().map_err(text)?;
    lane.wait(&filled).map_err(text)?;
    let one = one.slice(0, SLOT);
    let adding = |x: &View, to: &View| {
        lane.capture(&mut |stand_in| stand_in.launch(&add(x, to, &one), &Touches::none()))
            .map_err(text)
    };
    let slots = (0..SLOTS)
        .map(|slot| {
            let view = pool.slice(slot * SLOT, SLOT);
            Ok(Slot {
                step: adding(&one, &view)?,
                end: adding(&view, &found.slice(slot * SLOT, SLOT))?,
                view,
            })
        })
        .collect::<Result<Vec<_>, String>>()?;
    let (free, freed) = mpsc::sync_channel(SLOTS);
    let (give, given) = mpsc::sync_channel(SLOTS);
    std::thread::scope(|scope| {
        // The lane's launch thread: every owner takes a slot that it must find zeroed.
        let owners = scope.spawn(|| -> Outcome {
            // Owned, so that the other thread is not left waiting when this one fails. There is room for every slot.
            let (freed, give): (mpsc::Receiver<&Slot>, mpsc::SyncSender<&Slot>) = (freed, give);
            for slot in freed {
                for graph in [&slot.step; STEPS].into_iter().chain([&slot.end]) {
                    lane.replay(graph, &Touches::none()).map_err(text)?;
                }
                give.send(slot).map_err(|_| "nobody frees slots".to_owned())?;
            }
            Ok(())
        });
        // The engine's loop: frees a slot as soon as its owner's last step is launched, landed or not.
        let freeing = (|| -> Outcome {
            for owner in 0..OWNERS {
                let slot = match slots.get(owner) {
                    Some(slot) => slot,
                    None => given
                        .recv_timeout(DEADLINE)
                        .map_err(|error| format!("no owner gave a slot back: {error}"))?,
                };
                launch(
                    &*lane,
                    &[Op::Zero(Zero {
                        dst: slot.view.clone(),
                    })],
                )?;
                free.send(slot).map_err(|_| "the owners ended early".to_owned())?;
            }
            Ok(())
        })();
        drop(free);
        let owning = owners
            .join()
            .map_err(|_| "the owners' thread panicked".to_owned())?;
        owning.and(freeing)
    })?;
    let landed = lane.record().map_err(text)?;
    kit.stream.wait(&landed).map_err(text)?;
    // A zero that comes late takes steps from an owner; one that does not come leaves it those of the owner before.
    kit.holds(&found.view(), (OWNERS / SLOTS * STEPS) as f32)
}
