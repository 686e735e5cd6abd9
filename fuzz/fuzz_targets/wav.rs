//! A clip to clone: whatever a file claims, what is read is bounded and can be computed with.
#![no_main]

use laneway_audio::{Clip, ClipLimits, MAX_AMPLITUDE, read_raw_f32, read_wav};
use libfuzzer_sys::fuzz_target;

const LIMITS: ClipLimits = ClipLimits { max_ms: 60_000 };

fuzz_target!(|data: &[u8]| {
    let rate = data
        .first_chunk()
        .map_or(24_000, |bytes| u32::from_le_bytes(*bytes));
    for read in [read_wav(data, LIMITS), read_raw_f32(data, rate, LIMITS)] {
        let Ok(Clip { samples, sample_rate }) = read else {
            continue;
        };
        // A sample is a byte at least.
        assert!(!samples.is_empty() && samples.len() <= data.len());
        assert!((8_000..=192_000).contains(&sample_rate));
        assert!(samples.len() as u64 * 1000 / u64::from(sample_rate) <= u64::from(LIMITS.max_ms));
        assert!(samples.iter().all(|sample| sample.abs() <= MAX_AMPLITUDE));
    }
});
