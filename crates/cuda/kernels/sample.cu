// Logits processors and the choice of a token: a block for each row.
//
// What the choice depends on is compared, never summed in an order of chance: the k-th score is exact, candidates are
// sorted by score and then by id where a sum follows, and of equal scores the lower id wins.

constexpr int SAMPLE_THREADS = 512;
constexpr int SAMPLE_WARPS = SAMPLE_THREADS / 32;

// Digits of the radix select, from the top: 11, 11 and 10 bits, each with bins of its own.
constexpr int PASSES = 3, DIGIT_BINS = 2048, BINS = 2 * DIGIT_BINS + DIGIT_BINS / 2;

// laneway_device::op::SampleRow.
struct SampleRow {
    float temperature, top_p, repetition_penalty;
    int top_k;
    u32 seed_lo, seed_hi, frame;
    int eos;
    u32 ban_eos;
    int slot;
    u32 reserved[2];
};

#define BANNED __int_as_float(0xff800000)  // -inf

// Ascending as f32::total_cmp orders (no NaN gets here), and back.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// First word of Philox4x32-10.
__device__ __forceinline__ u32 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

__device__ __forceinline__ double gumbel(const SampleRow& row, u32 group, u32 id) {
    const u32 word = philox(id, row.frame, group, 0, row.seed_lo, row.seed_hi);
    const double u = __dmul_rn(__dadd_rn((double)word, 0.5), 2.3283064365386963e-10);  // 2^-32
    return -log(-log(u));
}

// Sum of `x` over the threads before this one and this one, in a fixed pattern; `total` is that of all. `partial` must
// not be in use, and is until the next barrier.
template <typename T>
__device__ __forceinline__ T block_scan(T x, T* partial, T& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const T other = __shfl_up_sync(0xffffffffu, x, offset);
        if (lane >= offset) x += other;
    }
    if (lane == 31) partial[warp] = x;
    __syncthreads();
    T ahead = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < SAMPLE_WARPS; ++w) {
        if (w == warp) ahead = total;
        total += partial[w];
    }
    return ahead + x;
}

// What the radix select needs beside its bins, for each pass.
struct Digit {
    u32 partial[SAMPLE_WARPS];
    u32 bin;    // where the k-th score is; NO_BIN: there are fewer than k
    u32 above;  // scores in the bins above
};
constexpr u32 NO_BIN = 0xffffffffu;

// The k-th greatest of the scores that are not banned, or BANNED when there are fewer than k. The first digits are
// counted already.
__device__ __forceinline__ float kth_score(const float* z, int vocab, u32 k, u32* bins, Digit* digits) {
    u32 prefix = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        const int bits = pass == 2 ? 10 : 11;
        constexpr int BINS_EACH = DIGIT_BINS / SAMPLE_THREADS;
        const int each = pass == 2 ? BINS_EACH / 2 : BINS_EACH;
        const u32* counted = bins + pass * DIGIT_BINS;
        Digit& digit = digits[pass];
        if (pass > 0) {
            for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
                const u32 key = ordered(z[id]);
                const bool in = key >> (shift + bits) == prefix && z[id] != BANNED;
                if (in) atomicAdd(&bins[pass * DIGIT_BINS + (key >> shift & ((1u << bits) - 1))], 1u);
            }
            __syncthreads();
        }
        // Thread t has `each` bins from the last but `each` t downwards.
        const int last = (1 << bits) - 1 - (int)threadIdx.x * each;
        u32 counts[BINS_EACH], sum = 0, total;
#pragma unroll
        for (int i = 0; i < BINS_EACH; ++i) {
            counts[i] = i < each ? counted[last - i] : 0;
            sum += counts[i];
        }
        u32 above = block_scan(sum, digit.partial, total) - sum;
#pragma unroll
        for (int i = 0; i < BINS_EACH; ++i) {
            if (above < k && k <= above + counts[i]) digit.bin = last - i, digit.above = above;
            above += counts[i];
        }
        __syncthreads();
        if (digit.bin == NO_BIN) return BANNED;
        prefix = prefix << bits | digit.bin;
        k -= digit.above;
    }
    return from_ordered(prefix);
}

// Sort ascending; `size` is a power of two.
__device__ void sort(u64* keys, int size) {
    for (int run = 2; run <= size; run <<= 1) {
        for (int step = run >> 1; step > 0; step >>= 1) {
            for (int i = threadIdx.x; i < size / 2; i += SAMPLE_THREADS) {
                const int low = 2 * i - (i & (step - 1)), high = low + step;
                const u64 a = keys[low], b = keys[high];
                if ((a > b) == ((low & run) == 0)) keys[low] = b, keys[high] = a;
            }
            __syncthreads();
        }
    }
}

__device__ __forceinline__ float key_score(u64 key) { return from_ordered(~(u32)(key >> 32)); }
__device__ __forceinline__ int key_id(u64 key) { return (int)(u32)key; }

