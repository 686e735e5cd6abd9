// Attention over keys and values of 16 bits, in matrix instructions.
//
// The keys that a row sees, oldest first and its own last, form chunks of 16. Chunk c belongs to stream c % `streams`; a
// stream takes its chunks ascending, and streams are merged ascending. Their number follows from the cache's shape
// alone, and a warp takes whole streams: so nothing depends on how many warps and blocks share a row's keys, nor on
// the rows beside it, and a row decoded in one pass has the bits of the same row in two (`qkv_rope`, then `attention`).
//
// What is f32 (queries, weights of the softmax) enters a product as the sum of three 16-bit parts, each a column of its
// own. Of the 8 columns of m16n8k16, column n belongs to head n / 2 % 2 of the block's: for n < 4 it is part n % 2, for
// n = 4 and 6 part 2, and 5 and 7 are zero. So the head of the results of lane l is l % 2.

constexpr int CHUNK = 16;
constexpr int PARTS = 3;

template <typename KV>
struct Half;

template <>
struct Half<bf16_t> {
    static __device__ __forceinline__ u32 pack(float low, float high) { return pack_bf16(low, high); }
    static __device__ __forceinline__ float low(u32 pair) { return low_bf16(pair); }
    static __device__ __forceinline__ float high(u32 pair) { return high_bf16(pair); }
    static __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_bf16(d, a, b); }
};

template <>
struct Half<f16_t> {
    static __device__ __forceinline__ u32 pack(float low, float high) { return pack_f16(low, high); }
    static __device__ __forceinline__ float low(u32 pair) { return f16_to_float((bf16_t)pair); }
    static __device__ __forceinline__ float high(u32 pair) { return f16_to_float((bf16_t)(pair >> 16)); }
    static __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_f16(d, a, b); }
};

// Two floats as sums of 16-bit parts.
template <typename H>
__device__ __forceinline__ void split(float low, float high, u32 (&part)[PARTS]) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        part[i] = H::pack(low, high);
        low = __fsub_rn(low, H::low(part[i]));
        high = __fsub_rn(high, H::high(part[i]));
    }
}

// Word i of four.
__device__ __forceinline__ u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// ---- How the blocks of a cluster hand their streams to its first one: each store reports its bytes to a barrier in
// the first block's shared memory, so nobody waits but the one that reads. Without clusters (before sm_90) nothing of
// this is called with effect. ----

// The first block has set up its barrier. Every thread calls this once, and `cluster_begun` before it stores.
__device__ __forceinline__ void begin_cluster(u64* barrier, bool first_thread) {
#if __CUDA_ARCH__ >= 900
    if (first_thread) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
                     :: "r"((u32)__cvta_generic_to_shared(barrier))
                     : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_begun() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// By one thread of the first block: how many bytes the others store.
__device__ __forceinline__ void expect_bytes(u64* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"((u32)__cvta_generic_to_shared(barrier)), "r"(bytes)
                 : "memory");
#endif
}

// Until the expected bytes are there.
__device__ __forceinline__ void await_bytes(u64* barrier) {
#if __CUDA_ARCH__ >= 900
    const u32 at = (u32)__cvta_generic_to_shared(barrier);
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at)
            : "memory");
    }
#endif
}

// The address that `at` has in the shared memory of the cluster's first block.
__device__ __forceinline__ u32 in_first_block(const void* at) {
    u32 there = 0;
#if __CUDA_ARCH__ >= 900
    const u32 here = (u32)__cvta_generic_to_shared(at);
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(here));
#endif
    return there;
}

__device__ __forceinline__ void send(float* at, float4 x, u64* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(in_first_block(at)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(in_first_block(barrier))
                 : "memory");
#endif
}

__device__ __forceinline__ void send(float* at, float2 x, u64* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 :: "r"(in_first_block(at)), "f"(x.x), "f"(x.y), "r"(in_first_block(barrier))
                 : "memory");
#endif
}

// The lane, such that what is computed from it is computed where it is used: kept over a loop it costs registers.
__device__ __forceinline__ int lane_here() {
    int lane = threadIdx.x & 31;
    asm volatile("" : "+r"(lane));
    return lane;
}

