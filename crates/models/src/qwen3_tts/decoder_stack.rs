//! The Qwen3-style decoder stack that Talker and code predictor share: weights, workspace, one pass.

use laneway_device::op::{
    Activation, Attention, DecodeAttention, Gemm, InputNorm, KvCache, QkvRope, RmsNorm, RopeTable,
};
use laneway_device::{Buffer, BufferSpec, DType, Device, Launcher, Matrix, Place, Result, View};

use super::load::{LoadError, Loader};
use crate::checkpoint::concat_rows;
use crate::checkpoint::config::StackConfig;

/// Weights of a stack.
#[derive(Debug)]
pub(super) struct DecoderStack {
    pub(super) config: StackConfig,
    layers: Vec<Layer>,
    norm: View,
    inv_freq: View,
}

#[derive(Debug)]
struct Layer {
    input_norm: View,
    /// `[q | k | v, hidden]`
    qkv: Matrix,
    q_norm: View,
    k_norm: View,
    o: Matrix,
    post_norm: View,
    /// `[gate | up, hidden]`
    gate_up: Matrix,
    down: Matrix,
}

impl DecoderStack {
    /// Load `{prefix}layers.*` and `{prefix}norm`, fusing the projections that read the same input.
    pub(super) fn load(loader: &Loader<'_>, config: &StackConfig) -> Result<Self, LoadError> {
        let c = config;
        let (hidden, inter) = (c.hidden_size, c.intermediate_size);
        let layer = |i: usize| -> Result<Layer, LoadError> {
            let loader = loader.under(&format!("layers.{i}."));
            let fused = |name: &str, parts: &[(&str, usize)]| -> Result<Matrix, LoadError> {
                let parts = parts
                    .iter()
                    .map(|(part, rows)| loader.tensor(part, &[*rows, hidden]))
                    .collect::<Result<Vec<_>, _>>()?;
                loader.pack(&concat_rows(&format!("{}{name}", loader.prefix), &parts))
            };
            Ok(Layer {
                input_norm: loader.floats("input_layernorm.weight", &[hidden])?,
                qkv: fused(
                    "self_attn.qkv",
                    &[
                        ("self_attn.q_proj.weight", c.q_width()),
                        ("self_attn.k_proj.weight", c.kv_width()),
                        ("self_attn.v_proj.weight", c.kv_width()),
                    ],
                )?,
                q_norm: loader.floats("self_attn.q_norm.weight", &[c.head_dim])?,
                k_norm: loader.floats("self_attn.k_norm.weight", &[c.head_dim])?,
                o: loader.matrix("self_attn.o_proj.weight", &[hidden, c.q_width()])?,
                post_norm: loader.floats("post_attention_layernorm.weight", &[hidden])?,
                gate_up: fused(
                    "mlp.gate_up",
                    &[("mlp.gate_proj.weight", inter), ("mlp.up_proj.weight", inter)],
                )?,
                down: loader.matrix("mlp.down_proj.weight", &[hidden, inter])?,
            })
        };
        Ok(Self {
            layers: (0..c.num_hidden_layers).map(layer).collect::<Result<_, _>>()?,
            norm: loader.floats("norm.weight", &[hidden])?,
            inv_freq: loader.inv_freq(c.rope_theta, c.head_dim)?,
            config: c.clone(),
        })
    }

    /// Cosines and sines of `rows` positions, `[rows, head_dim]`.
    pub(super) fn rope_table(&self, positions: View, rows: usize, out: View) -> RopeTable {
        RopeTable {
            positions,
            inv_freq: self.inv_freq.clone(),
            rows,
            head_dim: self.config.head_dim,
            out,
        }
    }

    /// The final norm of `rows` rows.
    pub(super) fn final_norm(&self, x: View, rows: usize, out: View) -> RmsNorm {
        RmsNorm {
            x,
            rows,
            width: self.config.hidden_size,
            weight: self.norm.clone(),
            eps: self.config.rms_norm_eps,
            out,
        }
    }

    /// How `device` keeps what goes into the stack's products: all of them are of one type.
    pub(super) fn product_dtype(&self, device: &dyn Device) -> DType {
        let layer = self.layers.first();
        layer.map_or(DType::F32, |layer| device.activation_dtype(&layer.o))
    }

    /// The final norm in front of a product.
    pub(super) fn final_input_norm(&self, scratch: View, prepared: bool) -> InputNorm {
        InputNorm {
            weight: self.norm.clone(),
            eps: self.config.rms_norm_eps,
            scratch,
            prepared,
        }
    }

