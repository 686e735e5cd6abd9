//! Sizes: resources, windows, capture buckets.

use std::collections::BTreeMap;

use crate::declaration::{ChunkPolicy, ModelDeclaration, ResourceDecl};
use crate::deployment::ResourceSize;
use crate::load::{Loaded, suggest};
use crate::raw::{RawDeployment, RawResource, defaults};
use crate::violation::{Reason, Violation};

impl Loaded {
    pub(super) fn resources(
        &mut self,
        raw: &RawDeployment,
        declaration: &ModelDeclaration,
    ) -> Vec<ResourceSize> {
        for key in raw.resources.keys() {
            if !declaration.resources.iter().any(|resource| resource.key == *key) {
                let known = declaration.resources.iter().map(|resource| resource.key.as_str());
                let message = format!("model `{}` has no resource `{key}`", declaration.model);
                let remedy = suggest(key, known, "resources");
                let violation = Violation::new(
                    Reason::UnknownResource,
                    format!("resources.{key}"),
                    message,
                    remedy,
                );
                self.add(violation.resource(key));
            }
        }
        let declared = |key: &str| {
            declaration
                .nodes
                .iter()
                .any(|node| node.resources.iter().any(|name| name == key))
        };
        let declared = declaration
            .resources
            .iter()
            .filter(|resource| declared(&resource.key));
        declared.map(|resource| self.resource(raw, resource)).collect()
    }

    fn resource(&mut self, raw: &RawDeployment, resource: &ResourceDecl) -> ResourceSize {
        let sizes = raw.resources.get(&resource.key).cloned().unwrap_or_default();
        let RawResource {
            slots,
            pages,
            page_size,
        } = sizes;
        let key = format!("resources.{}", resource.key);
        let paged = resource.page_size > 0;
        let wrong: &[(&str, bool)] = if paged {
            &[("slots", slots.is_some())]
        } else {
            &[("pages", pages.is_some()), ("page_size", page_size.is_some())]
        };
        for (name, _) in wrong.iter().filter(|(_, written)| *written) {
            let (what, remedy) = match paged {
                true => ("a paged cache", "write `pages` (and `page_size`)"),
                false => ("a pool of slots", "write `slots`"),
            };
            let message = format!("`{}` is {what}: it has no `{name}`", resource.key);
            let violation = Violation::new(Reason::ResourceUnits, format!("{key}.{name}"), message, remedy);
            self.add(violation.resource(&resource.key));
        }

        let max_rows = raw.limits.max_rows.get();
        if !paged {
            let slots = slots.map_or(max_rows, Into::into);
            return ResourceSize {
                key: resource.key.clone(),
                slots,
                page_size: 0,
            };
        }
        let page_size = page_size.map_or(defaults::PAGE_SIZE, Into::into);
        let for_longest = raw.max_seq_len.get().div_ceil(page_size);
        let pages = pages.map_or(for_longest.saturating_mul(max_rows), Into::into);
        if pages < for_longest {
            let message = format!(
                "{pages} pages hold no sequence of `max_seq_len` {} ({for_longest} pages)",
                raw.max_seq_len
            );
            let remedy = format!("write `pages: {for_longest}` or more, or a smaller `max_seq_len`");
            let violation = Violation::new(Reason::InvalidValue, format!("{key}.pages"), message, remedy);
            self.add(violation.resource(&resource.key));
        }
        ResourceSize {
            key: resource.key.clone(),
            slots: pages,
            page_size,
        }
    }

    pub(super) fn chunks(
        &mut self,
        raw: &RawDeployment,
        declaration: &ModelDeclaration,
    ) -> BTreeMap<String, ChunkPolicy> {
        let mut policies: BTreeMap<String, ChunkPolicy> = declaration
            .stream_edges
            .iter()
            .map(|edge| (edge.name.clone(), edge.chunk.clone()))
            .collect();
        for (name, written) in &raw.chunks {
            let key = format!("chunks.{name}");
            let Some(edge) = declaration.stream_edges.iter().find(|edge| edge.name == *name) else {
                let known = declaration.stream_edges.iter().map(|edge| edge.name.as_str());
                let message = format!("model `{}` has no stream edge `{name}`", declaration.model);
                let remedy = suggest(name, known, "stream edges");
                self.add(Violation::new(Reason::UnknownStreamEdge, key, message, remedy));
                continue;
            };
            let policy = ChunkPolicy {
                first: written.first.get(),
                ramp: written.ramp.iter().map(|items| items.get()).collect(),
                steady: written.steady.get(),
            };
            let widest = edge.max_window.min(edge.capacity);
            if policy.widest() > widest {
                let message = format!(
                    "a window of {} items is wider than `{name}` allows",
                    policy.widest()
                );
                let remedy = format!("write windows of at most {widest}");
                self.add(Violation::new(Reason::ChunkPolicy, key, message, remedy));
            }
            policies.insert(name.clone(), policy);
        }
        policies
    }

    pub(super) fn capture_buckets(&mut self, raw: &RawDeployment) -> Vec<u32> {
        let max_rows = raw.limits.max_rows.get();
        let Some(written) = &raw.capture_buckets else {
            // Twice the rows at first, where a row more costs little beside a step's fixed cost; then two in an
            // octave, and no more than 32 rows of padding.
            let step = |rows: u32| match rows {
                ..8 => rows,
                _ => (1 << rows.ilog2() >> 1).min(32),
            };
            return std::iter::successors(Some(1_u32), |&rows| rows.checked_add(step(rows)))
                .take_while(|&rows| rows < max_rows)
                .chain([max_rows])
                .collect();
        };
        let buckets: Vec<u32> = written.iter().map(|rows| rows.get()).collect();
        if !buckets.is_sorted_by(|a, b| a < b) || buckets.last() != Some(&max_rows) {
            let message = "row counts must ascend and end with `limits.max_rows`".to_owned();
            let remedy = format!("end the list with {max_rows}, or leave it out");
            self.add(Violation::new(
                Reason::CaptureBuckets,
                "capture_buckets",
                message,
                remedy,
            ));
        }
        buckets
    }
}
