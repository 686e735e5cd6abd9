//! A model with the shape of a speech model and arithmetic that shows every mistake: each request's items and
//! samples are a chain over device memory, `y' = y/2 + input (+ the page of the position before)/4`, so that a
//! dirty slot, a wrong page, a ring row read too early or a neighbour's row changes everything behind it.

mod kit;
mod nodes;

use std::collections::HashMap;
use std::sync::Arc;

use laneway_engine::node::*;
use laneway_plan::declaration::*;
use parking_lot::Mutex;

use kit::{Bank, Kit, MAX_REFERENCE, TALKER_INDICES};
use nodes::{Codec, RefEncoder, Talker};

/// Words of an item, a state slot and a position of the cache.
pub(crate) const WORDS: usize = 4;
pub(crate) const PAGE: u32 = 4;
pub(crate) const MAX_WINDOW: u32 = 8;
pub(crate) const CAPACITY: u32 = 16;

pub(crate) const REF_ENCODE: usize = 0;
pub(crate) const PREFILL: usize = 1;
pub(crate) const DECODE: usize = 2;
pub(crate) const PRIME: usize = 3;
pub(crate) const CHUNK: usize = 4;

type Words = [f32; WORDS];

/// Where a request goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The node does not open it for this walk.
    Open(usize),
    /// This walk's plan refuses it at this step.
    Plan(usize, u32),
    /// This walk's outcome at this step is an error.
    Outcome(usize, u32),
    /// This walk's launch breaks off at this step, after its first operation.
    Forward(usize, u32),
    /// An operation of this walk fails on the device at this step.
    Device(usize, u32),
    /// The node panics in this walk's plan at this step.
    Panic(usize, u32),
}

/// What is submitted.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakeRequest {
    pub(crate) seed: u32,
    /// Items to make.
    pub(crate) frames: u32,
    /// Ends by an end token: one more step, with no item.
    pub(crate) end_token: bool,
    /// Items of its reference; 0: none.
    pub(crate) reference: u32,
    pub(crate) fault: Option<Fault>,
    /// Its prompt is a page with this content, which others may share; its first item depends on it.
    pub(crate) prompt: Option<u32>,
}

fn input(seed: u32, step: u32) -> Words {
    std::array::from_fn(|word| ((seed * 31 + step * 17 + word as u32 * 7) % 97) as f32 / 8.0)
}

/// What a request makes, computed on the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Expected {
    pub(crate) items: Vec<Words>,
    pub(crate) samples: Vec<f32>,
}

impl FakeRequest {
    pub(crate) fn new(seed: u32, frames: u32) -> Self {
        Self {
            seed,
            frames,
            ..Self::default()
        }
    }

    pub(crate) fn reference_items(&self) -> Vec<Words> {
        (0..self.reference)
            .map(|step| input(self.seed + 1000, step))
            .collect()
    }

    fn prompt_words(&self) -> Words {
        self.prompt.map_or([0.0; WORDS], |prompt| input(prompt + 2000, 0))
    }

    fn producer_input(&self, step: u32, reference: Option<&Reference>) -> Words {
        let mut words = input(self.seed, step);
        if step == 0
            && let Some(first) = reference.and_then(|reference| reference.0.first())
        {
            for (word, add) in words.iter_mut().zip(first) {
                *word += add;
            }
        }
        words
    }

    pub(crate) fn expected(&self) -> Expected {
        let reference = (self.reference > 0).then(|| Reference(self.reference_items()));
        let (mut y, mut items) = ([0.0; WORDS], Vec::new());
        for step in 0..self.frames {
            let before = if step == 0 { self.prompt_words() } else { y };
            let input = self.producer_input(step, reference.as_ref());
            y = std::array::from_fn(|word| before[word] * 0.25 + (y[word] * 0.5 + input[word]));
            items.push(y);
        }
        let mut state = [0.0; WORDS];
        for item in self.reference_items() {
            state = std::array::from_fn(|word| state[word] * 0.5 + item[word]);
        }
        let samples = items
            .iter()
            .map(|item| {
                state = std::array::from_fn(|word| state[word] * 0.5 + item[word]);
                state[0]
            })
            .collect();
        Expected { items, samples }
    }
}

/// Result of the reference encoder.
#[derive(Debug, Clone)]
pub(crate) struct Reference(pub(crate) Vec<Words>);

/// The model.
pub(crate) struct FakeModel {
    pub(crate) declaration: ModelDeclaration,
    pub(crate) log: Arc<Log>,
}

/// What the nodes were asked to do.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Rows planned so far, by seed.
    pub(crate) planned: Mutex<HashMap<u32, u32>>,
    /// Prompts that were in the cache.
    pub(crate) cached: Mutex<u32>,
}

