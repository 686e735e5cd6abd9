//! The operations of one pass of the codec decoder, one frame a stream.

use laneway_device::op::{
    Activation, Attention, Conv, DepthwiseConv, Embed, Gemm, InputNorm, LayerNorm, Pointwise, QkvRope,
    RopeTable, Snake,
};
use laneway_device::{Matrix, Result, View};

use super::Stage;
use super::operands::{CacheShape, Operands};

const CODEBOOKS: usize = 16;
const ENTRIES: usize = 2048;
const ENTRY: usize = 256;
const CODEBOOK_DIM: usize = 512;
const LATENT: usize = 1024;
const HIDDEN: usize = 512;
const INTERMEDIATE: usize = 1024;
const HEADS: usize = 16;
const DIM: usize = 64;
const LAYERS: usize = 8;
const WINDOW: usize = 72;
const DECODER: usize = 1536;
/// Values of a frame where there are most.
const WIDEST: usize = 1920 * DECODER / 16;
/// Scratch for a frame, with its window's carried rows, where that is most.
const MOST_STAGED: usize = (1920 + 6 * 9) * DECODER / 16;

struct Codec<'a> {
    o: &'a Operands,
    streams: usize,
    windows: View,
    /// As the model has them: input and output in turn, and the scratch of all.
    wide: [View; 3],
    stage: Stage,
}

/// A convolution's shape.
#[derive(Debug, Clone, Copy)]
struct Shape {
    c_in: usize,
    c_out: usize,
    taps: usize,
    dilation: usize,
    rate: usize,
    snake: bool,
    /// A second convolution of one tap behind it, and its input added.
    unit: bool,
}

/// `streams` frames, in windows of `width`.
pub(crate) fn codec(o: &Operands, streams: usize, width: usize) -> Result<Stage> {
    let mut codec = Codec {
        o,
        streams,
        windows: o.windows(streams, width)?,
        wide: [
            o.out(streams * WIDEST)?,
            o.out(streams * WIDEST)?,
            o.out(streams * MOST_STAGED)?,
        ],
        stage: Stage::new("codec"),
    };
    let quantized = codec.dequantize()?;
    let latent = codec.transform(&quantized)?;
    let (latent, rate) = codec.upsample(latent)?;
    codec.vocode(latent, rate)?;
    Ok(codec.stage)
}

