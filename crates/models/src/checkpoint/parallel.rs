//! Making the elements of a large tensor on all cores: a true-size checkpoint has 2 billion.

/// Elements that are worth a thread of their own.
pub(crate) const ELEMENTS_PER_THREAD: usize = 1 << 18;

/// Bytes of `len` elements, made on as many threads as there are cores.
pub(crate) fn fill<const N: usize>(len: usize, element: impl Fn(usize) -> [u8; N] + Sync) -> Vec<u8> {
    let mut data = vec![0; len * N];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let chunk = len.div_ceil(threads).max(ELEMENTS_PER_THREAD);
    let fill = |first: usize, data: &mut [u8]| {
        for (i, bytes) in (first..).zip(data.as_chunks_mut::<N>().0) {
            *bytes = element(i);
        }
    };
    std::thread::scope(|scope| {
        let mut chunks = data.chunks_mut(chunk * N).enumerate();
        let own = chunks.next();
        for (i, data) in chunks {
            let fill = &fill;
            scope.spawn(move || fill(i * chunk, data));
        }
        if let Some((_, data)) = own {
            fill(0, data);
        }
    });
    data
}
