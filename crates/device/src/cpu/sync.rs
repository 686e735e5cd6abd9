//! The locks and atomics that the queue and the events are made of: the usual ones, or loom's where its model
//! checker runs them (see `loom_models`).

#[cfg(not(loom))]
pub(super) use {
    parking_lot::{Condvar, Mutex},
    std::sync::atomic,
};

#[cfg(loom)]
pub(super) use {
    loom::sync::atomic,
    model::{Condvar, Mutex},
};

/// loom's lock and condition variable with the calls of parking_lot's. A wait never times out, so that loom
/// reports a wake-up that is lost as a deadlock.
#[cfg(loom)]
mod model {
    use std::ops::{Deref, DerefMut};
    use std::time::Instant;

    const POISONED: &str = "no thread of a model panics with the lock";

    #[derive(Debug, Default)]
    pub(in crate::cpu) struct Mutex<T>(loom::sync::Mutex<T>);

    pub(in crate::cpu) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    #[derive(Debug)]
    pub(in crate::cpu) struct Condvar(loom::sync::Condvar);

    pub(in crate::cpu) struct Waited;

    impl<T> Mutex<T> {
        pub(in crate::cpu) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(in crate::cpu) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().expect(POISONED)))
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().expect("only empty inside a wait")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("only empty inside a wait")
        }
    }

    impl Condvar {
        pub(in crate::cpu) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub(in crate::cpu) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let inner = guard.0.take().expect("only empty inside a wait");
            guard.0 = Some(self.0.wait(inner).expect(POISONED));
        }

        pub(in crate::cpu) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _: Instant) -> Waited {
            self.wait(guard);
            Waited
        }

        pub(in crate::cpu) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(in crate::cpu) fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    impl Waited {
        pub(in crate::cpu) fn timed_out(&self) -> bool {
            false
        }
    }
}
