// One-shot operations of the reference encoders: whole clips, once a request. Everything here is f32 arithmetic; a
// product with 16-bit weights takes its inputs rounded to their type.

enum { AS_F32 = 0, AS_BF16, AS_F16 };

__device__ __forceinline__ float widened(int as, bf16_t bits) {
    return as == AS_F16 ? f16_to_float(bits) : bf16_to_float(bits);
}

__device__ __forceinline__ float rounded(int as, float x) {
    return as == AS_F32 ? x : widened(as, (bf16_t)(as == AS_F16 ? pack_f16(x, 0.0f) : pack_bf16(x, 0.0f)));
}

// Element (n, k) of a matrix: row-major f32, or 16 bits in mma.m16n8k16's A fragments, as gemm.cu has it.
template <int AS>
__device__ __forceinline__ float weight_at(const void* w, int k_all, int n, int k) {
    if (AS == AS_F32) return ((const float*)w)[(i64)n * k_all + k];
    int r = n % 16, c = k % 16, lane = (r % 8) * 4 + (c % 8) / 2, k_tiles = (k_all + 15) / 16;
    int slot = (c / 8) * 4 + (r / 8) * 2 + c % 2;
    return widened(AS, ((const bf16_t*)w)[((i64)(n / 16) * k_tiles + k / 16) * 256 + lane * 8 + slot]);
}

// enum laneway_device::op::Padding, in its order.
enum { PAD_ZERO = 0, PAD_REFLECT, PAD_REPLICATE };

// The row that stands at time t of a clip of `rows`; -1: zeros. Also where the clip is too short to be mirrored.
__device__ __forceinline__ int source_row(int t, int rows, int padding) {
    if (t >= 0 && t < rows) return t;
    if (padding == PAD_REFLECT) t = t < 0 ? -t : 2 * (rows - 1) - t;
    if (padding == PAD_REPLICATE) t = min(max(t, 0), rows - 1);
    return t >= 0 && t < rows ? t : -1;
}

struct ClipConv {
    const float* x;
    const void* w;
    const float* bias;
    const float* residual;
    float* out;
    int rows_in, rows_out, c_in, c_out, taps, stride, dilation, pad_left, padding, input_activation, activation;
};

// A block makes 64 outputs of 64 rows; k ascends, one fused multiply-add each. The next step's operands are asked for
// while this one's are multiplied.
template <int AS>
__device__ __forceinline__ void conv1d(const ClipConv& c) {
    constexpr int TILE = 64, STEP = 16;
    __shared__ __align__(16) float xs[STEP][TILE + 4];
    __shared__ __align__(16) float ws[STEP][TILE + 4];
    const int tid = threadIdx.x, k_all = c.taps * c.c_in;
    const int row_first = BLOCK_X * TILE, channel_first = BLOCK_Y * TILE;
    release_dependents();
    dependency_wait();

    const int kk = tid % STEP;
    float x_next[4], w_next[4];
    auto load = [&](int k0) {
        const int k = k0 + kk, tap = k / c.c_in, channel = k - tap * c.c_in;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = tid / STEP + i * 16, row = row_first + r, n = channel_first + r;
            float v = 0.0f, weight = 0.0f;
            if (k < k_all && row < c.rows_out) {
                const int t = source_row(row * c.stride + tap * c.dilation - c.pad_left, c.rows_in, c.padding);
                if (t >= 0) v = c.x[(i64)t * c.c_in + channel];
            }
            if (k < k_all && n < c.c_out) weight = weight_at<AS>(c.w, k_all, n, k);
            x_next[i] = v;
            w_next[i] = weight;
        }
    };

    float acc[4][4] = {};
    const int ty = tid / 16, tx = tid % 16;
    load(0);
    for (int k0 = 0; k0 < k_all; k0 += STEP) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = tid / STEP + i * 16;
            float v = k0 + kk < k_all ? activate(c.input_activation, x_next[i]) : 0.0f;
            xs[kk][r] = rounded(AS, v);
            ws[kk][r] = w_next[i];
        }
        __syncthreads();
        if (k0 + STEP < k_all) load(k0 + STEP);
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
        const int row = row_first + ty * 4 + i;
        if (row >= c.rows_out) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int n = channel_first + tx * 4 + j;
            if (n >= c.c_out) continue;
            const i64 at = (i64)row * c.c_out + n;
            float v = acc[i][j];
            if (c.bias) v = __fadd_rn(v, c.bias[n]);
            v = activate(c.activation, v);
            c.out[at] = c.residual ? __fadd_rn(c.residual[at], v) : v;
        }
    }
}

