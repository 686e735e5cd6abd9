// Rotary positions, the key/value cache and attention over it.
//
// Attention of one row and key/value head is divided into streams. With n keys before the row's own, counted from
// the oldest visible one, stream s of S takes keys s, s + S, ... ascending; the row's own key comes first in
// stream n % S. Streams are merged ascending. S follows from the launch's threads and cluster, which the lowering
// takes from the cache's shape alone; so nothing depends on the rows beside this one, and a row decoded in one pass
// (`decode_attention`) has the bits of the same row in two (`qkv_rope`, then `attention`). What attention.cu has
// kernels for is not attended here.
//
// No product and sum of attention is left for the compiler to contract: its choice may differ between kernels.

__device__ __forceinline__ double sine(double x) {
    const double u = x * x;
    double p = 1.0 / 6227020800.0;
    p = fma(p, u, -1.0 / 39916800.0);
    p = fma(p, u, 1.0 / 362880.0);
    p = fma(p, u, -1.0 / 5040.0);
    p = fma(p, u, 1.0 / 120.0);
    p = fma(p, u, -1.0 / 6.0);
    return fma(p * u, x, x);
}

__device__ __forceinline__ double cosine(double x) {
    const double u = x * x;
    double p = 1.0 / 479001600.0;
    p = fma(p, u, -1.0 / 3628800.0);
    p = fma(p, u, 1.0 / 40320.0);
    p = fma(p, u, -1.0 / 720.0);
    p = fma(p, u, 1.0 / 24.0);
    p = fma(p, u, -0.5);
    return fma(p, u, 1.0);
}

// Sine and cosine of the f32 angle, in f64: the library's own reduction of large angles needs local memory.
extern "C" __global__ void __launch_bounds__(256) rope_table(const int* positions, const float* inv_freq, int rows,
                                                              int head_dim, float* out) {
    release_dependents();
    dependency_wait();
    const int half = head_dim / 2;
    const i64 i = (i64)BLOCK_X * 256 + threadIdx.x;
    if (i >= (i64)rows * half) return;
    const i64 row = i / half;
    const int c = (int)(i - row * half);
    const double angle = (double)__fmul_rn((float)positions[row], inv_freq[c]);
    // Quarter turns, with π/2 in two parts: |x| stays under π/4.
    const double turns = rint(angle * 0.63661977236758134);
    double x = fma(-turns, 1.5707963267948966, angle);
    x = fma(-turns, 6.123233995736766e-17, x);
    const int quarter = (int)((i64)turns & 3);
    const double s = sine(x), k = cosine(x);
    const double sin = quarter == 0 ? s : quarter == 1 ? k : quarter == 2 ? -s : -k;
    const double cos = quarter == 0 ? k : quarter == 1 ? -s : quarter == 2 ? -k : s;
    out[row * head_dim + c] = (float)cos;
    out[row * head_dim + half + c] = (float)sin;
}

// A warp for each head of [q | k | v] of each row.
template <typename KV>
__device__ __forceinline__ void qkv_rope_body(const float* qkv, int rows, int heads, const float* q_norm,
                                              const float* k_norm, float eps, const float* cos_sin,
                                              const int* sequences, const int* positions, KV* pool, const Cache cache,
                                              float* q_out) {
    release_dependents();
    dependency_wait();
    const int lane = threadIdx.x & 31, dim = cache.head_dim, kv_heads = cache.kv_heads;
    const int heads_in_row = heads + 2 * kv_heads;
    const i64 unit = (i64)BLOCK_X * 8 + (threadIdx.x >> 5);
    const i64 row = unit / heads_in_row;
    if (row >= rows) return;
    const int head = (int)(unit - row * heads_in_row);
    const float* x = qkv + unit * dim;
    const bool is_q = head < heads, is_k = !is_q && head < heads + kv_heads;
    const float* weight = is_q ? q_norm : k_norm;
    RotaryHead<0> rotary;
    if (is_q || is_k) rotary.load(x, weight, cos_sin + row * dim, dim);
    const int sequence = sequences[row], position = positions[row];
    const bool padding = sequence < 0 || position < 0;
    if (is_q) {
        float* q = q_out + (row * heads + head) * dim;
        if (padding) {
            for (int c = lane; c < dim; c += 32) q[c] = 0.0f;
        } else {
            rotary.finish(weight != nullptr, eps, dim, [q](int c, float value) { q[c] = value; });
        }
        return;
    }
    const i64 at = padding ? -1 : cache.find(sequence, position);
    if (at < 0) return;
    if (is_k) {
        KV* k = pool + at + cache.k_offset + (head - heads) * dim;
        rotary.finish(weight != nullptr, eps, dim, [k](int c, float value) { narrow(value, k[c]); });
    } else {
        KV* v = pool + at + cache.v_offset + (head - heads - kv_heads) * dim;
        for (int c = lane; c < dim; c += 32) narrow(x[c], v[c]);
    }
}

