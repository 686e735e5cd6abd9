//! The utterance that a worker speaks to itself before it serves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use laneway_engine::OutputEvent;

use crate::backend::{Backend, DecodeStart, Utterance};
use crate::service::Role;

/// How long it may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// Frames of it: enough for the first windows of any policy.
const N_FRAMES: u32 = 8;

/// Pitch of the clip that a cloning model is warmed up with.
const PITCH_HZ: f32 = 220.0;

/// Its id among requests; a caller's id cannot hold a space.
const ID: &str = "warm up";

/// Run one request through everything that this worker has, and drop what comes out.
pub(crate) async fn warm_up(backend: &dyn Backend, role: Role) -> anyhow::Result<()> {
    let deadline = Some(Instant::now() + DEADLINE);
    let mut running = match role.synthesizes {
        true => backend.synthesize(ID, utterance(backend), deadline)?,
        false => {
            let start = DecodeStart {
                max_frames: N_FRAMES,
                ..Default::default()
            };
            let running = backend.decode(ID, start, deadline)?;
            let frame: Arc<[i32]> = vec![0; backend.frame_shape().words as usize].into();
            backend.push_frames(ID, &vec![frame; N_FRAMES as usize])?;
            backend.end_frames(ID)?;
            running
        }
    };
    while let Some(event) = running.events.next().await {
        match event {
            OutputEvent::Finished { .. } => return Ok(()),
            OutputEvent::Failed(failure) => return Err(failure.into()),
            _ => {}
        }
    }
    anyhow::bail!("its event stream ended without a terminal event")
}

/// A second of a hum at the pitch of a voice. Not silence, which is no voice to clone and is refused.
fn tone(sample_rate: u32) -> Vec<f32> {
    let radians = |index: u32| 2.0 * std::f32::consts::PI * PITCH_HZ * index as f32 / sample_rate as f32;
    (0..sample_rate).map(|index| 0.3 * radians(index).sin()).collect()
}

/// Something that any model can speak.
fn utterance(backend: &dyn Backend) -> Utterance {
    let facts = backend.facts();
    let voice = facts
        .voices
        .first()
        .map(|voice| voice.name.clone())
        .unwrap_or_default();
    let instruct = if facts.needs_instruct {
        "A calm voice.".to_owned()
    } else {
        String::new()
    };
    let reference = facts.takes_reference.then(|| crate::backend::ReferenceClip {
        samples: tone(facts.sample_rate),
        sample_rate: facts.sample_rate,
        text: String::new(),
    });
    Utterance {
        text: "Warm up.".into(),
        voice,
        instruct,
        reference,
        max_frames: Some(N_FRAMES),
        ..Default::default()
    }
}
