// Shared by every kernel file: it is prepended to each source before NVRTC sees it. No other header exists.
//
// Reduction order never depends on how many rows a launch has, on a row's place, or on the grid.
//
// Blocks are numbered through BLOCK_X/Y/Z. The checking build (-DSHUFFLE_BLOCKS) numbers them in another order:
// a kernel whose result changes with it depends on the order in which blocks run.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short bf16_t;  // bits of a bfloat16

#ifdef SHUFFLE_BLOCKS
#define BLOCK_X ((int)(gridDim.x - 1 - blockIdx.x))
#define BLOCK_Y ((int)(gridDim.y - 1 - blockIdx.y))
#define BLOCK_Z ((int)(gridDim.z - 1 - blockIdx.z))
#else
#define BLOCK_X ((int)blockIdx.x)
#define BLOCK_Y ((int)blockIdx.y)
#define BLOCK_Z ((int)blockIdx.z)
#endif

// Programmatic dependent launch: a kernel may start before the one ahead of it on the stream has ended.
// EVERY kernel calls dependency_wait() before it reads or writes anything that another kernel of a step writes or
// reads, and release_dependents() as early as it likes: the wait of the next kernel returns only once this
// kernel has ended and its writes are visible.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float bf16_to_float(bf16_t x) { return __uint_as_float((u32)x << 16); }

// Two floats to two bf16, round to nearest even; `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// d += a[16x16] * b[16x8]: bf16 operands, f32 accumulators. Fragments as PTX documents mma.m16n8k16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats to two f16, round to nearest even, no further than the largest f16; `low` in the low half.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 out;
    const float most = 65504.0f;
    low = fminf(fmaxf(low, -most), most);
    high = fminf(fmaxf(high, -most), most);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float f16_to_float(bf16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// As mma_bf16, of f16 operands.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// 1 / sqrt(mean(x²) + eps) of a row by a block (products that fold a norm in have a warp do it, see product.cuh):
// thread t takes elements t, t + THREADS, ... ascending, then lanes by warp_sum, then warps ascending. All THREADS threads of the block
// call it, and all get the result; `partial` holds THREADS / 32 floats and may be used again at once.
template <int THREADS>
__device__ float row_inverse_rms(const float* x, int width, float eps, float* partial) {
    float sum = 0.0f;
    for (int i = (int)threadIdx.x; i < width; i += THREADS) sum = fmaf(x[i], x[i], sum);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = partial[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) sum = __fadd_rn(sum, partial[warp]);
    __syncthreads();
    return 1.0f / sqrtf(sum / (float)width + eps);
}

// (x * inverse) * weight, each product rounded: what every RMS norm makes of a value.
__device__ __forceinline__ float normalized(float x, float inverse, float weight) {
    return __fmul_rn(__fmul_rn(x, inverse), weight);
}

// How what a product takes or makes is kept: as f32, or in the weights' own 16-bit type: by rows, or in blocks of
// ROW_BLOCK rows (the last one of as many as there are), in which eight columns of all rows lie together. Lowering
// says which (lower/kept.rs has the rule); writer and reader of a view have the same rows.
enum { KEPT_F32 = 0, KEPT_16 = 1, KEPT_BLOCKED = 2 };
constexpr int ROW_BLOCK = 64;

// Rows of the block of KEPT_BLOCKED that has `row`.
__device__ __forceinline__ int block_rows(int row, int rows) { return min(ROW_BLOCK, rows - row / ROW_BLOCK * ROW_BLOCK); }

// Where an element of KEPT_BLOCKED lies; eight columns from a multiple of eight on lie side by side.
__device__ __forceinline__ i64 blocked_at(int row, int rows, int column, int width) {
    const int first = row / ROW_BLOCK * ROW_BLOCK;
    return (i64)first * width + ((i64)(column / 8) * block_rows(row, rows) + row - first) * 8 + column % 8;
}

__device__ __forceinline__ i64 kept_at(int kept, int row, int rows, int column, int width) {
    return kept == KEPT_BLOCKED ? blocked_at(row, rows, column, width) : (i64)row * width + column;
}

// enum laneway_device::op::Activation, in its order.
enum { ACT_NONE = 0, ACT_SILU, ACT_GELU, ACT_RELU, ACT_ELU, ACT_TANH, ACT_RELU_TANH, ACT_SIGMOID };

__device__ __forceinline__ float activate(int kind, float x) {
    switch (kind) {
        case ACT_SILU: return x / (1.0f + expf(-x));
        case ACT_GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
        case ACT_RELU: return fmaxf(x, 0.0f);
        case ACT_ELU: return x < 0.0f ? expm1f(x) : x;
        case ACT_TANH: return tanhf(x);
        case ACT_RELU_TANH: return tanhf(fmaxf(x, 0.0f));
        case ACT_SIGMOID: return 1.0f / (1.0f + expf(-x));
        default: return x;
    }
}
