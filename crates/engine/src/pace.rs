//! How long the steps of a walk take by the items in them, and how many items a step should have at most.

use std::time::Duration;

/// Weight that a step keeps with each step after it: about the last twenty count.
const MEMORY: f64 = 0.95;

/// A straight line through the newest steps, `time = fixed + each * items`, by least squares.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pace {
    weight: f64,
    items: f64,
    time: f64,
    items_squared: f64,
    items_time: f64,
}

impl Pace {
    /// A step of this many items landed.
    pub(crate) fn landed(&mut self, items: usize, took: Duration) {
        let (items, took) = (items as f64, took.as_secs_f64());
        let add = |sum: &mut f64, value: f64| *sum = *sum * MEMORY + value;
        add(&mut self.weight, 1.0);
        add(&mut self.items, items);
        add(&mut self.time, took);
        add(&mut self.items_squared, items * items);
        add(&mut self.items_time, items * took);
    }

    /// Most items of a step that should last no longer than `budget`; `None`: as many as there are.
    ///
    /// Where a step's fixed part alone takes most of the budget, short steps would waste the device: items may
    /// then take as long as that part.
    pub(crate) fn most_items(&self, budget: Duration) -> Option<usize> {
        let spread = self.weight * self.items_squared - self.items * self.items;
        // Steps of one size say nothing of another.
        if spread < self.items * self.items * 1e-3 || self.weight == 0.0 {
            return None;
        }
        let each = (self.weight * self.items_time - self.items * self.time) / spread;
        if each <= 0.0 {
            return None;
        }
        let fixed = ((self.time - each * self.items) / self.weight).max(0.0);
        let room = (budget.as_secs_f64() - fixed).max(fixed);
        Some(((room / each) as usize).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Duration = Duration::from_millis(25);

    fn pace(steps: &[(usize, f64)]) -> Pace {
        let mut pace = Pace::default();
        for &(items, ms) in steps {
            pace.landed(items, Duration::from_secs_f64(ms / 1e3));
        }
        pace
    }

    #[test]
    fn nothing_is_bounded_before_steps_of_two_sizes_landed() {
        assert_eq!(Pace::default().most_items(BUDGET), None);
        assert_eq!(
            pace(&[(8, 100.0), (8, 101.0), (8, 99.0)]).most_items(BUDGET),
            None
        );
    }

    #[test]
    fn items_share_what_the_fixed_part_leaves_of_the_budget() {
        // 5 ms and 2 ms an item.
        let measured = pace(&[(1, 7.0), (16, 37.0), (4, 13.0)]);
        assert!(matches!(measured.most_items(BUDGET), Some(9 | 10)));
    }

    #[test]
    fn a_costly_fixed_part_is_shared_by_many_items() {
        // 40 ms and 1 ms an item: no step is within the budget, and a step of one item would waste most of it.
        let measured = pace(&[(1, 41.0), (16, 56.0), (4, 44.0)]);
        assert!(matches!(measured.most_items(BUDGET), Some(39..=41)));
    }

    #[test]
    fn where_items_cost_nothing_any_number_runs() {
        assert_eq!(pace(&[(1, 3.0), (64, 2.9), (8, 3.0)]).most_items(BUDGET), None);
    }

    #[test]
    fn old_steps_are_forgotten() {
        let mut measured = pace(&[(1, 7.0), (16, 37.0)].repeat(50));
        for _ in 0..100 {
            measured.landed(1, Duration::from_micros(1100));
            measured.landed(16, Duration::from_micros(2600));
        }
        // 1 ms and 0.1 ms an item.
        assert!(matches!(measured.most_items(BUDGET), Some(230..=250)));
    }
}
