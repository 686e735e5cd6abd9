// Residual units over streams with Hopper's warpgroup products (sm_90a only): f16 weights that come through shared memory,
// for 192 outputs of a block. The kernel is also right for more channels, which blocks of a cluster share, and for
// convolutions alone; others are faster there (benches/NOTES.md).
//
// Weights are the first operand, from registers. One warp copies them to shared memory as they are packed, a few stages
// ahead; the blocks of a cluster that make the same outputs of other rows each fetch a part and send it to all, so that
// the second cache is read once for them. Three warps stage inputs: activated, in f16, eight channels of a row side by side
// and rows 16 bytes apart, so that a tap is another first row. Three warpgroups multiply, 64 outputs each.
//
// A unit's second convolution takes what the first one gives from shared memory: the warpgroups put it there as they
// would be staged. Where a block does not make all channels, the blocks that make the others of the same rows are in its
// cluster, and each sends the others what it has.
//
// Order of a sum: channels in chunks of 48, within a chunk taps ascending, within a tap the chunk's three steps of 16
// channels, all in one accumulator. The tile, the cluster and which block makes what decide no bit.

// How the work is divided, see lower/codec/ring.rs.
struct RingCut {
    int items;         // that a cluster takes at a time: as many blocks of outputs and tiles of rows as it has blocks
    int wide;          // items that make all outputs of a row
    int across_shift;  // logarithm of the blocks of a cluster that make other outputs
    int down_shift;    // logarithm of those that make the same outputs of other rows
    int inputs;        // chunks of channels that there is room for
    int stages;        // of weights that there is room for
};

constexpr int RING_WARPGROUPS = 3, RING_OUTPUTS = RING_WARPGROUPS * 64;
constexpr int RING_CHUNK = 48, RING_STEPS = RING_CHUNK / 16;   // channels, products of a stage
constexpr int RING_TILE_BYTES = RING_STEPS * 512;              // of 16 outputs
constexpr int RING_TILES = RING_OUTPUTS / 16;                  // of a stage
constexpr int RING_STAGE_BYTES = RING_TILES * RING_TILE_BYTES;
constexpr int RING_STAGERS = 96, RING_ABREAST = RING_STAGERS / (RING_CHUNK / 4);
constexpr int RING_MOST = 8;        // stages and chunks
constexpr int RING_MOST_UNITS = 5;
constexpr int RING_FIXED = 1024;    // bytes ahead of the stages

// Where the rows of a run of a tile come from, which lies in one window: address of the first staged one, bytes from one
// to the next, how many of the first ones are carried, and where these are.
struct Run {
    const char* x;
    const char* state;
    int stride;
    int old;
};

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Orders nothing but the barriers' own beginning, which has a fence, and the blocks' end.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote(barrier, rank)) : "memory");
}
// To the same place of all blocks that `ranks` has a bit for, each of which is told so at its own barrier.
__device__ __forceinline__ void copy_to_all(u32 to, const void* from, int bytes, u32 barrier, u32 ranks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)ranks)
        : "memory");
}
// The lane and the warp of the block, read anew: what is made of them between two tiles need not be kept while products
// need all registers.
__device__ __forceinline__ int fresh_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
__device__ __forceinline__ int fresh_warp() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread / 32;
}

// The window that contains a row, or -1: all lanes look, and get the same.
__device__ __forceinline__ int window_with(const Streams& streams, int row, int lane) {
    int found = -1;
    for (int i = lane; i < (streams.count + 31) / 32 * 32 && found < 0; i += 32) {
        Window window = {0, 0, 0};
        if (i < streams.count) window = read_window(streams, i);
        const u32 here = __ballot_sync(0xffffffffu, window.first <= row && row < window.first + window.rows);
        if (here) found = i - lane + __ffs(here) - 1;
    }
    return found;
}

