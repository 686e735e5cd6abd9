// Causal convolutions over streams by Hopper's warpgroup products (sm_90a only), from inputs that are staged in memory
// first: activated, in f16, each window's rows behind those that it carries. Eight channels of a row lie side by side and
// rows 16 bytes apart, so that a tap is another first row, and a block fetches its inputs in a few copies.
//
// Weights are the first operand, from registers: a warpgroup's fragment of 64 outputs is four packed tiles of 16, so
// they come from memory as they lie. A tile is N consecutive places of the staged rows; that of an output is that of its
// first tap. Those between two windows are computed for nothing.
//
// Order of a sum: channels ascending in steps of 16 and, within a step, taps ascending, in one accumulator. The tile and
// the warpgroups of a block decide no bit.

// d[64 x N] (+)= a[64 x 16] * b[16 x N]
#define OUT32(i) OUT16(i), OUT16(i + 16)
#define LIST32 TEN("") "," TEN("1") "," TEN("2") ",%30,%31"
#define LIST64 TEN("") "," TEN("1") "," TEN("2") "," TEN("3") "," TEN("4") "," TEN("5") ",%60,%61,%62,%63"
#define LIST128                                                                                                     \
    TEN("") "," TEN("1") "," TEN("2") "," TEN("3") "," TEN("4") "," TEN("5") "," TEN("6") "," TEN("7") ","         \
        TEN("8") "," TEN("9") "," TEN("10") "," TEN("11") ",%120,%121,%122,%123,%124,%125,%126,%127"
PRODUCTS("64", 32, LIST32, "%32,%33,%34,%35", "%36", "%37", OUT32(0))
PRODUCTS("128", 64, LIST64, "%64,%65,%66,%67", "%68", "%69", OUT32(0), OUT32(32))
PRODUCTS("256", 128, LIST128, "%128,%129,%130,%131", "%132", "%133", OUT32(0), OUT32(32), OUT32(64), OUT32(96))

// Where a window is staged: its carried rows begin at the place of the first row of `x` that is its own, moved by `past`
// for each window ahead of it, and an output has the place of the first input that it needs.
struct Place {
    int first;  // own row of `x`
    int rows;   // own ones; 0: there is no such window
    int moved;  // places from a row of `x` to that of its output
};

// The table of all windows, by all threads of the block, and the first place behind all outputs.
__device__ __forceinline__ void find_windows(const Streams& streams, int past, Place* table, int* end) {
    const int tid = threadIdx.x, threads = blockDim.x;
    if (tid == 0) *end = 0;
    bool unordered = false;
#pragma unroll 1
    for (int i = tid; i < streams.count; i += threads) {
        const Window window = read_window(streams, i);
        table[i] = {window.first, window.rows, i * past};
        if (i > 0 && window.rows > 0) {
            const Window before = read_window(streams, i - 1);
            unordered |= before.rows == 0 || before.first > window.first;
        }
    }
    if (__syncthreads_or(unordered)) {
#pragma unroll 1
        for (int i = tid; i < streams.count; i += threads) {
            int ahead = 0;
#pragma unroll 1
            for (int j = 0; j < streams.count; ++j) ahead += table[j].rows > 0 && table[j].first < table[i].first;
            table[i].moved = ahead * past;
        }
    }
#pragma unroll 1
    for (int i = tid; i < streams.count; i += threads)
        if (table[i].rows > 0) atomicMax(end, table[i].first + table[i].rows + table[i].moved);
    __syncthreads();
}

// The output row of each of `n` places from `tile_first` on, or -1, by one warp.
__device__ __forceinline__ void find_rows(const Streams& streams, const Place* table, int tile_first, int n, int lane,
                                          int* rows_of) {
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < n; i += 32) rows_of[i] = -1;
#pragma unroll 1
    for (int first = 0; first < streams.count; first += 32) {
        const int i = first + lane;
        const int begin = i < streams.count ? table[i].first + table[i].moved - tile_first : n;
        u32 here = __ballot_sync(0xffffffffu, begin < n && table[min(i, streams.count - 1)].rows > 0 &&
                                                  begin + table[min(i, streams.count - 1)].rows > 0);
#pragma unroll 1
        for (; here; here &= here - 1) {
            const Place at = table[first + __ffs(here) - 1];
            const int from = at.first + at.moved - tile_first;
#pragma unroll 1
            for (int place = max(from, 0) + lane; place < min(from + at.rows, n); place += 32)
                rows_of[place] = tile_first + place - at.moved;
        }
    }
    __syncwarp();
}

