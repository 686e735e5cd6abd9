// What convolutions over streams with carried state share: stands in front of codec.cu and codec_any.cu.
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

#define CONV_PARAMETERS(WEIGHT)                                                                                     \
    const float *x, const WEIGHT *w, const float *bias, const float *alpha, const float *inv_beta,                  \
        const void *state, int state_bf16, i64 slot_stride, int slots, const int *windows, int count, int rate,     \
        int rows, const float *residual, float *out, int clamp, int c_in, int c_out, int taps, int dilation
#define CONV_STREAMS \
    Streams { windows, count, rate, rows, state, state_bf16, slot_stride, slots }
