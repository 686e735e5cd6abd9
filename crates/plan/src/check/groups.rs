//! Node groups: which node runs where, and the lanes that this makes.

use std::collections::{BTreeMap, BTreeSet};

use crate::declaration::ModelDeclaration;
use crate::deployment::{LaneSpec, NodePlacement, Placement, Priority, RankSpec};
use crate::inventory::DeviceInventory;
use crate::load::{Loaded, suggest};
use crate::placement::Assigned;
use crate::raw::{RawDeployment, RawLane, RawNodeGroup};
use crate::violation::{Reason, Violation};

/// A node group with its lane decided.
#[derive(Debug, Clone)]
pub(super) struct Group {
    /// `node_groups[1]`.
    pub(super) key: String,
    pub(super) nodes: Vec<String>,
    pub(super) ranks: Vec<u32>,
    pub(super) walks: Option<Vec<String>>,
    pub(super) placement: Placement,
    pub(super) settings: LaneSettings,
}

/// What a group says of its lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LaneSettings {
    priority: Option<Priority>,
    sms: Option<u32>,
    auto_sms: Option<Vec<u32>>,
    pub(super) memory: Option<u64>,
    max_rows: Option<u32>,
}

impl Loaded {
    pub(super) fn groups(&mut self, raw: &RawDeployment) -> Vec<Group> {
        let groups = raw.node_groups.as_deref().unwrap_or_default();
        groups
            .iter()
            .enumerate()
            .map(|(i, group)| self.group(raw, group, format!("node_groups[{i}]")))
            .collect()
    }

    fn group(&mut self, raw: &RawDeployment, group: &RawNodeGroup, key: String) -> Group {
        if group.nodes.is_empty() && !self.was_lost(&format!("{key}.nodes")) {
            let remedy = "write `nodes: [Codec]`, or take the group out";
            self.add(Violation::new(
                Reason::MissingKey,
                format!("{key}.nodes"),
                "this group has no nodes",
                remedy,
            ));
        }
        let placement = match (group.lane, group.lane_id) {
            (None | Some(RawLane::Id(0)), _) => Placement::Chain,
            (Some(RawLane::Id(id)), _) => Placement::Lane(id),
            (Some(RawLane::Auto), Some(id)) => Placement::Auto(id.get()),
            (Some(RawLane::Auto), None) => {
                if !self.was_lost(&format!("{key}.lane_id")) {
                    let message = "`lane: auto` does not say which lane the worker may move the node to";
                    self.add(Violation::new(
                        Reason::LaneIdRequired,
                        format!("{key}.lane"),
                        message,
                        "add `lane_id: 1`",
                    ));
                }
                Placement::Auto(1)
            }
        };
        self.unused_keys(group, placement, &key);
        if let Some(rows) = group
            .max_rows
            .filter(|rows| rows.get() > raw.limits.max_rows.get())
        {
            let message = format!(
                "{rows} rows are more than run at once (`limits.max_rows`: {})",
                raw.limits.max_rows
            );
            let remedy = format!("write at most {}", raw.limits.max_rows);
            self.add(Violation::new(
                Reason::InvalidValue,
                format!("{key}.max_rows"),
                message,
                remedy,
            ));
        }
        Group {
            nodes: group.nodes.clone(),
            ranks: group.ranks.clone().unwrap_or_else(|| vec![0]),
            walks: group.walks.clone(),
            placement,
            settings: LaneSettings {
                priority: group.priority,
                sms: group.sms.map(Into::into),
                auto_sms: group.auto.as_ref().map(|auto| auto.sms.clone()),
                memory: group.memory.map(|bytes| bytes.0),
                max_rows: group.max_rows.map(Into::into),
            },
            key,
        }
    }

