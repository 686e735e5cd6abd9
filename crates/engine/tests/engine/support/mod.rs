//! What the engine's tests share: a device that can be held and broken, a model whose output shows every
//! mix-up, and a rig that starts an engine on both.

pub(crate) mod device;
pub(crate) mod model;

use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_device::Priority;
use laneway_engine::node::{FinishReason, Payload};
use laneway_engine::{
    AutoConfig, Engine, EngineConfig, EngineHandle, EngineStats, Failure, FailureKind, LaneConfig, Limits,
    NodeConfig, OutputEvent, RequestStats, RequestStream, ResourceConfig, Submission,
};

pub(crate) use device::FakeDevice;
pub(crate) use model::{FakeModel, FakeRequest, Fault, Reference};

/// No wait of a test is longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Where the nodes run, and how much there is of everything.
#[derive(Debug, Clone)]
pub(crate) struct RigConfig {
    /// Node and lane.
    pub(crate) nodes: Vec<(&'static str, usize)>,
    /// The node that moves between the chain and its lane.
    pub(crate) auto: Option<(&'static str, AutoConfig)>,
    pub(crate) max_rows: usize,
    pub(crate) pages: u32,
    pub(crate) talker_slots: u32,
    pub(crate) codec_slots: u32,
    /// An item is one sample: at 1 a listener always has enough to play, at 24,000 it never has.
    pub(crate) playback_hz: u32,
    pub(crate) limits: Limits,
}

impl Default for RigConfig {
    fn default() -> Self {
        Self {
            nodes: vec![("Talker", 0), ("Codec", 1)],
            auto: None,
            max_rows: 8,
            pages: 256,
            talker_slots: 16,
            codec_slots: 16,
            playback_hz: 24_000,
            limits: Limits {
                max_running: 8,
                max_queue: 64,
                step_deadline: PATIENCE,
                ..Limits::default()
            },
        }
    }
}

/// A running engine.
pub(crate) struct Rig {
    pub(crate) engine: Option<Engine>,
    pub(crate) handle: EngineHandle,
    pub(crate) device: Arc<FakeDevice>,
    pub(crate) log: Arc<model::Log>,
    runtime: tokio::runtime::Runtime,
}

impl Rig {
    pub(crate) fn start(config: RigConfig) -> Self {
        Self::start_on(FakeDevice::new(), config)
    }

    pub(crate) fn start_on(device: Arc<FakeDevice>, config: RigConfig) -> Self {
        Self::start_with(device, FakeModel::new(), config)
    }

    pub(crate) fn start_with(device: Arc<FakeDevice>, model: FakeModel, config: RigConfig) -> Self {
        let log = model.log.clone();
        let config = engine_config(device.clone(), model, &config);
        let (engine, handle) = Engine::start(config).expect("the rig starts");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        Self {
            engine: Some(engine),
            handle,
            device,
            log,
            runtime: runtime.expect("a runtime for timeouts"),
        }
    }

    pub(crate) fn submit(&self, id: &str, request: FakeRequest) -> RequestStream {
        self.handle
            .submit(submission(id, request))
            .expect("the request is accepted")
    }

    /// The next event of a stream.
    pub(crate) fn next(&self, stream: &mut RequestStream) -> Option<OutputEvent> {
        let next = async { tokio::time::timeout(PATIENCE, stream.recv()).await };
        self.runtime.block_on(next).expect("a stream moves on")
    }

    /// Everything up to the end.
    pub(crate) fn collect(&self, stream: &mut RequestStream) -> Collected {
        self.collect_rest(stream, Collected::default())
    }

    /// As [`Self::collect`], behind what was taken already.
    pub(crate) fn collect_rest(&self, stream: &mut RequestStream, mut collected: Collected) -> Collected {
        while let Some(event) = self.next(stream) {
            collected.add(event);
        }
        collected
    }

    /// Run one request to its end.
    pub(crate) fn run(&self, id: &str, request: FakeRequest) -> Collected {
        self.collect(&mut self.submit(id, request))
    }

    pub(crate) fn stats(&self) -> EngineStats {
        self.handle.stats()
    }

    pub(crate) fn steps(&self, walk: &str) -> u64 {
        let stats = self.stats();
        let found = stats.walks.iter().find(|stats| &*stats.walk == walk);
        found.expect("a walk of the worker").steps
    }

    pub(crate) fn used(&self, pool: &str) -> u32 {
        let stats = self.stats();
        let found = stats.pools.iter().find(|stats| &*stats.key == pool);
        found.expect("a pool of the worker").used
    }

    /// Rows that any node planned for the request of this seed.
    pub(crate) fn planned(&self, seed: u32) -> u32 {
        self.log.planned.lock().get(&seed).copied().unwrap_or_default()
    }

    /// Wait for every slot, page and place to be free again.
    pub(crate) fn wait_until_empty(&self) {
        eventually("every account returns to zero", || {
            let stats = self.stats();
            stats.queued == 0 && stats.running == 0 && stats.pools.iter().all(|pool| pool.used == 0)
        });
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.device.open_all();
        self.engine = None;
        self.device.forget_streams();
    }
}

pub(crate) fn engine_config(device: Arc<FakeDevice>, model: FakeModel, config: &RigConfig) -> EngineConfig {
    let n_lanes = config.nodes.iter().map(|(_, lane)| lane + 1).max().unwrap_or(1);
    let resource = |key: &str, slots, page_size| ResourceConfig {
        key: key.into(),
        slots,
        page_size,
    };
    EngineConfig {
        device,
        model: Arc::new(model),
        lanes: vec![
            LaneConfig {
                priority: Priority::Normal,
                partition_sms: None,
                max_rows: config.max_rows,
            };
            n_lanes
        ],
        nodes: config
            .nodes
            .iter()
            .map(|&(node, lane)| NodeConfig {
                node: node.into(),
                lane,
                auto: config
                    .auto
                    .as_ref()
                    .filter(|(moving, _)| *moving == node)
                    .map(|(_, auto)| auto.clone()),
            })
            .collect(),
        resources: vec![
            resource("talker_kv", config.pages, model::PAGE),
            resource("talker_state", config.talker_slots, 0),
            resource("codec_state", config.codec_slots, 0),
        ],
        chunks: Default::default(),
        max_prefill_tokens: 1024,
        max_seq_len: 1024,
        capture_buckets: vec![1, 2, 4, 8],
        playback_hz: config.playback_hz,
        limits: config.limits.clone(),
    }
}

pub(crate) fn submission(id: &str, request: FakeRequest) -> Submission {
    Submission {
        id: id.into(),
        payload: Arc::new(request) as Payload,
        chunk: None,
        deadline: None,
        results: Vec::new(),
    }
}

/// What a listener got.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) started: usize,
    pub(crate) samples: Vec<f32>,
    /// Items of each window, in order.
    pub(crate) windows: Vec<u32>,
    pub(crate) items: Vec<Arc<[i32]>>,
    pub(crate) results: usize,
    pub(crate) finished: Option<(FinishReason, RequestStats)>,
    pub(crate) failed: Option<Failure>,
    pub(crate) terminals: usize,
}

impl Collected {
    pub(crate) fn add(&mut self, event: OutputEvent) {
        assert_eq!(self.terminals, 0, "an event behind the terminal one: {event:?}");
        self.terminals += usize::from(event.is_terminal());
        match event {
            OutputEvent::Started { .. } => self.started += 1,
            OutputEvent::Samples {
                samples,
                first_item,
                n_items,
            } => {
                assert_eq!(
                    first_item,
                    self.windows.iter().sum::<u32>(),
                    "windows follow each other"
                );
                self.windows.push(n_items);
                self.samples.extend_from_slice(&samples);
            }
            OutputEvent::Items {
                first_item, items, ..
            } => {
                assert_eq!(first_item as usize, self.items.len(), "items follow each other");
                self.items.extend(items);
            }
            OutputEvent::Result { .. } => self.results += 1,
            OutputEvent::Finished { reason, stats } => self.finished = Some((reason, stats)),
            OutputEvent::Failed(failure) => self.failed = Some(failure),
        }
    }

