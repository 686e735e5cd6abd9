//! The fake nodes: a talker with paged cache and state, a codec with state, a reference encoder.

use std::sync::Arc;

use laneway_device::{Launcher, Touches, op};
use laneway_engine::node::*;

use super::kit::*;
use super::{CHUNK, Fault, MAX_WINDOW, PAGE, Reference, WORDS, request, words_of};

pub(super) struct Talker {
    pub(super) kit: Kit,
    pub(super) banks: [Bank; 2],
}

impl Node for Talker {
    fn name(&self) -> &str {
        "Talker"
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.kit.context.max_rows
    }

    fn open(&mut self, walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
        open(walk, payload)
    }

    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError> {
        self.kit.faults(walk, stage, rows)?;
        let bank = &self.banks[stage.0];
        let mut indices = vec![-1; bank.rows * TALKER_INDICES];
        let mut inputs = vec![0.0; 2 * bank.rows * WORDS];
        for (index, row) in rows.iter().enumerate() {
            let step = state(row.state).launched;
            let slot = slots(row, "talker_state")[0];
            let pages = slots(row, "talker_kv");
            // The prompt's page comes before those of the steps.
            let at = |position: u32| (pages[(1 + position / PAGE) as usize] * PAGE + position % PAGE) as i32;
            let prompt = (pages[0] * PAGE) as i32;
            indices[index] = slot as i32;
            indices[bank.rows + index] = row.ring_row.map_or(-1, |row| row as i32);
            indices[2 * bank.rows + index] = at(step);
            if step > 0 {
                indices[3 * bank.rows + index] = at(step - 1);
            } else if request(row.payload).prompt.is_some() {
                indices[3 * bank.rows + index] = prompt;
                let cached = row.grants[0].cached > 0;
                if !cached {
                    indices[4 * bank.rows + index] = prompt;
                }
                *self.kit.log.cached.lock() += u32::from(cached);
            }
            inputs[(bank.rows + index) * WORDS..][..WORDS]
                .copy_from_slice(&request(row.payload).prompt_words());
            let reference = row.results.first().and_then(|result| result.downcast_ref());
            inputs[index * WORDS..][..WORDS]
                .copy_from_slice(&request(row.payload).producer_input(step, reference));
            self.kit.touch_slot("talker_state", slot, touches);
            for &page in pages {
                self.kit.touch_slot("talker_kv", page, touches);
            }
            if let (Some(ring), Some(row)) = (self.kit.ring(), row.ring_row) {
                touches.write(ring.buffer.slice(row as usize * WORDS, WORDS));
            }
        }
        if let Some(Fault::Device(..)) = self.kit.broken[stage.0] {
            indices[0] = 1 << 20;
        }
        bank.fill(self.kit.device(), &indices, &inputs)?;
        Ok(())
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        let (kit, bank) = (&self.kit, &self.banks[stage.0]);
        let (states, pages) = (&kit.pool("talker_state").pool, &kit.pool("talker_kv").pool);
        bank.upload(launcher)?;
        kit.break_off(stage, launcher, bank.index(0, 1))?;
        Kit::gather(launcher, states, bank.index(0, n_rows), n_rows, &kit.a)?;
        let inputs = bank.block(&bank.inputs, 0, n_rows);
        Kit::scale_add(launcher, &kit.a, &kit.half, inputs, n_rows, &kit.a)?;
        launcher.run(op::Copy {
            src: bank.block(&bank.inputs, 1, n_rows),
            dst: kit.b.slice(0, n_rows * WORDS),
        })?;
        Kit::scatter(launcher, &kit.b, bank.index(4, n_rows), n_rows, pages)?;
        Kit::gather(launcher, pages, bank.index(3, n_rows), n_rows, &kit.b)?;
        let sum = kit.a.slice(0, n_rows * WORDS);
        Kit::scale_add(launcher, &kit.b, &kit.quarter, sum, n_rows, &kit.b)?;
        Kit::scatter(launcher, &kit.b, bank.index(0, n_rows), n_rows, states)?;
        Kit::scatter(launcher, &kit.b, bank.index(2, n_rows), n_rows, pages)?;
        if let Some(ring) = kit.ring() {
            Kit::scatter(launcher, &kit.b, bank.index(1, n_rows), n_rows, &ring.buffer)?;
        }
        launcher.run(op::Copy {
            src: kit.b.slice(0, n_rows * WORDS),
            dst: bank.block(&bank.out, 0, n_rows),
        })
    }