    /// Run all layers on `pass.x`, in place, without the final norm.
    pub(super) fn run(
        &self,
        launcher: &Launcher<'_>,
        workspace: &StackWorkspace,
        pass: &StackPass<'_>,
    ) -> Result<()> {
        let (c, w, rows) = (&self.config, workspace, pass.rows);
        let norm = |weight: &View, prepared| {
            Some(InputNorm {
                weight: weight.clone(),
                eps: c.rms_norm_eps,
                scratch: w.normed.view(),
                prepared,
            })
        };
        let product = |x: View, weight: &Matrix, out: View| Gemm {
            x,
            norm: None,
            rows,
            w: weight.clone(),
            bias: None,
            activation: Activation::None,
            scale: None,
            accumulate: false,
            gated: None,
            out,
            next: None,
        };
        for (i, layer) in self.layers.iter().enumerate() {
            let qkv = QkvRope {
                qkv: w.qkv.view(),
                rows,
                heads: c.num_attention_heads,
                q_norm: Some(layer.q_norm.clone()),
                k_norm: Some(layer.k_norm.clone()),
                eps: c.rms_norm_eps,
                cos_sin: pass.cos_sin.clone(),
                sequences: pass.sequences.clone(),
                positions: pass.positions.clone(),
                cache: pass.cache.layer(c, i),
                q_out: w.q.view(),
            };
            launcher.run(Gemm {
                // The layer before has prepared it.
                norm: norm(&layer.input_norm, i > 0),
                ..product(pass.x.clone(), &layer.qkv, w.qkv.view())
            })?;
            let last = i + 1 == self.layers.len();
            match pass.kind {
                Rows::OneEach => launcher.run(DecodeAttention {
                    qkv,
                    window: None,
                    out: w.attended.view(),
                })?,
                // Nobody reads what comes behind the last layer's keys and values.
                Rows::Prompts if last => return launcher.run(qkv),
                Rows::Prompts | Rows::Several => {
                    let cache = qkv.cache.clone();
                    launcher.run(qkv)?;
                    launcher.run(Attention {
                        q: w.q.view(),
                        rows,
                        heads: c.num_attention_heads,
                        sequences: pass.sequences.clone(),
                        positions: pass.positions.clone(),
                        cache,
                        window: None,
                        out: w.attended.view(),
                    })?;
                }
            }
            launcher.run(Gemm {
                accumulate: true,
                next: norm(&layer.post_norm, false),
                ..product(w.attended.view(), &layer.o, pass.x.clone())
            })?;
            launcher.run(Gemm {
                norm: norm(&layer.post_norm, true),
                gated: Some(w.gate_up.view()),
                ..product(pass.x.clone(), &layer.gate_up, w.activated.view())
            })?;
            launcher.run(Gemm {
                accumulate: true,
                next: match self.layers.get(i + 1) {
                    Some(behind) => norm(&behind.input_norm, false),
                    None => pass.next.clone(),
                },
                ..product(w.activated.view(), &layer.down, pass.x.clone())
            })?;
        }
        Ok(())
    }
}

/// Activations between the operations of a layer.
#[derive(Debug)]
pub(super) struct StackWorkspace {
    normed: Buffer,
    qkv: Buffer,
    q: Buffer,
    attended: Buffer,
    gate_up: Buffer,
    activated: Buffer,
}

impl StackWorkspace {
    /// For passes of at most `rows` rows.
    pub(super) fn new(device: &dyn Device, name: &str, stack: &DecoderStack, rows: usize) -> Result<Self> {
        let typed = |part: &str, width: usize, dtype| {
            device.alloc(BufferSpec {
                name: format!("{name}.{part}"),
                dtype,
                len: rows * width,
                place: Place::Device,
            })
        };
        let buffer = |part: &str, width| typed(part, width, DType::F32);
        let product = stack.product_dtype(device);
        let c = &stack.config;
        Ok(Self {
            normed: buffer("normed", c.hidden_size)?,
            qkv: buffer("qkv", c.q_width() + 2 * c.kv_width())?,
            q: buffer("q", c.q_width())?,
            attended: typed("attended", c.q_width(), product)?,
            gate_up: buffer("gate_up", 2 * c.intermediate_size)?,
            activated: typed("activated", c.intermediate_size, product)?,
        })
    }
}

/// Which rows a pass has of each sequence, and what is wanted of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    /// No two belong to the same sequence.
    OneEach,
    /// Several may belong to one.
    Several,
    /// The same, and only the cache is wanted: `x` is of no use behind the pass.
    Prompts,
}

/// One pass through a stack.
#[derive(Debug)]
pub(super) struct StackPass<'a> {
    /// Residual stream `[rows, hidden]`, in and out.
    pub(super) x: View,
    pub(super) rows: usize,
    /// `[rows, head_dim]`
    pub(super) cos_sin: View,
    /// Row of the block table of each row `[rows]`.
    pub(super) sequences: View,
    /// `[rows]`
    pub(super) positions: View,
    pub(super) kind: Rows,
    pub(super) cache: &'a PagedCache,
    /// The norm in front of a product behind the stack, of all rows of `x`.
    pub(super) next: Option<InputNorm>,
}

/// A paged cache of all layers: a page holds, layer by layer, the keys and then the values of its positions.
#[derive(Debug, Clone)]
pub(super) struct PagedCache {
    pub(super) pool: View,
    /// Elements from one page to the next.
    pub(super) page_elements: usize,
    /// Positions of a page.
    pub(super) page_size: usize,
    /// `[sequences, pages_per_sequence]`
    pub(super) table: View,
    pub(super) pages_per_sequence: usize,
}

impl PagedCache {
    /// Elements of a page.
    pub(super) fn page_elements(config: &StackConfig, page_size: usize) -> usize {
        config.num_hidden_layers * 2 * page_size * config.kv_width()
    }

    fn layer(&self, config: &StackConfig, layer: usize) -> KvCache {
        let part = self.page_size * config.kv_width();
        KvCache {
            pool: self.pool.clone(),
            page_stride: self.page_elements,
            k_offset: layer * 2 * part,
            v_offset: (layer * 2 + 1) * part,
            page_size: self.page_size,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            table: self.table.clone(),
            blocks_per_sequence: self.pages_per_sequence,
            ring: false,
        }
    }
}
