//! Names and shapes of every tensor of a checkpoint, from its configuration.

use super::config::{
    CodecDecoderConfig, CodecEncoderConfig, ModelConfig, SpeakerEncoderConfig, SpeechTokenizerConfig,
    StackConfig,
};

/// One tensor's name and shape.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TensorShape {
    /// Name in the checkpoint.
    pub name: String,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
}

#[derive(Default)]
struct List(Vec<TensorShape>);

impl List {
    fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.0.push(TensorShape {
            name: name.into(),
            shape: shape.to_vec(),
        });
    }

    /// A weight and a bias as long as its first dimension.
    fn biased(&mut self, name: &str, shape: &[usize]) {
        self.add(format!("{name}.weight"), shape);
        self.add(format!("{name}.bias"), &shape[..1]);
    }
}

/// Tensors of `model.safetensors`.
pub fn main(config: &ModelConfig) -> Vec<TensorShape> {
    let mut list = List::default();
    let talker = &config.talker_config;
    let (hidden, text) = (talker.stack.hidden_size, talker.text_hidden_size);
    stack(&mut list, "talker.model.", &talker.stack);
    list.add(
        "talker.model.codec_embedding.weight",
        &[talker.stack.vocab_size, hidden],
    );
    list.add(
        "talker.model.text_embedding.weight",
        &[talker.text_vocab_size, text],
    );
    list.biased("talker.text_projection.linear_fc1", &[text, text]);
    list.biased("talker.text_projection.linear_fc2", &[hidden, text]);
    list.add("talker.codec_head.weight", &[talker.stack.vocab_size, hidden]);

    let predictor = &talker.code_predictor_config;
    let prefix = "talker.code_predictor.";
    stack(&mut list, &format!("{prefix}model."), predictor);
    for group in 0..predictor.num_code_groups - 1 {
        list.add(
            format!("{prefix}model.codec_embedding.{group}.weight"),
            &[predictor.vocab_size, hidden],
        );
        list.add(
            format!("{prefix}lm_head.{group}.weight"),
            &[predictor.vocab_size, predictor.hidden_size],
        );
    }
    if config.has_predictor_projection() {
        list.biased(
            &format!("{prefix}small_to_mtp_projection"),
            &[predictor.hidden_size, hidden],
        );
    }
    if let Some(speaker) = &config.speaker_encoder_config {
        speaker_encoder(&mut list, speaker);
    }
    list.0
}

fn stack(list: &mut List, prefix: &str, c: &StackConfig) {
    let (hidden, inter) = (c.hidden_size, c.intermediate_size);
    for layer in 0..c.num_hidden_layers {
        let mut add =
            |name: &str, shape: &[usize]| list.add(format!("{prefix}layers.{layer}.{name}.weight"), shape);
        add("self_attn.q_proj", &[c.q_width(), hidden]);
        add("self_attn.k_proj", &[c.kv_width(), hidden]);
        add("self_attn.v_proj", &[c.kv_width(), hidden]);
        add("self_attn.o_proj", &[hidden, c.q_width()]);
        add("self_attn.q_norm", &[c.head_dim]);
        add("self_attn.k_norm", &[c.head_dim]);
        add("mlp.gate_proj", &[inter, hidden]);
        add("mlp.up_proj", &[inter, hidden]);
        add("mlp.down_proj", &[hidden, inter]);
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
    }
    list.add(format!("{prefix}norm.weight"), &[hidden]);
}