    fn commit(&mut self, _walk: WalkId, rows: &mut [StepRow<'_>]) {
        commit(rows);
    }

    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let (kit, bank) = (&self.kit, &self.banks[stage.0]);
        let outcome = |(index, row): (usize, &mut Option<StepRow<'_>>)| {
            let Some(row) = row else {
                return RowOutcome::default();
            };
            let step = match landed(walk, row) {
                Ok(step) => step,
                Err(outcome) => return *outcome,
            };
            let request = request(row.payload);
            if request.end_token && step == request.frames {
                return RowOutcome {
                    finish: Some(FinishReason::Stop),
                    ..RowOutcome::default()
                };
            }
            let words = bank.read(kit.device(), 0, index).expect("the step has landed");
            let at_budget = !request.end_token && step + 1 == request.frames;
            RowOutcome {
                items: vec![words_of(&words)],
                finish: at_budget.then_some(FinishReason::Length),
                ..RowOutcome::default()
            }
        };
        rows.iter_mut().enumerate().map(outcome).collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        self.kit.warm_up(launcher)
    }
}

pub(super) struct Codec {
    pub(super) kit: Kit,
    pub(super) banks: [Bank; 2],
}

impl Node for Codec {
    fn name(&self) -> &str {
        "Codec"
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.kit.context.max_rows
    }

    fn open(&mut self, walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
        open(walk, payload)
    }

    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError> {
        self.kit.faults(walk, stage, rows)?;
        let (bank, window) = (&self.banks[stage.0], MAX_WINDOW as usize);
        let mut indices = vec![-1; bank.rows * 2 * window];
        let mut inputs = vec![0.0; bank.rows * window * WORDS];
        for (index, row) in rows.iter().enumerate() {
            let slot = slots(row, "codec_state")[0];
            self.kit.touch_slot("codec_state", slot, touches);
            for (place, item) in row.items.iter().enumerate() {
                indices[(window + place) * bank.rows + index] = slot as i32;
                match (item.ring_row, self.kit.ring()) {
                    (Some(ring_row), Some(ring)) => {
                        indices[place * bank.rows + index] = ring_row as i32;
                        touches.read(ring.buffer.slice(ring_row as usize * WORDS, WORDS));
                    }
                    _ => {
                        let words = &mut inputs[(place * bank.rows + index) * WORDS..][..WORDS];
                        for (word, &bits) in words.iter_mut().zip(item.words.iter()) {
                            *word = f32::from_bits(bits as u32);
                        }
                    }
                }
            }
        }
        if let Some(ring) = self.kit.ring() {
            touches.read(ring.buffer.slice(0, 0));
        }
        if let Some(Fault::Device(..)) = self.kit.broken[stage.0] {
            indices[0] = 1 << 20;
        }
        bank.fill(self.kit.device(), &indices, &inputs)?;
        Ok(())
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        let (kit, bank, window) = (&self.kit, &self.banks[stage.0], MAX_WINDOW as usize);
        let states = &kit.pool("codec_state").pool;
        bank.upload(launcher)?;
        kit.break_off(stage, launcher, bank.index(0, 1))?;
        for place in 0..window {
            let item = bank.block(&bank.inputs, place, n_rows);
            if let Some(ring) = kit.ring() {
                Kit::gather(launcher, &ring.buffer, bank.index(place, n_rows), n_rows, &kit.a)?;
                Kit::scale_add(launcher, &kit.a, &kit.one, item, n_rows, &kit.a)?;
            } else {
                launcher.run(op::Copy {
                    src: item,
                    dst: kit.a.slice(0, n_rows * WORDS),
                })?;
            }
            let slots = || bank.index(window + place, n_rows);
            Kit::gather(launcher, states, slots(), n_rows, &kit.b)?;
            let item = kit.a.slice(0, n_rows * WORDS);
            Kit::scale_add(launcher, &kit.b, &kit.half, item, n_rows, &kit.b)?;
            Kit::scatter(launcher, &kit.b, slots(), n_rows, states)?;
            launcher.run(op::Copy {
                src: kit.b.slice(0, n_rows * WORDS),
                dst: bank.block(&bank.out, place, n_rows),
            })?;
        }
        Ok(())
    }

