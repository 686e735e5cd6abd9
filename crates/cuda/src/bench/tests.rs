//! The stages as they are built: what they read agrees with what is known of the released models.

use laneway_device::{CpuConfig, CpuDevice};

use super::language::TALKER_SMALL;
use super::*;

fn operands(given: DType) -> Operands {
    let device = CpuDevice::new(CpuConfig { memory_bytes: None }).unwrap();
    Operands::new(Arc::new(device), DType::F32, given)
}

fn total(stage: &Stage) -> Cost {
    for timed in &stage.ops {
        timed
            .op
            .validate()
            .unwrap_or_else(|e| panic!("{}: {e}", timed.label));
    }
    stage
        .ops
        .iter()
        .fold(Cost::default(), |sum, timed| sum + timed.cost)
}

fn near(got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 0.01, "{got:.4e} for {want:.4e}");
}

#[test]
fn a_small_talker_step_reads_and_computes_what_the_model_has() {
    let widths = language::Widths {
        layers: 4,
        ..TALKER_SMALL
    };
    let stage = language::talker(&operands(DType::Bf16), widths, 2, 1).unwrap();
    let total = total(&stage);
    // Layers 440,466,432 and head 3,145,728 of the full depth.
    let weights = 440_466_432.0 * 4.0 / 28.0 + 3_145_728.0;
    near(total.bytes, 2.0 * weights + 2.0 * 16.0 * 1024.0 * 2.0);
    near(total.flops, 2.0 * 2.0 * weights);
}

#[test]
fn a_predictor_frame_reads_its_weights_fifteen_times() {
    let stage = language::predictor(&operands(DType::Bf16), TALKER_SMALL.hidden, 1, 1).unwrap();
    let total = total(&stage);
    near(total.bytes, 2.423e9);
    near(total.flops, 2.58e9);
}

#[test]
fn a_codec_frame_computes_what_the_decoder_has() {
    let stage = codec::codec(&operands(DType::F32), 1, 1).unwrap();
    let total = total(&stage);
    near(total.flops, 4.96e9);
}

#[test]
fn a_stage_is_timed_whole_and_by_kind() {
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(CpuConfig { memory_bytes: None }).unwrap());
    let stream = device
        .create_stream(StreamConfig {
            name: "bench".to_owned(),
            priority: Priority::Normal,
            partition_sms: None,
        })
        .unwrap();
    let o = Operands::new(device.clone(), DType::F32, DType::Bf16);
    let widths = language::Widths {
        layers: 2,
        hidden: 64,
        intermediate: 128,
    };
    let stage = language::talker(&o, widths, 3, 5).unwrap();
    let config = BenchConfig {
        device,
        model: Model::Small,
        rows: 3,
        context: 5,
        window: 1,
        detail: true,
        budget: Duration::from_millis(20),
        cache_dtype: Some(DType::F32),
    };
    let time = time_stage(&stage, &stage, &*stream, &config).unwrap();
    assert!(time.seconds >= time.best_seconds && time.best_seconds > 0.0);
    assert_eq!(
        time.kinds.iter().map(|kind| kind.count).sum::<usize>(),
        time.operations
    );
    assert!(time.kinds.iter().all(|kind| kind.seconds > 0.0));
}
