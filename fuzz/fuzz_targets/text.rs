//! A caller's text: cut into sentences, checked, and laid out as a prompt.
#![no_main]

use std::path::Path;
use std::sync::{Arc, LazyLock};

use laneway_models::checkpoint::config::Configs;
use laneway_models::qwen3_tts::request::{RequestBuilder, SpeechInput};
use laneway_models::qwen3_tts::tokenizer::{Tokenizer, WordSplit};
use libfuzzer_sys::fuzz_target;

/// The tokenizer, its first id that no text of a caller may make, and the prompts of a small model.
static MODEL: LazyLock<(Arc<Tokenizer>, u32, RequestBuilder)> = LazyLock::new(|| {
    let directory =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/golden/tiny/model-custom_voice");
    let tokenizer = Tokenizer::load(&directory, WordSplit::Qwen2).expect("the vocabulary is in the checkout");
    let tokenizer = Arc::new(tokenizer);
    let configs = Configs::read(&directory).expect("the configuration is in the checkout");
    let builder = RequestBuilder::new(Arc::new(configs), tokenizer.clone());
    let first_added = tokenizer.encode_template("<|endoftext|>")[0];
    (tokenizer, first_added, builder)
});

fuzz_target!(|data: &[u8]| {
    laneway_gateway::fuzzing::text(data);
    let (tokenizer, first_added, builder) = &*MODEL;
    let text = String::from_utf8_lossy(data).into_owned();
    let ids = tokenizer.encode(&text);
    assert!(
        ids.iter().all(|id| id < first_added),
        "a token of the template out of {text:?}"
    );
    let input = SpeechInput {
        text,
        voice: Some("ryan".into()),
        ..SpeechInput::default()
    };
    if let Ok(request) = builder.build(&input) {
        assert!(request.max_frames > 0 && !request.prompt.rows.is_empty());
    }
});