#define QKV_ROPE(name, KV)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) name(                                                          \
        const float* qkv, int rows, int heads, const float* q_norm, const float* k_norm, float eps,                   \
        const float* cos_sin, const int* sequences, const int* positions, KV* pool, CACHE_PARAMS, float* q_out) {     \
        qkv_rope_body<KV>(qkv, rows, heads, q_norm, k_norm, eps, cos_sin, sequences, positions, pool, CACHE, q_out);  \
    }

QKV_ROPE(qkv_rope_f32, float)
QKV_ROPE(qkv_rope_bf16, bf16_t)
QKV_ROPE(qkv_rope_f16, f16_t)

// ---- Attention ----

// How a warp holds heads. `LANES` lanes hold one, so that a load brings 32 / LANES of them; a lane has PER values.
// Keys and values of a width that is known come through shared memory, where a lane puts and takes its own only: so a
// warp has many of them on their way and needs no registers for them.
template <int DIM>
struct Heads {
    static constexpr int LANES = DIM / 4, PER = 4, BATCH = 4;
    static constexpr bool STAGED = true;
    static __device__ __forceinline__ int dim(int) { return DIM; }
    static __device__ __forceinline__ int at(int lane, int e) { return lane % LANES * 4 + e; }
};

// Any width up to 256, at any alignment.
template <>
struct Heads<0> {
    static constexpr int LANES = 32, PER = 8, BATCH = 2;
    static constexpr bool STAGED = false;
    static __device__ __forceinline__ int dim(int head_dim) { return head_dim; }
    static __device__ __forceinline__ int at(int lane, int e) { return lane + 32 * e; }
};

// A lane's values of the head at `head`, or zeros.
template <typename H, typename KV>
__device__ __forceinline__ void load_head(bool on, const KV* head, int lane, int dim, float (&value)[H::PER]) {
#pragma unroll
    for (int e = 0; e < H::PER; ++e) {
        const bool in = on && (H::STAGED || H::at(lane, e) < dim);
        value[e] = in ? widen(head[H::at(lane, e)]) : 0.0f;
    }
}

// Start a copy of four values to shared memory, or of zeros.
__device__ __forceinline__ void copy_async(float4* to, const float* from, bool on) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(on ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last N closed groups of this thread's copies have arrived.
template <int N>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// q · k over the lanes of a head; all of them get it.
template <int LANES, int PER>
__device__ __forceinline__ float dot(const float (&q)[PER], const float (&k)[PER]) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < PER; ++e) sum = fmaf(q[e], k[e], sum);
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset >>= 1) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
    }
    return sum;
}

__device__ __forceinline__ void take(float4 x, float (&value)[4]) {
    value[0] = x.x, value[1] = x.y, value[2] = x.z, value[3] = x.w;
}

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// A float of the cluster's block `rank` that lies where `x` lies in this block's shared memory.
__device__ __forceinline__ float load_from_block(const float* x, int rank) {
#if __CUDA_ARCH__ >= 900
    const u32 here = (u32)__cvta_generic_to_shared(x);
    u32 there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
#else
    return *x;  // Without clusters the only block is this one.
#endif
}

