// Causal convolutions over streams without tensor cores, their state, and depthwise ones. k ascends.

// Any shape: f32 weights, and 16-bit ones whose channels do not divide into tiles. A block makes 64 outputs of 64 rows.

template <int AS>
__device__ __forceinline__ void conv_any(const float* x, const void* w, const float* alpha, const float* inv_beta,
                                         const Streams& streams, const ConvShape& c, const ConvEpilogue& e) {
    constexpr int TILE = 64, STEP = 16;
    __shared__ __align__(16) float xs[STEP][TILE + 4];
    __shared__ __align__(16) float ws[STEP][TILE + 4];
    __shared__ int row_first[TILE];  // first row of the row's window; -1: none
    __shared__ i64 row_state[TILE];
    const int tid = threadIdx.x, k_all = c.taps * c.c_in;
    const int past = (c.taps - 1) * c.dilation;
    const int tile_first = BLOCK_Y * TILE, channel_first = BLOCK_X * TILE;
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
            xs[kk][r] = rounded(AS, rounded(streams.state_as, v));
            const int n = channel_first + r;
            ws[kk][r] = n < c.c_out && k < k_all ? weight_at<AS>(w, k_all, n, k) : 0.0f;
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

#define CONV_ANY(NAME, AS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) NAME(CONV_PARAMETERS) {                                       \
        conv_any<AS>(x, w, alpha, inv_beta, CONV_STREAMS, ConvShape{c_in, c_out, taps, dilation},                   \
                     ConvEpilogue{bias, residual, out, clamp});                                                     \
    }
CONV_ANY(conv_any_f32, AS_F32)
CONV_ANY(conv_any_bf16, AS_BF16)
CONV_ANY(conv_any_f16, AS_F16)

// ---------------------------------------------------------------------------------------------------------------
// One output of seven taps side by side: the samples, of f32 weights (of 16-bit ones see codec.cu). A block makes 128
// rows of one window; four lanes share four rows, lane j takes every fourth channel from j on. Staged rows are c_in + 1
// floats apart.

