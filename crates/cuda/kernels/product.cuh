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

// The two 16-bit types of products: bf16, and f16 for weights that the checkpoint has in f32.
template <bool F16>
__device__ __forceinline__ void mma_tile(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
    const u32 fragment[4] = {a.x, a.y, a.z, a.w};
    const u32 columns[2] = {b0, b1};
    if (F16) mma_f16(d, fragment, columns);
    else mma_bf16(d, fragment, columns);
}

template <bool F16>
__device__ __forceinline__ u32 pack_pair(float low, float high) {
    return F16 ? pack_f16(low, high) : pack_bf16(low, high);
}

struct Epilogue {
    const float* bias;
    const float* scale;
    void* out;
    int n;
    int activation;
    int accumulate;
    int out_kept;

    // Where in `out` an output lies.
    __device__ __forceinline__ i64 at(int row, int rows, int column) const {
        return kept_at(out_kept, row, rows, column, n);
    }
};

template <bool F16>
__device__ __forceinline__ void store_output(const Epilogue& e, int row, int rows, int column, float v) {
    if (e.bias) v = __fadd_rn(v, e.bias[column]);
    v = activate(e.activation, v);
    if (e.scale) v = __fmul_rn(v, e.scale[column]);
    const i64 at = e.at(row, rows, column);
    if (e.out_kept != KEPT_F32) {
        ((bf16_t*)e.out)[at] = (bf16_t)pack_pair<F16>(v, 0.0f);
        return;
    }
    float* out = (float*)e.out + at;
    *out = e.accumulate ? __fadd_rn(*out, v) : v;
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// As store_output, four outputs of a row from a multiple of four on; `before` is what an f32 output held. What it holds
// now, where it is f32.
template <bool F16>
__device__ __forceinline__ float4 store_four(const Epilogue& e, int row, int rows, int column, float4 v, float4 before) {
    if (e.bias) v = add4(v, *(const float4*)(e.bias + column));
    if (e.activation)
        v = make_float4(activate(e.activation, v.x), activate(e.activation, v.y), activate(e.activation, v.z),
                        activate(e.activation, v.w));
    if (e.scale) {
        const float4 scale = *(const float4*)(e.scale + column);
        v = make_float4(__fmul_rn(v.x, scale.x), __fmul_rn(v.y, scale.y), __fmul_rn(v.z, scale.z),
                        __fmul_rn(v.w, scale.w));
    }
    const i64 at = e.at(row, rows, column);
    if (e.out_kept == KEPT_F32) {
        if (e.accumulate) v = add4(before, v);
        *(float4*)((float*)e.out + at) = v;
        return v;
    }
    *(uint2*)((bf16_t*)e.out + at) = make_uint2(pack_pair<F16>(v.x, v.y), pack_pair<F16>(v.z, v.w));
    return v;
}

// A norm in front of a product, split in two: whatever makes the row leaves x * weight, rounded, in blocks of rows, and
// for each SQUARES columns the sum of their squares; the product divides its sums by the root of the mean square. The sum
// is one balanced tree: the four of a float4, the 16 of those of a part, the parts.
constexpr int SQUARES = 64;       // columns of a part, held by 16 lanes
constexpr int MOST_SQUARES = 32;  // parts of a row

struct Normed {
    const float* squares;  // [rows, k / SQUARES]; null: x is not normed
    float eps;
};

struct Next {
    const float* weight;  // [n]; null: no norm is next
    bf16_t* x;            // KEPT_BLOCKED
    float* squares;       // [rows, n / SQUARES]
};

__device__ __forceinline__ float4 scaled4(float4 v, float by) {
    return make_float4(__fmul_rn(v.x, by), __fmul_rn(v.y, by), __fmul_rn(v.z, by), __fmul_rn(v.w, by));
}

__device__ __forceinline__ float4 times4(float4 v, float4 by) {
    return make_float4(__fmul_rn(v.x, by.x), __fmul_rn(v.y, by.y), __fmul_rn(v.z, by.z), __fmul_rn(v.w, by.w));
}

// The sum of the squares of 64 columns, four in each of 16 neighbouring lanes; in all of them.
__device__ __forceinline__ float part_squares(float4 v) {
    float sum = __fadd_rn(__fadd_rn(__fmul_rn(v.x, v.x), __fmul_rn(v.y, v.y)),
                          __fadd_rn(__fmul_rn(v.z, v.z), __fmul_rn(v.w, v.w)));
    const u32 sixteen = 0xffffu << (threadIdx.x & 16);
#pragma unroll
    for (int offset = 1; offset < 16; offset <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(sixteen, sum, offset));
    return sum;
}

__device__ __forceinline__ float inverse_rms(float squares, int width, float eps) {
    return 1.0f / sqrtf(__fadd_rn(squares / (float)width, eps));
}

// The lane's part of a row's sum of squares: warp_sum adds them as the tree does.
__device__ __forceinline__ float square_part(const Normed& normed, int row, int width) {
    const int parts = width / SQUARES, part = threadIdx.x % 32;
    return part < parts ? normed.squares[(i64)row * parts + part] : 0.0f;
}

// Four values of a row, by 16 neighbouring lanes with the 64 columns of a part.
template <bool F16>
__device__ __forceinline__ void leave_for_next(const Next& next, int row, int rows, int column, int width, float4 v) {
    const float4 x = times4(v, *(const float4*)(next.weight + column));
    *(uint2*)(next.x + kept_at(KEPT_BLOCKED, row, rows, column, width)) =
        make_uint2(pack_pair<F16>(x.x, x.y), pack_pair<F16>(x.z, x.w));
    const float sum = part_squares(v);
    if ((threadIdx.x & 15) == 0) next.squares[(i64)row * (width / SQUARES) + column / SQUARES] = sum;
}

__device__ __forceinline__ float gate(float g, float up) { return __fmul_rn(activate(ACT_SILU, g), up); }

// The sum of squares of a row, by one warp: lane l takes every 32nd group of four elements, ascending.
struct Squares {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    __device__ __forceinline__ void add(float4 v) {
        sum[0] = fmaf(v.x, v.x, sum[0]);
        sum[1] = fmaf(v.y, v.y, sum[1]);
        sum[2] = fmaf(v.z, v.z, sum[2]);
        sum[3] = fmaf(v.w, v.w, sum[3]);
    }
    // 1 / sqrt(mean + eps), in every lane.
    __device__ __forceinline__ float inverse_rms(int width, float eps) const {
        float all = warp_sum(__fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3])));
        return 1.0f / sqrtf(all / (float)width + eps);
    }
};

constexpr int ROW_LOADS = 16;  // of a lane at once, where the row is kept: 2048 elements
constexpr int SUM_LOADS = 4;   // where it is not

__device__ __forceinline__ float warp_inverse_rms(const float* x, int width, float eps) {
    Squares squares;
    for (int first = (int)(threadIdx.x % 32) * 4; first < width; first += 128 * SUM_LOADS) {
        float4 v[SUM_LOADS];
#pragma unroll
        for (int j = 0; j < SUM_LOADS; j++)
            if (first + j * 128 < width) v[j] = *(const float4*)(x + first + j * 128);
#pragma unroll
        for (int j = 0; j < SUM_LOADS; j++)
            if (first + j * 128 < width) squares.add(v[j]);
    }
    return squares.inverse_rms(width, eps);
}

__device__ __forceinline__ uint4 load_tile(const uint4* tile) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(tile));
    return v;
}
