//! The deployment that is served: where it was read from, and what it came to.

use laneway_models_decl::{Validated, load_deployment};
use laneway_plan::declaration::WalkKind;
use laneway_plan::{Deployment, DeviceInventory, Sources, Violation, WorkerPlan};

/// A deployment that passed every rule, and the sources to check it again with a worker's devices in hand.
#[derive(Debug)]
pub struct Served {
    sources: Sources,
    validated: Validated,
}

impl Served {
    /// Read and check a deployment. Devices are left for the workers to report.
    ///
    /// # Errors
    /// Every violation, in the order of the file.
    pub fn load(sources: Sources) -> Result<Self, Vec<Violation>> {
        let validated = load_deployment(&sources, None)?;
        Ok(Served { sources, validated })
    }

    /// The deployment.
    pub fn deployment(&self) -> &Deployment {
        &self.validated.deployment
    }

    /// What the file alone could not tell: devices, memory, partitions.
    ///
    /// # Errors
    /// Every violation, in the order of the file.
    pub(crate) fn check_devices(&self, inventory: &DeviceInventory) -> Result<(), Vec<Violation>> {
        load_deployment(&self.sources, Some(inventory)).map(drop)
    }

    /// Ranks in order.
    pub(crate) fn ranks(&self) -> Vec<u32> {
        self.deployment().ranks.iter().map(|spec| spec.rank).collect()
    }

    /// The plan of a rank, if the deployment has it.
    pub(crate) fn plan(&self, rank: u32) -> Option<WorkerPlan> {
        WorkerPlan::for_rank(self.deployment(), &self.validated.declaration, rank)
    }

    /// Names of the nodes of a rank.
    pub(crate) fn nodes(&self, rank: u32) -> Vec<String> {
        let rank = self.deployment().layout_rank(rank);
        let placed = self
            .deployment()
            .nodes
            .iter()
            .filter(|placed| placed.ranks.contains(&rank));
        placed.map(|placed| placed.node.clone()).collect()
    }

    /// Whether requests start there.
    pub(crate) fn runs_entry(&self, rank: u32) -> bool {
        let rank = self.deployment().layout_rank(rank);
        let entries = self
            .validated
            .declaration
            .walks
            .iter()
            .filter(|walk| walk.kind == WalkKind::Entry);
        entries
            .flat_map(|walk| &walk.nodes)
            .any(|node| self.deployment().ranks_of(node).contains(&rank))
    }
}
