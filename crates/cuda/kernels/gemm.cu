// Products with a weight matrix: out[rows, n] = epilogue(x[rows, k] . w[n, k]^T).
//
// bf16 weights lie in tiles of 16x16 in the order of mma.m16n8k16's A fragments (see pack_bf16), so a warp
// streams a tile from memory into registers with one 16-byte load a lane and no shared memory. Outputs of the
// matrix are the rows of the mma, batch rows its columns.
//
// One reduction order for every kernel here: the k tiles are cut into 8 segments of consecutive tiles (by k alone);
// each is accumulated by the tensor cores in ascending order from zero; the eight sums are added as a
// balanced tree ((0+1)+(2+3))+((4+5)+(6+7)). Few rows: one warp a segment. Many rows: the segments of a block in
// turn, the tree's upper levels across the blocks of a cluster. The number of rows decides nothing else.

constexpr int SEGMENTS = 8;

__device__ __forceinline__ int segment_begin(int segment, int k_tiles) { return segment * k_tiles / SEGMENTS; }

struct Epilogue {
    const float* bias;
    const float* scale;
    float* out;
    int n;
    int activation;
    int accumulate;
};

__device__ __forceinline__ void store_output(const Epilogue& e, int row, int column, float v) {
    if (e.bias) v = __fadd_rn(v, e.bias[column]);
    v = activate(e.activation, v);
    if (e.scale) v = __fmul_rn(v, e.scale[column]);
    float* out = e.out + (i64)row * e.n + column;
    *out = e.accumulate ? __fadd_rn(*out, v) : v;
}

__device__ __forceinline__ float gate(float g, float up) { return __fmul_rn(activate(ACT_SILU, g), up); }

// 1 / sqrt(mean(x^2) + eps) of a row, by one warp: lane l takes every 32nd group of four elements.
__device__ __forceinline__ float warp_inverse_rms(const float* x, int width, float eps) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = (int)(threadIdx.x % 32) * 4; i < width; i += 128) {
        float4 v = *(const float4*)(x + i);
        sum[0] = fmaf(v.x, v.x, sum[0]);
        sum[1] = fmaf(v.y, v.y, sum[1]);
        sum[2] = fmaf(v.z, v.z, sum[2]);
        sum[3] = fmaf(v.w, v.w, sum[3]);
    }
    return 1.0f / sqrtf(warp_sum(__fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]))) / (float)width + eps);
}

__device__ __forceinline__ uint4 load_tile(const uint4* tile) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(tile));
    return v;
}

__device__ __forceinline__ void mma_tile(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
    const u32 fragment[4] = {a.x, a.y, a.z, a.w};
    const u32 columns[2] = {b0, b1};
    mma_bf16(d, fragment, columns);
}

// ---------------------------------------------------------------------------------------------------------------
// At most 8 rows: a block of 8 warps makes NT tiles of 16 outputs; warp s accumulates segment s. Weights are
// asked for before the wait for the kernel ahead: they do not depend on it.

template <int NT, int UNROLL, bool NORM, bool GATED>
__device__ __forceinline__ void gemm_few_body(const float* x, const uint4* w, int n, int k, int rows,
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
            float inv = warp_inverse_rms(x + (i64)warp * k, k, eps);
            if (lane == 0) inverse[warp] = inv;
        }
        __syncthreads();
    }
    const int column = lane / 4, offset = (lane % 4) * 2;
    const bool active = column < rows;
    const float* row = x + (i64)(active ? column : 0) * k + offset;
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
            b[u][0] = pack_bf16(low.x, low.y);
            b[u][1] = pack_bf16(high.x, high.y);
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
                for (int t = 0; t < NT; t++) mma_tile(acc[t], a[u][t], b[u][0], b[u][1]);
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
        if (threadIdx.x < 128) store_output(e, batch, BLOCK_X * 16 + i % 16, gate(total(0, i), total(NT - 1, i)));
    } else {
        for (int t = threadIdx.x / 128; t < NT; t += 2) {
            int output = (BLOCK_X * NT + t) * 16 + i % 16;
            if (output < n) store_output(e, batch, output, total(t, i));
        }
    }
}

#define GEMM_FEW(NAME, NT, UNROLL, NORM, GATED)                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                            \
        NAME(const float* x, const uint4* w, int n, int k, int rows, const float* norm_weight, float eps,           \
             const float* bias, const float* scale, float* out, int activation, int accumulate) {                   \
        Epilogue e = {bias, scale, out, GATED ? n / 2 : n, activation, accumulate};                                 \
        gemm_few_body<NT, UNROLL, NORM, GATED>(x, w, n, k, rows, norm_weight, eps, e);                              \
    }