// Blocks: for each row, for each G query heads that share a key/value head, `cluster` blocks that divide the streams.
// `window` 0: all keys are visible; `depth` (1, 2 or 4): batches that a warp has on their way. `q` is used when `FUSED`
// is not, `from` when it is.
template <typename KV, int DIM, int G, bool FUSED>
__device__ __forceinline__ void attend(const float* q, const Projections from, int heads, const int* sequences,
                                       const int* positions, KV* pool, const Cache cache, int window, int cluster,
                                       int depth, const Output out) {
    using H = Heads<DIM>;
    constexpr int LANES = H::LANES, PER = H::PER, BATCH = H::BATCH, SIDE = 32 / LANES;
    extern __shared__ __align__(16) float shared[];
    release_dependents();
    dependency_wait();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int dim = H::dim(cache.head_dim);
    const int blocks_in_row = heads / G * cluster;
    const int row = BLOCK_X / blocks_in_row;
    const int part = BLOCK_X % blocks_in_row % cluster;
    const int head = BLOCK_X % blocks_in_row / cluster * G;
    const int group = heads / cache.kv_heads;
    const int kv_head = head / group;
    const int head_out = row * heads + head;

    const int sequence = sequences[row], position = positions[row];
    if (sequence < 0 || position < 0) {
        for (int i = part * blockDim.x + threadIdx.x; i < G * dim; i += cluster * blockDim.x)
            out.store(out.place(head_out, heads, dim, i), 0.0f);
        return;
    }

    // Shared memory: keys and values on their way; each stream's sum of values, greatest score and sum of weights;
    // the row's own heads.
    const int block_streams = warps * SIDE, streams = block_streams * cluster;
    float4* staged = (float4*)shared + warp * depth * 2 * BATCH * 32 + lane;
    float* stream_values = H::STAGED ? (float*)((float4*)shared + warps * depth * 2 * BATCH * 32) : shared;
    float* stream_max = stream_values + block_streams * G * dim;
    float* stream_sum = stream_max + block_streams * G;
    float* own_q = stream_sum + block_streams * G;
    float* own_k = own_q + G * dim;
    float* own_v = own_k + dim;

    const int first = window > 0 && position >= window ? position - window + 1 : 0;
    const int before = position - first;
    const int local = warp * SIDE + lane / LANES;
    const int warp_stream = part * block_streams + warp * SIDE;
    const int stream = warp_stream + lane / LANES;
    // Keys of the warp's first stream; the others have as many or one less.
    const int count = before > warp_stream ? (before - warp_stream + streams - 1) / streams : 0;
    KV* keys = pool + cache.k_offset + kv_head * dim;
    KV* values = pool + cache.v_offset + kv_head * dim;

    // Lane b * SIDE + s finds the warp's b-th key from `t` on of its stream s.
    auto find_batch = [&](int t) -> i64 {
        const int key = warp_stream + lane % SIDE + (t + lane / SIDE) * streams;
        return lane < BATCH * SIDE && key < before ? cache.find(sequence, first + key) : -1;
    };
    auto found_by = [&](i64 found, int b) { return __shfl_sync(0xffffffffu, found, b * SIDE + lane / LANES); };
    // A batch of keys or values, which are f32 here, into its place in the ring of `depth` pairs.
    auto stage_batch = [&](float4* to, const KV* heads, i64 found) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const i64 at = found_by(found, b);
            copy_async(to + b * 32, (const float*)heads + (at >= 0 ? at : 0) + H::at(lane, 0), at >= 0);
        }
    };
    i64 next = find_batch(0);
    if constexpr (H::STAGED) {
        for (int d = 0; d < depth; ++d) {
            // Groups are closed also when they are empty: their number says which ones to wait for.
            if (d * BATCH < count) stage_batch(staged + d * 2 * BATCH * 32, keys, next);
            close_copies();
            if (d * BATCH < count) stage_batch(staged + (d * 2 + 1) * BATCH * 32, values, next);
            close_copies();
            next = find_batch((d + 1) * BATCH);
        }
    }

    // The row's own heads, beside the first keys on their way.
    const i64 own = cache.find(sequence, position);
    if constexpr (FUSED) {
        const float* x = from.qkv + (i64)row * (heads + 2 * cache.kv_heads) * dim;
        const float* angles = from.cos_sin + (i64)row * dim;
        const bool store = part == 0 && head % group == 0 && own >= 0;
        for (int task = warp; task < G + 2; task += warps) {
            if (task <= G) {
                const bool is_q = task < G;
                const float* weight = is_q ? from.q_norm : from.k_norm;
                RotaryHead<DIM> rotary;
                rotary.load(x + (is_q ? head + task : heads + kv_head) * dim, weight, angles, dim);
                float* q_to = own_q + task * dim;
                rotary.finish(weight != nullptr, from.eps, dim, [=](int c, float value) {
                    if (is_q) {
                        q_to[c] = value;
                        return;
                    }
                    KV stored;
                    narrow(value, stored);
                    own_k[c] = widen(stored);
                    if (store) keys[own + c] = stored;
                });
            } else {
                const float* projected = x + (heads + cache.kv_heads + kv_head) * dim;
                for (int c = lane; c < dim; c += 32) {
                    KV stored;
                    narrow(projected[c], stored);
                    own_v[c] = widen(stored);
                    if (store) values[own + c] = stored;
                }
            }
        }
        __syncthreads();
    }
    float query[G][PER];
