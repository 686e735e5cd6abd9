// Attention over a cache of sixteen positions at most: the code predictor's. cache.cuh stands in front of it.
//
// So few keys are no work for matrix instructions: what counts is how many instructions and waits there are one behind the
// other. A block has two query heads of a row, which share a key/value head. Its threads have 16 dimensions of one key each,
// eight threads a key; then a pair of dimensions of one head each, over all keys. Sums: 8 and 8 dimensions of a thread
// ascending, the two, the eight threads as a balanced tree; values by keys ascending. Keys that are not there count as
// zero, so that nothing depends on how many there are, nor on the rows beside.

constexpr int SHORT_KEYS = 16, SHORT_DIM = 128, SHORT_HEADS = 2;

template <typename KV>
__device__ __forceinline__ KV narrowed(float x) {
    KV out;
    narrow(x, out);
    return out;
}

__device__ __forceinline__ float low_half(u32 pair, bf16_t) { return low_bf16(pair); }
__device__ __forceinline__ float high_half(u32 pair, bf16_t) { return high_bf16(pair); }
__device__ __forceinline__ float low_half(u32 pair, f16_t) { return f16_to_float((bf16_t)pair); }
__device__ __forceinline__ float high_half(u32 pair, f16_t) { return f16_to_float((bf16_t)(pair >> 16)); }

// The sum of x[i] * q[i] over eight dimensions onto `sum`.
template <typename KV>
__device__ __forceinline__ float dot8(const uint4& x, const float* q, float sum) {
    const float4 a = *(const float4*)q, b = *(const float4*)(q + 4);
    sum = fmaf(low_half(x.x, KV()), a.x, sum);
    sum = fmaf(high_half(x.x, KV()), a.y, sum);
    sum = fmaf(low_half(x.y, KV()), a.z, sum);
    sum = fmaf(high_half(x.y, KV()), a.w, sum);
    sum = fmaf(low_half(x.z, KV()), b.x, sum);
    sum = fmaf(high_half(x.z, KV()), b.y, sum);
    sum = fmaf(low_half(x.w, KV()), b.z, sum);
    return fmaf(high_half(x.w, KV()), b.w, sum);
}

// Operands as attend() of attention.cu has them.
template <typename KV, bool FUSED>
__device__ __forceinline__ void attend_short(const float* q, const Projections from, int heads, const int* sequences,
                                             const int* positions, KV* pool, const Cache cache, int window,
                                             const Output out) {
    constexpr int DIM = SHORT_DIM, KEYS = SHORT_KEYS;
    __shared__ __align__(16) float queries[SHORT_HEADS][DIM];
    __shared__ __align__(16) KV own_key[DIM], values[KEYS][DIM];
    __shared__ __align__(16) float scores[SHORT_HEADS][KEYS], weights[4][KEYS];
    release_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, key = threadIdx.x / 8, eighth = threadIdx.x % 8;
    const int blocks_in_row = heads / SHORT_HEADS, row = BLOCK_X / blocks_in_row;
    const int head = (BLOCK_X - row * blocks_in_row) * SHORT_HEADS;
    const int group = heads / cache.kv_heads, kv_head = head / group;
    const i64 to_values = cache.v_offset - cache.k_offset;

    int sequence = peek(sequences + row), position = peek(positions + row);
    // The thread's key, of those that the row sees, oldest first.
    auto first = [&] { return window > 0 && position >= window ? position - window + 1 : 0; };
    auto spot_of_key = [&] {
        const int at = first() + key;
        return sequence >= 0 && at <= position ? cache.spot(sequence, at) : Cache::Spot{-1, 0};
    };
    auto address_of = [&](Cache::Spot spot, int block) -> const KV* {
        const i64 at = cache.resolve(spot, block);
        return at < 0 ? nullptr : pool + at + cache.k_offset + kv_head * DIM + eighth * 8;
    };
    // Indices are seldom a kernel's result: guessed while the kernels ahead end, compared later.
    Cache::Spot spot = spot_of_key();
    int block = spot.cell >= 0 ? peek(cache.table + spot.cell) : -1;
    const KV* at = address_of(spot, block);

    dependency_wait();
    const int sequence_now = sequences[row], position_now = positions[row];
    int block_now = spot.cell >= 0 ? cache.table[spot.cell] : -1;
    uint4 k[2] = {}, v[2] = {};
    auto load = [&] {
        if (!at) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) k[i] = *(const uint4*)(at + 64 * i), v[i] = *(const uint4*)(at + to_values + 64 * i);
    };
    load();
    // Warps 0 and 1 bring the query heads, the others the row's own key and value.
    const float* x = FUSED ? from.qkv + (i64)row * (heads + 2 * cache.kv_heads) * DIM : q + (i64)row * heads * DIM;
    RotaryHead<DIM> rotary;
    const float* weight = nullptr;
    float plain[DIM / 32];
    if (FUSED && warp < 3) {
        weight = warp < 2 ? from.q_norm : from.k_norm;
        rotary.load(x + (warp < 2 ? head + warp : heads + kv_head) * DIM, weight, from.cos_sin + (i64)row * DIM, DIM);
    } else if (FUSED || warp < 2) {
        const float* mine = x + (FUSED ? heads + cache.kv_heads + kv_head : head + warp) * DIM;
#pragma unroll
        for (int i = 0; i < DIM / 32; ++i) plain[i] = mine[lane + 32 * i];
    }
    if (sequence_now != sequence || position_now != position || block_now != block) {
        sequence = sequence_now, position = position_now;
        spot = spot_of_key();
        block_now = spot.cell >= 0 ? cache.table[spot.cell] : -1;
        at = address_of(spot, block_now);
        k[0] = k[1] = v[0] = v[1] = make_uint4(0, 0, 0, 0);
        load();
    }
    const int own = position - first();  // the row's own key, of the keys

    if (!FUSED || key != own) {
#pragma unroll
        for (int i = 0; i < 2; ++i) *(uint4*)(&values[key][64 * i + 8 * eighth]) = v[i];
    }
    if constexpr (FUSED) {
        const i64 place = cache.find(sequence, position);
        const bool store = head % group == 0 && place >= 0;
        KV* const to = pool + place + cache.k_offset + kv_head * DIM;
        if (warp < 3) {
            rotary.finish(weight != nullptr, from.eps, DIM, [&](int c, float x) {
                if (warp < 2) {
                    queries[warp][c] = x;
                    return;
                }
                own_key[c] = narrowed<KV>(x);
                if (store) to[c] = narrowed<KV>(x);
            });
        } else {
#pragma unroll
            for (int i = 0; i < DIM / 32; ++i) {
                const KV x = narrowed<KV>(plain[i]);
                if (own >= 0 && own < KEYS) values[own][lane + 32 * i] = x;
                if (store) to[to_values + lane + 32 * i] = x;
            }
        }
    } else if (warp < 2) {
#pragma unroll
        for (int i = 0; i < DIM / 32; ++i) queries[warp][lane + 32 * i] = plain[i];
    }
    __syncthreads();

    // Scores are in units of log2, so that a weight is one exp2.
    const float scale = __fdiv_rn(1.4426950408889634f, sqrtf((float)DIM));
    if (FUSED && key == own) {
#pragma unroll
        for (int i = 0; i < 2; ++i) k[i] = *(const uint4*)(own_key + 64 * i + 8 * eighth);
    }
    // A warp has four keys; of those behind the row's own there is nothing to know.
    if (warp * 4 > own) {
        if (eighth < SHORT_HEADS) scores[eighth][key] = NONE;
    } else {
#pragma unroll
        for (int h = 0; h < SHORT_HEADS; ++h) {
            const float* const mine = queries[h] + 8 * eighth;
            float s = __fadd_rn(dot8<KV>(k[0], mine, 0.0f), dot8<KV>(k[1], mine + 64, 0.0f));
#pragma unroll
            for (int offset = 1; offset < 8; offset <<= 1) s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, offset));
            if (eighth == h) scores[h][key] = at ? __fmul_rn(s, scale) : NONE;
        }
    }
    __syncthreads();

    const int h = threadIdx.x / 64, column = threadIdx.x % 64 * 2;
    const float score = scores[h][lane % KEYS];
    float greatest = score;