// Blocks: for each row, for each G query heads that share a key/value head, `cluster` blocks of no fewer than G + 2
// warps that divide the streams, a power of two of them; blocks of a cluster have a warp for each stream. `window` 0: all
// keys are visible. `q` is used when `FUSED` is not, `from` when it is.
//
// Lane l is lane t = l % 4 of quad l / 4. As operands of the products have it: of a chunk's keys it holds key `quad`
// and key `quad` + 8, 8 of every 32 dimensions; of its values those of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, 8 of every
// 64. Products take dimensions in any order, so all come 16 bytes at a time from where they lie.
template <typename KV, int DIM, int G, bool FUSED>
__device__ __forceinline__ void attend(const float* q, const Projections from, int heads, const int* sequences,
                                       const int* positions, KV* pool, const Cache cache, int window, int streams,
                                       int cluster, const Output out) {
    using H = Half<KV>;
    using Spot = Cache::Spot;
    constexpr int KEY_LOADS = DIM / 32, VALUE_LOADS = DIM / 64, TILES = DIM / 16;
    constexpr int COLUMN = DIM + 32;  // in shared memory, so that two quads find their parts in different banks
    extern __shared__ __align__(16) float shared[];
    release_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int quad = lane / 4, t = lane % 4;
    const int blocks_in_row = heads / G * cluster;
    const int row = BLOCK_X / blocks_in_row;
    const int place_in_row = BLOCK_X - row * blocks_in_row;
    // A cluster's blocks divide the streams by their place in the cluster, whatever the blocks' numbers.
    const int part = cluster > 1 ? (int)blockIdx.x % cluster : 0;
    const int head = place_in_row / cluster * G;
    const int group = heads / cache.kv_heads;
    const int kv_head = head / group;

    // Shared memory: a barrier; each stream's sum of values; the queries' parts; the row's own key and value; each
    // stream's greatest score and sum of weights.
    u64* barrier = (u64*)shared;
    float* stream_values = shared + 4;
    KV* columns = (KV*)(stream_values + streams * G * DIM);
    KV* own_k = columns + 7 * COLUMN;
    KV* own_v = own_k + DIM;
    float2* stream_sums = (float2*)(own_v + DIM);
    if (cluster > 1) begin_cluster(barrier, part == 0 && threadIdx.x == 0);

    // The keys that the row sees: `count` from position `first` on.
    int sequence = peek(sequences + row), position = peek(positions + row);
    int first = 0, count = 0;
    auto span = [&] {
        first = window > 0 && position >= window ? position - window + 1 : 0;
        count = sequence < 0 || position < 0 ? 0 : position - first + 1;
    };
    span();
    // The warp's chunks: the first one of a stream, and the one behind another; -1: there is none.
    const int all_warps = warps * cluster;
    auto first_of = [&](int stream) { return stream < streams && stream * CHUNK < count ? stream : -1; };
    auto behind = [&](int chunk) {
        const int next = chunk + streams;
        return chunk < 0 ? -1 : next * CHUNK < count ? next : first_of((chunk & (streams - 1)) + all_warps);
    };
    // Lanes i and i + 16 find the chunk's key i.
    auto spot_of = [&](int chunk) {
        const int key = chunk * CHUNK + lane % CHUNK;
        return chunk >= 0 && key < count ? cache.spot(sequence, first + key) : Spot{-1, 0};
    };
    // Its address, or null.
    auto address_of = [&](Spot spot, int block) -> const KV* {
        const i64 at = cache.resolve(spot, block);
        return at < 0 ? nullptr : pool + at + cache.k_offset + kv_head * DIM;
    };
    auto find = [&](int chunk) -> const KV* {
        const Spot spot = spot_of(chunk);
        return address_of(spot, spot.cell >= 0 ? cache.table[spot.cell] : -1);
    };
    const i64 to_values = cache.v_offset - cache.k_offset;

    uint4 key[2][KEY_LOADS], value[4][VALUE_LOADS];
    auto load_keys = [&](const KV* found) {
        const int lane = lane_here(), quad = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const KV* at = (const KV*)__shfl_sync(0xffffffffu, (u64)found, quad + 8 * r);
#pragma unroll
            for (int i = 0; i < KEY_LOADS; ++i) {
                key[r][i] = make_uint4(0, 0, 0, 0);
                if (at) key[r][i] = *(const uint4*)(at + i * 32 + t * 8);
            }
        }
    };
    auto load_values = [&](const KV* found) {
        const int lane = lane_here(), quad = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const KV* at = (const KV*)__shfl_sync(0xffffffffu, (u64)found, 2 * t + r % 2 + r / 2 * 8);
#pragma unroll
            for (int i = 0; i < VALUE_LOADS; ++i) {
                value[r][i] = make_uint4(0, 0, 0, 0);
                if (at) value[r][i] = *(const uint4*)(at + to_values + i * 64 + quad * 8);
            }
        }
    };

    // Indices are seldom a kernel's result. While the kernels before this one end, they tell which keys will most
    // likely be needed; later all guesses are compared.
    int chunk = first_of(part * warps + warp);
    const Spot spot = spot_of(chunk), own_spot = cache.spot(sequence, position);
    const int block = spot.cell >= 0 ? peek(cache.table + spot.cell) : -1;
    const KV* found = address_of(spot, block);
    if (found) {
        const KV* at = found + (lane < CHUNK ? 0 : to_values);
#pragma unroll
        for (int i = 0; i < DIM; i += 64) prefetch(at + i);
    }

    dependency_wait();
    const int sequence_now = sequences[row], position_now = positions[row];
    const int block_now = spot.cell >= 0 ? cache.table[spot.cell] : -1;
    int own_block = own_spot.cell >= 0 ? cache.table[own_spot.cell] : -1;
    // Warp 0 brings the row's own value, the next ones a head each.
    const int task = warp - 1;
    const float* x = FUSED ? from.qkv + (i64)row * (heads + 2 * cache.kv_heads) * DIM
                           : q + ((i64)row * heads + head) * DIM;
    const float* weight = nullptr;
    RotaryHead<DIM> rotary;
    float plain[DIM / 32];
    if (FUSED && task >= 0 && task <= G) {
        weight = task < G ? from.q_norm : from.k_norm;
        rotary.load(x + (task < G ? head + task : heads + kv_head) * DIM, weight, from.cos_sin + (i64)row * DIM, DIM);
    } else if (FUSED ? task < 0 : task >= 0 && task < G) {
        const float* mine = FUSED ? x + (heads + cache.kv_heads + kv_head) * DIM : x + task * DIM;
#pragma unroll
        for (int i = 0; i < DIM / 32; ++i) plain[i] = mine[lane + 32 * i];
    }
    load_keys(found);
    load_values(found);

    i64 own = cache.resolve(own_spot, own_block);
    const bool guessed = sequence_now == sequence && position_now == position && block_now == block;
    if (__any_sync(0xffffffffu, !guessed)) {
        sequence = sequence_now, position = position_now;
        span();
        chunk = first_of(part * warps + warp);
        found = find(chunk);
        own = cache.find(sequence, position);
        load_keys(found);
        load_values(found);
    }
    // Where the heads' output begins, and how far on the next eight columns are. 32 bits: registers are short.
    const int eights = out.blocked_rows > 0 ? 8 * block_rows(row, out.blocked_rows) : 8;
    const int row_out = (int)(out.blocked_rows > 0 ? blocked_at(row, out.blocked_rows, head * DIM, heads * DIM)
                                                   : ((i64)row * heads + head) * DIM);
    if (count == 0) {
        // No block ends with its cluster's barrier open.
        if (cluster > 1) cluster_begun();
        if (part > 0) return;
        for (int i = threadIdx.x; i < G * DIM; i += blockDim.x) out.store((i64)row_out + i / 8 * eights + i % 8, 0.0f);
        return;
    }
    u32 visible = __ballot_sync(0xffffffffu, found != nullptr) >> quad;
    int next = behind(chunk);
    found = find(next);

    // The row's own heads.
    auto emit_q = [&](int h, int c, float q) {
        u32 parts[PARTS];
        split<H>(q, 0.0f, parts);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            ((bf16_t*)columns)[(i < 2 ? 2 * h + i : 4 + 2 * h) * COLUMN + c] = (bf16_t)parts[i];
        }
    };
    if constexpr (FUSED) {
        const bool store = part == 0 && head % group == 0 && own >= 0;
        KV* k_to = pool + own + cache.k_offset + kv_head * DIM;
        if (task >= 0 && task <= G) {
            rotary.finish(weight != nullptr, from.eps, DIM, [&](int c, float x) {
                if (task < G) {
                    emit_q(task, c, x);
                    return;
                }
                narrow(x, own_k[c]);
                if (store) narrow(x, k_to[c]);
            });
        } else if (task < 0) {
#pragma unroll
            for (int i = 0; i < DIM / 32; ++i) {
                narrow(plain[i], own_v[lane + 32 * i]);
                if (store) narrow(plain[i], k_to[to_values + lane + 32 * i]);
            }
        }
    } else if (task >= 0 && task < G) {
#pragma unroll
        for (int i = 0; i < DIM / 32; ++i) emit_q(task, lane + 32 * i, plain[i]);
    }
    __syncthreads();
    if (cluster > 1) {
        cluster_begun();
        if (part == 0 && threadIdx.x == 0) {
            // A stream that has keys comes from each warp of the other blocks.
            const int others = max(0, min((count + CHUNK - 1) / CHUNK, streams) - warps);
            expect_bytes(barrier, others * G * (DIM + 2) * (int)sizeof(float));
        }
    }

    // Scores are in units of log2, so that a weight is one exp2.
    const float scale = __fdiv_rn(1.4426950408889634f, sqrtf((float)DIM));
    const int my_head = t % 2, column_head = quad / 2 % 2;
    const bool column_used = column_head < G && (quad < 4 || quad % 2 == 0);
    float most = NONE, sum = 0.0f, total[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; ++i) total[i][0] = total[i][1] = total[i][2] = total[i][3] = 0.0f;
    while (chunk >= 0) {
        const int lane = lane_here(), quad = lane / 4, t = lane % 4;
        const int own_key = count - 1 - chunk * CHUNK;
        if (FUSED && own_key < CHUNK) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (own_key != quad + 8 * r) continue;
#pragma unroll
                for (int i = 0; i < KEY_LOADS; ++i) key[r][i] = *(const uint4*)(own_k + i * 32 + t * 8);
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (own_key != 2 * t + r % 2 + r / 2 * 8) continue;
#pragma unroll
                for (int i = 0; i < VALUE_LOADS; ++i) value[r][i] = *(const uint4*)(own_v + i * 64 + quad * 8);
            }
        }

        float product[2][4] = {};
