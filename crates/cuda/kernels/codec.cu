// Causal convolutions over streams on tensor cores: 16-bit weights, channels in whole tiles.
//
// Order of a sum: the channels are cut into `slices`, by the weight's shape alone. A slice is accumulated by the tensor
// cores from zero over steps of 16 channels ascending and, within a step, taps ascending. Slices are added in order
// within each four, and then the fours. Which block accumulates a slice, and how many rows it has beside the one in
// question, decides no bit.

// A part of a tile that lies in one window. Its staged rows are `past` rows of history and its own.
struct Segment {
    int begin;   // first row, within the tile
    int rows;
    int base;    // first staged row
    int offset;  // of the first row within its window
    int first;   // window's first row
    i64 state;
};

// Four 8x8 matrices of 16-bit values, lane l names row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrices(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

template <int AS>
__device__ __forceinline__ void mma_tile(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
    const u32 fragment[4] = {a.x, a.y, a.z, a.w};
    const u32 columns[2] = {b0, b1};
    if (AS == AS_F16)
        mma_f16(d, fragment, columns);
    else
        mma_bf16(d, fragment, columns);
}

// How the work is divided, see lower/codec.rs.
struct Cut {
    int slices;    // of the sum over k
    int blocks;    // of a cluster, which share the slices
    int share;     // slices of a block: 1, 4 or all
    int chunk;     // channels staged at a time
    int capacity;  // staged rows there is room for
};

// A block makes M = 16 MT WM outputs of N = 8 NT WN packed time rows, or its slices' part of them, which the blocks
// of a cluster then add. Inputs are staged activated, in the weights' type, [time][channel]: a tap is another first
// row. The state is f32 or of the weights' type; c_in is a
// multiple of 16 * slices, c_out of 4; chunk divides c_in / slices.
template <int AS, int MT, int NT, int WM, int WN, int DEPTH, int ROUND>
__device__ __forceinline__ void conv_mma(const float* x, const bf16_t* w, const float* alpha, const float* inv_beta,
                                         const Streams& streams, const ConvShape& c, const Cut& cut,
                                         const ConvEpilogue& e) {
    constexpr int M = WM * MT * 16, N = WN * NT * 8, THREADS = WM * WN * 32, PITCH = M + 4;
    static_assert(NT % 2 == 0, "load_matrices gives two tiles of columns");
    static_assert(MT <= 2, "a second tile of outputs is the next one");
    extern __shared__ __align__(16) unsigned char shared[];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, wm = warp % WM, wn = warp / WM;
    const int past = (c.taps - 1) * c.dilation, stride = cut.chunk + 8;
    const Cluster cluster(cut.blocks);
    const int block = BLOCK_X >> (31 - __clz(cut.blocks));

    int* counts = (int*)shared;  // segments, staged rows
    int* staged_row = (int*)(shared + 16);
    Segment* segments = (Segment*)(staged_row + N);
    i64* source = (i64*)(segments + N);  // address of each staged row; its complement: carried
    bf16_t* stage = (bf16_t*)(source + (cut.capacity + 1) / 2 * 2);
    // Sums lie as [row][output], four floats of padding a row: eight outputs of four rows are on 32 banks. A single
    // slice's take the place of its inputs.
    float* totals = (float*)(cut.share > 1 ? stage + cut.capacity * stride : stage);

    // The weights of a warp are one sequence of tiles: channels ascending, then taps.
    const int channel_tiles = c.c_in / 16, k_tiles = c.taps * channel_tiles, n_tiles = (c.c_out + 15) / 16;
    const int slice_channels = c.c_in / cut.slices, channels = slice_channels * cut.share;
    const int channel_first = cluster.mine * channels;
    const int n_first = min(block * (M / 16) + wm * MT, n_tiles - 1);
    const bf16_t* const weights = w + ((i64)n_first * k_tiles + channel_first / 16) * 256 + lane * 8;
    const int next_tile = n_first + 1 < n_tiles ? k_tiles * 256 : 0;
    const int steps = cut.chunk / 16 * c.taps;  // of a chunk
    int load_tap = 0, load_at = 0;            // the next tile to load: its tap and its place
    uint4 a[DEPTH][MT];
    auto load_weights = [&](uint4(&to)[MT]) {
#pragma unroll
        for (int i = 0; i < MT; ++i) to[i] = __ldg((const uint4*)(weights + load_at + i * next_tile));
        load_at += channel_tiles * 256;
        if (++load_tap == c.taps) {
            load_tap = 0;
            load_at += 256 - k_tiles * 256;
        }
    };
    auto load_first_weights = [&](int first) {
        load_tap = 0;
        load_at = first / 16 * 256;
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (d < steps) load_weights(a[d]);
    };
    // Weights do not depend on the kernel ahead. A wide tile has no registers left to hold them while it stages.
    constexpr bool EARLY = MT * NT < 16;
    if (EARLY) load_first_weights(0);

    release_dependents();
    dependency_wait();

    // Which windows lie in this tile. The order of segments depends on the race for them, and no value on it.
    const int tile_first = BLOCK_Y * N;
    if (tid < 2) counts[tid] = 0;
    for (int r = tid; r < N; r += THREADS) staged_row[r] = -1;
#pragma unroll 1
    for (int r = tid; r < cut.capacity; r += THREADS) source[r] = (i64)x;
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < streams.count; i += THREADS) {
        const Window window = read_window(streams, i);
        const int begin = max(window.first, tile_first), end = min(window.first + window.rows, tile_first + N);
        if (begin >= end) continue;
        const int base = atomicAdd(&counts[1], past + end - begin);
        if (base + past + end - begin > cut.capacity) continue;
        const int at = atomicAdd(&counts[0], 1);
        if (at >= N) continue;
        segments[at] = {begin - tile_first, end - begin, base, begin - window.first, window.first, window.state};
    }
    __syncthreads();
    const int n_segments = min(counts[0], N), staged = min(counts[1], cut.capacity);
    if (n_segments == 0) return;
    const int state_bytes = streams.state_as == AS_F32 ? 4 : 2;