#define CONV1D(NAME, AS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        NAME(const float* x, const void* w, const float* bias, const float* residual, float* out, int rows_in,      \
             int rows_out, int c_in, int c_out, int taps, int stride, int dilation, int pad_left, int padding,      \
             int input_activation, int activation) {                                                                \
        conv1d<AS>(ClipConv{x, w, bias, residual, out, rows_in, rows_out, c_in, c_out, taps, stride, dilation,      \
                            pad_left, padding, input_activation, activation});                                      \
    }
CONV1D(conv1d_f32, AS_F32)
CONV1D(conv1d_bf16, AS_BF16)
CONV1D(conv1d_f16, AS_F16)

// ---------------------------------------------------------------------------------------------------------------
// Over time, per channel. A block takes 32 channels, a warp every 32nd row of them: lane c of warp w reduces rows w,
// w + 32, ... ascending, then warps ascending.

constexpr int TIME_WARPS = 32;

// The block's 32 partials of each channel, in order; everybody gets the result of their channel.
template <class Reduce>
__device__ __forceinline__ float over_time(float mine, float (&partial)[TIME_WARPS][32], Reduce reduce) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    partial[warp][lane] = mine;
    __syncthreads();
    float all = partial[0][lane];
    for (int i = 1; i < TIME_WARPS; ++i) all = reduce(all, partial[i][lane]);
    __syncthreads();
    return all;
}

extern "C" __global__ void __launch_bounds__(TIME_WARPS * 32)
    time_stats(const float* x, const float* weights, float* mean_out, float* std_out,
               int rows, int channels) {
    __shared__ float partial[TIME_WARPS][32];
    release_dependents();
    dependency_wait();
    const int warp = threadIdx.x / 32, channel = BLOCK_X * 32 + threadIdx.x % 32;
    const bool active = channel < channels;
    const float uniform = 1.0f / (float)rows;
    auto add = [](float a, float b) { return __fadd_rn(a, b); };
    float sum = 0.0f;
    if (active)
#pragma unroll 4
        for (int r = warp; r < rows; r += TIME_WARPS) {
            const i64 at = (i64)r * channels + channel;
            sum = __fmaf_rn(weights ? weights[at] : uniform, x[at], sum);
        }
    const float mean = over_time(sum, partial, add);
    if (active && warp == 0) mean_out[channel] = mean;
    if (!std_out) return;
    float variance = 0.0f;
    if (active)
#pragma unroll 4
        for (int r = warp; r < rows; r += TIME_WARPS) {
            const i64 at = (i64)r * channels + channel;
            const float d = __fsub_rn(x[at], mean);
            variance = __fmaf_rn(weights ? weights[at] : uniform, __fmul_rn(d, d), variance);
        }
    variance = over_time(variance, partial, add);
    if (active && warp == 0) std_out[channel] = sqrtf(fmaxf(variance, 1e-12f));
}

extern "C" __global__ void __launch_bounds__(TIME_WARPS * 32) time_softmax(float* x, int rows, int channels) {
    __shared__ float partial[TIME_WARPS][32];
    release_dependents();
    dependency_wait();
    const int warp = threadIdx.x / 32, channel = BLOCK_X * 32 + threadIdx.x % 32;
    const bool active = channel < channels;
    float most = -__int_as_float(0x7f800000);
    if (active)
#pragma unroll 4
        for (int r = warp; r < rows; r += TIME_WARPS) most = fmaxf(most, x[(i64)r * channels + channel]);
    most = over_time(most, partial, [](float a, float b) { return fmaxf(a, b); });
    float total = 0.0f;
    if (active)
        for (int r = warp; r < rows; r += TIME_WARPS) {
            float* at = x + (i64)r * channels + channel;
            const float e = expf(__fsub_rn(*at, most));
            *at = e;
            total = __fadd_rn(total, e);
        }
    total = over_time(total, partial, [](float a, float b) { return __fadd_rn(a, b); });
    const float inverse = 1.0f / total;
    if (active)
        for (int r = warp; r < rows; r += TIME_WARPS) {
            float* at = x + (i64)r * channels + channel;
            *at = __fmul_rn(*at, inverse);
        }
}

