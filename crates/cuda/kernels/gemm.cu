// Products of at most 8 rows, of odd shapes, and the packing of weights. product.cuh stands in front of it.

// ---------------------------------------------------------------------------------------------------------------
// At most 8 rows: a block of 8 warps makes NT tiles of 16 outputs; warp s accumulates segment s. Weights are
// asked for before the wait for the kernel ahead: they do not depend on it. Where the rows are a part of KEPT_BLOCKED,
// `x` is their first element and `x_pitch` the rows of their block.

template <int NT, int UNROLL, bool NORM, bool GATED, bool F16>
__device__ __forceinline__ void gemm_few_body(const void* x, int x_kept, int x_pitch, const uint4* w, int n, int k, int rows,
                                              const float* norm_weight, float eps, Epilogue e) {
    __shared__ float partial[SEGMENTS][NT][128];
    __shared__ float inverse[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int k_tiles = k / 16, n_tiles = (n + 15) / 16;
    const int begin = segment_begin(warp, k_tiles), end = segment_begin(warp + 1, k_tiles);

    const uint4* tiles[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        int tile = GATED ? BLOCK_X + t * (n_tiles / 2) : BLOCK_X * NT + t;
        tiles[t] = w + ((i64)min(tile, n_tiles - 1) * k_tiles) * 32 + lane;
    }
    uint4 a[UNROLL][NT];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int t = 0; t < NT; t++)
            if (begin + u < end) a[u][t] = load_tile(tiles[t] + (begin + u) * 32);

    release_dependents();
    dependency_wait();

    if (NORM) {
        if (warp < rows) {
            float inv = warp_inverse_rms((const float*)x + (i64)warp * k, k, eps);
            if (lane == 0) inverse[warp] = inv;
        }
        __syncthreads();
    }
    const int column = lane / 4, offset = (lane % 4) * 2;
    const bool active = column < rows;
    const i64 row_begin = (i64)(active ? column : 0) * k + offset;
    const float* row = (const float*)x + row_begin;
    const bf16_t* narrow = (const bf16_t*)x + row_begin;
    const bf16_t* blocked = (const bf16_t*)x + (active ? column : 0) * 8 + offset;
    const float inv = NORM ? inverse[active ? column : 0] : 1.0f;

    float acc[NT][4];
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[t][i] = 0.0f;

    for (int kt = begin; kt < end; kt += UNROLL) {
        u32 b[UNROLL][2];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float2 low = make_float2(0.0f, 0.0f), high = low;
            if (!NORM && x_kept == KEPT_16) {
                const bool live = active && kt + u < end;
                b[u][0] = live ? *(const u32*)(narrow + (kt + u) * 16) : 0;
                b[u][1] = live ? *(const u32*)(narrow + (kt + u) * 16 + 8) : 0;
                continue;
            }
            if (!NORM && x_kept == KEPT_BLOCKED) {
                const bool live = active && kt + u < end;
                const bf16_t* eight = blocked + (i64)(kt + u) * 16 * x_pitch;
                b[u][0] = live ? *(const u32*)eight : 0;
                b[u][1] = live ? *(const u32*)(eight + 8 * x_pitch) : 0;
                continue;
            }
            if (active && kt + u < end) {
                low = *(const float2*)(row + (kt + u) * 16);
                high = *(const float2*)(row + (kt + u) * 16 + 8);
                if (NORM) {
                    float2 wl = *(const float2*)(norm_weight + offset + (kt + u) * 16);
                    float2 wh = *(const float2*)(norm_weight + offset + (kt + u) * 16 + 8);
                    low.x = normalized(low.x, inv, wl.x);
                    low.y = normalized(low.y, inv, wl.y);
                    high.x = normalized(high.x, inv, wh.x);
                    high.y = normalized(high.y, inv, wh.y);
                }
            }
            b[u][0] = pack_pair<F16>(low.x, low.y);
            b[u][1] = pack_pair<F16>(high.x, high.y);
        }
        uint4 next[UNROLL][NT];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int t = 0; t < NT; t++)
                if (kt + UNROLL + u < end) next[u][t] = load_tile(tiles[t] + (kt + UNROLL + u) * 32);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (kt + u < end)