__device__ __forceinline__ void copy_out(void* to, u32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Stage inputs: a block does STAGE_ROWS places of 64 channels at a time, four threads of which have 32 neighbouring
// channels of a row.
constexpr int STAGE_ROWS = 64, STAGE_CHANNELS = 64;

extern "C" __global__ void __launch_bounds__(256, 4)
    conv_stage(const float* x, const float* alpha, const float* inv_beta, const int* windows, int count, int rate,
               int rows, int slots, const void* state, int state_as, i64 slot_stride, int c_in, int past,
               int all_rows, bf16_t* staged) {
    __shared__ int window_of[STAGE_ROWS], end;
    extern __shared__ Place stage_table[];
    const Streams streams = CONV_STREAMS;
    const int tid = threadIdx.x, place_first = BLOCK_X * STAGE_ROWS;
    release_dependents();
    dependency_wait();
    find_windows(streams, past, stage_table, &end);
    if (place_first >= end + past) return;
    for (int i = tid; i < STAGE_ROWS; i += blockDim.x) window_of[i] = -1;
    __syncthreads();
    for (int i = tid / 32; i < count; i += blockDim.x / 32) {
        const Place at = stage_table[i];
        const int begin = at.first + at.moved - place_first;
        if (at.rows == 0) continue;
        for (int place = max(begin, 0) + tid % 32; place < min(begin + past + at.rows, STAGE_ROWS); place += 32)
            window_of[place] = i;
    }
    __syncthreads();
    constexpr int ROUND = STAGE_ROWS / 32;
    const int within = tid / 128 * 32 + tid % 4 * 8;
    const char* from[ROUND];
    bool old[ROUND];
#pragma unroll
    for (int r = 0; r < ROUND; ++r) {
        const int place = r * 32 + tid % 128 / 4, found = window_of[place];
        from[r] = nullptr;
        old[r] = false;
        if (found < 0) continue;
        const Place at = stage_table[found];
        const int row = place_first + place - at.moved - past;  // of `x`
        old[r] = row < at.first;
        if (old[r])
            from[r] = (const char*)state + (read_window(streams, found).state + (i64)(past + row - at.first) * c_in) *
                                               (state_as == AS_F32 ? 4 : 2);
        else
            from[r] = (const char*)(x + (i64)row * c_in);
    }
    bf16_t* const out = staged + (i64)place_first * 8;
    for (int channel = BLOCK_Y * STAGE_CHANNELS + within; channel < c_in; channel += gridDim.y * STAGE_CHANNELS) {
        float4 v[ROUND][2];
        uint4 kept[ROUND];
#pragma unroll
        for (int r = 0; r < ROUND; ++r) {
            if (!from[r]) continue;
            if (old[r] && state_as != AS_F32) {
                const uint2* const two = (const uint2*)(from[r] + channel * 2);
                const uint2 low = two[0], high = two[1];
                kept[r] = make_uint4(low.x, low.y, high.x, high.y);
            } else {
                v[r][0] = *(const float4*)(from[r] + channel * 4);
                v[r][1] = *(const float4*)(from[r] + channel * 4 + 16);
            }
        }
        float4 al[2] = {}, be[2] = {};  // zeros leave a value as it is
        if (alpha) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                al[h] = *(const float4*)(alpha + channel + h * 4);
                be[h] = *(const float4*)(inv_beta + channel + h * 4);
            }
        }
#pragma unroll
        for (int r = 0; r < ROUND; ++r) {
            if (!from[r]) continue;
            if (!old[r]) {
#pragma unroll
                for (int h = 0; h < 2; ++h) v[r][h] = quick_snake4(v[r][h], al[h], be[h]);
            }
            if (!old[r] || state_as == AS_F32)
                kept[r] = make_uint4(pack_f16(v[r][0].x, v[r][0].y), pack_f16(v[r][0].z, v[r][0].w),
                                     pack_f16(v[r][1].x, v[r][1].y), pack_f16(v[r][1].z, v[r][1].w));
            *(uint4*)(out + ((i64)(channel / 8) * all_rows + r * 32 + tid % 128 / 4) * 8) = kept[r];
        }
    }
}