fn speaker_encoder(list: &mut List, c: &SpeakerEncoderConfig) {
    let p = "speaker_encoder.";
    let blocks = c.enc_channels.len() - 1;
    list.biased(
        &format!("{p}blocks.0.conv"),
        &[c.enc_channels[0], c.mel_dim, c.enc_kernel_sizes[0]],
    );
    for b in 1..blocks {
        let (input, width) = (c.enc_channels[b - 1], c.enc_channels[b]);
        let part = width / c.enc_res2net_scale;
        let p = format!("{p}blocks.{b}.");
        list.biased(&format!("{p}tdnn1.conv"), &[width, input, 1]);
        for i in 0..c.enc_res2net_scale - 1 {
            list.biased(
                &format!("{p}res2net_block.blocks.{i}.conv"),
                &[part, part, c.enc_kernel_sizes[b]],
            );
        }
        list.biased(&format!("{p}tdnn2.conv"), &[width, width, 1]);
        list.biased(&format!("{p}se_block.conv1"), &[c.enc_se_channels, width, 1]);
        list.biased(&format!("{p}se_block.conv2"), &[width, c.enc_se_channels, 1]);
    }
    let joined = c.enc_channels[blocks];
    let inner: usize = c.enc_channels[1..blocks].iter().sum();
    list.biased(
        &format!("{p}mfa.conv"),
        &[joined, inner, c.enc_kernel_sizes[blocks]],
    );
    list.biased(
        &format!("{p}asp.tdnn.conv"),
        &[c.enc_attention_channels, 3 * joined, 1],
    );
    list.biased(&format!("{p}asp.conv"), &[joined, c.enc_attention_channels, 1]);
    list.biased(&format!("{p}fc"), &[c.enc_dim, 2 * joined, 1]);
}

/// Tensors of `speech_tokenizer/model.safetensors`.
pub fn speech(config: &SpeechTokenizerConfig) -> Vec<TensorShape> {
    let mut list = List::default();
    codec_encoder(&mut list, &config.encoder_config);
    codec_decoder(&mut list, &config.decoder_config);
    list.0
}

fn codec_decoder(list: &mut List, c: &CodecDecoderConfig) {
    let p = "decoder.pre_transformer.";
    let (hidden, inter) = (c.hidden_size, c.intermediate_size);
    let (q, kv) = (
        c.num_attention_heads * c.head_dim,
        c.num_key_value_heads * c.head_dim,
    );
    for layer in 0..c.num_hidden_layers {
        let mut add = |name: &str, shape: &[usize]| list.add(format!("{p}layers.{layer}.{name}"), shape);
        add("self_attn.q_proj.weight", &[q, hidden]);
        add("self_attn.k_proj.weight", &[kv, hidden]);
        add("self_attn.v_proj.weight", &[kv, hidden]);
        add("self_attn.o_proj.weight", &[hidden, q]);
        add("mlp.gate_proj.weight", &[inter, hidden]);
        add("mlp.up_proj.weight", &[inter, hidden]);
        add("mlp.down_proj.weight", &[hidden, inter]);
        for name in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
            add(name, &[hidden]);
        }
        for name in ["self_attn_layer_scale.scale", "mlp_layer_scale.scale"] {
            add(name, &[hidden]);
        }
    }
    list.add(format!("{p}norm.weight"), &[hidden]);
    list.biased(&format!("{p}input_proj"), &[hidden, c.latent_dim]);
    list.biased(&format!("{p}output_proj"), &[c.latent_dim, hidden]);

    let entry = c.codebook_dim / 2;
    for (book, layers) in [("first", 1), ("rest", c.num_quantizers - 1)] {
        let p = format!("decoder.quantizer.rvq_{book}.");
        list.add(format!("{p}input_proj.weight"), &[entry, c.codebook_dim, 1]);
        list.add(format!("{p}output_proj.weight"), &[c.codebook_dim, entry, 1]);
        for layer in 0..layers {
            let p = format!("{p}vq.layers.{layer}._codebook.");
            list.add(format!("{p}cluster_usage"), &[c.codebook_size]);
            list.add(format!("{p}embedding_sum"), &[c.codebook_size, entry]);
        }
    }
    list.biased("decoder.pre_conv.conv", &[c.latent_dim, c.codebook_dim, 3]);
    for (i, ratio) in c.upsampling_ratios.iter().enumerate() {
        let (p, width) = (format!("decoder.upsample.{i}."), c.latent_dim);
        list.add(format!("{p}0.conv.weight"), &[width, width, *ratio]);
        list.add(format!("{p}0.conv.bias"), &[width]);
        list.add(format!("{p}1.gamma"), &[width]);
        list.biased(&format!("{p}1.dwconv.conv"), &[width, 1, 7]);
        list.biased(&format!("{p}1.norm"), &[width]);
        list.biased(&format!("{p}1.pwconv1"), &[4 * width, width]);
        list.biased(&format!("{p}1.pwconv2"), &[width, 4 * width]);
    }
    list.biased("decoder.decoder.0.conv", &[c.decoder_dim, c.latent_dim, 7]);
    let mut width = c.decoder_dim;
    for (i, rate) in c.upsample_rates.iter().enumerate() {
        let p = format!("decoder.decoder.{}.block.", i + 1);
        snake(list, &format!("{p}0"), width);
        list.add(format!("{p}1.conv.weight"), &[width, width / 2, 2 * rate]);
        list.add(format!("{p}1.conv.bias"), &[width / 2]);
        width /= 2;
        for unit in 2..5 {
            snake(list, &format!("{p}{unit}.act1"), width);
            list.biased(&format!("{p}{unit}.conv1.conv"), &[width, width, 7]);
            snake(list, &format!("{p}{unit}.act2"), width);
            list.biased(&format!("{p}{unit}.conv2.conv"), &[width, width, 1]);
        }
    }
    let blocks = c.upsample_rates.len();
    snake(list, &format!("decoder.decoder.{}", blocks + 1), width);
    list.biased(&format!("decoder.decoder.{}.conv", blocks + 2), &[1, width, 7]);
}