// A block makes 192 outputs of UNITS * ROWS packed time rows at a time. The rate is a multiple of ROWS, so that a run of
// ROWS lies in one window. c_in is a multiple of RING_CHUNK, c_out of 16. A unit has as many outputs as inputs, and
// `second` is what its second convolution takes.
template <int TAPS, int UNITS, int ROWS, bool UNIT>
__device__ __forceinline__ void conv_ring(const float* x, const bf16_t* w, const float* bias, const float* alpha,
                                          const float* inv_beta, const Streams& streams, const ConvShape& c,
                                          const RingCut& cut, const Second& second, const float* residual,
                                          float* out) {
    constexpr int N = UNITS * ROWS, REGISTERS = ROWS / 2;
    extern __shared__ __align__(128) unsigned char ring_shared[];
    unsigned char* const shared = ring_shared;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int past = (TAPS - 1) * c.dilation, pitch = ROWS + past, staged = UNITS * pitch;
    // An odd count of rows keeps the groups of a row on different banks.
    const int group_rows = staged | 1, input_bytes = RING_CHUNK * 2 * group_rows;
    constexpr int INNER_ROWS = N | 1;
    const int chunks = c.c_in / RING_CHUNK, channel_tiles = c.c_in / 16;

    const int across = 1 << cut.across_shift, down = 1 << cut.down_shift, size_shift = cut.across_shift + cut.down_shift;
    const int mine = cluster_rank() & (across - 1), row_rank = cluster_rank() >> cut.across_shift;
    const int first_item = BLOCK_X >> size_shift, next_item = gridDim.x >> size_shift;

    // Pairs of barriers: stages of weights, chunks of inputs, what lies inside a unit.
    const u32 stage_full = shared_address(shared), stage_empty = stage_full + RING_MOST * 8;
    const u32 input_full = stage_empty + RING_MOST * 8, input_empty = input_full + RING_MOST * 8;
    const u32 inner_full = input_empty + RING_MOST * 8, inner_empty = inner_full + 8;
    Run* const runs = (Run*)(shared + 512);
    int* const live = (int*)(shared + 768);  // of each chunk's place: whether each run lies in a window
    unsigned char* const stages = shared + RING_FIXED;
    unsigned char* const inputs = stages + cut.stages * RING_STAGE_BYTES;
    unsigned char* const inner = inputs + cut.inputs * input_bytes;
    const int inner_bytes = RING_OUTPUTS * 2 * INNER_ROWS;  // of a block's own outputs

    if (tid == 0) {
        for (int i = 0; i < cut.stages; ++i) {
            barrier_init(stage_full + i * 8, 1);
            barrier_init(stage_empty + i * 8, RING_WARPGROUPS * 4 * down);
        }
        for (int i = 0; i < cut.inputs; ++i) {
            barrier_init(input_full + i * 8, RING_STAGERS);
            barrier_init(input_empty + i * 8, RING_WARPGROUPS * 4);
        }
        barrier_init(inner_full, 1);
        barrier_init(inner_empty, RING_WARPGROUPS * 4 * across);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_arrive();
    release_dependents();
    cluster_wait();

    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
        if (warp == 0) {
            // Weights do not depend on the kernel ahead.
            const int parts = RING_TILES >> cut.down_shift, first_tile = row_rank * parts;
            u32 ranks = 0;
            for (int r = 0; r < down; ++r) ranks |= 1u << (r * across + mine);
            Turn turn;
            // The same part of all tiles of a stage: from tile to tile it is `apart` elements.
            const auto stage = [&](const bf16_t* from, int block, i64 apart) {
                barrier_wait(stage_empty + turn.at * 8, turn.parity ^ 1);
                if (lane == 0) {
                    const u32 full = stage_full + turn.at * 8;
                    u32 to = shared_address(stages) + turn.at * RING_STAGE_BYTES + first_tile * RING_TILE_BYTES;
                    barrier_expect(full, RING_STAGE_BYTES);
                    for (int i = 0; i < parts; ++i, to += RING_TILE_BYTES) {
                        // In place of outputs that there are not, in the last block, others come again.
                        const int tile = block * RING_TILES + first_tile + i;
                        const bf16_t* const at = from + (tile * 16 < c.c_out ? tile : 0) * apart;
                        if (down > 1)
                            copy_to_all(to, at, RING_TILE_BYTES, full, ranks);
                        else
                            copy_here(to, at, RING_TILE_BYTES, full);
                    }
                }
                __syncwarp();  // a lane that lags behind would miss a phase
                turn.next(cut.stages);
            };
            for (int item = first_item; item < cut.items; item += next_item) {
                const int block = (item % cut.wide << cut.across_shift) + mine;
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; ++chunk)
#pragma unroll 1
                    for (int tap = 0; tap < TAPS; ++tap)
                        stage(w + (i64)(tap * channel_tiles + chunk * RING_STEPS) * 256, block,
                              (i64)TAPS * channel_tiles * 256);
                if (UNIT) {
#pragma unroll 1
                    for (int chunk = 0; chunk < chunks; ++chunk)
                        stage(second.w + (i64)chunk * RING_STEPS * 256, block, (i64)channel_tiles * 256);
                }
            }
        } else {
            dependency_wait();
            const int at = tid - 32, quad = at % (RING_CHUNK / 4), row = at / (RING_CHUNK / 4);
            const int state_bytes = streams.state_as == AS_F32 ? 4 : 2;
            Turn turn;
            for (int item = first_item; item < cut.items; item += next_item) {
                const int tile_first = ((item / cut.wide << cut.down_shift) + row_rank) * N;
                asm volatile("bar.sync 2, 96;" ::: "memory");
                for (int u = warp - 1; u < UNITS; u += RING_STAGERS / 32) {
                    const int first = tile_first + u * ROWS, found = window_with(streams, first, lane);
                    if (lane == 0) {
                        Run run = {(const char*)x, (const char*)streams.state, 0, 0};
                        if (found >= 0) {
                            const Window window = read_window(streams, found);
                            const int before = first - window.first;
                            run.x += (i64)(first - past) * c.c_in * 4;
                            run.state += (window.state + (i64)before * c.c_in) * state_bytes;
                            run.stride = c.c_in * 4;
                            run.old = max(past - before, 0);
                        }
                        runs[u] = run;
                    }
                }
                asm volatile("bar.sync 2, 96;" ::: "memory");
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    const int channel = chunk * RING_CHUNK + quad * 4;
                    float4 al = {}, be = {};  // zeros leave a value as it is
                    if (alpha) {
                        al = *(const float4*)(alpha + channel);
                        be = *(const float4*)(inv_beta + channel);
                    }
                    barrier_wait(input_empty + turn.at * 8, turn.parity ^ 1);
                    if (at < UNITS) live[turn.at * RING_MOST_UNITS + at] = runs[at].stride;
                    unsigned char* const to =
                        inputs + turn.at * input_bytes + quad / 2 * group_rows * 16 + quad % 2 * 8;
#pragma unroll 1
                    for (int u = 0; u < UNITS; ++u) {
                        const int old = runs[u].old;
                        const char* const from = runs[u].state + channel * state_bytes;
                        constexpr int OLD = 7;
#pragma unroll 1
                        for (int first = row; first < old; first += OLD * RING_ABREAST) {
                            uint2 v[OLD] = {};
                            if (streams.state_as == AS_F32) {
                                float4 loaded[OLD];
#pragma unroll
                                for (int i = 0; i < OLD; ++i)
                                    loaded[i] = load_row(from + (i64)min(first + i * RING_ABREAST, old - 1) * c.c_in * 4);
#pragma unroll
                                for (int i = 0; i < OLD; ++i)
                                    v[i] = make_uint2(pack_f16(loaded[i].x, loaded[i].y),
                                                      pack_f16(loaded[i].z, loaded[i].w));
                            } else {
#pragma unroll
                                for (int i = 0; i < OLD; ++i)
                                    v[i] = *(const uint2*)(from + (i64)min(first + i * RING_ABREAST, old - 1) * c.c_in * 2);
                            }
#pragma unroll
                            for (int i = 0; i < OLD; ++i)
                                *(uint2*)(to + (u * pitch + min(first + i * RING_ABREAST, old - 1)) * 16) = v[i];
                        }
                    }
                    // All loads of a round are on their way before the first value is used. In place of a carried row,
                    // and behind the last one, another one comes again: no decision keeps loads apart.
                    constexpr int ROUND = UNITS == 1 ? 9 : 7;
#pragma unroll 1
                    for (int first = row; first < staged; first += ROUND * RING_ABREAST) {
                        float4 v[ROUND];
                        int place[ROUND];
#pragma unroll
                        for (int i = 0; i < ROUND; ++i) {
                            const int s = min(first + i * RING_ABREAST, staged - 1), u = UNITS == 1 ? 0 : s / pitch;
                            const Run* const run = runs + u;
                            const int within = max(s - u * pitch, run->old);
                            place[i] = u * pitch + within;
                            v[i] = load_row(run->x + (i64)within * run->stride + channel * 4);
                        }
#pragma unroll
                        for (int i = 0; i < ROUND; ++i) {
                            v[i] = quick_snake4(v[i], al, be);
                            *(uint2*)(to + place[i] * 16) =
                                make_uint2(pack_f16(v[i].x, v[i].y), pack_f16(v[i].z, v[i].w));
                        }
                    }
                    // The products read through another proxy than these stores went.
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    barrier_arrive(input_full + turn.at * 8);
                    turn.next(cut.inputs);
                }
            }
        }
        __syncwarp();
        // Nobody sends anything any more to a block that has ended.
        cluster_arrive();
        cluster_wait();
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
    dependency_wait();
    // Of the warp and not of the thread, or every product's descriptor would be computed by all threads.
    const int warpgroup = __shfl_sync(0xffffffffu, warp / 4 - 1, 0);
    // Above its own memory a shared address names the block of the cluster, of which a descriptor knows nothing.
    const auto units_of_16 = [](const void* p) { return (int)((shared_address(p) & 0x3ffff) >> 4); };
    const u64 inputs_at = (u64)group_rows << 16 | (u64)8 << 32 | (u64)(u32)units_of_16(inputs);
    const u64 inner_at = (u64)INNER_ROWS << 16 | (u64)8 << 32 | (u64)(u32)units_of_16(inner);
    const u32 tile_at = shared_address(stages) + (warpgroup * 4 + warp % 4) * RING_TILE_BYTES + lane * 16;

    float acc[UNITS][REGISTERS];
    uint4 a[2][RING_STEPS];
    Turn stage_turn, input_turn;
    int inner_parity = 0;
    // The products of a stage, whose weights take the registers `set`, with rows from `rows` on; `step` is from one
    // eight channels to the next, `run` from one run of rows to the next. Those ahead may still be under way.
    const auto multiply = [&](int set, u64 rows, int step, int run, int more) {
        barrier_wait(stage_full + stage_turn.at * 8, stage_turn.parity);
#pragma unroll
        for (int i = 0; i < RING_STEPS; ++i)
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(a[set][i].x), "=r"(a[set][i].y), "=r"(a[set][i].z), "=r"(a[set][i].w)
                         : "r"(tile_at + stage_turn.at * RING_STAGE_BYTES + i * 512)
                         : "memory");
        product_fence();