// ---------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(256)
    channel_scale(const float* x, const float* scale, const float* add, float* out, int rows, int channels) {
    release_dependents();
    dependency_wait();
    const i64 at = (i64)BLOCK_X * 256 + threadIdx.x;
    if (at >= (i64)rows * channels) return;
    const float v = __fmul_rn(x[at], scale[at % channels]);
    out[at] = add ? __fadd_rn(v, add[at]) : v;
}

// ---------------------------------------------------------------------------------------------------------------
// Nearest entry of a codebook. A block takes four rows; sixteen lanes take an entry, lane l its elements l, l + 16, ...
// ascending, and are then added by halves: the order that the CPU device has, because it decides between entries
// that are as near.

constexpr int NEAREST_ROWS = 4;

extern "C" __global__ void __launch_bounds__(256)
    nearest_code(float* x, const float* book, int* codes, int rows, int width, int entries,
                 int code_stride, int code_offset, int codes_len) {
    extern __shared__ float nearest_shared[];  // the rows
    __shared__ float distances[16][NEAREST_ROWS];
    __shared__ int ids[16][NEAREST_ROWS];
    __shared__ int chosen[NEAREST_ROWS];
    release_dependents();
    dependency_wait();
    const int tid = threadIdx.x, group = tid / 16, lane = tid % 16;
    const int first = BLOCK_X * NEAREST_ROWS, n_rows = min(NEAREST_ROWS, rows - first);
    for (int i = tid; i < NEAREST_ROWS * width; i += 256)
        nearest_shared[i] = i < n_rows * width ? x[(i64)first * width + i] : 0.0f;
    __syncthreads();

    float nearest[NEAREST_ROWS];
    int best[NEAREST_ROWS];
#pragma unroll
    for (int r = 0; r < NEAREST_ROWS; ++r) {
        nearest[r] = __int_as_float(0x7f800000);
        best[r] = 0;
    }
    // Both halves of a warp go round as often, so that shuffles have all lanes.
    for (int base = 0; base < entries; base += 16) {
        const int entry = base + group;
        const float* e = book + (i64)min(entry, entries - 1) * width;
        float sum[NEAREST_ROWS] = {};
#pragma unroll 8
        for (int c = lane; c < width; c += 16) {
            const float value = e[c];
#pragma unroll
            for (int r = 0; r < NEAREST_ROWS; ++r) {
                const float d = __fsub_rn(nearest_shared[r * width + c], value);
                sum[r] = __fmaf_rn(d, d, sum[r]);
            }
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < NEAREST_ROWS; ++r) {
#pragma unroll
            for (int half = 8; half > 0; half /= 2)
                sum[r] = __fadd_rn(sum[r], __shfl_xor_sync(0xffffffffu, sum[r], half));
            if (entry < entries && sum[r] < nearest[r]) {
                nearest[r] = sum[r];
                best[r] = entry;
            }
        }
    }
    if (lane == 0) {
#pragma unroll
        for (int r = 0; r < NEAREST_ROWS; ++r) {
            distances[group][r] = nearest[r];
            ids[group][r] = best[r];
        }
    }
    __syncthreads();
    if (tid < n_rows) {
        float distance = distances[0][tid];
        int id = ids[0][tid];
        for (int g = 1; g < 16; ++g)
            if (distances[g][tid] < distance || (distances[g][tid] == distance && ids[g][tid] < id)) {
                distance = distances[g][tid];
                id = ids[g][tid];
            }
        chosen[tid] = id;
        const i64 at = (i64)(first + tid) * code_stride + code_offset;
        if (at < codes_len) codes[at] = id;
    }
    __syncthreads();
    for (int i = tid; i < n_rows * width; i += 256)
        x[(i64)first * width + i] =
            __fsub_rn(nearest_shared[i], book[(i64)chosen[i / width] * width + i % width]);
}
