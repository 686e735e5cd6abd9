// Causal convolutions over streams with carried state.
//
// Order of a sum with bf16 weights (conv_mma): the channels are cut into `slices`, by the weight's shape alone. A
// slice is accumulated by the tensor cores from zero over steps of 16 channels ascending and, within a step, taps
// ascending. Slices are added in order within each four, and then the fours. Which block accumulates a slice, and
// how many rows it has beside the one in question, decides no bit. Otherwise (conv_any) k ascends.
//
// Inputs are rounded to bf16 where weights are bf16, and where the state is: what is carried then has the bits that
// it would have within a window.

// Time rows of one stream; `first` and `rows` count rows at this depth.
struct Window {
    int first;
    int rows;
    i64 state;  // first element of the slot's part of the state
};

// How packed rows divide into streams, see op::Windows. `slots`: slots that lie wholly in the pool.
struct Streams {
    const int* windows;
    int count;
    int rate;
    int rows;
    const void* state;  // of slot 0; null: nothing is carried
    int state_bf16;
    i64 slot_stride;
    int slots;
};

// Window i; no rows when it is empty or leaves its operands.
__device__ __forceinline__ Window read_window(const Streams& s, int i) {
    const int first = s.windows[3 * i], frames = s.windows[3 * i + 1], slot = s.windows[3 * i + 2];
    const int all = s.rows / s.rate;
    Window w = {0, 0, 0};
    if (first < 0 || frames <= 0 || first > all || frames > all - first) return w;
    if (s.state && (slot < 0 || slot >= s.slots)) return w;
    w.first = first * s.rate;
    w.rows = frames * s.rate;
    w.state = s.state ? (i64)slot * s.slot_stride : 0;
    return w;
}

__device__ __forceinline__ float carried(const Streams& s, i64 at) {
    return s.state_bf16 ? bf16_to_float(((const bf16_t*)s.state)[at]) : ((const float*)s.state)[at];
}

__device__ __forceinline__ void carry(void* state, int bf16, i64 at, float v) {
    if (bf16)
        ((bf16_t*)state)[at] = (bf16_t)pack_bf16(v, 0.0f);
    else
        ((float*)state)[at] = v;
}

// sin²(x) as cpu/kernels/math.rs has it, every operation rounded: the state's values are made by another
// kernel than the rows of a window and must have the same bits.
__device__ __forceinline__ float sin_squared(float x) {
    float n = rintf(__fmul_rn(x, 0.318309886183790672f));
    float r = __fmaf_rn(n, -3.140625f, x);
    r = __fmaf_rn(n, -9.6702576e-4f, r);
    r = __fmaf_rn(n, -6.2783296e-7f, r);
    float u = __fmul_rn(r, r);
    float p = 2.5905108e-6f;
    p = __fmaf_rn(p, u, -0.00019800912f);
    p = __fmaf_rn(p, u, 0.0083329f);
    p = __fmaf_rn(p, u, -0.16666648f);
    p = __fmaf_rn(p, u, 1.0f);
    float s = __fmul_rn(p, r);
    return __fmul_rn(s, s);
}

__device__ __forceinline__ float snake(float x, float alpha, float inv_beta) {
    return __fmaf_rn(sin_squared(__fmul_rn(x, alpha)), inv_beta, x);
}

__device__ __forceinline__ float4 snake4(float4 x, float4 alpha, float4 inv_beta) {
    return make_float4(snake(x.x, alpha.x, inv_beta.x), snake(x.y, alpha.y, inv_beta.y),
                       snake(x.z, alpha.z, inv_beta.z), snake(x.w, alpha.w, inv_beta.w));
}

// Element (n, k) of a matrix in mma.m16n8k16 A fragments, as gemm.cu has it.
__device__ __forceinline__ float tiled_weight(const bf16_t* w, int k_tiles, int n, int k) {
    int r = n % 16, c = k % 16, lane = (r % 8) * 4 + (c % 8) / 2;
    int slot = (c / 8) * 4 + (r / 8) * 2 + c % 2;
    return bf16_to_float(w[((i64)(n / 16) * k_tiles + k / 16) * 256 + lane * 8 + slot]);
}

__device__ __forceinline__ float round_bf16(float x) { return low_bf16(pack_bf16(x, 0.0f)); }

// What is added to a sum: bias, residual, clamp, in this order.
struct ConvEpilogue {
    const float* bias;
    const float* residual;
    float* out;
    int clamp;
};