impl Codec<'_> {
    fn gemm(&self, rate: usize, x: &View, w: Matrix, out: &View) -> Gemm {
        Gemm {
            x: x.clone(),
            norm: None,
            rows: self.streams * rate,
            w,
            bias: None,
            activation: Activation::None,
            scale: None,
            accumulate: false,
            gated: None,
            out: out.clone(),
            next: None,
        }
    }

    fn biased(&self, rate: usize, x: &View, (n, k): (usize, usize), out: &View) -> Result<Gemm> {
        Ok(Gemm {
            bias: Some(self.o.floats(n)?),
            ..self.gemm(rate, x, self.o.matrix(n, k)?, out)
        })
    }

    fn add_scaled(&self, x: &View, (n, k): (usize, usize), out: &View) -> Result<Gemm> {
        Ok(Gemm {
            scale: Some(self.o.floats(n)?),
            accumulate: true,
            ..self.gemm(1, x, self.o.matrix(n, k)?, out)
        })
    }

    fn snake(&self, channels: usize) -> Result<Snake> {
        Ok(Snake {
            alpha: self.o.ones(channels)?,
            inv_beta: self.o.ones(channels)?,
        })
    }

    fn conv(&mut self, label: &str, x: &View, shape: Shape) -> Result<View> {
        let (o, streams) = (self.o, self.streams);
        let rows = streams * shape.rate;
        let past = (shape.taps - 1) * shape.dilation * shape.c_in;
        let [a, b, scratch] = &self.wide;
        let out = if x.buffer.id() == a.buffer.id() { b } else { a };
        let out = out.slice(0, rows * shape.c_out);
        let pointwise = match shape.unit {
            true => Some(Pointwise {
                snake: self.snake(shape.c_out)?,
                w: o.matrix(shape.c_out, shape.c_out)?,
                bias: Some(o.floats(shape.c_out)?),
            }),
            false => None,
        };
        let snake = match shape.snake {
            true => Some(self.snake(shape.c_in)?),
            false => None,
        };
        let op = Conv {
            x: x.clone(),
            rows,
            w: o.matrix(shape.c_out, shape.taps * shape.c_in)?,
            bias: Some(o.floats(shape.c_out)?),
            c_in: shape.c_in,
            taps: shape.taps,
            dilation: shape.dilation,
            snake,
            state: match past {
                0 => None,
                past => Some(o.state(streams, past.next_multiple_of(4))?),
            },
            windows: Operands::windows_at(&self.windows, streams, shape.rate),
            pointwise,
            scratch: Some(scratch.clone()),
            residual: shape.unit.then(|| x.clone()),
            clamp: shape.c_out == 1,
            out: out.clone(),
        };
        self.stage.add(label, op);
        Ok(out)
    }

    fn dequantize(&mut self) -> Result<View> {
        let (o, rows) = (self.o, self.streams);
        let codes: Vec<i32> = (0..rows * CODEBOOKS).map(|i| (i * 37 % ENTRIES) as i32).collect();
        let codes = o.ints(&codes)?;
        let (entry, out) = (o.out(rows * ENTRY)?, o.out(rows * CODEBOOK_DIM)?);
        for (first_id, tables) in [(0, 1), (1, CODEBOOKS - 1)] {
            self.stage.add(
                "embed",
                Embed {
                    tables: (0..tables)
                        .map(|_| o.table(ENTRIES, ENTRY))
                        .collect::<Result<_>>()?,
                    ids: codes.clone(),
                    ids_stride: CODEBOOKS,
                    first_id,
                    rows,
                    width: ENTRY,
                    accumulate: false,
                    out: entry.clone(),
                },
            );
            let project = Gemm {
                accumulate: first_id > 0,
                ..self.gemm(1, &entry, o.matrix(CODEBOOK_DIM, ENTRY)?, &out)
            };
            self.stage.add("quantizer projection", project);
        }
        Ok(out)
    }

    fn transform(&mut self, quantized: &View) -> Result<View> {
        let (o, rows) = (self.o, self.streams);
        let shape = Shape {
            c_in: CODEBOOK_DIM,
            c_out: LATENT,
            taps: 3,
            dilation: 1,
            rate: 1,
            snake: false,
            unit: false,
        };
        let latent = self.conv("pre conv", quantized, shape)?;
        let (hidden, normed) = (o.out(rows * HIDDEN)?, o.out(rows * HIDDEN)?);
        let op = self.biased(1, &latent, (HIDDEN, LATENT), &hidden)?;
        self.stage.add("input projection", op);
        let index: Vec<i32> = (0..rows as i32).collect();
        let sequences = o.ints(&index)?;
        let positions = o.ints(&vec![200; rows])?;
        let cos_sin = o.out(rows * DIM)?;
        self.stage.add(
            "rope table",
            RopeTable {
                positions: positions.clone(),
                inv_freq: o.floats(DIM / 2)?,
                rows,
                head_dim: DIM,
                out: cos_sin.clone(),
            },
        );
        let width = HEADS * DIM;
        let (qkv, q, attended) = (
            o.out(rows * 3 * width)?,
            o.out(rows * width)?,
            o.out(rows * width)?,
        );
        let gate_up = o.out(rows * 2 * INTERMEDIATE)?;
        let norm = || {
            Ok(Some(InputNorm {
                weight: o.ones(HIDDEN)?,
                eps: 1e-5,
                scratch: normed.clone(),
                prepared: false,
            }))
        };
        for _ in 0..LAYERS {
            let cache = o.cache(CacheShape {
                sequences: rows,
                positions: 0,
                page_size: WINDOW + 24,
                kv_heads: HEADS,
                head_dim: DIM,
                ring: true,
            })?;
            let op = Gemm {
                norm: norm()?,
                ..self.gemm(1, &hidden, o.matrix(3 * width, HIDDEN)?, &qkv)
            };
            self.stage.add("qkv", op);
            let rope = QkvRope {
                qkv: qkv.clone(),
                rows,
                heads: HEADS,
                q_norm: None,
                k_norm: None,
                eps: 1e-5,
                cos_sin: cos_sin.clone(),
                sequences: sequences.clone(),
                positions: positions.clone(),
                cache: cache.clone(),
                q_out: q.clone(),
            };
            self.stage.add("qkv rope", rope);
            let attention = Attention {
                q: q.clone(),
                rows,
                heads: HEADS,
                sequences: sequences.clone(),
                positions: positions.clone(),
                cache,
                window: Some(WINDOW),
                out: attended.clone(),
            };
            self.stage.add_attention("attention", attention, WINDOW);
            let op = self.add_scaled(&attended, (HIDDEN, width), &hidden)?;
            self.stage.add("o", op);
            let down = o.matrix(HIDDEN, INTERMEDIATE)?;
            let inner = o.out_for(&down, rows * INTERMEDIATE)?;
            let op = Gemm {
                norm: norm()?,
                gated: Some(gate_up.clone()),
                ..self.gemm(1, &hidden, o.matrix(2 * INTERMEDIATE, HIDDEN)?, &inner)
            };
            self.stage.add("gate up", op);
            let op = Gemm {
                scale: Some(o.floats(HIDDEN)?),
                accumulate: true,
                ..self.gemm(1, &inner, down, &hidden)
            };
            self.stage.add("down", op);
        }
        let op = Gemm {
            norm: norm()?,
            ..self.biased(1, &hidden, (LATENT, HIDDEN), &latent)?
        };
        self.stage.add("output projection", op);
        Ok(latent)
    }

    fn upsample(&mut self, mut x: View) -> Result<(View, usize)> {
        let o = self.o;
        let mut rate = 1;
        for _ in 0..2 {
            let out = o.out(self.streams * rate * 2 * LATENT)?;
            let op = self.biased(rate, &x, (2 * LATENT, LATENT), &out)?;
            self.stage.add("latent up", op);
            rate *= 2;
            let rows = self.streams * rate;
            let spare = o.out(rows * LATENT)?;
            let narrow = o.matrix(LATENT, 4 * LATENT)?;
            let inner = o.out_for(&narrow, rows * 4 * LATENT)?;
            self.stage.add(
                "depthwise",
                DepthwiseConv {
                    x: out.clone(),
                    rows,
                    w: o.floats(7 * LATENT)?,
                    bias: o.floats(LATENT)?,
                    channels: LATENT,
                    taps: 7,
                    state: o.state(self.streams, 6 * LATENT)?,
                    windows: Operands::windows_at(&self.windows, self.streams, rate),
                    out: spare.clone(),
                },
            );
            self.stage.add(
                "layer norm",
                LayerNorm {
                    x: spare.clone(),
                    rows,
                    width: LATENT,
                    weight: o.ones(LATENT)?,
                    bias: o.floats(LATENT)?,
                    eps: 1e-6,
                    out: spare.clone(),
                },
            );
            let widen = Gemm {
                activation: Activation::Gelu,
                ..self.biased(rate, &spare, (4 * LATENT, LATENT), &inner)?
            };
            self.stage.add("widen", widen);
            let narrow = Gemm {
                scale: Some(o.floats(LATENT)?),
                accumulate: true,
                bias: Some(o.floats(LATENT)?),
                ..self.gemm(rate, &inner, narrow, &out)
            };
            self.stage.add("narrow", narrow);
            x = out;
        }
        Ok((x, rate))
    }

    fn vocode(&mut self, x: View, mut rate: usize) -> Result<()> {
        let entry = Shape {
            c_in: LATENT,
            c_out: DECODER,
            taps: 7,
            dilation: 1,
            rate,
            snake: false,
            unit: false,
        };
        let mut x = self.conv("entry", &x, entry)?;
        let mut channels = DECODER;
        for (block, up) in [8, 5, 4, 3].into_iter().enumerate() {
            let shape = |taps, dilation, rate| Shape {
                c_in: channels / 2,
                c_out: channels / 2,
                taps,
                dilation,
                rate,
                snake: true,
                unit: taps == 7,
            };
            let transposed = Shape {
                c_in: channels,
                c_out: up * channels / 2,
                ..shape(2, 1, rate)
            };
            x = self.conv(&format!("block {block} up"), &x, transposed)?;
            rate *= up;
            for dilation in [1, 3, 9] {
                x = self.conv(&format!("block {block} unit"), &x, shape(7, dilation, rate))?;
            }
            channels /= 2;
        }
        let exit = Shape {
            c_in: channels,
            c_out: 1,
            taps: 7,
            dilation: 1,
            rate,
            snake: true,
            unit: false,
        };
        self.conv("exit", &x, exit)?;
        Ok(())
    }
}