#pragma unroll
        for (int i = 0; i < KEY_LOADS; ++i) {
            uint4 parts = make_uint4(0, 0, 0, 0);
            if (column_used) parts = *(const uint4*)(columns + quad * COLUMN + i * 32 + t * 8);
            const uint4 low = key[0][i], high = key[1][i];
            H::mma(product[0], {low.x, high.x, low.y, high.y}, {parts.x, parts.y});
            H::mma(product[1], {low.z, high.z, low.w, high.w}, {parts.z, parts.w});
        }
        load_keys(found);

        // Scores and weights of keys `quad` and `quad` + 8 for head `my_head`.
        float score[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float a = __fadd_rn(product[0][2 * r], product[1][2 * r]);
            const float b = __fadd_rn(product[0][2 * r + 1], product[1][2 * r + 1]);
            float s = __fadd_rn(a, b);
            s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, 2));
            score[r] = visible >> 8 * r & 1 ? __fmul_rn(s, scale) : NONE;
        }
        float top = fmaxf(score[0], score[1]);
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
        top = fmaxf(top, most);
        const float base = top == NONE ? 0.0f : top;
        const float shrink = exp2f(__fsub_rn(most, base));
        most = top;
#pragma unroll
        for (int r = 0; r < 2; ++r) score[r] = exp2f(__fsub_rn(score[r], base));
        sum = __fadd_rn(__fmul_rn(sum, shrink), __fadd_rn(score[0], score[1]));
        if (chunk >= streams) {
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) total[i][j] = __fmul_rn(total[i][j], shrink);
            }
        }

        // The weights change places: from a lane for each key to the keys of each lane's values.
        u32 weights[2];
        const int from_lane = lane_here() % 4 * 8 + column_head;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float even = __shfl_sync(0xffffffffu, score[r], from_lane);
            const float odd = __shfl_sync(0xffffffffu, score[r], from_lane + 4);
            u32 parts[PARTS];
            split<H>(even, odd, parts);
            weights[r] = !column_used ? 0 : quad >= 4 ? parts[2] : quad % 2 == 1 ? parts[1] : parts[0];
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            // Rows `quad` and `quad` + 8 of tile i are dimension i of the lane's first and second TILES values.
            u32 a[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int element = i + r % 2 * TILES, load = element / 8, pair = r / 2 * 2;
                const u32 even = word(value[pair][load], element % 8 / 2);
                const u32 odd = word(value[pair + 1][load], element % 8 / 2);
                a[r] = __byte_perm(even, odd, element % 2 == 0 ? 0x5410 : 0x7632);
            }
            H::mma(total[i], a, weights);
        }
        load_values(found);

        const int stream = chunk & (streams - 1);
        if (next != chunk + streams) {
            // The stream ends. The parts' sum: lanes 0 and 1 of a quad take the first TILES values, lanes 2 and 3 the
            // others.
#pragma unroll
            for (int offset = 4; offset < 32; offset <<= 1) {
                sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
            }
            // The first and second TILES values lie side by side in one load, or in two loads.
            float* to = stream_values + (stream * G + my_head) * DIM + quad * 8 +
                        t / 2 * (VALUE_LOADS == 1 ? TILES : 64);
#pragma unroll
            for (int i = 0; i < TILES; i += 4) {
                float result[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float low = __fadd_rn(total[i + j][0], total[i + j][1]);
                    const float high = __fadd_rn(total[i + j][2], total[i + j][3]);
                    result[j] = __fadd_rn(t < 2 ? low : high, __shfl_xor_sync(0xffffffffu, t < 2 ? high : low, 2));
                    total[i + j][0] = total[i + j][1] = total[i + j][2] = total[i + j][3] = 0.0f;
                }
                const float4 four = make_float4(result[0], result[1], result[2], result[3]);
                if (my_head >= G) continue;
                if (part > 0) {
                    send(to + i, four, barrier);
                } else {
                    *(float4*)(to + i) = four;
                }
            }
            if (lane < G) {
                float2* sums = stream_sums + stream * G + lane;
                if (part > 0) {
                    send((float*)sums, make_float2(most, sum), barrier);
                } else {
                    *sums = make_float2(most, sum);
                }
            }
            most = NONE, sum = 0.0f;
        }
        chunk = next;
        visible = __ballot_sync(0xffffffffu, found != nullptr) >> (lane_here() / 4);
        next = behind(next);
        found = find(next);
    }

    if (part > 0) return;
    __syncthreads();
    if (cluster > 1) await_bytes(barrier);
    // Streams past the last key are empty.
    const int used = min((count + CHUNK - 1) / CHUNK, streams);
    const int i = 2 * threadIdx.x;
    if (i >= G * DIM) return;
    const int h = i / DIM;
    float greatest = NONE;
    for (int s = 0; s < used; ++s) greatest = fmaxf(greatest, stream_sums[s * G + h].x);
    float weights = 0.0f, low = 0.0f, high = 0.0f;
    if (greatest != NONE) {
        for (int s = 0; s < used; ++s) {
            const float2 sums = stream_sums[s * G + h];
            const float2 pair = *(const float2*)(stream_values + s * G * DIM + i);
            const float weight = exp2f(__fsub_rn(sums.x, greatest));
            weights = fmaf(sums.y, weight, weights);
            low = fmaf(pair.x, weight, low);
            high = fmaf(pair.y, weight, high);
        }
        low = __fdiv_rn(low, weights);
        high = __fdiv_rn(high, weights);
    }
    const i64 to = (i64)row_out + i / 8 * eights + i % 8;
    out.store(to, low);
    out.store(to + 1, high);
}