#pragma unroll
        for (int i = 0; i < RING_STEPS; ++i) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                product(acc[u], a[set][i], rows + (u32)(2 * i * step + u * run), i == 0 ? more : 1);
            // Behind a product, which has waited for the loads: till then they are merely on their way, and an arrival
            // overtakes them. (It did: now and then the next weights came before the last loads were served. Behind the
            // fence alone the assembler puts the arrival ahead of it, and behind all products registers run short.)
            if (i == RING_STEPS - 2) {
                __syncwarp();
                if (lane < down) barrier_arrive_at(stage_empty + stage_turn.at * 8, lane * across + mine);
                stage_turn.next(cut.stages);
            }
        }
        product_commit();
        product_wait<1>();
    };

    for (int item = first_item; item < cut.items; item += next_item) {
        const int tile = (item / cut.wide << cut.down_shift) + row_rank;
        u32 alive = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            barrier_wait(input_full + input_turn.at * 8, input_turn.parity);
            if (chunk == 0) {
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
                    alive |= (live[input_turn.at * RING_MOST_UNITS + u] ? 1u : 0u) << u;
            }
            const u64 rows = inputs_at + (u32)(input_turn.at * (input_bytes / 16));
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap)
                multiply(tap % 2, rows + (u32)(tap * c.dilation), group_rows, pitch, tap > 0 ? 1 : chunk);
            product_wait<0>();
            if (lane == 0) barrier_arrive(input_empty + input_turn.at * 8);
            input_turn.next(cut.inputs);
        }

        const auto first_output = [&]() {
            const int block = (item % cut.wide << cut.across_shift) + mine;
            return block * RING_OUTPUTS + warpgroup * 64 + fresh_warp() % 4 * 16;
        };
        if (UNIT) {
            const int own_lane = fresh_lane(), output = first_output() + own_lane / 4;
            // The turned fragments of 16 outputs and 16 rows are four matrices of eight rows with eight outputs each.
            const float b[2] = {bias ? bias[output] : 0.0f, bias ? bias[output + 8] : 0.0f};
            const float al[2] = {second.alpha[output], second.alpha[output + 8]};
            const float be[2] = {second.inv_beta[output], second.inv_beta[output + 8]};
            const u32 own = shared_address(inner) + mine * inner_bytes;
            const u32 to = own + ((output % RING_OUTPUTS / 16 * 2 + own_lane / 8 % 2) * INNER_ROWS + own_lane / 16 * 8 + own_lane % 8) * 16;
            barrier_wait(inner_empty, inner_parity ^ 1);
#pragma unroll
            for (int column = 0; column < N; column += 16) {
                u32 packed[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const float* v = acc[column / ROWS] + column % ROWS / 2 + q * 2;
                    packed[q] = pack_f16(quick_snake(__fadd_rn(v[0], b[q % 2]), al[q % 2], be[q % 2]),
                                         quick_snake(__fadd_rn(v[1], b[q % 2]), al[q % 2], be[q % 2]));
                }
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to + column * 16),
                             "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                             : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync 1, 384;" ::: "memory");
            if (across > 1) {
                if (tid == 128) {
                    barrier_expect(inner_full, (across - 1) * inner_bytes);
                    for (int o = 0; o < across; ++o) {
                        const u32 to_rank = row_rank * across + o;
                        if (o != mine) copy_across(remote(own, to_rank), own, inner_bytes, remote(inner_full, to_rank));
                    }
                }
                barrier_wait(inner_full, inner_parity);
            }
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk += 2) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    multiply(i, inner_at + (u32)((chunk + i) * (RING_CHUNK / 8) * INNER_ROWS), INNER_ROWS, ROWS,
                             chunk + i);
            }
            product_wait<0>();
            if (lane < across) barrier_arrive_at(inner_empty, row_rank * across + lane);
            inner_parity ^= 1;
        }

        const int own_lane = fresh_lane(), output = first_output() + own_lane / 4;
        if (output - own_lane / 4 >= c.c_out || !alive) continue;
        const float* const last = UNIT ? second.bias : bias;
        const float b[2] = {last ? last[output] : 0.0f, last ? last[output + 8] : 0.0f};
        const i64 first = ((i64)tile * N + own_lane % 4 * 2) * c.c_out + output;
        const float* from = residual + first;
        float* to = out + first;
        constexpr int BATCH = 4;
        // BATCH times eight rows of the residual are read before any of them is written: it may be the output.