// How the work is divided, see lower/codec/staged.rs.
struct StagedCut {
    int past;      // carried rows of a window, by which its places are moved
    int all_rows;  // places
    int across;    // blocks' outputs that make a row
    int buffers;   // sets of inputs that there is room for
};

// What becomes of a sum: bias, and either residual and f32, or Snake and f16 as it would be staged.
struct StagedEpilogue {
    const float* bias;
    const float* alpha;
    const float* inv_beta;
    const float* residual;
    void* out;
};

constexpr int STAGED_BUFFERS = 8;
constexpr int STAGED_FIXED = 256;  // bytes of barriers
constexpr int STAGED_HELPERS = 128;  // threads: a warp that fetches inputs, and keepers of the results
constexpr int STAGED_KEEPERS = STAGED_HELPERS - 32;

// Blocks take items, 64 outputs of N places for each of their warpgroups but the last one, of whose warps one fetches
// inputs and the others keep the results' place: they bring there what the sums are added to, and take out what they have
// become while the next item is multiplied. `c_in` is a multiple of DEPTH sets' channels, c_out of 16.
template <int TAPS, int N, bool INNER>
__device__ __forceinline__ void conv_staged(const bf16_t* staged, const bf16_t* w, const Streams& streams,
                                            const ConvShape& c, const StagedCut& cut, const StagedEpilogue& e) {
    // A set of inputs, and the weights for it, which are loaded while those of the sets ahead are multiplied.
    constexpr int CHANNELS = TAPS == 7 || (TAPS == 2 && N == 256) ? 16 : 32, STEPS = CHANNELS / 16 * TAPS;
    constexpr int DEPTH = TAPS < 7 ? 3 : N == 256 ? 2 : 4;
    extern __shared__ __align__(128) unsigned char staged_shared[];
    unsigned char* const shared = staged_shared;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, consumers = blockDim.x - STAGED_HELPERS;
    const int reach = (TAPS - 1) * c.dilation, group_rows = N + reach, buffer_bytes = CHANNELS * 2 * group_rows;
    const int sets = c.c_in / CHANNELS, block_outputs = consumers / 2;
    // Results lie as [row][output] in f32, with padding against conflicts of banks, or in f16 as they are staged.
    constexpr int PITCH = 4 * 128 + 16;
    const u32 full = shared_address(shared), empty = full + STAGED_BUFFERS * 8;
    const u32 free = empty + STAGED_BUFFERS * 8, made = free + 8;  // the results' place
    int* const end = (int*)(shared + STAGED_FIXED - 4);  // the first place behind all outputs
    unsigned char* const results = shared + STAGED_FIXED;
    unsigned char* const buffers = results + (INNER ? N * block_outputs * 2 : N * PITCH);
    Place* const table = (Place*)(buffers + cut.buffers * buffer_bytes);
    int* const rows_of = (int*)(table + streams.count);  // output row of each place of a tile, or -1
    if (tid == 0) {
        for (int i = 0; i < cut.buffers; ++i) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, consumers / 32);
        }
        barrier_init(free, INNER ? 32 : STAGED_KEEPERS);
        barrier_init(made, consumers);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    release_dependents();
    // Where the windows are, and how many items there are for it.
    const auto find = [&]() {
        find_windows(streams, cut.past, table, end);
        return (*end + N - 1) / N * cut.across;
    };

    if (tid >= consumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        dependency_wait();
        const int items = find();
        if (warp == consumers / 32) {
            if (lane) return;
            Turn turn;
            for (int item = BLOCK_X; item < items; item += gridDim.x) {
                const int tile_first = item / cut.across * N, present = min(group_rows, cut.all_rows - tile_first);
                const bf16_t* from = staged + (i64)tile_first * 8;
                for (int set = 0; set < sets; ++set) {
                    barrier_wait(empty + turn.at * 8, turn.parity ^ 1);
                    barrier_expect(full + turn.at * 8, CHANNELS / 8 * present * 16);
                    u32 to = shared_address(buffers) + turn.at * buffer_bytes;
#pragma unroll
                    for (int group = 0; group < CHANNELS / 8; ++group) {
                        copy_here(to, from, present * 16, full + turn.at * 8);
                        to += group_rows * 16;
                        from += (i64)cut.all_rows * 8;
                    }
                    turn.next(cut.buffers);
                }
            }
        } else if (INNER) {
            if (warp != consumers / 32 + 1) return;
            int parity = 0;
            for (int item = BLOCK_X; item < items; item += gridDim.x, parity ^= 1) {
                const int tile_first = item / cut.across * N, output = item % cut.across * block_outputs;
                const int present = min(N, cut.all_rows - tile_first);
                barrier_arrive(free);
                barrier_wait(made, parity);
#pragma unroll 1
                for (int group = lane; group < block_outputs / 8; group += 32)
                    if (output + group * 8 < c.c_out)
                        copy_out((bf16_t*)e.out + ((i64)(output / 8 + group) * cut.all_rows + tile_first) * 8,
                                 shared_address(results) + group * N * 16, present * 16);
                asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
            }
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        } else {
            const int keeper = tid - consumers - 32, quads = block_outputs / 4, shift = block_outputs == 64 ? 4 : 5;
            int parity = 0;
            for (int item = BLOCK_X; item < items; item += gridDim.x, parity ^= 1) {
                const int output = item % cut.across * block_outputs;
                const int present = min(block_outputs, c.c_out - output) / 4;
                asm volatile("bar.sync 1, 96;" ::: "memory");
                if (keeper < 32) find_rows(streams, table, item / cut.across * N, N, lane, rows_of);
                asm volatile("bar.sync 1, 96;" ::: "memory");
                if (e.residual) {
#pragma unroll 4
                    for (int i = keeper; i < N * quads; i += STAGED_KEEPERS) {
                        const int row = rows_of[i >> shift], quad = i & (quads - 1);
                        if (row >= 0 && quad < present)
                            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                             shared_address(results) + (i >> shift) * PITCH + quad * 16),
                                         "l"(e.residual + (i64)row * c.c_out + output + quad * 4)
                                         : "memory");
                    }
                    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(free) : "memory");
                } else {
                    barrier_arrive(free);
                }
                barrier_wait(made, parity);
