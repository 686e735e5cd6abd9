//! What a worker says of its model and of itself, checked once at the edge.

use std::sync::Arc;

use laneway_plan::declaration::ChunkPolicy;
use laneway_proto::v1;
use laneway_proto::{InvalidId, WorkerId};
use tonic::transport::Uri;

use crate::voices::Registered;

/// A worker as discovery sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) address: Uri,
    /// It takes requests and its model is loaded.
    pub(crate) serving: bool,
    pub(crate) load: Load,
    /// Known from SERVING on.
    pub(crate) model: Option<ModelFacts>,
}

/// Load as the worker last reported it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Load {
    /// Waiting and running.
    pub(crate) requests: u32,
    /// Requests that can run at once; 0 when it does not say.
    pub(crate) capacity: u32,
    /// Requests that can wait.
    pub(crate) queue_capacity: u32,
}

/// A model that can be asked for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelFacts {
    pub(crate) name: String,
    pub(crate) voices: Vec<Voice>,
    pub(crate) languages: Vec<String>,
    pub(crate) sample_rate: u32,
    pub(crate) samples_per_frame: u32,
    /// Characters that it speaks in one go.
    pub(crate) max_text_chars: usize,
    pub(crate) max_instruct_chars: usize,
    pub(crate) max_frames: u32,
    pub(crate) max_chunk_frames: u32,
    pub(crate) max_reference_ms: u32,
    pub(crate) takes_instruct: bool,
    pub(crate) needs_instruct: bool,
    pub(crate) takes_reference: bool,
    pub(crate) default_chunk: Option<ChunkPolicy>,
    pub(crate) takes_exact_frames: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Voice {
    pub(crate) name: String,
    pub(crate) language: String,
    pub(crate) dialect: String,
    /// What it is cloned from; none for a preset, which the model has of its own.
    pub(crate) registered: Option<Arc<Registered>>,
}

impl Voice {
    /// Whether a request that says this means it.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        match &self.registered {
            Some(registered) => registered.is_called(name),
            None => self.name.eq_ignore_ascii_case(name),
        }
    }
}

impl ModelFacts {
    /// Voices that it has of its own.
    pub(crate) fn preset_voices(&self) -> impl Iterator<Item = &Voice> {
        self.voices.iter().filter(|voice| voice.registered.is_none())
    }
}