fn snake(list: &mut List, name: &str, width: usize) {
    list.add(format!("{name}.alpha"), &[width]);
    list.add(format!("{name}.beta"), &[width]);
}

fn codec_encoder(list: &mut List, c: &CodecEncoderConfig) {
    let p = "encoder.encoder.layers.";
    let mut width = c.num_filters;
    list.biased(&format!("{p}0.conv"), &[width, 1, c.kernel_size]);
    // Module numbers count the activations between the convolutions too.
    let mut module = 1;
    for stride in c.upsampling_ratios.iter().rev() {
        for _ in 0..c.num_residual_layers {
            list.biased(
                &format!("{p}{module}.block.1.conv"),
                &[width / c.compress, width, c.residual_kernel_size],
            );
            list.biased(
                &format!("{p}{module}.block.3.conv"),
                &[width, width / c.compress, 1],
            );
            module += 1;
        }
        list.biased(
            &format!("{p}{}.conv", module + 1),
            &[2 * width, width, 2 * stride],
        );
        module += 2;
        width *= 2;
    }
    let hidden = c.hidden_size;
    list.biased(
        &format!("{p}{}.conv", module + 1),
        &[hidden, width, c.last_kernel_size],
    );

    let (q, kv) = (
        c.num_attention_heads * c.head_dim,
        c.num_key_value_heads * c.head_dim,
    );
    for layer in 0..c.num_hidden_layers {
        let p = format!("encoder.encoder_transformer.layers.{layer}.");
        for (name, shape) in [
            ("self_attn.q_proj", [q, hidden]),
            ("self_attn.k_proj", [kv, hidden]),
            ("self_attn.v_proj", [kv, hidden]),
            ("self_attn.o_proj", [hidden, q]),
            ("mlp.fc1", [c.intermediate_size, hidden]),
            ("mlp.fc2", [hidden, c.intermediate_size]),
        ] {
            list.add(format!("{p}{name}.weight"), &shape);
        }
        list.biased(&format!("{p}input_layernorm"), &[hidden]);
        list.biased(&format!("{p}post_attention_layernorm"), &[hidden]);
        list.add(format!("{p}self_attn_layer_scale.scale"), &[hidden]);
        list.add(format!("{p}mlp_layer_scale.scale"), &[hidden]);
    }
    list.add("encoder.downsample.conv.weight", &[hidden, hidden, 4]);
    let acoustic = c.num_quantizers - c.num_semantic_quantizers;
    for (name, layers) in [("semantic", c.num_semantic_quantizers), ("acoustic", acoustic)] {
        let p = format!("encoder.quantizer.{name}_residual_vector_quantizer.");
        for layer in 0..layers {
            let p = format!("{p}layers.{layer}.codebook.");
            list.add(format!("{p}initialized"), &[1]);
            list.add(format!("{p}cluster_usage"), &[c.codebook_size]);
            list.add(format!("{p}embed_sum"), &[c.codebook_size, c.codebook_dim]);
        }
        list.add(format!("{p}input_proj.weight"), &[c.codebook_dim, hidden, 1]);
        list.add(format!("{p}output_proj.weight"), &[hidden, c.codebook_dim, 1]);
    }
}