GEMM_FEW(gemm_few, 1, 8, false, false)
GEMM_FEW(gemm_few_norm, 1, 8, true, false)
GEMM_FEW(gemm_few_gated, 2, 4, false, true)
GEMM_FEW(gemm_few_gated_norm, 2, 4, true, true)

// ---------------------------------------------------------------------------------------------------------------
// More rows: a block of 8 warps makes 128 outputs (64 gates and their 64 ups when gated) for COLS batch rows; its
// warps share the activations, staged as bf16. The 8 segments are spread over the SPLIT blocks of a cluster.

constexpr int CHUNK_TILES = 4;                      // k tiles staged at a time
constexpr int CHUNK = CHUNK_TILES * 16;             // 64
constexpr int PITCH = CHUNK + 8;                    // bf16; an odd multiple of 16 bytes: ldmatrix has no conflicts
constexpr int BLOCK_OUTPUTS = 128;
constexpr int PARTIAL_PITCH = BLOCK_OUTPUTS + 4;    // floats

__device__ __forceinline__ void load_matrices(u32 (&r)[4], const bf16_t* address) {
    u32 shared = (u32)__cvta_generic_to_shared(address);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared));
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float cluster_load(const float* mine, int rank) {
    u32 local = (u32)__cvta_generic_to_shared(mine), remote;
    float v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote) : "memory");
    return v;
}
#endif

// Where in the matrix the k tiles of a block's segments lie, chunk by chunk.
struct Chunks {
    int k_tiles, segment, last_segment, tile, end;
    __device__ __forceinline__ Chunks(int k_tiles, int first, int count)
        : k_tiles(k_tiles), segment(first), last_segment(first + count) {
        tile = segment_begin(segment, k_tiles);
        end = segment_begin(segment + 1, k_tiles);
        skip_empty();
    }
    __device__ __forceinline__ void skip_empty() {
        while (tile == end && segment + 1 < last_segment) next_segment();
    }
    __device__ __forceinline__ void next_segment() {
        segment++;
        tile = end;
        end = segment_begin(segment + 1, k_tiles);
    }
    __device__ __forceinline__ bool done() const { return tile == end; }
    __device__ __forceinline__ int count() const { return min(CHUNK_TILES, end - tile); }
    __device__ __forceinline__ void advance() {
        tile += count();
        skip_empty();
    }
};

