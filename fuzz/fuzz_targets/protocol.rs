//! What workers send, and what the caller of a session is told: every chunk follows on the one before, whatever was
//! taken back.
#![no_main]

use laneway_proto::{rows_from_frames, v1};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    laneway_gateway::fuzzing::session(data);
    laneway_gateway::fuzzing::worker(data);
    laneway_gateway::fuzzing::body(data);
    frames(data);
});

/// Frames from one worker to another.
fn frames(data: &[u8]) {
    let Some((&words_per_frame, codes)) = data.split_first() else {
        return;
    };
    let words_per_frame = u32::from(words_per_frame);
    let frames = v1::Frames {
        words_per_frame,
        codes: codes.iter().copied().map(u32::from).collect(),
        ..Default::default()
    };
    if let Ok(rows) = rows_from_frames(&frames, words_per_frame) {
        assert!(rows.iter().all(|row| row.len() == words_per_frame as usize));
        assert_eq!(rows.concat().len(), codes.len());
    }
}
