use laneway_device::Touches;

use super::*;
use crate::checkpoint::Checkpoint;
use crate::qwen3_tts::mel::mel_frames;
use crate::qwen3_tts::test_support::{Golden, Machine, assert_close, tiny, true_size};

fn load(machine: &Machine, checkpoint: &Checkpoint, frames: usize) -> SpeakerEncoder {
    let config = checkpoint.configs.model.speaker_encoder_config.as_ref().unwrap();
    SpeakerEncoder::load(&*machine.device, config, &checkpoint.main, frames).unwrap()
}

fn check(checkpoint: &Checkpoint, golden: &Golden, clips: &[&str]) {
    let machine = Machine::new();
    let frames = |clip: &str| mel_frames(golden.shape(&format!("{clip}/wav"))[0]);
    let longest = clips.iter().map(|clip| frames(clip)).max().unwrap();
    let encoder = load(&machine, checkpoint, longest);
    for clip in clips {
        let mel = machine.upload(DType::F32, &golden.time_major(&format!("{clip}/mel")));
        let mut speaker = None;
        machine.launch(&Touches::none(), |launcher| {
            speaker = Some(encoder.encode(launcher, &mel, frames(clip))?);
            Ok(())
        });
        let compare = |name: &str, view: View, time_major: bool| {
            let name = format!("{clip}/{name}");
            if !golden.contains(&name) {
                return;
            }
            let want = if time_major {
                golden.time_major(&name)
            } else {
                golden.floats(&name)
            };
            let got: Vec<f32> = machine.fetch(&view.slice(0, want.len()));
            assert_close(&name, &got, &want, 1e-3);
        };
        let work = &encoder.work;
        compare("spk_block0", work.first.view(), true);
        compare("spk_block3", work.block.view(), true);
        compare("spk_mfa", work.joined.view(), true);
        compare("spk_asp", work.pooled.view(), false);
        compare("spk_embedding", speaker.unwrap(), false);
    }
}

#[test]
fn speaker_vectors_agree_with_the_reference() {
    check(
        &tiny("base"),
        &Golden::open("tiny/audio_frontend"),
        &["short", "long", "short"],
    );
}

#[test]
#[ignore = "true size: generates the speaker encoder's 35 MB of weights and runs 30 GFLOP"]
fn speaker_vectors_agree_with_the_reference_at_true_size() {
    check(
        &true_size("0.6b-base"),
        &Golden::open("0.6b/audio_frontend"),
        &["short", "long"],
    );
}

#[test]
fn blocks_agree_with_the_reference() {
    let (machine, checkpoint) = (Machine::new(), tiny("base"));
    let golden = Golden::open("tiny/audio_frontend");
    let frames = golden.shape("long/mel")[1];
    let encoder = load(&machine, &checkpoint, frames);
    for index in 1..=3 {
        // Each block alone, on the reference's own input.
        let input = machine.upload(
            DType::F32,
            &golden.time_major(&format!("long/spk_block{}", index - 1)),
        );
        machine.launch(&Touches::none(), |launcher| {
            encoder.block(
                ClipOps(launcher),
                &encoder.blocks[index - 1],
                index,
                frames,
                &input,
            )
        });
        let want = golden.time_major(&format!("long/spk_block{index}"));
        let got: Vec<f32> = machine.fetch(&encoder.work.block.slice(0, want.len()));
        assert_close(&format!("block {index}"), &got, &want, 1e-3);
    }
}
