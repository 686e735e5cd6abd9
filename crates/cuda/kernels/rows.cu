// Row-wise operations. Elementwise kernels have a form for four words at a time and one for single words, which
// give the same bits; norms have one form only.

constexpr int ROW_THREADS = 256;

extern "C" __global__ void __launch_bounds__(256) rms_norm(const float* x, int width, const float* weight, float eps,
                                                            float* out) {
    __shared__ float partial[ROW_THREADS / 32];
    release_dependents();
    dependency_wait();
    const i64 start = (i64)BLOCK_X * width;
    const float inverse = row_inverse_rms<ROW_THREADS>(x + start, width, eps, partial);
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) {
        out[start + i] = normalized(x[start + i], inverse, weight[i]);
    }
}

// Sum over the block: lanes by warp_sum, then warps ascending.
__device__ __forceinline__ float block_sum(float sum, float* partial) {
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = partial[0];
#pragma unroll
    for (int warp = 1; warp < ROW_THREADS / 32; ++warp) sum = __fadd_rn(sum, partial[warp]);
    __syncthreads();
    return sum;
}

extern "C" __global__ void __launch_bounds__(256) layer_norm(const float* x, int width, const float* weight,
                                                              const float* bias, float eps, float* out) {
    __shared__ float partial[ROW_THREADS / 32];
    release_dependents();
    dependency_wait();
    const i64 start = (i64)BLOCK_X * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) sum = __fadd_rn(sum, x[start + i]);
    const float mean = block_sum(sum, partial) / (float)width;
    // The variance of the centred row does not cancel.
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) {
        const float centred = __fsub_rn(x[start + i], mean);
        squares = fmaf(centred, centred, squares);
    }
    const float variance = block_sum(squares, partial) / (float)width;
    const float inverse = 1.0f / sqrtf(__fadd_rn(variance, eps));
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) {
        const float centred = __fsub_rn(x[start + i], mean);
        out[start + i] = fmaf(__fmul_rn(centred, inverse), weight[i], bias[i]);
    }
}

// Element `i` of all rows' outputs; `width` outputs a row.
template <int VEC>
__device__ __forceinline__ void silu_mul_body(const float* x, int width, i64 count, float* out) {
    release_dependents();
    dependency_wait();
    const i64 i = ((i64)BLOCK_X * ROW_THREADS + threadIdx.x) * VEC;
    if (i >= count) return;
    const i64 row = i / width;
    const float* gate = x + i + row * width;
    if constexpr (VEC == 4) {
        const float4 g = *(const float4*)gate;
        const float4 u = *(const float4*)(gate + width);
        float4 y;
        y.x = __fmul_rn(activate(ACT_SILU, g.x), u.x);
        y.y = __fmul_rn(activate(ACT_SILU, g.y), u.y);
        y.z = __fmul_rn(activate(ACT_SILU, g.z), u.z);
        y.w = __fmul_rn(activate(ACT_SILU, g.w), u.w);
        *(float4*)(out + i) = y;
    } else {
        out[i] = __fmul_rn(activate(ACT_SILU, gate[0]), gate[width]);
    }
}

extern "C" __global__ void __launch_bounds__(256) silu_mul(const float* x, int width, i64 count, float* out) {
    silu_mul_body<1>(x, width, count, out);
}

extern "C" __global__ void __launch_bounds__(256) silu_mul_4(const float* x, int width, i64 count, float* out) {
    silu_mul_body<4>(x, width, count, out);
}

// Tables of one launch. More tables, or tables of another type, take another launch that accumulates.
constexpr int TABLES = 16;

// Words of a table's row where `on`, else zeros. Volatile, so that the compiler leaves all loads of a thread in front
// of its sums: one latency instead of one for each table.
__device__ __forceinline__ void load_if(bool on, const void* at, u32 (&word)[4]) {
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
        "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(word[0]), "=&r"(word[1]), "=&r"(word[2]), "=&r"(word[3])
        : "l"(at), "r"((int)on));
}

__device__ __forceinline__ void load_if(bool on, const void* at, u32 (&word)[2]) {
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.v2.b32 {%0, %1}, [%2];}"
        : "=&r"(word[0]), "=&r"(word[1])
        : "l"(at), "r"((int)on));
}

// How a table's elements lie in words: `VEC` elements of one thread in `WORDS` words.
template <typename T, int VEC>
struct Row;

template <>
struct Row<float, 4> {
    static constexpr int WORDS = 4;
    static __device__ void load(bool on, const float* at, u32 (&word)[4]) { load_if(on, at, word); }
    static __device__ float value(const u32 (&word)[4], int e) { return __uint_as_float(word[e]); }
};

template <>
struct Row<bf16_t, 4> {
    static constexpr int WORDS = 2;
    static __device__ void load(bool on, const bf16_t* at, u32 (&word)[2]) { load_if(on, at, word); }
    static __device__ float value(const u32 (&word)[2], int e) {
        return e % 2 ? high_bf16(word[e / 2]) : low_bf16(word[e / 2]);
    }
};

template <>
struct Row<float, 1> {
    static constexpr int WORDS = 1;
    static __device__ void load(bool on, const float* at, u32 (&word)[1]) { word[0] = on ? __float_as_uint(*at) : 0; }
    static __device__ float value(const u32 (&word)[1], int) { return __uint_as_float(word[0]); }
};

template <>
struct Row<bf16_t, 1> {
    static constexpr int WORDS = 1;
    static __device__ void load(bool on, const bf16_t* at, u32 (&word)[1]) { word[0] = on ? *at : 0; }
    static __device__ float value(const u32 (&word)[1], int) { return low_bf16(word[0]); }
};