    fn commit(&mut self, _walk: WalkId, rows: &mut [StepRow<'_>]) {
        commit(rows);
    }

    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let (kit, bank) = (&self.kit, &self.banks[stage.0]);
        let outcome = |(index, row): (usize, &mut Option<StepRow<'_>>)| {
            let Some(row) = row else {
                return RowOutcome::default();
            };
            if let Err(outcome) = landed(walk, row) {
                return *outcome;
            }
            let sample = |place| {
                bank.read(kit.device(), place, index)
                    .expect("the step has landed")[0]
            };
            RowOutcome {
                output: (walk.0 == CHUNK)
                    .then(|| (0..row.items.len()).map(sample).collect::<Vec<f32>>().into()),
                ..RowOutcome::default()
            }
        };
        rows.iter_mut().enumerate().map(outcome).collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        self.kit.warm_up(launcher)
    }
}

pub(super) struct RefEncoder {
    pub(super) kit: Kit,
    pub(super) banks: [Bank; 2],
}

impl Node for RefEncoder {
    fn name(&self) -> &str {
        "RefEncoder"
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.kit.context.max_rows
    }

    fn open(&mut self, walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
        open(walk, payload)
    }

    fn fits(&self, _walk: WalkId, chosen: &[Payload], _next: &Payload) -> bool {
        chosen.len() < 2
    }

    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        _touches: &mut Touches,
    ) -> Result<(), PlanError> {
        self.kit.faults(walk, stage, rows)?;
        assert!(rows.len() <= 2, "the engine asks how many fit");
        let bank = &self.banks[stage.0];
        let mut inputs = vec![0.0; bank.rows * MAX_REFERENCE * WORDS];
        for (index, row) in rows.iter().enumerate() {
            for (place, item) in request(row.payload).reference_items().iter().enumerate() {
                inputs[(place * bank.rows + index) * WORDS..][..WORDS].copy_from_slice(item);
            }
        }
        bank.fill(self.kit.device(), &[], &inputs)?;
        Ok(())
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        _n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        let bank = &self.banks[stage.0];
        bank.upload(launcher)?;
        self.kit.break_off(stage, launcher, bank.index(0, 0))?;
        launcher.run(op::Copy {
            src: bank.inputs.view(),
            dst: bank.out.view(),
        })
    }

    fn commit(&mut self, _walk: WalkId, rows: &mut [StepRow<'_>]) {
        commit(rows);
    }

    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let (kit, bank) = (&self.kit, &self.banks[stage.0]);
        let outcome = |(index, row): (usize, &mut Option<StepRow<'_>>)| {
            let Some(row) = row else {
                return RowOutcome::default();
            };
            if let Err(outcome) = landed(walk, row) {
                return *outcome;
            }
            let items = 0..request(row.payload).reference as usize;
            let read = |place| {
                bank.read(kit.device(), place, index)
                    .expect("the step has landed")
            };
            RowOutcome {
                result: Some(Arc::new(Reference(items.map(read).collect()))),
                ..RowOutcome::default()
            }
        };
        rows.iter_mut().enumerate().map(outcome).collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        self.kit.warm_up(launcher)
    }
}