template <int AS>
__device__ __forceinline__ void conv_to_one(const float* x, const void* w, const float* alpha, const float* inv_beta,
                                            const Streams& streams, const ConvShape& c, const ConvEpilogue& e) {
    constexpr int TAPS = 7, ROWS = 128, PAST = TAPS - 1;
    extern __shared__ __align__(16) float to_one_shared[];
    __shared__ int found;
    const int tid = threadIdx.x, stride = c.c_in + 1;
    float* ws = to_one_shared;
    float* xs = ws + TAPS * c.c_in;
    for (int k = tid; k < TAPS * c.c_in; k += ROWS) ws[k] = weight_at<AS>(w, TAPS * c.c_in, 0, k);
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
        constexpr int ROUND = 8;
        for (int row = warp; row < ROWS + PAST; row += ROUND * ROWS / 32) {
            float v[ROUND];
#pragma unroll
            for (int u = 0; u < ROUND; ++u) {
                const int r = row + u * ROWS / 32, position = tile_first - window.first - PAST + r;
                if (r >= ROWS + PAST) continue;
                if (position >= 0)
                    v[u] = x[(i64)(window.first + position) * c.c_in + channel];
                else
                    v[u] = carried(streams, window.state + (i64)(PAST + position) * c.c_in + channel);
            }
#pragma unroll
            for (int u = 0; u < ROUND; ++u) {
                const int r = row + u * ROWS / 32, position = tile_first - window.first - PAST + r;
                if (r >= ROWS + PAST) continue;
                if (alpha && position >= 0) v[u] = snake(v[u], al, be);
                xs[r * stride + channel] = rounded(AS, rounded(streams.state_as, v[u]));
            }
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

#define CONV_TO_ONE(NAME, AS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128) NAME(CONV_PARAMETERS) {                                       \
        conv_to_one<AS>(x, w, alpha, inv_beta, CONV_STREAMS, ConvShape{c_in, c_out, taps, dilation},                \
                        ConvEpilogue{bias, residual, out, clamp});                                                  \
    }
CONV_TO_ONE(conv_to_one_f32, AS_F32)

// ---------------------------------------------------------------------------------------------------------------
// The last `past` activated inputs of each window become its slot's state. Behind the convolution, which reads the
// old state. A block takes 32 channels of some windows, 64 rows of one at a time: all are read before any is written, and
// what later rows still need lies behind what has been written.

extern "C" __global__ void __launch_bounds__(256, 4)
    conv_state(const float* x, const float* alpha, const float* inv_beta, void* state, int state_as, i64 slot_stride,
               int slots, const int* windows, int count, int rate, int rows, int channels, int past, int quick) {
    release_dependents();
    dependency_wait();
    const Streams streams = CONV_STREAMS;
    const int channel = BLOCK_X * 32 + threadIdx.x % 32;
    const bool active = channel < channels;
    const float al = alpha && active ? alpha[channel] : 0.0f, be = alpha && active ? inv_beta[channel] : 0.0f;
    // Most windows of a captured step do not exist: a block looks at several.
#pragma unroll 1
    for (int item = BLOCK_Y; item < count; item += gridDim.y) {
        const Window window = read_window(streams, item);
        if (window.rows == 0) continue;
#pragma unroll 1
        for (int first = 0; first < past; first += 64) {
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = first + threadIdx.x / 32 + i * 8;
                const int from = row + window.rows;  // within old state and window, one behind the other
                if (!active || row >= past) continue;
                if (from < past)
                    v[i] = carried(streams, window.state + (i64)from * channels + channel);
                else
                    v[i] = x[(i64)(window.first + from - past) * channels + channel];
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = first + threadIdx.x / 32 + i * 8;
                if (!active || row >= past) continue;
                if (alpha && row + window.rows >= past)
                    v[i] = quick ? quick_snake(v[i], al, be) : snake(v[i], al, be);
                carry(state, state_as, window.state + (i64)row * channels + channel, v[i]);
            }
            __syncthreads();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Depthwise: a thread owns one channel of one window, its state too.

extern "C" __global__ void __launch_bounds__(128)
    depthwise_conv(const float* x, const float* w, const float* bias,
                   void* state, int state_as, i64 slot_stride, int slots, const int* windows, int count, int rate,
                   int rows, float* out, int channels, int taps) {
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
    constexpr int TAPS = 7, ROUND = 4;
    if (taps == TAPS) {
        // The inputs that outputs still need stay in registers; in the end they are the state.
        float v[TAPS - 1 + ROUND], weight[TAPS];
#pragma unroll
        for (int i = 0; i < TAPS; ++i) weight[i] = w[i * channels + channel];
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) v[i] = carried(streams, own + (i64)i * channels);
        for (int t = 0; t < window.rows; t += ROUND) {
            const int n = min(ROUND, window.rows - t);
#pragma unroll
            for (int i = 0; i < ROUND; ++i)
                if (i < n) v[TAPS - 1 + i] = in[(i64)(t + i) * channels];
#pragma unroll
            for (int i = 0; i < ROUND; ++i) {
                if (i >= n) continue;
                float sum = 0.0f;
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap)
                    sum = __fmaf_rn(rounded(state_as, v[i + tap]), weight[tap], sum);
                to[(i64)(t + i) * channels] = __fadd_rn(sum, b);
            }
            for (int moved = 0; moved < n; ++moved) {
#pragma unroll
                for (int i = 0; i < TAPS - 2 + ROUND; ++i) v[i] = v[i + 1];
            }
        }
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) carry(state, state_as, own + (i64)i * channels, v[i]);
        return;
    }
    for (int t = 0; t < window.rows; ++t) {
        float sum = 0.0f;
        for (int tap = 0; tap < taps; ++tap) {
            const int position = t - past + tap;
            const float v = position >= 0 ? in[(i64)position * channels]
                                          : carried(streams, own + (i64)(past + position) * channels);
            sum = __fmaf_rn(rounded(state_as, v), w[tap * channels + channel], sum);
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
            if (first + i < past) carry(state, state_as, own + (i64)(first + i) * channels, v[i]);
    }
}