#pragma unroll 4
                for (int i = keeper; i < N * quads; i += STAGED_KEEPERS) {
                    const int row = rows_of[i >> shift], quad = i & (quads - 1);
                    if (row >= 0 && quad < present)
                        *(float4*)((float*)e.out + (i64)row * c.c_out + output + quad * 4) =
                            *(const float4*)(results + (i >> shift) * PITCH + quad * 16);
                }
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int channel_tiles = c.c_in / 16, k_tiles = TAPS * channel_tiles, last_tile = (c.c_out - 1) / 16;
    // The weights of an item; in place of outputs that there are not, in the last block, the last ones come again.
    const auto weights_of = [&](int item) {
        const int tile = min(item % cut.across * (consumers / 32) + warp, last_tile);
        return w + (i64)tile * k_tiles * 256 + lane * 8;
    };
    const bf16_t* weights = weights_of(BLOCK_X);
    uint4 a[DEPTH][STEPS];
    int left = sets, loaded = BLOCK_X;  // sets and item to load
    const auto load_weights = [&](uint4(&to)[STEPS]) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
            to[i] = __ldg((const uint4*)(weights + (i64)(i % TAPS) * channel_tiles * 256 + i / TAPS * 256));
        weights += CHANNELS / 16 * 256;
        if (--left == 0) {
            left = sets;
            loaded += gridDim.x;
            weights = weights_of(loaded);
        }
    };
    // Weights do not depend on the kernel ahead.
#pragma unroll
    for (int d = 0; d + 1 < DEPTH; ++d) load_weights(a[d]);
    dependency_wait();
    const int items = find();

    const u64 layout = (u64)group_rows << 16 | (u64)8 << 32;
    const int stage_first = (int)((shared_address(buffers) & 0x3ffff) >> 4), buffer_rows = buffer_bytes / 16;
    float acc[N / 2];
    Turn turn;
    int parity = 0;