/// Why a worker cannot be routed to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FactsError {
    #[error("worker id: {0}")]
    Id(#[from] InvalidId),
    #[error("address \"{0}\" is not like http://host:port")]
    Address(String),
    #[error("a serving worker states no `{0}`")]
    Missing(&'static str),
}

impl TryFrom<v1::WorkerInfo> for Worker {
    type Error = FactsError;

    fn try_from(info: v1::WorkerInfo) -> Result<Self, FactsError> {
        let serving = info.state() == v1::WorkerState::Serving && info.takes_requests;
        Self::checked(info.worker_id, info.address, serving, info.load, info.facts)
    }
}

impl Worker {
    /// A worker that was asked for its status at `address`.
    pub(crate) fn from_status(address: String, status: v1::WorkerStatusResponse) -> Result<Self, FactsError> {
        let serving = status.state() == v1::WorkerState::Serving && status.takes_requests;
        Self::checked(status.worker_id, address, serving, status.load, status.facts)
    }

    fn checked(
        id: String,
        address: String,
        serving: bool,
        load: Option<v1::WorkerLoad>,
        facts: Option<v1::ModelFacts>,
    ) -> Result<Self, FactsError> {
        if serving && facts.is_none() {
            return Err(FactsError::Missing("facts"));
        }
        let parsed = address
            .parse::<Uri>()
            .ok()
            .filter(|uri| uri.scheme().is_some() && uri.host().is_some());
        Ok(Self {
            id: WorkerId::new(id)?,
            address: parsed.ok_or(FactsError::Address(address))?,
            serving,
            load: load.map(Load::from).unwrap_or_default(),
            model: facts.map(ModelFacts::try_from).transpose()?,
        })
    }
}

impl From<v1::WorkerLoad> for Load {
    fn from(load: v1::WorkerLoad) -> Self {
        Self {
            requests: load.queued.saturating_add(load.running),
            capacity: load.capacity,
            queue_capacity: load.queue_capacity,
        }
    }
}

impl TryFrom<v1::ModelFacts> for ModelFacts {
    type Error = FactsError;

    fn try_from(facts: v1::ModelFacts) -> Result<Self, FactsError> {
        let limits = facts.limits.ok_or(FactsError::Missing("limits"))?;
        for (name, stated) in [
            ("model", !facts.model.is_empty()),
            ("sample_rate", facts.sample_rate > 0),
            ("samples_per_frame", facts.samples_per_frame > 0),
            ("limits.max_text_chars", limits.max_text_chars > 0),
            ("limits.max_frames", limits.max_frames > 0),
            ("limits.max_chunk_frames", limits.max_chunk_frames > 0),
            (
                "limits.max_instruct_chars",
                limits.max_instruct_chars > 0 || !facts.takes_instruct,
            ),
            (
                "limits.max_reference_ms",
                limits.max_reference_ms > 0 || !facts.takes_reference,
            ),
        ] {
            if !stated {
                return Err(FactsError::Missing(name));
            }
        }
        Ok(Self {
            name: facts.model,
            voices: facts.voices.into_iter().map(Voice::from).collect(),
            languages: facts.languages,
            sample_rate: facts.sample_rate,
            samples_per_frame: facts.samples_per_frame,
            max_text_chars: limits.max_text_chars as usize,
            max_instruct_chars: limits.max_instruct_chars as usize,
            max_frames: limits.max_frames,
            max_chunk_frames: limits.max_chunk_frames,
            max_reference_ms: limits.max_reference_ms,
            takes_instruct: facts.takes_instruct,
            needs_instruct: facts.needs_instruct,
            takes_reference: facts.takes_reference,
            default_chunk: facts.default_chunk.map(ChunkPolicy::from),
            takes_exact_frames: facts.takes_exact_frames,
        })
    }
}

impl From<&ModelFacts> for v1::ModelFacts {
    fn from(facts: &ModelFacts) -> Self {
        Self {
            model: facts.name.clone(),
            voices: facts.voices.iter().map(v1::Voice::from).collect(),
            languages: facts.languages.clone(),
            sample_rate: facts.sample_rate,
            samples_per_frame: facts.samples_per_frame,
            limits: Some(v1::ModelLimits {
                max_text_chars: wire_size(facts.max_text_chars),
                max_instruct_chars: wire_size(facts.max_instruct_chars),
                max_frames: facts.max_frames,
                max_chunk_frames: facts.max_chunk_frames,
                max_reference_ms: facts.max_reference_ms,
                max_utterance_chars: wire_size(facts.max_text_chars),
            }),
            takes_instruct: facts.takes_instruct,
            needs_instruct: facts.needs_instruct,
            takes_reference: facts.takes_reference,
            default_chunk: facts.default_chunk.as_ref().map(v1::ChunkPolicy::from),
            takes_exact_frames: facts.takes_exact_frames,
        }
    }
}

fn wire_size(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

impl From<v1::Voice> for Voice {
    fn from(voice: v1::Voice) -> Self {
        Self {
            name: voice.name,
            language: voice.language,
            dialect: voice.dialect,
            registered: None,
        }
    }
}

impl From<&Arc<Registered>> for Voice {
    fn from(registered: &Arc<Registered>) -> Self {
        Self {
            name: registered.name.clone(),
            language: String::new(),
            dialect: String::new(),
            registered: Some(registered.clone()),
        }
    }
}

impl From<&Voice> for v1::Voice {
    fn from(voice: &Voice) -> Self {
        Self {
            name: voice.name.clone(),
            language: voice.language.clone(),
            dialect: voice.dialect.clone(),
            id: voice
                .registered
                .as_ref()
                .map(|it| it.id.clone())
                .unwrap_or_default(),
            created_at: voice.registered.as_ref().map_or(0, |it| it.created_at),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A preset-voice model as a worker states it.
    pub(crate) fn stated() -> v1::ModelFacts {
        let voice = |name: &str, dialect: &str| v1::Voice {
            name: name.into(),
            language: "english".into(),
            dialect: dialect.into(),
            ..Default::default()
        };
        v1::ModelFacts {
            model: "nano".into(),
            voices: vec![voice("ryan", ""), voice("eric", "sichuan_dialect")],
            languages: vec!["english".into(), "german".into()],
            sample_rate: 24_000,
            samples_per_frame: 1920,
            limits: Some(v1::ModelLimits {
                max_text_chars: 100,
                max_instruct_chars: 50,
                max_frames: 400,
                max_chunk_frames: 25,
                max_reference_ms: 5000,
                max_utterance_chars: 100,
            }),
            takes_instruct: true,
            needs_instruct: false,
            takes_reference: false,
            default_chunk: Some(v1::ChunkPolicy {
                first: 1,
                ramp: vec![2, 4],
                steady: 8,
            }),
            takes_exact_frames: true,
        }
    }

    #[test]
    fn facts_survive_the_wire() {
        let checked = ModelFacts::try_from(stated()).unwrap();
        assert_eq!(v1::ModelFacts::from(&checked), stated());
    }

    #[test]
    fn what_a_serving_worker_must_state_is_named() {
        let missing = |facts: v1::ModelFacts| ModelFacts::try_from(facts).unwrap_err();
        assert_eq!(
            missing(v1::ModelFacts {
                limits: None,
                ..stated()
            }),
            FactsError::Missing("limits")
        );
        assert_eq!(
            missing(v1::ModelFacts {
                sample_rate: 0,
                ..stated()
            }),
            FactsError::Missing("sample_rate")
        );
        let clones = v1::ModelFacts {
            takes_reference: true,
            limits: Some(v1::ModelLimits {
                max_reference_ms: 0,
                ..stated().limits.unwrap()
            }),
            ..stated()
        };
        assert_eq!(missing(clones), FactsError::Missing("limits.max_reference_ms"));
        let info = v1::WorkerInfo {
            worker_id: "w".into(),
            state: v1::WorkerState::Serving.into(),
            takes_requests: true,
            ..Default::default()
        };
        assert_eq!(Worker::try_from(info.clone()), Err(FactsError::Missing("facts")));
        let nowhere = v1::WorkerInfo {
            facts: Some(stated()),
            address: "host".into(),
            ..info
        };
        assert_eq!(Worker::try_from(nowhere), Err(FactsError::Address("host".into())));
    }

    #[test]
    fn only_a_serving_worker_with_the_entry_walk_serves() {
        for (state, takes_requests, serving) in [
            (v1::WorkerState::Serving, true, true),
            (v1::WorkerState::Serving, false, false),
            (v1::WorkerState::Loading, true, false),
            (v1::WorkerState::Draining, true, false),
            (v1::WorkerState::Failed, true, false),
        ] {
            let info = v1::WorkerInfo {
                worker_id: "w".into(),
                address: "http://host:1".into(),
                state: state.into(),
                takes_requests,
                facts: Some(stated()),
                ..Default::default()
            };
            assert_eq!(
                Worker::try_from(info).unwrap().serving,
                serving,
                "{state:?} {takes_requests}"
            );
        }
    }
}