// How many of the `count` candidates, sorted by score, are the smallest set that reaches `top_p`.
__device__ int nucleus(const u64* keys, int count, float top_p, double* partial, int* found) {
    const int chunk = (count + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
    const int begin = min(count, (int)threadIdx.x * chunk), end = min(count, begin + chunk);
    const double greatest = (double)key_score(keys[0]);
    double sum = 0.0, total;
    for (int i = begin; i < end; ++i) sum += exp((double)key_score(keys[i]) - greatest);
    if (threadIdx.x == 0) *found = count;
    double reached = block_scan(sum, partial, total) - sum;
    const double target = (double)top_p * total;
    for (int i = begin; i < end; ++i) {
        reached += exp((double)key_score(keys[i]) - greatest);
        if (reached >= target) {
            atomicMin(found, i + 1);
            break;
        }
    }
    __syncthreads();
    return *found;
}

// Shared memory: `capacity` sort keys (the power of two from `vocab` on, and no fewer than the bins need), then `vocab`
// scores.
// A row with a logit that is not a number, or with every token banned, gets token -1: the kernel has no other way
// to say that there is none.
extern "C" __global__ void __launch_bounds__(512) sample(const float* logits, int vocab, int live, int extra_live,
                                                          const SampleRow* params, u32 group, u32* seen_pool,
                                                          i64 slot_stride, i64 seen_offset, i64 pool_len, int* tokens,
                                                          int token_stride, int token_offset, float* scores,
                                                          int capacity) {
    extern __shared__ u64 shared_keys[];
    __shared__ double partial[SAMPLE_WARPS];
    __shared__ int best_ids[SAMPLE_WARPS];
    __shared__ int count;
    __shared__ int nucleus_size;
    __shared__ Digit digits[PASSES];
    u64* keys = shared_keys;
    u32* bins = (u32*)shared_keys;
    float* z = (float*)(keys + capacity);
    release_dependents();
    for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) bins[i] = 0;
    if (threadIdx.x < PASSES) digits[threadIdx.x].bin = NO_BIN;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    dependency_wait();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 r = BLOCK_X;
    const SampleRow row = params[r];
    u32* seen = nullptr;
    if (seen_pool && row.slot >= 0) {
        const i64 start = row.slot * slot_stride + seen_offset;
        if (start + (vocab + 31) / 32 <= pool_len) seen = seen_pool + start;
    }
    const bool penalise = seen && row.repetition_penalty != 1.0f;
    const bool drawn = row.temperature > 0.0f;

    bool bad = false;
    for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
        float x = logits[r * vocab + id];
        if (penalise && (seen[id >> 5] >> (id & 31) & 1)) {
            x = x < 0.0f ? __fmul_rn(x, row.repetition_penalty) : __fdiv_rn(x, row.repetition_penalty);
        }
        if (id >= live && id != row.eos && id != extra_live) x = BANNED;
        if (row.ban_eos != 0 && id == row.eos) x = BANNED;
        if (drawn) x = __fdiv_rn(x, row.temperature);
        bad |= x != x;
        z[id] = x;
        if (drawn && row.top_k > 0 && x != BANNED) atomicAdd(&bins[ordered(x) >> 21], 1u);
    }
    bad = __syncthreads_or(bad);

    float threshold = BANNED;
    int best_id = 0x7fffffff;
    double best = 0.0;
    auto offer = [&](int id, double score) {
        if (best_id == 0x7fffffff || score > best || (score == best && id < best_id)) best = score, best_id = id;
    };
    if (bad) {
    } else if (!drawn) {
        for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
            if (z[id] != BANNED) offer(id, (double)z[id]);
        }
    } else {
        if (row.top_k > 0) threshold = kth_score(z, vocab, row.top_k, bins, digits);
        // The bins are done with: their place takes the candidates.
        for (int first = 0; first < vocab; first += SAMPLE_THREADS) {
            const int id = first + threadIdx.x;
            const bool in = id < vocab && z[id] != BANNED && !(z[id] < threshold);
            const u32 mask = __ballot_sync(0xffffffffu, in);
            int at = 0;
            if (lane == 0 && mask) at = atomicAdd(&count, __popc(mask));
            at = __shfl_sync(0xffffffffu, at, 0) + __popc(mask & ((1u << lane) - 1));
            if (in) keys[at] = (u64)~ordered(z[id]) << 32 | (u32)id;
        }
        __syncthreads();
        int kept = count;
        if (row.top_p < 1.0f && kept > 0) {
            int size = 2;
            while (size < kept) size <<= 1;
            for (int i = kept + threadIdx.x; i < size; i += SAMPLE_THREADS) keys[i] = ~0ull;
            __syncthreads();
            sort(keys, size);
            const int all = kept;
            kept = nucleus(keys, all, row.top_p, partial, &nucleus_size);
            for (int i = kept + threadIdx.x; i < all; i += SAMPLE_THREADS) z[key_id(keys[i])] = BANNED;
        }
        for (int i = threadIdx.x; i < kept; i += SAMPLE_THREADS) {
            const int id = key_id(keys[i]);
            offer(id, (double)key_score(keys[i]) + gumbel(row, group, id));
        }
    }

#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const int id = __shfl_down_sync(0xffffffffu, best_id, offset);
        const double score = __shfl_down_sync(0xffffffffu, best, offset);
        if (id != 0x7fffffff) offer(id, score);
    }
    __syncthreads();
    if (lane == 0) best_ids[warp] = best_id, partial[warp] = best;
    __syncthreads();
    if (scores) {
        for (int id = threadIdx.x; id < vocab; id += SAMPLE_THREADS) {
            scores[r * vocab + id] = z[id] < threshold ? BANNED : z[id];
        }
    }
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int w = 1; w < SAMPLE_WARPS; ++w) {
        if (best_ids[w] != 0x7fffffff) offer(best_ids[w], partial[w]);
    }
    const int token = best_id == 0x7fffffff ? -1 : best_id;
    if (seen && token >= 0) seen[token >> 5] |= 1u << (token & 31);
    tokens[r * token_stride + token_offset] = token;
}