#pragma unroll
    for (int g = 0; g < G; ++g) {
        load_head<H>(true, FUSED ? own_q + g * dim : q + ((i64)row * heads + head + g) * dim, lane, dim, query[g]);
    }

    // Scores are in units of log2, so that a weight is one exp2.
    const float scale = __fdiv_rn(1.4426950408889634f, sqrtf((float)dim));
    float most[G], sum[G], value[G][PER];
#pragma unroll
    for (int g = 0; g < G; ++g) {
        most[g] = NONE, sum[g] = 0.0f;
#pragma unroll
        for (int e = 0; e < PER; ++e) value[g][e] = 0.0f;
    }
    const int own_stream = before % streams;
    if (own >= 0 && own_stream >= warp_stream && own_stream < warp_stream + SIDE) {
        float key[PER], val[PER];
        if constexpr (FUSED) {
            load_head<H>(true, own_k, lane, dim, key);
            load_head<H>(true, own_v, lane, dim, val);
        } else {
            load_head<H>(true, keys + own, lane, dim, key);
            load_head<H>(true, values + own, lane, dim, val);
        }
        const bool mine = stream == own_stream;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            const float score = __fmul_rn(dot<LANES, PER>(query[g], key), scale);
            if (mine) {
                most[g] = score, sum[g] = 1.0f;
#pragma unroll
                for (int e = 0; e < PER; ++e) value[g][e] = val[e];
            }
        }
    }

    auto wait_one = [&] {
        if (depth == 1) {
            wait_copies<1>();
        } else if (depth == 2) {
            wait_copies<3>();
        } else {
            wait_copies<7>();
        }
    };
    int place = 0;
    for (int t = 0; t < count; t += BATCH) {
        float4* here = staged + place * 2 * BATCH * 32;
        const bool more = t + depth * BATCH < count;
        float score[BATCH][G];
        if constexpr (H::STAGED) wait_one();
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            float key[PER];
            if constexpr (H::STAGED) {
                take(here[b * 32], key);
            } else {
                const i64 at = found_by(next, b);
                load_head<H>(at >= 0, keys + at, lane, dim, key);
            }
            const bool visible = stream + (t + b) * streams < before;
#pragma unroll
            for (int g = 0; g < G; ++g) {
                const float product = __fmul_rn(dot<LANES, PER>(query[g], key), scale);
                score[b][g] = visible ? product : NONE;
            }
        }
        if constexpr (H::STAGED) {
            if (more) stage_batch(here, keys, next);
            close_copies();
        }
#pragma unroll
        for (int g = 0; g < G; ++g) {
            float top = most[g];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) top = fmaxf(top, score[b][g]);
            const float base = top == NONE ? 0.0f : top;
            const float shrink = exp2f(__fsub_rn(most[g], base));
            most[g] = top;
            sum[g] = __fmul_rn(sum[g], shrink);