    fn unused_keys(&mut self, group: &RawNodeGroup, placement: Placement, key: &str) {
        let mut unused = |name: &str, why: &str, remedy: &str| {
            let message = format!("`{name}` has no effect {why}");
            self.add(Violation::new(
                Reason::LaneKeyUnused,
                format!("{key}.{name}"),
                message,
                remedy,
            ));
        };
        if !matches!(group.lane, Some(RawLane::Auto)) {
            let remedy = "write `lane: auto`, or take it out";
            if group.lane_id.is_some() {
                unused("lane_id", "without `lane: auto`", remedy);
            }
            if group.auto.is_some() {
                unused("auto", "without `lane: auto`", remedy);
            }
        }
        if placement == Placement::Chain && group.max_rows.is_some() {
            unused(
                "max_rows",
                "on the chain",
                "set `limits.max_rows`, or take it out",
            );
        }
        if group.auto.is_some() && group.sms.is_some() {
            unused(
                "sms",
                "beside `auto.sms`, which chooses it",
                "keep one of the two",
            );
        }
    }

    /// The lanes of every rank, chains included, with the settings of the groups on them.
    pub(super) fn lanes(
        &mut self,
        raw: &RawDeployment,
        groups: &[Group],
        ranks: &[RankSpec],
        inventory: Option<&DeviceInventory>,
    ) -> Vec<LaneSpec> {
        for group in groups {
            self.partitions(raw, group, ranks, inventory);
        }
        let mut lanes: BTreeMap<(u32, u32), Vec<&Group>> = BTreeMap::new();
        let n_layout = ranks.len() / (raw.replicas.get() as usize).clamp(1, ranks.len().max(1));
        for rank in &ranks[..n_layout] {
            lanes.entry((rank.rank, 0)).or_default();
        }
        for group in groups {
            for &rank in &group.ranks {
                lanes
                    .entry((rank, group.placement.lane_id()))
                    .or_default()
                    .push(group);
            }
        }
        lanes
            .into_iter()
            .map(|((rank, id), groups)| self.lane(raw, rank, id, &groups))
            .collect()
    }

    fn lane(&mut self, raw: &RawDeployment, rank: u32, id: u32, groups: &[&Group]) -> LaneSpec {
        let max_rows = raw.limits.max_rows.get();
        LaneSpec {
            rank,
            id,
            priority: self
                .setting(id, groups, "priority", |settings| settings.priority)
                .unwrap_or_default(),
            sms: self.setting(id, groups, "sms", |settings| settings.sms),
            auto_sms: self
                .setting(id, groups, "auto", |settings| settings.auto_sms.clone())
                .unwrap_or_default(),
            memory_bytes: self.setting(id, groups, "memory", |settings| settings.memory),
            max_rows: self
                .setting(id, groups, "max_rows", |settings| settings.max_rows)
                .unwrap_or(max_rows),
        }
    }

    /// The one value that the groups of a lane give a setting.
    fn setting<T: PartialEq>(
        &mut self,
        lane: u32,
        groups: &[&Group],
        name: &str,
        get: impl Fn(&LaneSettings) -> Option<T>,
    ) -> Option<T> {
        let mut given = groups
            .iter()
            .filter_map(|group| Some((group, get(&group.settings)?)));
        let (first, value) = given.next()?;
        for (group, other) in given {
            if other != value {
                let message = format!("lane {lane} has another `{name}` already, from {}", first.key);
                let remedy = format!("give `{name}` once, or the same value twice");
                self.add(Violation::new(
                    Reason::LaneSettingsConflict,
                    format!("{}.{name}", group.key),
                    message,
                    remedy,
                ));
            }
        }
        Some(value)
    }

