//! From the configuration as written to the checked [`Deployment`]: the only validator.
//!
//! Everything that can be checked is, whatever else is wrong, so that one run reports all violations.

mod groups;
mod ranks;
mod sizes;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::declaration::ModelDeclaration;
use crate::deployment::{Deployment, Limits, MpsMode, Services};
use crate::inventory::DeviceInventory;
use crate::load::Loaded;
use crate::raw::RawDeployment;
use crate::violation::{Reason, Violation};
use crate::{budget, placement};

impl Loaded {
    /// Check everything and make the deployment.
    ///
    /// `declaration` is what the model named by the file declares; without one (the model is unknown, and the
    /// caller said so through [`Loaded::add`]) only what needs no model is checked. `inventory` is what the
    /// machine has; the file's own `devices` come before it, and with neither, devices, memory and
    /// partitions are left for the worker to refuse.
    ///
    /// # Errors
    /// Every violation, in the order of the file.
    pub fn check(
        mut self,
        declaration: Option<&ModelDeclaration>,
        inventory: Option<&DeviceInventory>,
    ) -> Result<Deployment, Vec<Violation>> {
        let deployment = self
            .raw
            .clone()
            .and_then(|raw| self.build(&raw, declaration, inventory));
        match deployment {
            Some(deployment) if self.violations.is_empty() => Ok(deployment),
            _ => {
                let mut violations = self.violations;
                violations.sort_by(|a, b| {
                    (&a.location, a.reason, &a.key, &a.resource).cmp(&(
                        &b.location,
                        b.reason,
                        &b.key,
                        &b.resource,
                    ))
                });
                Err(violations)
            }
        }
    }

    fn build(
        &mut self,
        raw: &RawDeployment,
        declaration: Option<&ModelDeclaration>,
        inventory: Option<&DeviceInventory>,
    ) -> Option<Deployment> {
        self.require(
            "model",
            raw.model.is_some(),
            "the registry name of a model, such as `model: qwen3_tts`",
        );
        self.require(
            "weights",
            raw.weights.is_some(),
            "`weights: hf://organisation/name`, a directory, or `random:<seed>`",
        );
        self.require("device", raw.device.is_some(), "`device: cuda` or `device: cpu`");
        self.require(
            "node_groups",
            raw.node_groups.is_some(),
            "`node_groups:` with the nodes of each rank",
        );
        if raw.services.stall_timeout.0.is_zero() {
            let message = "no worker lands a step in no time";
            self.add(Violation::new(
                Reason::InvalidValue,
                "services.stall_timeout",
                message,
                "write a time such as `8s`",
            ));
        }

        self.check_addresses(raw);
        self.check_precision(raw);
        let file_inventory = self.inventory(raw);
        let inventory = file_inventory.as_ref().or(inventory);
        let groups = self.groups(raw);
        let ranks = self.ranks(raw, &groups, inventory);
        self.mps(raw, &ranks);
        let lanes = self.lanes(raw, &groups, &ranks, inventory);
        let replicas = raw.replicas.get().min(ranks.len().max(1) as u32);
        let capture_buckets = self.capture_buckets(raw);

        let declaration = declaration?;
        let assigned = self.assign(&groups, declaration);
        for violation in placement::violations(declaration, &assigned) {
            self.add(violation);
        }
        let nodes = groups::placements(&groups, declaration);
        let deployment = Deployment {
            model: raw.model.clone()?,
            weights: self.weights()?,
            model_config: self.model_config(),
            device: raw.device?,
            precision: raw.precision.unwrap_or(raw.device?.default_precision()),
            max_seq_len: raw.max_seq_len.get(),
            nodes,
            lanes,
            replicas,
            ranks,
            mps: raw.mps.as_ref().map_or(MpsMode::Unset, |mps| mps.mode.into()),
            resources: self.resources(raw, declaration),
            limits: limits(raw),
            capture_buckets,
            chunks: self.chunks(raw, declaration),
            services: services(raw),
        };
        // A default in the place of a size that could not be read says nothing about memory.
        if !self.lost_any() {
            self.memory(&deployment, declaration, inventory, &groups);
        }
        Some(deployment)
    }

    /// Where the gateway listens, nobody else is reached. (Equal addresses to listen on may be of two machines.)
    fn check_addresses(&mut self, raw: &RawDeployment) {
        let services = services(raw);
        let gateway = &services.gateway_listen;
        if *gateway == services.engine_manager_address && !gateway.ends_with(":0") {
            let message = format!("the gateway and the engine-manager are both at {gateway}");
            self.add(Violation::new(
                Reason::AddressTaken,
                "services.gateway.listen",
                message,
                "give one of them another port",
            ));
        }
    }

    fn require(&mut self, key: &str, present: bool, what: &str) {
        if !present && !self.was_lost(key) {
            let message = format!("`{key}` is missing");
            self.add(Violation::new(
                Reason::MissingKey,
                key,
                message,
                format!("write {what}"),
            ));
        }
    }

    fn memory(
        &mut self,
        deployment: &Deployment,
        declaration: &ModelDeclaration,
        inventory: Option<&DeviceInventory>,
        groups: &[groups::Group],
    ) {
        for lane in &deployment.lanes {
            let Some(budget) = lane.memory_bytes else { continue };
            let needed = budget::lane_bytes(deployment, declaration, lane.rank, lane.id);
            if needed > budget {
                let group = groups.iter().find(|group| {
                    group.placement.lane_id() == lane.id
                        && group.ranks.contains(&lane.rank)
                        && group.settings.memory.is_some()
                });
                let key = group.map_or_else(String::new, |group| format!("{}.memory", group.key));
                self.add(budget::lane_violation(key, lane, needed, budget));
            }
        }
        let mut by_device: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for rank in &deployment.ranks {
            by_device.entry(rank.device).or_default().push(rank.rank);
        }
        for rank in &deployment.ranks {
            let Some(bound) = rank.pinned_device_memory_bytes else {
                continue;
            };
            let needed = budget::rank_bytes(deployment, declaration, rank.rank);
            if needed > bound {
                self.add(budget::pinned_violation(rank.rank, needed, bound));
            }
        }
        for (index, ranks) in by_device {
            let Some(device) = inventory.and_then(|inventory| inventory.find(&deployment.device.name(index)))
            else {
                continue;
            };
            if let Some(violation) = budget::device_violation(deployment, declaration, device, &ranks) {
                self.add(violation);
            }
        }
    }
}

fn limits(raw: &RawDeployment) -> Limits {
    Limits {
        max_rows: raw.limits.max_rows.get(),
        max_prefill_tokens: raw.limits.max_prefill_tokens.get(),
        max_queue: raw.limits.max_queue,
        max_text_chars: raw.limits.max_text_chars.get(),
        max_frames: raw.limits.max_frames.get(),
    }
}

fn services(raw: &RawDeployment) -> Services {
    let services = &raw.services;
    let listen = services.engine_manager.listen.0.clone();
    Services {
        engine_manager_address: services
            .engine_manager
            .address
            .as_ref()
            .map_or(listen.clone(), |at| at.0.clone()),
        engine_manager_listen: listen,
        gateway_listen: services.gateway.listen.0.clone(),
        worker_listen: services.worker.listen.0.clone(),
        worker_advertise: services.worker.advertise.clone(),
        drain_timeout: services.drain_timeout.0,
        stall_timeout: services.stall_timeout.0,
    }
}