    /// The samples are a beginning of what the request makes alone.
    pub(crate) fn assert_samples(&self, request: &FakeRequest) {
        let expected = request.expected().samples;
        let n_samples = self.samples.len();
        assert!(
            n_samples <= expected.len(),
            "{n_samples} samples of {}",
            expected.len()
        );
        assert_eq!(
            self.samples,
            expected[..n_samples],
            "another request's memory shows in {request:?}"
        );
    }

    /// It finished with all of its samples.
    pub(crate) fn assert_finished(&self, request: &FakeRequest) {
        let (reason, stats) = self.finished.as_ref().unwrap_or_else(|| panic!("{self:?}"));
        let expected = if request.end_token {
            FinishReason::Stop
        } else {
            FinishReason::Length
        };
        assert_eq!(*reason, expected);
        assert_eq!(stats.items, request.frames);
        assert_eq!(self.samples.len(), request.frames as usize);
        assert_eq!(self.started, 1);
        self.assert_samples(request);
    }

    pub(crate) fn assert_failed(&self, kind: FailureKind) -> &Failure {
        let failure = self.failed.as_ref().unwrap_or_else(|| panic!("{self:?}"));
        assert_eq!(failure.kind, kind, "{failure:?}");
        failure
    }
}

/// Wait for a condition that other threads bring about.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "it never came that {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