impl FakeModel {
    pub(crate) fn new() -> Self {
        let node = |name: &str, stop_check, resources: &[&str]| NodeDecl {
            name: name.into(),
            parallel_ranks: 1,
            stop_check,
            output_spans: false,
            resources: resources.iter().map(|key| key.to_string()).collect(),
            weight_bytes: 0,
            workspace_bytes: 0,
            workspace_bytes_per_row: 0,
        };
        let walk = |name: &str, node: &str, kind| WalkDecl {
            name: name.into(),
            nodes: vec![node.into()],
            kind,
            combined_with: None,
            state_across_requests: false,
        };
        let resource = |key: &str, kind: &str, page_size: u32, zero_on_release| ResourceDecl {
            key: key.into(),
            kind: kind.into(),
            page_size,
            zero_on_release,
            element: Default::default(),
            report: ResourceReport {
                bytes_per_slot: (WORDS * 4) as u64 * u64::from(page_size.max(1)),
                ..ResourceReport::default()
            },
        };
        Self {
            log: Arc::default(),
            declaration: ModelDeclaration {
                model: "fake".into(),
                nodes: vec![
                    node("Talker", true, &["talker_kv", "talker_state"]),
                    node("Codec", false, &["codec_state"]),
                    node("RefEncoder", false, &[]),
                ],
                walks: vec![
                    walk("ref_encode", "RefEncoder", WalkKind::Once),
                    walk("talker_prefill", "Talker", WalkKind::Entry),
                    walk("talker_decode", "Talker", WalkKind::Loop),
                    walk("codec_prime", "Codec", WalkKind::Prime),
                    walk("codec_chunk", "Codec", WalkKind::Stream),
                ],
                stream_edges: vec![StreamEdgeDecl {
                    name: "codes".into(),
                    from: vec!["talker_prefill".into(), "talker_decode".into()],
                    to: "codec_chunk".into(),
                    item_words: WORDS as u32,
                    chunk: ChunkPolicy {
                        first: 1,
                        ramp: vec![2],
                        steady: 4,
                    },
                    max_window: MAX_WINDOW,
                    capacity: CAPACITY,
                }],
                request_edges: vec![RequestEdgeDecl {
                    name: "reference".into(),
                    from: "ref_encode".into(),
                    to: vec!["talker_prefill".into(), "codec_prime".into()],
                }],
                resources: vec![
                    resource("talker_kv", "paged_kv", PAGE, false),
                    resource("talker_state", "state_pool", 0, true),
                    resource("codec_state", "state_pool", 0, true),
                ],
            },
        }
    }
}

fn request(payload: &Payload) -> &FakeRequest {
    payload.downcast_ref().expect("the tests submit fake requests")
}

fn words_of(words: &Words) -> Arc<[i32]> {
    words.iter().map(|word| word.to_bits() as i32).collect()
}

impl Model for FakeModel {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn build_node(
        &self,
        name: &str,
        context: NodeContext,
    ) -> Result<Box<dyn Node>, Box<dyn std::error::Error + Send + Sync>> {
        let declared = self.declaration.nodes.iter().find(|node| node.name == name);
        let given: Vec<_> = context
            .resources
            .iter()
            .map(|resource| resource.key.clone())
            .collect();
        assert_eq!(
            given,
            declared.expect("a declared node").resources,
            "a node gets what it declares"
        );
        let log = self.log.clone();
        Ok(match name {
            "Talker" => Box::new(Talker {
                banks: [
                    Bank::new(&context, TALKER_INDICES, 2)?,
                    Bank::new(&context, TALKER_INDICES, 2)?,
                ],
                kit: Kit::new(context, log)?,
            }),
            "Codec" => Box::new(Codec {
                banks: [Bank::codec(&context)?, Bank::codec(&context)?],
                kit: Kit::new(context, log)?,
            }),
            "RefEncoder" => Box::new(RefEncoder {
                banks: [
                    Bank::new(&context, 0, MAX_REFERENCE)?,
                    Bank::new(&context, 0, MAX_REFERENCE)?,
                ],
                kit: Kit::new(context, log)?,
            }),
            other => return Err(format!("no node {other}").into()),
        })
    }

    fn needs(&self, node: &str, payload: &Payload) -> Vec<Need> {
        let request = request(payload);
        let need = |resource: &str, amount| Need {
            resource: resource.into(),
            amount,
            prefix: Vec::new(),
        };
        match node {
            "Talker" => {
                let mut pages = need("talker_kv", Amount::Positions(PAGE + request.frames + 3));
                pages.prefix.extend(request.prompt.map(u64::from));
                vec![pages, need("talker_state", Amount::Slots(1))]
            }
            "Codec" => vec![need("codec_state", Amount::Slots(1))],
            _ => Vec::new(),
        }
    }

    fn runs_once(&self, _walk: WalkId, payload: &Payload) -> bool {
        request(payload).reference > 0
    }

    fn prime_items(&self, _walk: WalkId, _payload: &Payload, results: &[EdgeResult]) -> Vec<Arc<[i32]>> {
        let reference = results
            .first()
            .and_then(|result| result.downcast_ref::<Reference>());
        reference.map_or_else(Vec::new, |reference| reference.0.iter().map(words_of).collect())
    }
}