#pragma unroll
            for (int e = 0; e < PER; ++e) value[g][e] = __fmul_rn(value[g][e], shrink);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                score[b][g] = exp2f(__fsub_rn(score[b][g], base));
                sum[g] = __fadd_rn(sum[g], score[b][g]);
            }
        }
        if constexpr (H::STAGED) wait_one();
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            float val[PER];
            if constexpr (H::STAGED) {
                take(here[(BATCH + b) * 32], val);
            } else {
                const i64 at = found_by(next, b);
                load_head<H>(at >= 0, values + at, lane, dim, val);
            }
#pragma unroll
            for (int g = 0; g < G; ++g) {
#pragma unroll
                for (int e = 0; e < PER; ++e) value[g][e] = fmaf(score[b][g], val[e], value[g][e]);
            }
        }
        if constexpr (H::STAGED) {
            if (more) stage_batch(here + BATCH * 32, values, next);
            close_copies();
            next = find_batch(t + (depth + 1) * BATCH);
            place = place + 1 == depth ? 0 : place + 1;
        } else {
            next = find_batch(t + BATCH);
        }
    }

#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
        for (int e = 0; e < PER; ++e) {
            if (H::STAGED || H::at(lane, e) < dim) stream_values[(local * G + g) * dim + H::at(lane, e)] = value[g][e];
        }
        if (lane % LANES == 0) {
            stream_max[local * G + g] = most[g];
            stream_sum[local * G + g] = sum[g];
        }
    }
    if (cluster > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }

    // Streams past the last key are empty.
    const int used = before + 1 < streams ? before + 1 : streams;
    for (int i = part * blockDim.x + threadIdx.x; i < G * dim; i += cluster * blockDim.x) {
        const int g = i / dim;
        auto each = [&](const float* array, int width, int column, int s) {
            const int rank = s / block_streams;
            const float* here = array + (s - rank * block_streams) * width + column;
            if (cluster == 1) return *here;
#ifdef SHUFFLE_BLOCKS
            return load_from_block(here, cluster - 1 - rank);
#else
            return load_from_block(here, rank);
#endif
        };
        float top = NONE;
        for (int s = 0; s < used; ++s) top = fmaxf(top, each(stream_max, G, g, s));
        float total = 0.0f, result = 0.0f;
        if (top != NONE) {
            for (int s = 0; s < used; ++s) {
                const float weight = exp2f(__fsub_rn(each(stream_max, G, g, s), top));
                total = fmaf(each(stream_sum, G, g, s), weight, total);
                result = fmaf(each(stream_values, G * dim, i, s), weight, result);
            }
            result = __fdiv_rn(result, total);
        }
        out.store(out.place(head_out, heads, dim, i), result);
    }
    // No block leaves while another reads from it.
    if (cluster > 1) cluster_barrier();
}

// Two blocks at a time on a multiprocessor: one reads while the other begins or ends. Heads of any width need the
// registers more.
#define ATTENTION(suffix, KV, DIM, G)                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, DIM == 0 ? 1 : 2) attention_##suffix(                          \
        const float* q, int heads, const int* sequences, const int* positions, KV* pool, CACHE_PARAMS, int window,    \
        int cluster, int depth, void* out, int out_type, int blocked_rows) {                                          \
        attend<KV, DIM, G, false>(q, Projections{}, heads, sequences, positions, pool, CACHE, window, cluster, depth, \
                                  Output{out, out_type, blocked_rows});                                               \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, DIM == 0 ? 1 : 2) decode_attention_##suffix(                   \
        const float* qkv, int heads, const float* q_norm, const float* k_norm, float eps, const float* cos_sin,       \
        const int* sequences, const int* positions, KV* pool, CACHE_PARAMS, int window, int cluster, int depth,       \
        void* out, int out_type, int blocked_rows) {                                                                  \
        attend<KV, DIM, G, true>(nullptr, Projections{qkv, q_norm, k_norm, eps, cos_sin}, heads, sequences,           \
                                 positions, pool, CACHE, window, cluster, depth, Output{out, out_type, blocked_rows});\
    }

ATTENTION(f32_128_2, float, 128, 2)
ATTENTION(f32_128_1, float, 128, 1)
ATTENTION(f32_64_1, float, 64, 1)
ATTENTION(f32_any, float, 0, 1)
ATTENTION(bf16_any, bf16_t, 0, 1)
ATTENTION(f16_any, f16_t, 0, 1)