// THREADS: of a block at most. 512 leave registers for 16 warps at a time on a multiprocessor.
#define ATTENTION(suffix, KV, DIM, G, THREADS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##suffix(                                            \
        const float* q, int heads, const int* sequences, const int* positions, KV* pool, CACHE_PARAMS, int window,    \
        int streams, int cluster, void* out, int out_type, int blocked_rows) {                                        \
        attend<KV, DIM, G, false>(q, Projections{}, heads, sequences, positions, pool, CACHE, window, streams,        \
                                  cluster, Output{out, out_type, blocked_rows});                                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_attention_##suffix(                                     \
        const float* qkv, int heads, const float* q_norm, const float* k_norm, float eps, const float* cos_sin,       \
        const int* sequences, const int* positions, KV* pool, CACHE_PARAMS, int window, int streams, int cluster,     \
        void* out, int out_type, int blocked_rows) {                                                                  \
        attend<KV, DIM, G, true>(nullptr, Projections{qkv, q_norm, k_norm, eps, cos_sin}, heads, sequences,           \
                                 positions, pool, CACHE, window, streams, cluster, Output{out, out_type, blocked_rows});\
    }

ATTENTION(bf16_128_2, bf16_t, 128, 2, 512)
ATTENTION(bf16_128_1, bf16_t, 128, 1, 256)
ATTENTION(bf16_64_1, bf16_t, 64, 1, 512)
ATTENTION(f16_128_2, f16_t, 128, 2, 512)
ATTENTION(f16_128_1, f16_t, 128, 1, 256)
ATTENTION(f16_64_1, f16_t, 64, 1, 512)
