//! The shapes of the codec that are checked.

use laneway_device::DType;

#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) c_in: usize,
    pub(super) c_out: usize,
    pub(super) taps: usize,
    pub(super) dilation: usize,
    pub(super) rate: usize,
    pub(super) snake: bool,
    pub(super) bias: bool,
    /// Adds its own output.
    pub(super) residual: bool,
    /// A second convolution of one tap behind it, and its input added.
    pub(super) unit: bool,
    pub(super) clamp: bool,
    pub(super) weights: DType,
    pub(super) pool: DType,
    pub(super) frames: &'static [usize],
    /// Frames behind the last window, as a step has them that fills up a bucket.
    pub(super) padding: usize,
}

const BASE: Shape = Shape {
    c_in: 0,
    c_out: 0,
    taps: 7,
    dilation: 1,
    rate: 1,
    snake: false,
    bias: true,
    residual: false,
    unit: false,
    clamp: false,
    weights: DType::F32,
    pool: DType::F32,
    frames: &[4, 1, 3],
    padding: 0,
};

const fn padded(shape: Shape) -> Shape {
    Shape { padding: 2, ..shape }
}

/// A residual unit's first convolution.
const fn unit(channels: usize, rate: usize, dilation: usize) -> Shape {
    Shape {
        c_in: channels,
        c_out: channels,
        rate,
        dilation,
        snake: true,
        ..BASE
    }
}

/// Its second one.
const fn second(channels: usize, rate: usize) -> Shape {
    Shape {
        taps: 1,
        residual: true,
        ..unit(channels, rate, 1)
    }
}

/// Both of them as one operation.
const fn whole(shape: Shape) -> Shape {
    Shape { unit: true, ..shape }
}

/// So many rows that wide tiles are worth their while.
const fn many(shape: Shape) -> Shape {
    Shape {
        frames: &[40, 28, 32],
        ..shape
    }
}

/// A block's transposed convolution.
const fn transposed(channels: usize, up: usize, rate: usize) -> Shape {
    Shape {
        c_in: 2 * channels,
        c_out: up * channels,
        taps: 2,
        rate,
        snake: true,
        ..BASE
    }
}

const fn exit(channels: usize, rate: usize) -> Shape {
    Shape {
        c_out: 1,
        clamp: true,
        ..unit(channels, rate, 1)
    }
}

pub(super) const SMALL: &[Shape] = &[
    Shape {
        c_in: 5,
        c_out: 3,
        taps: 3,
        dilation: 2,
        bias: false,
        ..BASE
    },
    unit(16, 4, 1),
    unit(16, 4, 3),
    unit(12, 5, 9),
    unit(24, 1, 9),
    second(16, 4),
    second(7, 2),
    padded(unit(16, 4, 9)),
    whole(unit(16, 4, 3)),
    whole(unit(5, 3, 9)),
    padded(whole(unit(16, 4, 9))),
    padded(second(16, 4)),
    padded(transposed(8, 5, 2)),
    transposed(8, 5, 2),
    transposed(6, 3, 4),
    exit(12, 6),
    exit(5, 3),
    Shape {
        frames: &[2, 1],
        ..exit(5, 128)
    },
    Shape {
        c_in: 32,
        c_out: 64,
        taps: 3,
        frames: &[9, 2, 1, 5],
        ..BASE
    },
];

/// `pre_conv`, `decoder.0`, the four blocks, the last one.
pub(super) const RELEASED: &[Shape] = &[
    Shape {
        c_in: 512,
        c_out: 1024,
        taps: 3,
        frames: &[7, 1, 12, 3, 25],
        ..BASE
    },
    Shape {
        c_in: 1024,
        c_out: 1536,
        rate: 4,
        ..BASE
    },
    transposed(768, 8, 4),
    unit(768, 32, 1),
    unit(768, 32, 3),
    unit(768, 32, 9),
    second(768, 32),
    transposed(384, 5, 32),
    unit(384, 160, 1),
    unit(384, 160, 9),
    second(384, 160),
    transposed(192, 4, 160),
    unit(192, 640, 1),
    unit(192, 640, 3),
    second(192, 640),
    transposed(96, 3, 640),
    unit(96, 1920, 1),
    unit(96, 1920, 9),
    second(96, 1920),
    exit(96, 1920),
    whole(unit(768, 32, 3)),
    whole(unit(384, 160, 9)),
    whole(unit(192, 640, 1)),
    whole(unit(96, 1920, 1)),
    whole(unit(96, 1920, 3)),
    whole(unit(96, 1920, 9)),
    many(whole(unit(384, 160, 9))),
    many(transposed(192, 4, 160)),
    padded(whole(unit(96, 1920, 9))),
    padded(unit(384, 160, 3)),
    padded(exit(96, 1920)),
    // Enough rows that blocks make several slices, or several tiles.
    Shape {
        frames: &[20, 1, 3],
        ..unit(768, 32, 1)
    },
    Shape {
        frames: &[20, 1, 3],
        ..unit(384, 160, 9)
    },
    Shape {
        frames: &[9, 1, 2],
        ..unit(96, 1920, 9)
    },
    Shape {
        frames: &[9, 1, 2],
        ..second(96, 1920)
    },
    Shape {
        frames: &[9, 1, 2],
        ..whole(unit(96, 1920, 3))
    },
    padded(whole(unit(192, 640, 9))),
    padded(transposed(192, 4, 160)),
    // Odd numbers of wide tiles, of which a cluster takes two.
    Shape {
        frames: &[20, 1, 3],
        ..transposed(384, 5, 32)
    },
    Shape {
        frames: &[20, 1, 2],
        ..whole(unit(384, 160, 9))
    },
];
