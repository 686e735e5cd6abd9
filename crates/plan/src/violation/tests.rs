use crate::test_support::{TOY_YAML, toy};
use crate::{DeviceInventory, Sources, load, render};

#[test]
fn violations_read_like_a_compilers() {
    let yaml = TOY_YAML
        .replace("lane: 1", "lane: 1\n    sms: 12")
        .replace("device", "devise");
    let sources = Sources {
        flags: vec!["limits.max_row=8".to_owned()],
        ..Sources::text("configs/test.yaml", yaml)
    };
    let mut declaration = toy();
    declaration.resources[2].report.stages_host_rows = true;
    let violations = load(&sources)
        .check(Some(&declaration), Some(&DeviceInventory::h200(1)))
        .unwrap_err();
    let expected = r"error[MISSING_KEY]: `device` is missing
  --> configs/test.yaml:1:1
  |
1 | model: toy
  | ^
  = key device
  = help: write `device: cuda` or `device: cpu`

error[UNKNOWN_KEY]: there is no key `devise` here
  --> configs/test.yaml:4:1
  |
4 | devise: cuda
  | ^
  = key devise
  = help: write `device`; the keys are `model`, `weights`, `model_config`, `device`, `precision`, `max_seq_len`, `node_groups`, `replicas`, `rank_devices`, `mps`, `resources`, `limits`, `capture_buckets`, `chunks`, `services`, `devices`

error[LANE_STAGES_HOST_ROWS]: resource `codec_state` stages host rows for a later step
  --> configs/test.yaml:9:5
  |
9 |     lane: 1
  |     ^
  = key node_groups[1].lane, node Codec, resource codec_state
  = help: leave `lane` out: the node then runs on the chain

error[UNKNOWN_KEY]: there is no key `max_row` here
  --> flag --set limits.max_row
  = key limits.max_row
  = help: write `max_rows`; the keys are `max_rows`, `max_prefill_tokens`, `max_queue`, `max_text_chars`, `max_frames`

4 violations
";
    assert_eq!(render(&violations), expected);
}
