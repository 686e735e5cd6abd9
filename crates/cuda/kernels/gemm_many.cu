// Products of many rows, and what stands between them. product.cuh and block.cuh stand in front of it.

// ---------------------------------------------------------------------------------------------------------------
// More rows: a block of 8 warps makes 128 outputs (64 gates and their 64 ups when gated) for COLS batch rows; its
// warps share the activations, staged as bf16. The 8 segments are spread over the SPLIT blocks of a cluster.

constexpr int CHUNK_TILES = 4;                      // k tiles staged at a time
constexpr int CHUNK = CHUNK_TILES * 16;             // 64
constexpr int PITCH = CHUNK + 8;                    // bf16; an odd multiple of 16 bytes: ldmatrix has no conflicts
constexpr int BLOCK_OUTPUTS = 128;
constexpr int PARTIAL_PITCH = BLOCK_OUTPUTS + 4;    // floats

__device__ __forceinline__ void load_matrices_at(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared));
}

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

template <int COLS, int SPLIT, bool F16, bool EVEN>
__device__ __forceinline__ void gemm_many_body(const void* x, int x_kept, const uint4* w, int n, int k, int rows,
                                               int gated, Epilogue e) {
#if __CUDA_ARCH__ >= 900
    constexpr int BLOCKS = SPLIT;
#else
    // No clusters: the first block of each group does it all, in the same order.
    constexpr int BLOCKS = 1;
    if (BLOCK_X % SPLIT != 0) return;
#endif
    constexpr int MINE = SEGMENTS / BLOCKS, LEVELS = MINE == 8 ? 3 : MINE == 4 ? 2 : MINE == 2 ? 1 : 0;
    constexpr int TILES = COLS / 8;
    constexpr int STAGES = LEVELS > 0 ? 3 : 4;  // chunks on their way or in use: two blocks fit a multiprocessor
    constexpr int STAGE_WEIGHTS = 8 * CHUNK_TILES * 32;  // uint4
    constexpr int STAGE_INPUTS = COLS * PITCH;           // 16-bit
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    uint4* const staged_weights = (uint4*)dynamic_shared;
    bf16_t* const staged_inputs = (bf16_t*)(staged_weights + STAGES * STAGE_WEIGHTS);
    float* const waiting = (float*)(staged_inputs + STAGES * STAGE_INPUTS) + threadIdx.x;
    float* const partial = (float*)dynamic_shared;  // after the last product

    const int part = BLOCKS == 1 ? 0 : BLOCK_X % SPLIT, block = BLOCK_X / SPLIT, first_row = BLOCK_Y * COLS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int k_tiles = k / 16, n_tiles = (n + 15) / 16;
    int tile;
    if (gated) tile = warp < 4 ? block * 4 + warp : n_tiles / 2 + block * 4 + warp - 4;
    else tile = block * 8 + warp;
    const uint4* const tiles = w + ((i64)min(tile, n_tiles - 1) * k_tiles) * 32 + lane;

    // Weights of a warp's own 16 outputs: nobody else reads what a lane stages here but the lane itself.
    auto stage_weights = [&](int stage, const Chunks& at) {
        uint4* to = staged_weights + stage * STAGE_WEIGHTS + warp * CHUNK_TILES * 32 + lane;
#pragma unroll
        for (int i = 0; i < CHUNK_TILES; i++)
            if (i < at.count()) copy_async(to + i * 32, tiles + (at.tile + i) * 32, 16);
    };
    constexpr int ITEMS = COLS * (CHUNK / 8), PER_THREAD = (ITEMS + 255) / 256;
    auto stage_inputs = [&](int stage, const Chunks& at) {
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const int item = j * 256 + threadIdx.x, column = item / (CHUNK / 8), group = item % (CHUNK / 8);
            if (item >= ITEMS || group * 8 >= at.count() * 16) continue;
            const bool live = first_row + column < rows;
            const i64 element = kept_at(x_kept, live ? first_row + column : 0, rows, at.tile * 16 + group * 8, k);
            bf16_t* to = staged_inputs + stage * STAGE_INPUTS + column * PITCH + group * 8;
            if (x_kept != KEPT_F32) {
                copy_async(to, (const bf16_t*)x + element, live ? 16 : 0);
            } else {
                float4 low = {}, high = {};
                if (live) {
                    low = *(const float4*)((const float*)x + element);
                    high = *(const float4*)((const float*)x + element + 4);
                }
                *(uint4*)to = make_uint4(pack_pair<F16>(low.x, low.y), pack_pair<F16>(low.z, low.w),
                                         pack_pair<F16>(high.x, high.y), pack_pair<F16>(high.z, high.w));
            }
        }
    };

    // Even: every segment is a whole number of chunks, so that one follows the other with nothing to decide.
    const int chunks_each = k_tiles / (SEGMENTS * CHUNK_TILES), chunks = MINE * chunks_each;
    const uint4* next_weights = tiles + part * MINE * chunks_each * CHUNK_TILES * 32;
    const u32 weights_to = shared_address(staged_weights + warp * CHUNK_TILES * 32 + lane);
    auto stage_even_weights = [&](int stage) {
#pragma unroll
        for (int i = 0; i < CHUNK_TILES; i++)
            copy_async_to(weights_to + (stage * STAGE_WEIGHTS + i * 32) * 16, next_weights + i * 32, 16);
        next_weights += CHUNK_TILES * 32;
    };
    const unsigned char* next_inputs[PER_THREAD];
    u32 inputs_to[PER_THREAD];
    int inputs_bytes[PER_THREAD];  // 0: a row past the last, zeros; negative: not this thread's
    // Rows of a block of the grid are of one block of rows.
    const int inputs_step =
        CHUNK * (x_kept == KEPT_F32 ? 4 : x_kept == KEPT_16 ? 2 : 2 * block_rows(first_row, rows));
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        const int item = j * 256 + threadIdx.x, column = item / (CHUNK / 8), group = item % (CHUNK / 8);
        const bool live = first_row + column < rows;
        const i64 element = kept_at(x_kept, live ? first_row + column : first_row, rows,
                                    part * MINE * chunks_each * CHUNK + group * 8, k);
        next_inputs[j] = (const unsigned char*)x + element * (x_kept == KEPT_F32 ? 4 : 2);
        inputs_to[j] = shared_address(staged_inputs + column * PITCH + group * 8);
        inputs_bytes[j] = item < ITEMS ? (live ? 16 : 0) : -1;
    }
    auto stage_even_inputs = [&](int stage) {
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            if (inputs_bytes[j] < 0) continue;
            const u32 to = inputs_to[j] + stage * STAGE_INPUTS * 2;
            if (x_kept != KEPT_F32) {
                copy_async_to(to, next_inputs[j], inputs_bytes[j]);
                next_inputs[j] += inputs_step;
                continue;
            }
            float4 low = {}, high = {};
            if (inputs_bytes[j] > 0) {
                low = *(const float4*)next_inputs[j];
                high = *(const float4*)(next_inputs[j] + 16);
            }
            store_shared(to, make_uint4(pack_pair<F16>(low.x, low.y), pack_pair<F16>(low.z, low.w),
                                        pack_pair<F16>(high.x, high.y), pack_pair<F16>(high.z, high.w)));
            next_inputs[j] += inputs_step;
        }
    };

    Chunks use(k_tiles, part * MINE, MINE), load = use;
    int loaded = 0;
    if (EVEN) {
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++)
            if (s < chunks) stage_even_weights(s);
    } else {
        Chunks ahead = use;
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++)
            if (!ahead.done()) {
                stage_weights(s, ahead);
                ahead.advance();
            }
    }
    dependency_wait();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (EVEN) {
            if (s < chunks) stage_even_inputs(s);
            loaded++;
        } else if (!load.done()) {
            stage_inputs(s, load);
            load.advance();
        }
        commit_copies();
    }

    float acc[TILES][4];
    auto clear = [&]() {
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) acc[i / 4][i % 4] = 0.0f;
    };
    // The tree of sums as a binary counter: a level that is taken is added to what comes, and carried on.
    int closed = 0;
    auto close_segments = [&](int until) {
        for (; closed < until; closed++) {
            int level = 0;
            for (; level < LEVELS && (closed >> level & 1); level++)
#pragma unroll
                for (int i = 0; i < TILES * 4; i++)
                    acc[i / 4][i % 4] = waiting[(level * TILES * 4 + i) * 256] + acc[i / 4][i % 4];
            if (closed + 1 == MINE) continue;
#pragma unroll
            for (int i = 0; i < TILES * 4; i++) waiting[(level * TILES * 4 + i) * 256] = acc[i / 4][i % 4];
            clear();
        }
    };

    clear();
    // The products of a staged chunk: fragments of a step are asked for while those of the step before run.
    const u32 a_from = weights_to;
    const u32 b_from = shared_address(staged_inputs + ((lane / 16) * 8 + lane % 8) * PITCH + ((lane / 8) % 2) * 8);
    auto multiply = [&](int stage, int count) {
        const u32 a_base = a_from + stage * STAGE_WEIGHTS * 16, b_base = b_from + stage * STAGE_INPUTS * 2;
        u32 b[2][TILES / 2][4];
        uint4 a[2];
        auto load_step = [&](int i) {
            a[i & 1] = load_shared(a_base + i * 32 * 16);
#pragma unroll
            for (int t = 0; t < TILES / 2; t++) load_matrices_at(b[i & 1][t], b_base + (t * 16 * PITCH + i * 16) * 2);
        };
        load_step(0);
#pragma unroll
        for (int i = 0; i < CHUNK_TILES; i++) {
            if (i < count) {
                if (i + 1 < CHUNK_TILES && i + 1 < count) load_step(i + 1);
#pragma unroll
                for (int t = 0; t < TILES / 2; t++) {
                    mma_tile<F16>(acc[2 * t], a[i & 1], b[i & 1][t][0], b[i & 1][t][1]);
                    mma_tile<F16>(acc[2 * t + 1], a[i & 1], b[i & 1][t][2], b[i & 1][t][3]);
                }
            }
        }
    };
    int stage = 0;
    if (EVEN) {
        int left = chunks_each;  // of the segment
        for (int chunk = 0; chunk < chunks; chunk++) {
            if (MINE > 1 && left == 0) {
                close_segments(closed + 1);
                left = chunks_each;
            }
            left--;
            wait_copies<STAGES - 2>();
            __syncthreads();
            // The stage that everybody left before this barrier.
            if (loaded < chunks) {
                const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
                stage_even_weights(free_stage);
                stage_even_inputs(free_stage);
            }
            loaded++;
            commit_copies();
            multiply(stage, CHUNK_TILES);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
    while (!EVEN && !use.done()) {
        close_segments(use.segment - part * MINE);
        wait_copies<STAGES - 2>();
        __syncthreads();
        if (!load.done()) {
            const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
            stage_weights(free_stage, load);
            stage_inputs(free_stage, load);
            load.advance();
        }
        commit_copies();
        multiply(stage, use.count());
        use.advance();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    // Not earlier: blocks of the kernel behind would take the room that clusters need to start together.
    release_dependents();
    close_segments(MINE);
    wait_copies<0>();
    __syncthreads();

    // [batch row][output]
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        int column = t * 8 + (lane % 4) * 2, output = warp * 16 + lane / 4;
        partial[column * PARTIAL_PITCH + output] = acc[t][0];
        partial[(column + 1) * PARTIAL_PITCH + output] = acc[t][1];
        partial[column * PARTIAL_PITCH + output + 8] = acc[t][2];
        partial[(column + 1) * PARTIAL_PITCH + output + 8] = acc[t][3];
    }
    finish_block<COLS, BLOCKS, BLOCK_OUTPUTS, 256, F16>(partial, part, block, first_row, rows, gated, e);
}

#define GEMM_MANY(NAME, COLS, SPLIT, F16, EVEN)                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                            \
        NAME(const void* x, int x_kept, const uint4* w, int n, int k, int rows, int gated, const float* bias,       \
             const float* scale, void* out, int activation, int accumulate, int out_kept) {                         \
        Epilogue e = {bias, scale, out, gated ? n / 2 : n, activation, accumulate, out_kept};                       \
        gemm_many_body<COLS, SPLIT, F16, EVEN>(x, x_kept, w, n, k, rows, gated, e);                                 \
    }
#define GEMM_MANY_TYPES(COLS, SPLIT)                              \
    GEMM_MANY(gemm_many_##COLS##_##SPLIT##_bf16, COLS, SPLIT, false, true) \
    GEMM_MANY(gemm_many_##COLS##_##SPLIT##_f16, COLS, SPLIT, true, true)
GEMM_MANY_TYPES(16, 1)
GEMM_MANY_TYPES(16, 4)
GEMM_MANY_TYPES(16, 8)
GEMM_MANY_TYPES(32, 1)
GEMM_MANY_TYPES(32, 4)
GEMM_MANY_TYPES(32, 8)
GEMM_MANY_TYPES(64, 4)
GEMM_MANY_TYPES(64, 8)
// k that is no multiple of 512: the quantizer's, and test models'.
GEMM_MANY(gemm_odd_1_bf16, 16, 1, false, false)
GEMM_MANY(gemm_odd_1_f16, 16, 1, true, false)
GEMM_MANY(gemm_odd_8_bf16, 32, 8, false, false)
GEMM_MANY(gemm_odd_8_f16, 32, 8, true, false)

// silu(x[..width]) * x[width..] to the type of the product behind it: for shapes that do not divide into tiles.
extern "C" __global__ void __launch_bounds__(256)
    silu_mul_narrow(const float* x, bf16_t* out, int rows, int width, int f16, int out_kept) {
    release_dependents();
    dependency_wait();
    const i64 i = (i64)BLOCK_X * 256 + threadIdx.x;
    if (i >= (i64)rows * width) return;
    const int row = (int)(i / width), column = (int)(i % width);
    const float* in = x + (i64)row * 2 * width + column;
    const float v = gate(in[0], in[width]);
    out[kept_at(out_kept, row, rows, column, width)] = (bf16_t)(f16 ? pack_f16(v, 0.0f) : pack_bf16(v, 0.0f));
}

// RMS norm to the type of the product behind it, a warp a row: the same values that gemm_few_norm makes.
template <bool F16>
__device__ __forceinline__ void rms_norm_narrow(const float* x, const float* weight, float eps, bf16_t* out, int rows,
                                                int width, int out_kept) {
    const int row = BLOCK_X * 2 + threadIdx.x / 32, begin = (int)(threadIdx.x % 32) * 4;
    // Weights do not depend on the kernel ahead.
    float4 w[ROW_LOADS], v[ROW_LOADS];
    const bool whole = width <= 128 * ROW_LOADS;
#pragma unroll
    for (int j = 0; j < ROW_LOADS; j++)
        if (whole && begin + j * 128 < width) w[j] = *(const float4*)(weight + begin + j * 128);
    release_dependents();
    dependency_wait();
    if (row >= rows) return;
    const float* in = x + (i64)row * width + begin;
    bf16_t* to = out + kept_at(out_kept, row, rows, begin, width);
    const int step = out_kept == KEPT_BLOCKED ? block_rows(row, rows) : 1;  // for a column, over multiples of eight
    auto narrow = [&](float4 v, float inv, float4 w) {
        return make_uint2(pack_pair<F16>(normalized(v.x, inv, w.x), normalized(v.y, inv, w.y)),
                          pack_pair<F16>(normalized(v.z, inv, w.z), normalized(v.w, inv, w.w)));
    };
    if (!whole) {
        const float inv = warp_inverse_rms(in - begin, width, eps);
        for (int i = 0; begin + i < width; i += 128)
            *(uint2*)(to + i * step) = narrow(*(const float4*)(in + i), inv, *(const float4*)(weight + begin + i));
        return;
    }
#pragma unroll
    for (int j = 0; j < ROW_LOADS; j++)
        if (begin + j * 128 < width) v[j] = *(const float4*)(in + j * 128);
    Squares squares;
#pragma unroll
    for (int j = 0; j < ROW_LOADS; j++)
        if (begin + j * 128 < width) squares.add(v[j]);
    const float inv = squares.inverse_rms(width, eps);
#pragma unroll
    for (int j = 0; j < ROW_LOADS; j++)
        if (begin + j * 128 < width) *(uint2*)(to + j * 128 * step) = narrow(v[j], inv, w[j]);
}

extern "C" __global__ void __launch_bounds__(64)
    rms_norm_bf16(const float* x, const float* weight, float eps, bf16_t* out, int rows, int width, int out_kept) {
    rms_norm_narrow<false>(x, weight, eps, out, rows, width, out_kept);
}

extern "C" __global__ void __launch_bounds__(64)
    rms_norm_f16(const float* x, const float* weight, float eps, bf16_t* out, int rows, int width, int out_kept) {
    rms_norm_narrow<true>(x, weight, eps, out, rows, width, out_kept);
}

// The part of a split norm (see product.cuh) of rows that no product leaves it for, a warp a row.
template <bool F16>
__device__ __forceinline__ void prepare_norm(const float* x, const Next& next, int rows, int width) {
    const int row = BLOCK_X * 2 + threadIdx.x / 32, begin = (int)(threadIdx.x % 32) * 4;
    constexpr int PAIRS = MOST_SQUARES / 2;
    release_dependents();
    dependency_wait();
    if (row >= rows) return;
    const float* in = x + (i64)row * width + begin;
    float4 v[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++)
        if (j * 2 * SQUARES < width) v[j] = *(const float4*)(in + j * 2 * SQUARES);
#pragma unroll
    for (int j = 0; j < PAIRS; j++)
        if (j * 2 * SQUARES < width) leave_for_next<F16>(next, row, rows, begin + j * 2 * SQUARES, width, v[j]);
}

extern "C" __global__ void __launch_bounds__(64)
    prepare_norm_bf16(const float* x, const float* weight, bf16_t* out, float* squares, int rows, int width) {
    prepare_norm<false>(x, Next{weight, out, squares}, rows, width);
}

extern "C" __global__ void __launch_bounds__(64)
    prepare_norm_f16(const float* x, const float* weight, bf16_t* out, float* squares, int rows, int width) {
    prepare_norm<true>(x, Next{weight, out, squares}, rows, width);
}