#pragma unroll 1
    for (int s = warp; s < n_segments; s += THREADS / 32) {
        const Segment segment = segments[s];
#pragma unroll 1
        for (int j = lane; j < past + segment.rows; j += 32) {
            const int position = segment.offset - past + j;  // within the window; negative: carried
            source[segment.base + j] =
                position >= 0 ? (i64)(x + (i64)(segment.first + position) * c.c_in)
                              : ~((i64)streams.state + (segment.state + (i64)(past + position) * c.c_in) * state_bytes);
            if (j < segment.rows) staged_row[segment.begin + j] = segment.base + j;
        }
    }
    __syncthreads();

    const int tap_bytes = c.dilation * stride * 2;

    // Who stages what: each thread keeps its four channels.
    const int quads = cut.chunk / 4, abreast = THREADS / quads, within = tid % quads * 4;
    const int row_begin = tid / quads < abreast ? tid / quads : staged;

    float acc[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) acc[i][j][q] = 0.0f;

    for (int first = 0; first < channels; first += cut.chunk) {
        if (first > 0) {
            __syncthreads();
            if (EARLY) load_first_weights(first);
        }
        const int channel = channel_first + first + within;
        // All loads of a round are on their way before the first value is used.
        for (int row = row_begin; row < staged; row += ROUND * abreast) {
            uint4 raw[ROUND];
#pragma unroll
            for (int u = 0; u < ROUND; ++u) {
                const int r = row + u * abreast;
                if (r >= staged) continue;
                const i64 from = source[r];
                const char* in = (const char*)(from ^ (from >> 63));
                __builtin_assume(__isGlobal(in));
                if (from < 0 && streams.state_as != AS_F32) {
                    const uint2 half = *(const uint2*)(in + channel * 2);
                    raw[u].x = half.x;
                    raw[u].y = half.y;
                } else {
                    raw[u] = *(const uint4*)(in + channel * 4);
                }
            }
            float4 al = {}, be = {};
            if (alpha) {
                al = *(const float4*)(alpha + channel);
                be = *(const float4*)(inv_beta + channel);
            }
#pragma unroll
            for (int u = 0; u < ROUND; ++u) {
                const int r = row + u * abreast;
                if (r >= staged) continue;
                const bool old = source[r] < 0;
                uint2 packed = make_uint2(raw[u].x, raw[u].y);
                if (!(old && streams.state_as != AS_F32)) {
                    float4 v = make_float4(__uint_as_float(raw[u].x), __uint_as_float(raw[u].y),
                                           __uint_as_float(raw[u].z), __uint_as_float(raw[u].w));
                    if (alpha && !old) v = snake4(v, al, be);
                    packed = make_uint2(narrow_pair<AS>(v.x, v.y), narrow_pair<AS>(v.z, v.w));
                }
                *(uint2*)(stage + r * stride + within) = packed;
            }
        }
        if (!EARLY) load_first_weights(first);
        __syncthreads();

        // Addresses of the first tap's columns: lane l names row l%8 of columns l/16, channels from 8 * (l/8%2).
        u32 columns[NT / 2];
#pragma unroll
        for (int j = 0; j < NT / 2; ++j) {
            const int row = max(staged_row[wn * NT * 8 + j * 16 + lane / 16 * 8 + lane % 8], 0);
            columns[j] = shared_address(stage + row * stride + lane / 8 % 2 * 8);
        }
        int tap = 0, at = 0;
        for (int step = 0; step < steps; step += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (step + d >= steps) break;
                u32 b[2][4];
                load_matrices(b[0], columns[0] + at);
#pragma unroll
                for (int j = 0; j < NT / 2; ++j) {
                    if (j + 1 < NT / 2) load_matrices(b[(j + 1) % 2], columns[j + 1] + at);
#pragma unroll
                    for (int i = 0; i < MT; ++i) {
                        mma_tile<AS>(acc[i][2 * j], a[d][i], b[j % 2][0], b[j % 2][1]);
                        mma_tile<AS>(acc[i][2 * j + 1], a[d][i], b[j % 2][2], b[j % 2][3]);
                    }
                }
                if (step + d + DEPTH < steps) load_weights(a[d]);
                at += tap_bytes;
                if (++tap == c.taps) {
                    tap = 0;
                    at += 32 - c.taps * tap_bytes;
                }
            }
        }

        const int behind = first + cut.chunk;
        if (behind % slice_channels == 0) {
            const int slice = behind / slice_channels - 1;  // of the block
            const bool more = slice % 4 > 0;
            if (cut.share == 1) __syncthreads();
            float* const mine =
                totals + (slice / 4 * N + wn * NT * 8 + lane % 4 * 2) * PITCH + wm * MT * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int j = 0; j < NT; ++j)
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        float* total = mine + (j * 8 + q % 2) * PITCH + i * 16 + q / 2 * 8;
                        *total = more ? __fadd_rn(*total, acc[i][j][q]) : acc[i][j][q];
                        acc[i][j][q] = 0.0f;
                    }
        }
    }

    // Each block of the cluster finishes a part of the rows. The residual may be the output, so all that a thread
    // reads of it is read before it writes: reads overlap.
    cluster.barrier();
    // What is left to add: every block's slice, or the fours of every block, or those of this one.
    const int parts = cut.share == 1 ? cut.slices : cut.slices / 4;
    const int step = cut.share > 4 ? 0 : 1, area = cut.share > 4 ? N * PITCH : 0;
    const int rows_each = N / cluster.blocks, row_first = cluster.mine * rows_each;
    constexpr int QUADS = M / 4, EACH = N * QUADS / THREADS, BATCH = EACH < 4 ? EACH : 4;
    const i64 tile = (i64)tile_first * c.c_out;
    for (int first = tid; first < rows_each * QUADS; first += BATCH * THREADS) {
        float4 before[BATCH];
        int at[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int item = first + i * THREADS, row = row_first + item / QUADS;
            const int output = block * M + item % QUADS * 4;
            const bool live = item < rows_each * QUADS && staged_row[row] >= 0 && output < c.c_out;
            at[i] = live ? row * c.c_out + output : -1;
            before[i] = live && e.residual ? *(const float4*)(e.residual + tile + at[i]) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (at[i] < 0) continue;
            const int item = first + i * THREADS, output = block * M + item % QUADS * 4;
            const float* sums = totals + (row_first + item / QUADS) * PITCH + item % QUADS * 4;
            float4 sum = {};
#pragma unroll 1
            for (int four = 0; four < parts; four += 4) {
                float4 p[4];
#pragma unroll
                for (int g = 0; g < 4; ++g)
                    if (four + g < parts) p[g] = *(const float4*)cluster.peer(sums + g * area, (four + g) * step);
#pragma unroll
                for (int g = 1; g < 4; ++g)
                    if (four + g < parts) p[0] = add4(p[0], p[g]);
                sum = four == 0 ? p[0] : add4(sum, p[0]);
            }
            float4 bias = {};
            if (e.bias) bias = *(const float4*)(e.bias + output);
            *(float4*)(e.out + tile + at[i]) =
                make_float4(finish(e, sum.x, bias.x, before[i].x), finish(e, sum.y, bias.y, before[i].y),
                            finish(e, sum.z, bias.z, before[i].z), finish(e, sum.w, bias.w, before[i].w));
        }
    }
    cluster.leave();
}