#pragma unroll
        for (int begin = 0; begin < N / 8; begin += BATCH) {
            float before[BATCH][4] = {};
            if (UNIT) {
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    if (UNITS == 1 || alive >> ((begin + i) * 8 / ROWS) & 1) {
#pragma unroll
                        for (int q = 0; q < 4; ++q) before[i][q] = from[q % 2 * c.c_out + q / 2 * 8];
                    }
                    from += 8 * c.c_out;
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int column = (begin + i) * 8;
                if (UNITS == 1 || alive >> (column / ROWS) & 1) {
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        const float v = __fadd_rn(acc[column / ROWS][column % ROWS / 2 + q], b[q / 2]);
                        to[q % 2 * c.c_out + q / 2 * 8] = UNIT ? __fadd_rn(before[i][q], v) : v;
                    }
                }
                to += 8 * c.c_out;
            }
        }
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
}

#define RING_PARAMETERS int items, int wide, int across_shift, int down_shift, int inputs, int stages
#define RING_CUT \
    RingCut { items, wide, across_shift, down_shift, inputs, stages }

// unit_ring_{units}x{rows}
#define UNIT_RING(UNITS, ROWS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                              \
        unit_ring_##UNITS##x##ROWS(CONV_PARAMETERS, SECOND_PARAMETERS, RING_PARAMETERS) {                             \
        conv_ring<7, UNITS, ROWS, true>(x, (const bf16_t*)w, bias, alpha, inv_beta, CONV_STREAMS,                     \
                                        ConvShape{c_in, c_out, taps, dilation}, RING_CUT, SECOND, residual, out);     \
    }
UNIT_RING(1, 32)
UNIT_RING(1, 160)