__device__ __forceinline__ float finish(const ConvEpilogue& e, float v, float bias, float residual) {
    if (e.bias) v = __fadd_rn(v, bias);
    if (e.residual) v = __fadd_rn(residual, v);
    return e.clamp ? fmaxf(fminf(v, 1.0f), -1.0f) : v;
}

__device__ __forceinline__ void store_one(const ConvEpilogue& e, i64 at, int channel, float v) {
    e.out[at] = finish(e, v, e.bias ? e.bias[channel] : 0.0f, e.residual ? e.residual[at] : 0.0f);
}

// ---------------------------------------------------------------------------------------------------------------
// Tensor cores.

// A part of a tile that lies in one window. Its staged rows are `past` rows of history and its own.
struct Segment {
    int begin;   // first row, within the tile
    int rows;
    int base;    // first staged row
    int offset;  // of the first row within its window
    int first;   // window's first row
    i64 state;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8x8 matrices of bf16, lane l names row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrices(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void mma_tile(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
    const u32 fragment[4] = {a.x, a.y, a.z, a.w};
    const u32 columns[2] = {b0, b1};
    mma_bf16(d, fragment, columns);
}

struct ConvShape {
    int c_in, c_out, taps, dilation;
    int slices;    // of the sum over k
    int share;     // slices of a block: 1, 4 or all; the others are those of the other blocks of its cluster
    int chunk;     // channels staged at a time
    int capacity;  // staged rows there is room for
};

// Blocks of the cluster: `mine` says which this one is, the barrier waits for all, and load_peer reads four floats at
// the place that `p` has in this block's shared memory from another's.
struct Cluster {
    int blocks;
    int mine;
    __device__ __forceinline__ explicit Cluster(int blocks) : blocks(blocks), mine(BLOCK_X % blocks) {}
    __device__ __forceinline__ void barrier() const {
#if __CUDA_ARCH__ >= 900
        if (blocks > 1) {
            asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
            return;
        }
#endif
        __syncthreads();
    }
    __device__ __forceinline__ float4 load(const float* p, int block) const {
        if (block == mine) return *(const float4*)p;
#if __CUDA_ARCH__ >= 900
        float4 v;
        // Ranks count as blockIdx does, which the checking build turns round.
        const int rank = (int)(blockIdx.x % blocks) == mine ? block : blocks - 1 - block;
        u32 remote;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
        asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "r"(remote)
                     : "memory");
        return v;
#else
        // Without clusters a block has all slices.
        return *(const float4*)p;
#endif
    }
};

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// A block makes M = 16 MT WM outputs of N = 8 NT WN packed time rows, or its slices' part of them, which the blocks of a
// cluster then add. Inputs are staged activated, in bf16, [time][channel]: a tap is another first row. c_in is a
// multiple of 16 * slices, c_out of 4, chunk divides c_in / slices.
template <int MT, int NT, int WM, int WN, int DEPTH>
__device__ __forceinline__ void conv_mma(const float* x, const bf16_t* w, const float* alpha, const float* inv_beta,
                                         const Streams& streams, const ConvShape& c, const ConvEpilogue& e) {
    constexpr int M = WM * MT * 16, N = WN * NT * 8, THREADS = WM * WN * 32, PITCH = M + 4;
    static_assert(NT % 2 == 0, "load_matrices gives two tiles of columns");
    static_assert(MT <= 2, "a second tile of outputs is the next one");
    extern __shared__ __align__(16) unsigned char shared[];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, wm = warp % WM, wn = warp / WM;
    const int past = (c.taps - 1) * c.dilation, stride = c.chunk + 8;
    const Cluster cluster(c.slices / c.share);
    const int block = BLOCK_X / cluster.blocks;

    int* counts = (int*)shared;  // segments, staged rows
    int* staged_row = (int*)(shared + 16);
    Segment* segments = (Segment*)(staged_row + N);
    i64* source = (i64*)(segments + N);
    bf16_t* stage = (bf16_t*)(source + (c.capacity + 1) / 2 * 2);
    // Sums lie as [row][output], four floats of padding a row: eight outputs of four rows are on 32 banks. A single
    // slice's take the place of its inputs.
    float* totals = (float*)(c.share > 1 ? stage + c.capacity * stride : stage);

    // The weights of a warp are one sequence of tiles: channels ascending, then taps.
    const int channel_tiles = c.c_in / 16, k_tiles = c.taps * channel_tiles, n_tiles = (c.c_out + 15) / 16;
    const int slice_channels = c.c_in / c.slices, channels = slice_channels * c.share;
    const int channel_first = cluster.mine * channels;
    const int n_first = min(block * (M / 16) + wm * MT, n_tiles - 1);
    const bf16_t* const weights = w + ((i64)n_first * k_tiles + channel_first / 16) * 256 + lane * 8;
    const int next_tile = n_first + 1 < n_tiles ? k_tiles * 256 : 0;
    const int steps = c.chunk / 16 * c.taps;  // of a chunk
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
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (d < steps) load_weights(a[d]);

    release_dependents();
    dependency_wait();

    // Which windows lie in this tile. The order of segments depends on the race for them, and no value on it.
    const int tile_first = BLOCK_Y * N;
    if (tid < 2) counts[tid] = 0;
    for (int r = tid; r < N; r += THREADS) staged_row[r] = -1;
    for (int r = tid; r < c.capacity; r += THREADS) source[r] = 0;
    __syncthreads();
    for (int i = tid; i < streams.count; i += THREADS) {
        const Window window = read_window(streams, i);
        const int begin = max(window.first, tile_first), end = min(window.first + window.rows, tile_first + N);
        if (begin >= end) continue;
        const int base = atomicAdd(&counts[1], past + end - begin);
        if (base + past + end - begin > c.capacity) continue;
        const int at = atomicAdd(&counts[0], 1);
        if (at >= N) continue;
        segments[at] = {begin - tile_first, end - begin, base, begin - window.first, window.first, window.state};
    }
    __syncthreads();
    const int n_segments = min(counts[0], N), staged = min(counts[1], c.capacity);
    if (n_segments == 0) return;
    for (int s = warp; s < n_segments; s += THREADS / 32) {
        const Segment segment = segments[s];
        for (int j = lane; j < past + segment.rows; j += 32) {
            const int position = segment.offset - past + j;  // within the window; negative: carried
            source[segment.base + j] = position >= 0 ? (i64)(segment.first + position) * c.c_in
                                                     : ~(segment.state + (i64)(past + position) * c.c_in);
            if (j < segment.rows) staged_row[segment.begin + j] = segment.base + j;
        }
    }
    __syncthreads();

    // Addresses of the first tap's columns: lane l names row l%8 of columns l/16, channels from 8 * (l/8%2).
    u32 columns[NT / 2];
#pragma unroll
    for (int j = 0; j < NT / 2; ++j) {
        int row = max(staged_row[wn * NT * 8 + j * 16 + lane / 16 * 8 + lane % 8], 0);
        columns[j] = shared_address(stage + row * stride + lane / 8 % 2 * 8);
    }
    const int tap_bytes = c.dilation * stride * 2;

    // Who stages what: each thread keeps its four channels.
    const int quads = c.chunk / 4, abreast = THREADS / quads, within = tid % quads * 4;
    const int row_begin = tid / quads < abreast ? tid / quads : staged;

    float acc[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) acc[i][j][q] = 0.0f;

    for (int first = 0; first < channels; first += c.chunk) {
        if (first > 0) {
            __syncthreads();
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                if (d < steps) load_weights(a[d]);
        }
        const int channel = channel_first + first + within;
        float4 al = {}, be = {};
        if (alpha) {
            al = *(const float4*)(alpha + channel);
            be = *(const float4*)(inv_beta + channel);
        }
#pragma unroll 4
        for (int row = row_begin; row < staged; row += abreast) {
            const i64 from = source[row];
            uint2 packed;
            if (from < 0 && streams.state_bf16) {
                packed = *(const uint2*)((const bf16_t*)streams.state + ~from + channel);
            } else {
                float4 v = *(const float4*)((from >= 0 ? x + from : (const float*)streams.state + ~from) + channel);
                if (alpha && from >= 0) v = snake4(v, al, be);
                packed = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
            }
            *(uint2*)(stage + row * stride + within) = packed;
        }
        __syncthreads();

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
                        mma_tile(acc[i][2 * j], a[d][i], b[j % 2][0], b[j % 2][1]);
                        mma_tile(acc[i][2 * j + 1], a[d][i], b[j % 2][2], b[j % 2][3]);
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

        const int behind = first + c.chunk;
        if (behind % slice_channels == 0) {
            const int slice = behind / slice_channels - 1;  // of the block
            const bool more = slice % 4 > 0;
            if (c.share == 1) __syncthreads();
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
    const int parts = c.share == 1 ? c.slices : c.slices / 4;  // slices, or fours, of all blocks
    const int rows_each = N / cluster.blocks, row_first = cluster.mine * rows_each;
    constexpr int QUADS = M / 4, BATCH = 4;
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
            for (int four = 0; four < parts; four += 4) {
                float4 p[4];
#pragma unroll
                for (int g = 0; g < 4; ++g)
                    if (four + g < parts) {
                        const int part = four + g;
                        p[g] = c.share == 1 ? cluster.load(sums, part)
                                            : cluster.load(sums + part % (c.share / 4) * N * PITCH, part * 4 / c.share);
                    }
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
    // Shared memory lives until everybody has read it.
    if (cluster.blocks > 1) cluster.barrier();
}

#define CONV_PARAMETERS(WEIGHT)                                                                                     \
    const float *x, const WEIGHT *w, const float *bias, const float *alpha, const float *inv_beta,                  \
        const void *state, int state_bf16, i64 slot_stride, int slots, const int *windows, int count, int rate,     \
        int rows, const float *residual, float *out, int clamp, int c_in, int c_out, int taps, int dilation
#define CONV_STREAMS \
    Streams { windows, count, rate, rows, state, state_bf16, slot_stride, slots }

// conv_mma_{outputs}x{rows}
#define CONV_MMA(NAME, MT, NT, WM, WN, DEPTH)                                                                       \
    extern "C" __global__ void __launch_bounds__(WM * WN * 32, 2)                                                   \
        NAME(CONV_PARAMETERS(bf16_t), int slices, int share, int chunk, int capacity) {                             \
        conv_mma<MT, NT, WM, WN, DEPTH>(x, w, alpha, inv_beta, CONV_STREAMS,                                        \
                                        ConvShape{c_in, c_out, taps, dilation, slices, share, chunk, capacity},     \
                                        ConvEpilogue{bias, residual, out, clamp});                                  \
    }
CONV_MMA(conv_mma_64x32, 1, 2, 4, 2, 8)
CONV_MMA(conv_mma_96x64, 2, 4, 3, 2, 4)
CONV_MMA(conv_mma_96x128, 2, 8, 3, 2, 2)
CONV_MMA(conv_mma_128x64, 2, 4, 4, 2, 4)
CONV_MMA(conv_mma_128x128, 2, 8, 4, 2, 2)

// ---------------------------------------------------------------------------------------------------------------
// Any shape: f32 weights, and bf16 ones whose channels do not divide into tiles. A block makes 64 outputs of 64 rows.

template <bool BF16>
__device__ __forceinline__ void conv_any(const float* x, const void* w, const float* alpha, const float* inv_beta,
                                         const Streams& streams, const ConvShape& c, const ConvEpilogue& e) {
    constexpr int TILE = 64, STEP = 16;
    __shared__ __align__(16) float xs[STEP][TILE + 4];
    __shared__ __align__(16) float ws[STEP][TILE + 4];
    __shared__ int row_first[TILE];  // first row of the row's window; -1: none
    __shared__ i64 row_state[TILE];
    const int tid = threadIdx.x, k_all = c.taps * c.c_in, k_tiles = (k_all + 15) / 16;
    const int past = (c.taps - 1) * c.dilation;
    const int tile_first = BLOCK_Y * TILE, channel_first = BLOCK_X * TILE;
    const bool rounded = BF16 || streams.state_bf16;
    release_dependents();
    dependency_wait();

    if (tid < TILE) row_first[tid] = -1;
    __syncthreads();
    for (int i = tid; i < streams.count; i += 256) {
        const Window window = read_window(streams, i);
        const int begin = max(window.first, tile_first), end = min(window.first + window.rows, tile_first + TILE);
        for (int row = begin; row < end; ++row) {
            row_first[row - tile_first] = window.first;
            row_state[row - tile_first] = window.state;
        }
    }
    __syncthreads();

    float acc[4][4] = {};
    const int ty = tid / 16, tx = tid % 16;
    for (int k0 = 0; k0 < k_all; k0 += STEP) {
        const int kk = tid % STEP, k = k0 + kk;
        const int tap = k / c.c_in, channel = k - tap * c.c_in;
        const int back = (c.taps - 1 - tap) * c.dilation;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = tid / STEP + i * 16;
            const int first = row_first[r], position = tile_first + r - first - back;
            float v = 0.0f;
            if (first >= 0 && k < k_all) {
                if (position >= 0) {
                    v = x[(i64)(first + position) * c.c_in + channel];
                    if (alpha) v = snake(v, alpha[channel], inv_beta[channel]);
                } else {
                    v = carried(streams, row_state[r] + (i64)(past + position) * c.c_in + channel);
                }
            }
            xs[kk][r] = rounded ? round_bf16(v) : v;
            const int n = channel_first + r;
            float weight = 0.0f;
            if (n < c.c_out && k < k_all)
                weight = BF16 ? tiled_weight((const bf16_t*)w, k_tiles, n, k) : ((const float*)w)[(i64)n * k_all + k];
            ws[kk][r] = weight;
        }
        __syncthreads();
#pragma unroll
        for (int s = 0; s < STEP; ++s) {
            const float4 xv = *(const float4*)&xs[s][ty * 4], wv = *(const float4*)&ws[s][tx * 4];
            const float xr[4] = {xv.x, xv.y, xv.z, xv.w}, wr[4] = {wv.x, wv.y, wv.z, wv.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] = __fmaf_rn(xr[i], wr[j], acc[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = ty * 4 + i;
        if (row_first[r] < 0) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int channel = channel_first + tx * 4 + j;
            if (channel < c.c_out) store_one(e, (i64)(tile_first + r) * c.c_out + channel, channel, acc[i][j]);
        }
    }
}

#define CONV_ANY(NAME, WEIGHT, BF16)                                                                                \
    extern "C" __global__ void __launch_bounds__(256) NAME(CONV_PARAMETERS(WEIGHT)) {                               \
        conv_any<BF16>(x, w, alpha, inv_beta, CONV_STREAMS,     \
                       ConvShape{c_in, c_out, taps, dilation, 1, 0, 0}, ConvEpilogue{bias, residual, out, clamp});  \
    }
CONV_ANY(conv_any_f32, float, false)
CONV_ANY(conv_any_bf16, bf16_t, true)

// ---------------------------------------------------------------------------------------------------------------
// One output of seven taps side by side: the samples. A block makes 128 rows of one window; four lanes share four rows,
// lane j takes every fourth channel from j on. Staged rows are c_in + 1 floats apart.

template <bool BF16>
__device__ __forceinline__ void conv_to_one(const float* x, const void* w, const float* alpha, const float* inv_beta,
                                            const Streams& streams, const ConvShape& c, const ConvEpilogue& e) {
    constexpr int TAPS = 7, ROWS = 128, PAST = TAPS - 1;
    extern __shared__ __align__(16) float to_one_shared[];
    __shared__ int found;
    const int tid = threadIdx.x, stride = c.c_in + 1, k_tiles = (TAPS * c.c_in + 15) / 16;
    float* ws = to_one_shared;
    float* xs = ws + TAPS * c.c_in;
    for (int k = tid; k < TAPS * c.c_in; k += ROWS)
        ws[k] = BF16 ? tiled_weight((const bf16_t*)w, k_tiles, 0, k) : ((const float*)w)[k];
    release_dependents();
    dependency_wait();

    const int tile_first = BLOCK_X * ROWS;
    if (tid == 0) found = -1;
    __syncthreads();
    for (int i = tid; i < streams.count; i += ROWS) {
        const Window window = read_window(streams, i);
        if (window.first <= tile_first && tile_first < window.first + window.rows) found = i;
    }
    __syncthreads();
    if (found < 0) return;
    const Window window = read_window(streams, found);

    const int warp = tid / 32, lane = tid % 32;
    for (int channel = lane; channel < c.c_in; channel += 32) {
        const float al = alpha ? alpha[channel] : 0.0f, be = alpha ? inv_beta[channel] : 0.0f;
#pragma unroll 4
        for (int row = warp; row < ROWS + PAST; row += ROWS / 32) {
            const int position = tile_first - window.first - PAST + row;
            float v = position >= 0 ? x[(i64)(window.first + position) * c.c_in + channel]
                                    : carried(streams, window.state + (i64)(PAST + position) * c.c_in + channel);
            if (alpha && position >= 0) v = snake(v, al, be);
            xs[row * stride + channel] = BF16 || streams.state_bf16 ? round_bf16(v) : v;
        }
    }
    __syncthreads();

    const int j = tid % 4, row = tid / 4 * 4;
    float acc[4] = {};
    for (int channel = j; channel < c.c_in; channel += 4) {
        float in[PAST + 4];
#pragma unroll
        for (int i = 0; i < PAST + 4; ++i) in[i] = xs[(row + i) * stride + channel];
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
            const float weight = ws[tap * c.c_in + channel];
#pragma unroll
            for (int q = 0; q < 4; ++q) acc[q] = __fmaf_rn(in[q + tap], weight, acc[q]);
        }
    }
    float v = 0.0f;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        float sum = __fadd_rn(acc[q], __shfl_xor_sync(0xffffffffu, acc[q], 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        if (q == j) v = sum;
    }
    store_one(e, tile_first + row + j, 0, v);
}

#define CONV_TO_ONE(NAME, WEIGHT, BF16)                                                                             \
    extern "C" __global__ void __launch_bounds__(128) NAME(CONV_PARAMETERS(WEIGHT)) {                               \
        conv_to_one<BF16>(x, w, alpha, inv_beta, CONV_STREAMS,  \
                          ConvShape{c_in, c_out, taps, dilation, 1, 0, 0},                                          \
                          ConvEpilogue{bias, residual, out, clamp});                                                \
    }
CONV_TO_ONE(conv_to_one_f32, float, false)
CONV_TO_ONE(conv_to_one_bf16, bf16_t, true)

// ---------------------------------------------------------------------------------------------------------------
// The last `past` activated inputs of each window become its slot's state. Behind the convolution, which reads the
// old state. A block takes 32 channels of one window, 64 rows at a time: all are read before any is written, and
// what later rows still need lies behind what has been written.

extern "C" __global__ void __launch_bounds__(256)
    conv_state(const float* x, const float* alpha, const float* inv_beta, void* state, int state_bf16, i64 slot_stride,
               int slots, const int* windows, int count, int rate, int rows, int channels, int past) {
    release_dependents();
    dependency_wait();
    const Streams streams = CONV_STREAMS;
    const Window window = read_window(streams, BLOCK_Y);
    if (window.rows == 0) return;
    const int channel = BLOCK_X * 32 + threadIdx.x % 32;
    const bool active = channel < channels;
    const float al = alpha && active ? alpha[channel] : 0.0f, be = alpha && active ? inv_beta[channel] : 0.0f;
    for (int first = 0; first < past; first += 64) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = first + threadIdx.x / 32 + i * 8;
            const int from = row + window.rows;  // within old state and window, one behind the other
            if (!active || row >= past) continue;
            if (from < past) {
                v[i] = carried(streams, window.state + (i64)from * channels + channel);
            } else {
                v[i] = x[(i64)(window.first + from - past) * channels + channel];
                if (alpha) v[i] = snake(v[i], al, be);
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = first + threadIdx.x / 32 + i * 8;
            if (active && row < past) carry(state, state_bf16, window.state + (i64)row * channels + channel, v[i]);
        }
        __syncthreads();
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Depthwise: a thread owns one channel of one window, its state too.

extern "C" __global__ void __launch_bounds__(128)
    depthwise_conv(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
                   void* state, int state_bf16, i64 slot_stride, int slots, const int* windows, int count, int rate,
                   int rows, float* __restrict__ out, int channels, int taps) {
    release_dependents();
    dependency_wait();
    const Streams streams = CONV_STREAMS;
    const Window window = read_window(streams, BLOCK_Y);
    const int channel = BLOCK_X * 128 + threadIdx.x;
    if (window.rows == 0 || channel >= channels) return;
    const int past = taps - 1;
    const i64 own = window.state + channel;
    const float* in = x + (i64)window.first * channels + channel;
    float* to = out + (i64)window.first * channels + channel;
    const float b = bias[channel];
    for (int t = 0; t < window.rows; ++t) {
        float sum = 0.0f;
#pragma unroll 7
        for (int tap = 0; tap < taps; ++tap) {
            const int position = t - past + tap;
            float v = position >= 0 ? in[(i64)position * channels]
                                    : carried(streams, own + (i64)(past + position) * channels);
            if (state_bf16) v = round_bf16(v);
            sum = __fmaf_rn(v, w[tap * channels + channel], sum);
        }
        to[(i64)t * channels] = __fadd_rn(sum, b);
    }
    for (int first = 0; first < past; first += 8) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int from = first + i + window.rows;  // within old state and window, one behind the other
            if (first + i < past)
                v[i] = from < past ? carried(streams, own + (i64)from * channels) : in[(i64)(from - past) * channels];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + i < past) carry(state, state_bf16, own + (i64)(first + i) * channels, v[i]);
    }
}