#pragma unroll 1
    for (int item = BLOCK_X; item < items; item += gridDim.x, parity ^= 1) {
        u32 before = 0;  // barrier of the set before
#pragma unroll 1
        for (int set = 0; set < sets; set += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                barrier_wait(full + turn.at * 8, turn.parity);
                const int at = stage_first + turn.at * buffer_rows;
                product_fence();
#pragma unroll
                for (int i = 0; i < STEPS; ++i)
                    product(acc, a[d][i], layout | (u64)(u32)(at + i / TAPS * 2 * group_rows + i % TAPS * c.dilation),
                            d == 0 && i == 0 ? set : 1);
                product_commit();
                product_wait<1>();
                if ((d > 0 || set > 0) && lane == 0) barrier_arrive(before);
                before = empty + turn.at * 8;
                load_weights(a[(d + DEPTH - 1) % DEPTH]);
                turn.next(cut.buffers);
            }
        }
        product_wait<0>();
        if (lane == 0) barrier_arrive(before);

        const int output = min((item % cut.across * (consumers / 32) + warp), last_tile) * 16 + lane / 4;
        const float bias[2] = {e.bias ? e.bias[output] : 0.0f, e.bias ? e.bias[output + 8] : 0.0f};
        if (INNER) {
            // Two neighbouring rows of an output become two values that lie apart: matrices of eight outputs and eight rows
            // are turned on their way to shared memory.
            const float al[2] = {e.alpha[output], e.alpha[output + 8]};
            const float be[2] = {e.inv_beta[output], e.inv_beta[output + 8]};
            const u32 to = shared_address(results) + (warp * 2 + lane / 8 % 2) * (N * 16) +
                           (lane / 16 * 8 + lane % 8) * 16;
            barrier_wait(free, parity);
#pragma unroll
            for (int j = 0; j < N / 8; j += 2) {
                u32 packed[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const float* v = acc + (j + m / 2) * 4 + m % 2 * 2;
                    const int h = m % 2;
                    packed[m] = pack_f16(quick_snake(__fadd_rn(v[0], bias[h]), al[h], be[h]),
                                         quick_snake(__fadd_rn(v[1], bias[h]), al[h], be[h]));
                }
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to + j * 128),
                             "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                             : "memory");
            }
        } else {
            float* const to = (float*)(results + lane % 4 * 2 * PITCH) + warp * 16 + lane / 4;
            constexpr int ROW = PITCH / 4;
            barrier_wait(free, parity);
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    float* const at = to + (j * 8 + q % 2) * ROW + q / 2 * 8;
                    const float v = __fadd_rn(acc[j * 4 + q], bias[q / 2]);
                    *at = e.residual ? __fadd_rn(*at, v) : v;
                }
        }
        // A copy reads through another proxy than these stores went.
        if (INNER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(made);
    }
}

// conv_staged_{taps}_{rows}, and conv_staged_inner_{taps}_{rows}
#define CONV_STAGED(NAME, TAPS, N, INNER)                                                                           \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                            \
        NAME(const bf16_t* staged, const bf16_t* w, const int* windows, int count, int rate, int rows, int slots,  \
             const void* state, int c_in, int c_out, int dilation, int past, int all_rows, int across, int buffers, \
             const float* bias, const float* alpha, const float* inv_beta, const float* residual, void* out) {      \
        const int state_as = 0;                                                                                     \
        const i64 slot_stride = 0;                                                                                  \
        conv_staged<TAPS, N, INNER>(staged, w, CONV_STREAMS, ConvShape{c_in, c_out, TAPS, dilation},                \
                                    StagedCut{past, all_rows, across, buffers},                                     \
                                    StagedEpilogue{bias, alpha, inv_beta, residual, out});                          \
    }
CONV_STAGED(conv_staged_7_64, 7, 64, false)
CONV_STAGED(conv_staged_7_128, 7, 128, false)
CONV_STAGED(conv_staged_inner_7_64, 7, 64, true)
CONV_STAGED(conv_staged_inner_7_128, 7, 128, true)
CONV_STAGED(conv_staged_inner_7_256, 7, 256, true)
CONV_STAGED(conv_staged_2_64, 2, 64, false)
CONV_STAGED(conv_staged_2_128, 2, 128, false)
CONV_STAGED(conv_staged_2_256, 2, 256, false)
CONV_STAGED(conv_staged_1_64, 1, 64, false)
CONV_STAGED(conv_staged_1_128, 1, 128, false)
CONV_STAGED(conv_staged_1_256, 1, 256, false)