#pragma unroll
                for (int t = 0; t < NT; t++) mma_tile<F16>(acc[t], a[u][t], b[u][0], b[u][1]);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int t = 0; t < NT; t++) a[u][t] = next[u][t];
    }

    // Lane l holds outputs l/4 and l/4+8 of batch rows 2(l%4) and 2(l%4)+1; laid out [batch row][output].
#pragma unroll
    for (int t = 0; t < NT; t++) {
        float* p = partial[warp][t];
        p[offset * 16 + lane / 4] = acc[t][0];
        p[(offset + 1) * 16 + lane / 4] = acc[t][1];
        p[offset * 16 + lane / 4 + 8] = acc[t][2];
        p[(offset + 1) * 16 + lane / 4 + 8] = acc[t][3];
    }
    __syncthreads();
    auto total = [&](int t, int i) {
        float s01 = partial[0][t][i] + partial[1][t][i], s23 = partial[2][t][i] + partial[3][t][i];
        float s45 = partial[4][t][i] + partial[5][t][i], s67 = partial[6][t][i] + partial[7][t][i];
        return (s01 + s23) + (s45 + s67);
    };
    const int i = threadIdx.x % 128, batch = i / 16;
    if (batch >= rows) return;
    if (GATED) {
        if (threadIdx.x < 128) store_output<F16>(e, batch, rows, BLOCK_X * 16 + i % 16, gate(total(0, i), total(NT - 1, i)));
    } else {
        for (int t = threadIdx.x / 128; t < NT; t += 2) {
            int output = (BLOCK_X * NT + t) * 16 + i % 16;
            if (output < n) store_output<F16>(e, batch, rows, output, total(t, i));
        }
    }
}

#define GEMM_FEW(NAME, NT, UNROLL, NORM, GATED, F16)                                                                \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                            \
        NAME(const void* x, int x_kept, int x_pitch, const uint4* w, int n, int k, int rows,                        \
             const float* norm_weight, float eps, const float* bias, const float* scale, void* out, int activation, int accumulate,           \
             int out_kept) {                                                                                        \
        Epilogue e = {bias, scale, out, GATED ? n / 2 : n, activation, accumulate, out_kept};                       \
        gemm_few_body<NT, UNROLL, NORM, GATED, F16>(x, x_kept, x_pitch, w, n, k, rows, norm_weight, eps, e);                 \
    }
GEMM_FEW(gemm_few_bf16, 1, 8, false, false, false)
GEMM_FEW(gemm_few_norm_bf16, 1, 8, true, false, false)
GEMM_FEW(gemm_few_gated_bf16, 2, 4, false, true, false)
GEMM_FEW(gemm_few_gated_norm_bf16, 2, 4, true, true, false)
GEMM_FEW(gemm_few_f16, 1, 8, false, false, true)
GEMM_FEW(gemm_few_norm_f16, 1, 8, true, false, true)
GEMM_FEW(gemm_few_gated_f16, 2, 4, false, true, true)
GEMM_FEW(gemm_few_gated_norm_f16, 2, 4, true, true, true)

// ---------------------------------------------------------------------------------------------------------------
// Any shape, f32 or tiled bf16 weights: k ascending, one fused multiply-add each. The f32 mode, and odd shapes.

enum { TYPE_F32 = 0, TYPE_BF16, TYPE_F16 };

__device__ __forceinline__ float widened(int type, bf16_t x) {
    return type == TYPE_F16 ? f16_to_float(x) : bf16_to_float(x);
}

__device__ __forceinline__ float rounded(int type, float x) {
    if (type == TYPE_F32) return x;
    return widened(type, (bf16_t)(type == TYPE_F16 ? pack_f16(x, 0.0f) : pack_bf16(x, 0.0f)));
}