// conv_mma_{type}_{outputs}x{rows}
#define CONV_MMA_AS(NAME, AS, MT, NT, WM, WN, DEPTH, ROUND)                                                         \
    extern "C" __global__ void __launch_bounds__(WM * WN * 32, 2)                                                   \
        NAME(CONV_PARAMETERS, int slices, int blocks, int share, int chunk, int capacity) {                         \
        conv_mma<AS, MT, NT, WM, WN, DEPTH, ROUND>(                                                                 \
            x, (const bf16_t*)w, alpha, inv_beta, CONV_STREAMS, ConvShape{c_in, c_out, taps, dilation},             \
            Cut{slices, blocks, share, chunk, capacity}, ConvEpilogue{bias, residual, out, clamp});                 \
    }
#define CONV_MMA(SIZE, MT, NT, WM, WN, DEPTH, ROUND)                                                                \
    CONV_MMA_AS(conv_mma_bf16_##SIZE, AS_BF16, MT, NT, WM, WN, DEPTH, ROUND)                                        \
    CONV_MMA_AS(conv_mma_f16_##SIZE, AS_F16, MT, NT, WM, WN, DEPTH, ROUND)
CONV_MMA(64x32, 1, 2, 4, 2, 8, 8)
CONV_MMA(96x64, 2, 4, 3, 2, 4, 6)
CONV_MMA(96x128, 2, 8, 3, 2, 2, 6)
CONV_MMA(128x64, 2, 4, 4, 2, 4, 4)
CONV_MMA(128x128, 2, 8, 4, 2, 2, 3)

// ---------------------------------------------------------------------------------------------------------------
// One output of seven taps side by side: the samples. Every input belongs to seven outputs, so a product gives what each
// row has for each tap, and an output is the sum of seven of them, taps ascending. A block makes 128 rows of one window,
// a warp 16 rows; the first one has what lies ahead of them.
//
// The channels of a step of 16 are dealt to k so that a lane has four side by side.

template <int AS>
__device__ __forceinline__ void conv_to_one(const float* x, const bf16_t* w, const float* alpha, const float* inv_beta,
                                            const Streams& streams, const ConvShape& c, const ConvEpilogue& e) {
    constexpr int TAPS = 7, ROWS = 128, PAST = TAPS - 1, AHEAD = 16, MOST_STEPS = 6;
    __shared__ float sums[ROWS + AHEAD][TAPS + 2];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, group = lane / 4, within = lane % 4 * 4;
    const int steps = c.c_in / 16;

    // What a pair of k has for tap `group`, from the packed tiles' first output.
    u32 b[MOST_STEPS][2] = {};
    if (group < TAPS) {
#pragma unroll
        for (int s = 0; s < MOST_STEPS; ++s)
            if (s < steps) {
                const bf16_t* tile = w + (i64)(group * steps + s) * 256 + within / 8 * 4;
                b[s][0] = *(const u32*)(tile + within % 8 / 2 * 8);
                b[s][1] = *(const u32*)(tile + (within % 8 / 2 + 1) * 8);
            }
    }
    release_dependents();
    dependency_wait();

    const int tile_first = BLOCK_X * ROWS;
    int found = -1;
    for (int i = lane; i < (streams.count + 31) / 32 * 32 && found < 0; i += 32) {
        Window window = {0, 0, 0};
        if (i < streams.count) window = read_window(streams, i);
        const u32 here =
            __ballot_sync(0xffffffffu, window.first <= tile_first && tile_first < window.first + window.rows);
        if (here) found = i - lane + __ffs(here) - 1;
    }
    if (found < 0) return;
    const Window window = read_window(streams, found);

    float4 v[2][MOST_STEPS] = {};
    bool old[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 - AHEAD + h * 8 + group, position = tile_first - window.first + row;
        old[h] = position < 0;
        if (row < -PAST) continue;
        const i64 from = position >= 0 ? (i64)(window.first + position) * c.c_in + within
                                       : window.state + (i64)(PAST + position) * c.c_in + within;
#pragma unroll
        for (int s = 0; s < MOST_STEPS; ++s) {
            if (s >= steps) continue;
            if (position >= 0) {
                v[h][s] = *(const float4*)(x + from + s * 16);
            } else if (streams.state_as == AS_F32) {
                v[h][s] = *(const float4*)((const float*)streams.state + from + s * 16);
            } else {
                const ushort4 bits = *(const ushort4*)((const bf16_t*)streams.state + from + s * 16);
                v[h][s] = make_float4(widened(AS, bits.x), widened(AS, bits.y), widened(AS, bits.z), widened(AS, bits.w));
            }
        }
    }
    float sum[4] = {};
#pragma unroll
    for (int s = 0; s < MOST_STEPS; ++s) {
        if (s >= steps) continue;
        if (alpha) {
            const float4 al = *(const float4*)(alpha + s * 16 + within);
            const float4 be = *(const float4*)(inv_beta + s * 16 + within);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (!old[h]) v[h][s] = quick_snake4(v[h][s], al, be);
        }
        const u32 a[4] = {narrow_pair<AS>(v[0][s].x, v[0][s].y), narrow_pair<AS>(v[1][s].x, v[1][s].y),
                          narrow_pair<AS>(v[0][s].z, v[0][s].w), narrow_pair<AS>(v[1][s].z, v[1][s].w)};
        if (AS == AS_F16)
            mma_f16(sum, a, b[s]);
        else
            mma_bf16(sum, a, b[s]);
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) sums[warp * 16 + q / 2 * 8 + group][within / 2 + q % 2] = sum[q];
    __syncthreads();
    if (tid >= ROWS) return;
    float out = sums[AHEAD - PAST + tid][0];
#pragma unroll
    for (int tap = 1; tap < TAPS; ++tap) out = __fadd_rn(out, sums[AHEAD - PAST + tid + tap][tap]);
    store_one(e, tile_first + tid, 0, out);
}

#define CONV_TO_ONE(NAME, AS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(288) NAME(CONV_PARAMETERS) {                                       \
        conv_to_one<AS>(x, (const bf16_t*)w, alpha, inv_beta, CONV_STREAMS, ConvShape{c_in, c_out, taps, dilation}, \
                        ConvEpilogue{bias, residual, out, clamp});                                                  \
    }
CONV_TO_ONE(conv_to_one_bf16, AS_BF16)
CONV_TO_ONE(conv_to_one_f16, AS_F16)