template <int COLS, int SPLIT>
__device__ __forceinline__ void gemm_many_body(const void* x, int x_bf16, const uint4* w, int n, int k, int rows,
                                               int gated, Epilogue e) {
#if __CUDA_ARCH__ >= 900
    constexpr int BLOCKS = SPLIT;
#else
    // No clusters: the first block of each group does it all, in the same order.
    constexpr int BLOCKS = 1;
    if (BLOCK_X % SPLIT != 0) return;
#endif
    constexpr int MINE = SEGMENTS / BLOCKS;
    constexpr int TILES = COLS / 8;
    constexpr int STAGED = COLS * PITCH;  // bf16 a buffer
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    bf16_t* staged = (bf16_t*)dynamic_shared;
    float* partial = (float*)dynamic_shared;  // after the last product

    const int part = BLOCK_X % SPLIT, block = BLOCK_X / SPLIT, first_row = BLOCK_Y * COLS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int k_tiles = k / 16, n_tiles = (n + 15) / 16;
    int tile;
    if (gated) tile = warp < 4 ? block * 4 + warp : n_tiles / 2 + block * 4 + warp - 4;
    else tile = block * 8 + warp;
    const uint4* tiles = w + ((i64)min(tile, n_tiles - 1) * k_tiles) * 32 + lane;

    Chunks load(k_tiles, (BLOCKS == 1 ? 0 : part) * MINE, MINE), use = load;
    uint4 a[CHUNK_TILES];
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; i++)
        if (i < load.count()) a[i] = load_tile(tiles + (load.tile + i) * 32);

    release_dependents();
    dependency_wait();

    // Each thread stages 8 consecutive k of a row at a time; past the last row: zeros.
    constexpr int ITEMS = COLS * (CHUNK / 8);
    constexpr int PER_THREAD = (ITEMS + 255) / 256;
    uint4 fresh[PER_THREAD];
    auto fetch = [&](const Chunks& at) {
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            int item = j * 256 + threadIdx.x, column = item / (CHUNK / 8), group = item % (CHUNK / 8);
            fresh[j] = make_uint4(0, 0, 0, 0);
            if (item >= ITEMS || first_row + column >= rows || group * 8 >= at.count() * 16) continue;
            i64 element = (i64)(first_row + column) * k + at.tile * 16 + group * 8;
            if (x_bf16) {
                fresh[j] = *(const uint4*)((const bf16_t*)x + element);
            } else {
                float4 low = *(const float4*)((const float*)x + element);
                float4 high = *(const float4*)((const float*)x + element + 4);
                fresh[j] = make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y),
                                      pack_bf16(high.z, high.w));
            }
        }
    };
    auto put = [&](int buffer) {
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            int item = j * 256 + threadIdx.x, column = item / (CHUNK / 8), group = item % (CHUNK / 8);
            if (item < ITEMS) *(uint4*)(staged + buffer * STAGED + column * PITCH + group * 8) = fresh[j];
        }
    };

    float acc[TILES][4];
    // Sums that wait for their sibling, one level of the tree behind the other: [level][element][thread].
    float* sums = (float*)(staged + 2 * STAGED) + threadIdx.x;
    auto clear = [&]() {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[t][i] = 0.0f;
    };
    // The tree as a binary counter: a full level is added to what comes and carried on. `done` segments are in.
    int done = 0;
    auto carry = [&](int level) {
        // Left operand first: it holds the lower segments.
#pragma unroll
        for (int i = 0; i < TILES * 4; i++)
            acc[i / 4][i % 4] = sums[(level * TILES * 4 + i) * 256] + acc[i / 4][i % 4];
    };
    auto keep = [&](int level) {
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) sums[(level * TILES * 4 + i) * 256] = acc[i / 4][i % 4];
    };
    auto close_segment = [&]() {
        // After the last segment acc is the block's sum.
        if (MINE > 1) {
            int level = 0;
            while (done >> level & 1) carry(level++);
            if (done + 1 < MINE) keep(level);
        }
        done++;
        if (done < MINE) clear();
    };

    clear();
    int closed = (BLOCKS == 1 ? 0 : part) * MINE;  // segments before this one are in the sum
    int buffer = 0;
    if (!load.done()) {
        fetch(load);
        put(0);
        load.advance();
    }
    __syncthreads();
    while (!use.done()) {
        while (closed < use.segment) { close_segment(); closed++; }
        uint4 next[CHUNK_TILES];
        const bool more = !load.done();
        if (more) {
            fetch(load);
#pragma unroll
            for (int i = 0; i < CHUNK_TILES; i++)
                if (i < load.count()) next[i] = load_tile(tiles + (load.tile + i) * 32);
        }
        const bf16_t* rows_base = staged + buffer * STAGED + ((lane / 16) * 8 + lane % 8) * PITCH + ((lane / 8) % 2) * 8;
#pragma unroll
        for (int i = 0; i < CHUNK_TILES; i++) {
            if (i < use.count()) {
#pragma unroll
                for (int t = 0; t < TILES; t += 2) {
                    u32 b[4];
                    load_matrices(b, rows_base + t * 8 * PITCH + i * 16);
                    mma_tile(acc[t], a[i], b[0], b[1]);
                    mma_tile(acc[t + 1], a[i], b[2], b[3]);
                }
            }
        }
        if (more) {
            put(buffer ^ 1);
            load.advance();
#pragma unroll
            for (int i = 0; i < CHUNK_TILES; i++) a[i] = next[i];
        }
        use.advance();
        buffer ^= 1;
        __syncthreads();
    }
    const int all = ((BLOCKS == 1 ? 0 : part) + 1) * MINE;
    while (closed < all) { close_segment(); closed++; }
    // The partial sums lie where other threads may still read what waits for its sibling.
    if (MINE > 1) __syncthreads();

    // [batch row][output]
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        int column = t * 8 + (lane % 4) * 2, output = warp * 16 + lane / 4;
        partial[column * PARTIAL_PITCH + output] = acc[t][0];
        partial[(column + 1) * PARTIAL_PITCH + output] = acc[t][1];
        partial[column * PARTIAL_PITCH + output + 8] = acc[t][2];
        partial[(column + 1) * PARTIAL_PITCH + output + 8] = acc[t][3];
    }
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) cluster_barrier();
    else __syncthreads();
#else
    __syncthreads();
#endif
    auto total = [&](int i) {
#if __CUDA_ARCH__ >= 900
        if (BLOCKS > 1) {
            float v[BLOCKS];
#pragma unroll
            for (int p = 0; p < BLOCKS; p++) {
#ifdef SHUFFLE_BLOCKS
                v[p] = cluster_load(partial + i, BLOCKS - 1 - p);
#else
                v[p] = cluster_load(partial + i, p);
#endif
            }
#pragma unroll
            for (int step = 1; step < BLOCKS; step *= 2)
#pragma unroll
                for (int p = 0; p < BLOCKS; p += 2 * step) v[p] = v[p] + v[p + step];
            return v[0];
        }
#endif
        return partial[i];
    };
    constexpr int MY_COLS = COLS / BLOCKS;
    const int first_column = (BLOCKS == 1 ? 0 : part) * MY_COLS;
    const int width = gated ? BLOCK_OUTPUTS / 2 : BLOCK_OUTPUTS;
    for (int j = threadIdx.x; j < MY_COLS * width; j += 256) {
        int column = first_column + j / width, i = j % width, output = block * width + i;
        if (first_row + column >= rows || output >= e.n) continue;
        float v = total(column * PARTIAL_PITCH + i);
        if (gated) v = gate(v, total(column * PARTIAL_PITCH + i + width));
        store_output(e, first_row + column, output, v);
    }