__device__ __forceinline__ float tiled_weight(int type, const bf16_t* w, int k_tiles, int n, int k) {
    int r = n % 16, c = k % 16, lane = (r % 8) * 4 + (c % 8) / 2;
    int slot = (c / 8) * 4 + (r / 8) * 2 + c % 2;
    return widened(type, w[((i64)(n / 16) * k_tiles + k / 16) * 256 + lane * 8 + slot]);
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_any(const void* x, int x_kept, const void* w, int w_type, int n, int k, int rows, const float* bias,
             const float* scale, void* out, int activation, int accumulate, int out_kept) {
    constexpr int N = 64, R = 16, K = 32;
    __shared__ float weights[K][N + 1];
    __shared__ float inputs[R][K];
    release_dependents();
    dependency_wait();
    const int n0 = BLOCK_X * N, r0 = BLOCK_Y * R, k_tiles = (k + 15) / 16;
    const int column = threadIdx.x % N, quarter = threadIdx.x / N;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int k0 = 0; k0 < k; k0 += K) {
        for (int i = threadIdx.x; i < N * K; i += 256) {
            int o = i / K, c = i % K;
            float v = 0.0f;
            if (n0 + o < n && k0 + c < k)
                v = w_type != TYPE_F32 ? tiled_weight(w_type, (const bf16_t*)w, k_tiles, n0 + o, k0 + c)
                                       : ((const float*)w)[(i64)(n0 + o) * k + k0 + c];
            weights[c][o] = v;
        }
        for (int i = threadIdx.x; i < R * K; i += 256) {
            int r = i / K, c = i % K;
            float v = 0.0f;
            if (r0 + r < rows && k0 + c < k) {
                i64 at = kept_at(x_kept, r0 + r, rows, k0 + c, k);
                v = x_kept != KEPT_F32 ? widened(w_type, ((const bf16_t*)x)[at]) : ((const float*)x)[at];
            }
            inputs[r][c] = rounded(w_type, v);
        }
        __syncthreads();
        const int count = min(K, k - k0);
        for (int c = 0; c < count; c++) {
            float v = weights[c][column];
#pragma unroll
            for (int j = 0; j < 4; j++) acc[j] = fmaf(inputs[quarter * 4 + j][c], v, acc[j]);
        }
        __syncthreads();
    }
    Epilogue e = {bias, scale, out, n, activation, accumulate, out_kept};
    if (n0 + column >= n) return;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int row = r0 + quarter * 4 + j;
        if (row >= rows) continue;
        if (w_type == TYPE_F16) store_output<true>(e, row, rows, n0 + column, acc[j]);
        else store_output<false>(e, row, rows, n0 + column, acc[j]);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Packing, once at load: one thread an element of the destination.

// Tiles of 16x16 in fragment order, n and k padded with zeros: lane l of tile (nt, kt) owns 8 consecutive
// elements: rows l/4 and l/4+8, columns 2(l%4), +1, and those 8 further, as mma.m16n8k16 wants its A operand.
template <bool F16>
__device__ __forceinline__ void pack_tiles(const void* src, int src_f32, int n, int k, bf16_t* dst) {
    dependency_wait();
    const int k_tiles = (k + 15) / 16, n_tiles = (n + 15) / 16;
    const i64 i = (i64)BLOCK_X * 256 + threadIdx.x;
    if (i >= (i64)n_tiles * k_tiles * 256) return;
    const int slot = (int)(i % 8), lane = (int)(i / 8 % 32);
    const i64 tile = i / 256;
    const int row = (int)(tile / k_tiles) * 16 + lane / 4 + (slot / 2 % 2) * 8;
    const int column = (int)(tile % k_tiles) * 16 + (lane % 4) * 2 + slot % 2 + (slot / 4) * 8;
    bf16_t v = 0;
    if (row < n && column < k) {
        i64 from = (i64)row * k + column;
        v = src_f32 ? (bf16_t)pack_pair<F16>(((const float*)src)[from], 0.0f) : ((const bf16_t*)src)[from];
    }
    dst[i] = v;
}

extern "C" __global__ void pack_bf16(const void* src, int src_f32, int n, int k, bf16_t* dst) {
    pack_tiles<false>(src, src_f32, n, k, dst);
}

// From f32 alone.
extern "C" __global__ void pack_f16(const void* src, int src_f32, int n, int k, bf16_t* dst) {
    pack_tiles<true>(src, src_f32, n, k, dst);
}

extern "C" __global__ void pack_f32(const void* src, int src_bf16, int n, int k, float* dst) {
    dependency_wait();
    const i64 i = (i64)BLOCK_X * 256 + threadIdx.x;
    if (i >= (i64)n * k) return;
    dst[i] = src_bf16 ? bf16_to_float(((const bf16_t*)src)[i]) : ((const float*)src)[i];
}
