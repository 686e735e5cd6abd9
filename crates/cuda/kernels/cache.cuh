// The cache of keys and values, and what becomes of a row's own heads: stands in front of sequence.cu and attention.cu.

struct f16_t {
    bf16_t bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16_t x) { return bf16_to_float(x); }
__device__ __forceinline__ float widen(f16_t x) { return f16_to_float(x.bits); }

__device__ __forceinline__ void narrow(float x, float& out) { out = x; }
__device__ __forceinline__ void narrow(float x, bf16_t& out) { out = (bf16_t)pack_bf16(x, 0.0f); }
__device__ __forceinline__ void narrow(float x, f16_t& out) { out.bits = (bf16_t)pack_f16(x, 0.0f); }

// What attention writes, of one of the types that a product takes.
struct Output {
    void* at;
    int type;          // 0: f32, 1: bf16, 2: f16
    int blocked_rows;  // all rows, of KEPT_BLOCKED; 0: kept by rows

    // Of a head, counted over all rows of `heads` heads.
    __device__ __forceinline__ i64 place(int head, int heads, int dim, int column) const {
        return blocked_rows > 0 ? blocked_at(head / heads, blocked_rows, head % heads * dim + column, heads * dim)
                                : (i64)head * dim + column;
    }

    __device__ __forceinline__ void store(i64 i, float x) const {
        if (type == 0) {
            ((float*)at)[i] = x;
        } else if (type == 1) {
            narrow(x, ((bf16_t*)at)[i]);
        } else {
            narrow(x, ((f16_t*)at)[i]);
        }
    }
};

// An index that a kernel before this one may yet write: no more than a guess.
__device__ __forceinline__ int peek(const int* at) { return *(const volatile int*)at; }

// laneway_device::op::KvCache; strides and offsets in elements.
struct Cache {
    i64 page_stride, k_offset, v_offset, pool_len;
    const int* table;
    int table_len, blocks, page_size, kv_heads, head_dim, ring;

    // The table's cell for a position, -1 when it has none; where in the block the position lies.
    struct Spot {
        int cell;
        u32 slot;
    };

    __device__ __forceinline__ Spot spot(int sequence, int position) const {
        u32 i = (u32)position;
        if (ring) i %= (u32)blocks * (u32)page_size;
        const u32 column = i / (u32)page_size;
        const i64 cell = (i64)sequence * blocks + column;
        const bool inside = sequence >= 0 && position >= 0 && column < (u32)blocks && cell < table_len;
        return Spot{inside ? (int)cell : -1, i - column * (u32)page_size};
    }

    // Where the first head of the spot lies when the table says `block`, less the offset of keys or values; -1 when
    // that leads out of the pool.
    __device__ __forceinline__ i64 resolve(Spot spot, int block) const {
        const i64 width = (i64)kv_heads * head_dim;
        const i64 start = block * page_stride;
        const i64 end = start + (k_offset > v_offset ? k_offset : v_offset) + page_size * width;
        return spot.cell < 0 || block < 0 || end > pool_len ? -1 : start + spot.slot * width;
    }

    __device__ __forceinline__ i64 find(int sequence, int position) const {
        const Spot at = spot(sequence, position);
        return resolve(at, at.cell >= 0 ? table[at.cell] : -1);
    }
};

#define CACHE_PARAMS                                                                                                  \
    i64 page_stride, i64 k_offset, i64 v_offset, i64 pool_len, const int *table, int table_len, int blocks,           \
        int page_size, int kv_heads, int head_dim, int ring
#define CACHE                                                                                                         \
    Cache { page_stride, k_offset, v_offset, pool_len, table, table_len, blocks, page_size, kv_heads, head_dim, ring }

// A lane's part of a head of up to 256 values (of DIM values, where that is not 0) to be normed and rotated: loaded all
// at once, so that the loads wait for each other no more than they must.
template <int DIM>
struct RotaryHead {
    static constexpr int N = DIM > 0 ? DIM / 64 : 4;
    float low[N], high[N], low_weight[N], high_weight[N], cos[N], sin[N];

    __device__ __forceinline__ void load(const float* x, const float* weight, const float* cos_sin, int dim) {
        const int lane = threadIdx.x & 31, half = dim / 2;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int c = lane + 32 * i;
            const bool in = DIM > 0 || c < half;
            low[i] = in ? x[c] : 0.0f;
            high[i] = in ? x[half + c] : 0.0f;
            low_weight[i] = in && weight ? weight[c] : 0.0f;
            high_weight[i] = in && weight ? weight[half + c] : 0.0f;
            cos[i] = in ? cos_sin[c] : 0.0f;
            sin[i] = in ? cos_sin[half + c] : 0.0f;
        }
    }

    // By all lanes of a warp. The head is normed where it has a weight; emit(c, value) takes its values.
    template <typename Emit>
    __device__ __forceinline__ void finish(bool normed, float eps, int dim, Emit emit) const {
        const int lane = threadIdx.x & 31, half = dim / 2;
        float inverse = 1.0f;
        if (normed) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sum = fmaf(low[i], low[i], sum);
                sum = fmaf(high[i], high[i], sum);
            }
            inverse = 1.0f / sqrtf(__fadd_rn(__fdiv_rn(warp_sum(sum), (float)dim), eps));
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int c = lane + 32 * i;
            if (DIM == 0 && c >= half) continue;
            const float a = normed ? normalized(low[i], inverse, low_weight[i]) : low[i];
            const float b = normed ? normalized(high[i], inverse, high_weight[i]) : high[i];
            emit(c, __fsub_rn(__fmul_rn(a, cos[i]), __fmul_rn(b, sin[i])));
            emit(half + c, __fadd_rn(__fmul_rn(b, cos[i]), __fmul_rn(a, sin[i])));
        }
    }
};

// Operands that only the pass which also norms, rotates and stores has.
struct Projections {
    const float *qkv, *q_norm, *k_norm;
    float eps;
    const float* cos_sin;
};

#define NONE __int_as_float(0xff800000)  // -inf: the score of no key
