// What convolutions over streams with carried state share: stands in front of codec.cu and codec_any.cu.
//
// Inputs are rounded to the weights' type where that has 16 bits, and before that to the state's: what is carried then
// has the bits that it would have within a window.

// Element types: what lower/codec.rs calls `kind`.
enum { AS_F32 = 0, AS_BF16, AS_F16 };

template <int AS>
__device__ __forceinline__ u32 narrow_pair(float low, float high) {
    return AS == AS_F16 ? pack_f16(low, high) : pack_bf16(low, high);
}

__device__ __forceinline__ float widened(int as, bf16_t bits) {
    return as == AS_F16 ? f16_to_float(bits) : bf16_to_float(bits);
}

__device__ __forceinline__ bf16_t narrowed(int as, float x) {
    return (bf16_t)(as == AS_F16 ? pack_f16(x, 0.0f) : pack_bf16(x, 0.0f));
}

__device__ __forceinline__ float rounded(int as, float x) { return as == AS_F32 ? x : widened(as, narrowed(as, x)); }

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
    int state_as;
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
    return s.state_as == AS_F32 ? ((const float*)s.state)[at] : widened(s.state_as, ((const bf16_t*)s.state)[at]);
}

__device__ __forceinline__ void carry(void* state, int as, i64 at, float v) {
    if (as == AS_F32)
        ((float*)state)[at] = v;
    else
        ((bf16_t*)state)[at] = narrowed(as, v);
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

// Element (n, k) of a matrix: row-major f32, or 16 bits in mma.m16n8k16's A fragments, as gemm.cu has it.
template <int AS>
__device__ __forceinline__ float weight_at(const void* w, int k_all, int n, int k) {
    if (AS == AS_F32) return ((const float*)w)[(i64)n * k_all + k];
    int r = n % 16, c = k % 16, lane = (r % 8) * 4 + (c % 8) / 2, k_tiles = (k_all + 15) / 16;
    int slot = (c / 8) * 4 + (r / 8) * 2 + c % 2;
    return widened(AS, ((const bf16_t*)w)[((i64)(n / 16) * k_tiles + k / 16) * 256 + lane * 8 + slot]);
}

// Snake by the sine of the special function unit, a third of the operations: off by 2^-20 where 16 bits are kept of
// it. One convolution's rows and state are all made by one of the two.
__device__ __forceinline__ float quick_snake(float x, float alpha, float inv_beta) {
    float s = __sinf(__fmul_rn(x, alpha));
    return __fmaf_rn(__fmul_rn(s, s), inv_beta, x);
}

__device__ __forceinline__ float4 quick_snake4(float4 x, float4 alpha, float4 inv_beta) {
    return make_float4(quick_snake(x.x, alpha.x, inv_beta.x), quick_snake(x.y, alpha.y, inv_beta.y),
                       quick_snake(x.z, alpha.z, inv_beta.z), quick_snake(x.w, alpha.w, inv_beta.w));
}

struct ConvShape {
    int c_in, c_out, taps, dilation;
};

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

#define CONV_PARAMETERS                                                                                             \
    const float *x, const void *w, const float *bias, const float *alpha, const float *inv_beta,                    \
        const void *state, int state_as, i64 slot_stride, int slots, const int *windows, int count, int rate,       \
        int rows, const float *residual, float *out, int clamp, int c_in, int c_out, int taps, int dilation
#define CONV_STREAMS \
    Streams { windows, count, rate, rows, state, state_as, slot_stride, slots }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A power of two of blocks along x; `mine` says which this one is.
struct Cluster {
    int blocks;
    int mine;
    __device__ __forceinline__ explicit Cluster(int blocks) : blocks(blocks), mine(BLOCK_X & (blocks - 1)) {}

    // All have come here, and see what the others wrote to their shared memory.
    __device__ __forceinline__ void barrier() const {
#if __CUDA_ARCH__ >= 900
        if (blocks > 1) {
            asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
            return;
        }
#endif
        __syncthreads();
    }

    // All have read what they want of the others' shared memory, which ends with its block.
    __device__ __forceinline__ void leave() const {
#if __CUDA_ARCH__ >= 900
        if (blocks > 1)
            asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
    }

    // The same place in another block's shared memory.
    __device__ __forceinline__ const float* peer(const float* p, int block) const {
#if __CUDA_ARCH__ >= 900
        // Ranks count as blockIdx does, which the checking build turns round.
        const int rank = (int)(blockIdx.x & (blocks - 1)) == mine ? block : blocks - 1 - block;
        const float* there;
        asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
        return there;
#else
        return p;  // without clusters a block has all slices
#endif
    }
};

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