    /// Match groups with the model's nodes and walks.
    pub(super) fn assign<'a>(
        &mut self,
        groups: &[Group],
        declaration: &'a ModelDeclaration,
    ) -> Vec<Assigned<'a>> {
        let mut assigned: Vec<Assigned<'a>> = Vec::new();
        for group in groups {
            let nodes_key = format!("{}.nodes", group.key);
            for name in &group.nodes {
                let Some(node) = declaration.nodes.iter().find(|node| node.name == *name) else {
                    let known = declaration.nodes.iter().map(|node| node.name.as_str());
                    let message = format!("model `{}` has no node `{name}`", declaration.model);
                    let violation = Violation::new(
                        Reason::UnknownNode,
                        &nodes_key,
                        message,
                        suggest(name, known, "nodes"),
                    );
                    self.add(violation.node(name));
                    continue;
                };
                if let Some(other) = assigned.iter().find(|other| other.node.name == *name) {
                    let group_key = other.key.trim_end_matches(".lane");
                    let message = format!("`{name}` is already in {group_key}");
                    let violation = Violation::new(
                        Reason::NodeInTwoGroups,
                        &nodes_key,
                        message,
                        "keep it in one group",
                    );
                    self.add(violation.node(name));
                    continue;
                }
                let distinct = group.ranks.iter().collect::<BTreeSet<_>>().len();
                if group.ranks.len() != node.parallel_ranks as usize || distinct != group.ranks.len() {
                    let message = format!(
                        "`{name}` steps over {} rank(s), not over {:?}",
                        node.parallel_ranks, group.ranks
                    );
                    let remedy = format!(
                        "write {} different rank(s), such as `ranks: [0]`",
                        node.parallel_ranks
                    );
                    let violation =
                        Violation::new(Reason::NodeRanks, format!("{}.ranks", group.key), message, remedy);
                    self.add(violation.node(name));
                }
                assigned.push(Assigned {
                    node,
                    ranks: group.ranks.clone(),
                    lane: group.placement.lane_id(),
                    key: format!("{}.lane", group.key),
                });
            }
            self.walks(group, declaration);
        }
        if groups.is_empty() && self.was_lost("node_groups") {
            return assigned;
        }
        for node in &declaration.nodes {
            if !groups.iter().any(|group| group.nodes.contains(&node.name)) {
                let message = format!(
                    "node `{}` of model `{}` is in no group",
                    node.name, declaration.model
                );
                let remedy = format!("add it: `- nodes: [{}]`", node.name);
                self.add(
                    Violation::new(Reason::NodeUnassigned, "node_groups", message, remedy).node(&node.name),
                );
            }
        }
        assigned
    }

    fn walks(&mut self, group: &Group, declaration: &ModelDeclaration) {
        let Some(written) = &group.walks else { return };
        let of_nodes = declaration
            .walks
            .iter()
            .filter(|walk| walk.nodes.iter().any(|node| group.nodes.contains(node)));
        let expected: Vec<&str> = of_nodes.map(|walk| walk.name.as_str()).collect();
        let written: BTreeSet<&str> = written.iter().map(String::as_str).collect();
        if written != expected.iter().copied().collect() {
            let message = format!(
                "the walks of {} are {}",
                group.nodes.join(", "),
                expected.join(", ")
            );
            let remedy = format!("write `walks: [{}]`, or leave `walks` out", expected.join(", "));
            self.add(Violation::new(
                Reason::WalksDoNotMatch,
                format!("{}.walks", group.key),
                message,
                remedy,
            ));
        }
    }
}

/// Where each node of the model runs, in declaration order.
pub(super) fn placements(groups: &[Group], declaration: &ModelDeclaration) -> Vec<NodePlacement> {
    let placed = declaration.nodes.iter().filter_map(|node| {
        let group = groups.iter().find(|group| group.nodes.contains(&node.name))?;
        Some(NodePlacement {
            node: node.name.clone(),
            ranks: group.ranks.clone(),
            placement: group.placement,
        })
    });
    placed.collect()
}

impl Group {
    /// The SM partitions that it asks for, with their keys. 0 among `auto.sms` is no partition.
    pub(super) fn partitions(&self) -> Vec<(String, u32)> {
        let fixed = self
            .settings
            .sms
            .iter()
            .map(|&sms| (format!("{}.sms", self.key), sms));
        let auto = self.settings.auto_sms.iter().flatten().enumerate();
        let auto = auto.map(|(i, &sms)| (format!("{}.auto.sms[{i}]", self.key), sms));
        fixed.chain(auto.filter(|(_, sms)| *sms > 0)).collect()
    }
}