#if __CUDA_ARCH__ >= 900
    // Shared memory must live until the others have read it.
    if (BLOCKS > 1) cluster_barrier();
#endif
}

#define GEMM_MANY(COLS, SPLIT)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, SPLIT == 1 ? 1 : 2)                                           \
        gemm_many_##COLS##_##SPLIT(const void* x, int x_bf16, const uint4* w, int n, int k, int rows, int gated,    \
                                   const float* bias, const float* scale, float* out, int activation,               \
                                   int accumulate) {                                                                \
        Epilogue e = {bias, scale, out, gated ? n / 2 : n, activation, accumulate};                                 \
        gemm_many_body<COLS, SPLIT>(x, x_bf16, w, n, k, rows, gated, e);                                            \
    }
GEMM_MANY(16, 1)
GEMM_MANY(16, 2)
GEMM_MANY(16, 4)
GEMM_MANY(16, 8)
GEMM_MANY(32, 1)
GEMM_MANY(32, 2)
GEMM_MANY(32, 4)
GEMM_MANY(32, 8)
GEMM_MANY(64, 1)
GEMM_MANY(64, 2)
GEMM_MANY(64, 4)
GEMM_MANY(64, 8)

// RMS norm to bf16, a warp a row: the input of a product with many rows. The same values that gemm_few_norm makes.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_bf16(const float* x, const float* weight, float eps, bf16_t* out, int rows, int width) {
    release_dependents();
    dependency_wait();
    const int row = BLOCK_X * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float* in = x + (i64)row * width;
    const float inv = warp_inverse_rms(in, width, eps);
    for (int i = lane * 2; i < width; i += 64) {
        float2 v = *(const float2*)(in + i), w = *(const float2*)(weight + i);
        *(u32*)(out + (i64)row * width + i) =
            pack_bf16(normalized(v.x, inv, w.x), normalized(v.y, inv, w.y));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Any shape, f32 or tiled bf16 weights: k ascending, one fused multiply-add each. The f32 mode, and odd shapes.

__device__ __forceinline__ float tiled_weight(const bf16_t* w, int k_tiles, int n, int k) {
    int r = n % 16, c = k % 16, lane = (r % 8) * 4 + (c % 8) / 2;
    int slot = (c / 8) * 4 + (r / 8) * 2 + c % 2;
    return bf16_to_float(w[((i64)(n / 16) * k_tiles + k / 16) * 256 + lane * 8 + slot]);
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_any(const float* x, const void* w, int w_bf16, int n, int k, int rows, const float* bias, const float* scale,
             float* out, int activation, int accumulate) {
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
                v = w_bf16 ? tiled_weight((const bf16_t*)w, k_tiles, n0 + o, k0 + c)
                           : ((const float*)w)[(i64)(n0 + o) * k + k0 + c];
            weights[c][o] = v;
        }
        for (int i = threadIdx.x; i < R * K; i += 256) {
            int r = i / K, c = i % K;
            float v = r0 + r < rows && k0 + c < k ? x[(i64)(r0 + r) * k + k0 + c] : 0.0f;
            inputs[r][c] = w_bf16 ? low_bf16(pack_bf16(v, 0.0f)) : v;
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
    Epilogue e = {bias, scale, out, n, activation, accumulate};
    if (n0 + column >= n) return;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int row = r0 + quarter * 4 + j;
        if (row < rows) store_output(e, row, n0 + column, acc[j]);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Packing, once at load: one thread an element of the destination.

// Tiles of 16x16 in fragment order, n and k padded with zeros: lane l of tile (nt, kt) owns 8 consecutive
// elements: rows l/4 and l/4+8, columns 2(l%4), +1, and those 8 further, as mma.m16n8k16 wants its A operand.
extern "C" __global__ void pack_bf16(const void* src, int src_f32, int n, int k, bf16_t* dst) {
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
        v = src_f32 ? (bf16_t)pack_bf16(((const float*)src)[from], 0.0f) : ((const bf16_t*)src)[from];
    }
    dst[i] = v;
}

extern "C" __global__ void pack_f32(const void* src, int src_bf16, int n, int k, float* dst) {
    dependency_wait();
    const i64 i = (i64)BLOCK_X * 256 + threadIdx.x;
    if (i >= (i64)n * k) return;
    dst[i] = src_bf16 ? bf16_to_float(((const bf16_t*)src)[i]) : ((const float*)src)[i];
}