#pragma unroll
    for (int offset = 1; offset < KEYS; offset <<= 1)
        greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, offset));
    const float mine = greatest == NONE ? 0.0f : exp2f(__fsub_rn(score, greatest));
    float sum = mine;
#pragma unroll
    for (int offset = 1; offset < KEYS; offset <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
    if (lane < KEYS) weights[warp][lane] = mine;
    __syncwarp();
    float low = 0.0f, high = 0.0f;
    // Four keys at a time, as far as there are any: the others' weights are zero.
#pragma unroll
    for (int first_of_four = 0; first_of_four < KEYS; first_of_four += 4) {
        if (first_of_four > own) break;
#pragma unroll
        for (int i = first_of_four; i < first_of_four + 4; ++i) {
            const u32 pair = *(const u32*)(&values[i][column]);
            low = fmaf(low_half(pair, KV()), weights[warp][i], low);
            high = fmaf(high_half(pair, KV()), weights[warp][i], high);
        }
    }
    low = greatest == NONE ? 0.0f : __fdiv_rn(low, sum);
    high = greatest == NONE ? 0.0f : __fdiv_rn(high, sum);
    const i64 place = out.place(row * heads + head + h, heads, DIM, column);
    out.store(place, low);
    out.store(place + 1, high);
}

#define SHORT_ATTENTION(suffix, KV)                                                                                 \
    extern "C" __global__ void __launch_bounds__(128) attention_##suffix(                                           \
        const float* q, int heads, const int* sequences, const int* positions, KV* pool, CACHE_PARAMS, int window,  \
        void* out, int out_type, int blocked_rows) {                                                                \
        attend_short<KV, false>(q, Projections{}, heads, sequences, positions, pool, CACHE, window,                 \
                                Output{out, out_type, blocked_rows});                                               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(128) decode_attention_##suffix(                                    \
        const float* qkv, int heads, const float* q_norm, const float* k_norm, float eps, const float* cos_sin,     \
        const int* sequences, const int* positions, KV* pool, CACHE_PARAMS, int window, void* out, int out_type,    \
        int blocked_rows) {                                                                                         \
        attend_short<KV, true>(nullptr, Projections{qkv, q_norm, k_norm, eps, cos_sin}, heads, sequences,           \
                               positions, pool, CACHE, window, Output{out, out_type, blocked_rows});                \
    }

SHORT_ATTENTION(bf16_short, bf16_t)
SHORT_ATTENTION(f16_short, f16_t)