template <typename T, int VEC>
__device__ __forceinline__ void embed_body(const int* ids, int ids_stride, int first_id, int rows, int width,
                                           int accumulate, float* out, int groups, const void* const (&tables)[TABLES],
                                           const int (&entries)[TABLES]) {
    release_dependents();
    dependency_wait();
    const i64 i = ((i64)BLOCK_X * ROW_THREADS + threadIdx.x) * VEC;
    if (i >= (i64)rows * width) return;
    const i64 row = i / width;
    const int column = (int)(i - row * width);
    const int* row_ids = ids + row * ids_stride + first_id;
    int id[TABLES];
#pragma unroll
    for (int g = 0; g < TABLES; ++g) {
        id[g] = g < groups ? row_ids[g] : -1;
        if (id[g] >= entries[g]) id[g] = -1;
    }
    using Words = Row<T, VEC>;
    u32 word[TABLES][Words::WORDS];
#pragma unroll
    for (int g = 0; g < TABLES; ++g) {
        Words::load(id[g] >= 0, (const T*)tables[g] + (i64)id[g] * width + column, word[g]);
    }
    float sum[VEC];
#pragma unroll
    for (int e = 0; e < VEC; ++e) sum[e] = accumulate ? out[i + e] : 0.0f;
#pragma unroll
    for (int g = 0; g < TABLES; ++g) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            if (id[g] >= 0) sum[e] = __fadd_rn(sum[e], Words::value(word[g], e));
        }
    }
    if constexpr (VEC == 4) {
        *(float4*)(out + i) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    } else {
        out[i] = sum[0];
    }
}

#define EMBED(name, T, VEC)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) name(                                                          \
        const int* ids, int ids_stride, int first_id, int rows, int width, int accumulate, float* out, int groups,    \
        const void* t0, const void* t1, const void* t2, const void* t3, const void* t4, const void* t5,               \
        const void* t6, const void* t7, const void* t8, const void* t9, const void* t10, const void* t11,             \
        const void* t12, const void* t13, const void* t14, const void* t15, int n0, int n1, int n2, int n3, int n4,   \
        int n5, int n6, int n7, int n8, int n9, int n10, int n11, int n12, int n13, int n14, int n15) {               \
        const void* const tables[TABLES] = {t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15};    \
        const int entries[TABLES] = {n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15};           \
        embed_body<T, VEC>(ids, ids_stride, first_id, rows, width, accumulate, out, groups, tables, entries);         \
    }

EMBED(embed_f32, float, 1)
EMBED(embed_f32_4, float, 4)
EMBED(embed_bf16, bf16_t, 1)
EMBED(embed_bf16_4, bf16_t, 4)

// Rows of words, `Word` at a time; `width` counts these.
template <typename Word>
__device__ __forceinline__ void gather_body(const Word* src, i64 src_rows, const int* index, int rows, int width,
                                            Word* out) {
    release_dependents();
    dependency_wait();
    const i64 i = (i64)BLOCK_X * ROW_THREADS + threadIdx.x;
    if (i >= (i64)rows * width) return;
    const i64 row = i / width;
    const int from = index[row];
    Word value = {};
    if (from >= 0 && from < src_rows) value = src[(i64)from * width + (i - row * width)];
    out[i] = value;
}

extern "C" __global__ void __launch_bounds__(256) gather(const u32* src, i64 src_rows, const int* index, int rows,
                                                          int width, u32* out) {
    gather_body<u32>(src, src_rows, index, rows, width, out);
}

extern "C" __global__ void __launch_bounds__(256) gather_4(const uint4* src, i64 src_rows, const int* index, int rows,
                                                            int width, uint4* out) {
    gather_body<uint4>(src, src_rows, index, rows, width, out);
}

template <typename Word>
__device__ __forceinline__ void scatter_body(const Word* src, const int* index, int rows, int width, Word* dst,
                                             i64 dst_rows) {
    release_dependents();
    dependency_wait();
    const i64 i = (i64)BLOCK_X * ROW_THREADS + threadIdx.x;
    if (i >= (i64)rows * width) return;
    const i64 row = i / width;
    const int to = index[row];
    if (to >= 0 && to < dst_rows) dst[(i64)to * width + (i - row * width)] = src[i];
}

extern "C" __global__ void __launch_bounds__(256) scatter(const u32* src, const int* index, int rows, int width,
                                                           u32* dst, i64 dst_rows) {
    scatter_body<u32>(src, index, rows, width, dst, dst_rows);
}

extern "C" __global__ void __launch_bounds__(256) scatter_4(const uint4* src, const int* index, int rows, int width,
                                                             uint4* dst, i64 dst_rows) {
    scatter_body<uint4>(src, index, rows, width, dst, dst_rows);
}

// Source, addend and destination point at their first column. A source stride of 0 tiles one row.
extern "C" __global__ void __launch_bounds__(256) copy_columns(const u32* src, int src_stride, const float* add,
                                                                int add_stride, int rows, int columns, u32* dst,
                                                                int dst_stride) {
    release_dependents();
    dependency_wait();
    const i64 i = (i64)BLOCK_X * ROW_THREADS + threadIdx.x;
    if (i >= (i64)rows * columns) return;
    const i64 row = i / columns;
    const i64 column = i - row * columns;
    u32 word = src[row * src_stride + column];
    if (add) word = __float_as_uint(__fadd_rn(__uint_as_float(word), add[row * add_stride + column]));
    dst[row * dst_stride + column] = word;
}
