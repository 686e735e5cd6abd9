// Causal convolutions over streams with Hopper's warpgroup products (sm_90a only): 64 outputs and more, 16-bit weights.
//
// Weights are the first operand, from registers: a warpgroup's fragment of 64 outputs is four packed tiles of 16, so
// they come from memory as they lie. Inputs are the second one, from shared memory: activated, in the weights' type,
// eight channels of a row side by side and rows 16 bytes apart, so that a tap is another first row. One warpgroup
// stages them for the others, a few chunks of channels ahead.
//
// Order of a sum: the channels are cut into `slices` by the weight's shape alone. A slice is accumulated from zero over
// steps of 16 channels ascending and, within a step, taps ascending. Slices are added in order within each four, and
// then the fours. The tile, and which block has which slice, decide no bit.

// How the work is divided, see lower/codec/warpgroup.rs.
struct WarpgroupCut {
    int slices;   // of the sum over k
    int blocks;   // of a cluster, which share the slices
    int chunk;    // channels staged at a time
    int buffers;  // chunks that there is room for
    int staged;   // rows staged for a tile
    int pitch;    // staged rows from one unit of columns to the next
};

// Shared memory ahead of the tables: barriers, one pair a buffer.
constexpr int MOST_BUFFERS = 4;
constexpr int MOST_OUTPUTS = 192;  // of a block
constexpr int STAGERS = 128;       // threads

// A row to stage.
struct Source {
    const char* at;
    int place;  // among the staged rows
    int unused;
};

// A block makes 64 outputs a warpgroup of UNITS * ROWS packed time rows, or its slices' part of them, which the blocks
// of a cluster then add. The rate is a multiple of ROWS, so that a unit's rows lie in one window. c_out is a multiple
// of 16; chunk is one of PASS and divides the channels of a slice.
template <int TAPS, int UNITS, int ROWS>
__device__ __forceinline__ void conv_warpgroup(const float* x, const bf16_t* w, const float* alpha,
                                               const float* inv_beta, const Streams& streams, const ConvShape& c,
                                               const WarpgroupCut& cut, const ConvEpilogue& e) {
    constexpr int N = UNITS * ROWS, REGISTERS = ROWS / 2, BATCH = 2;
    constexpr int SUM_PITCH = MOST_OUTPUTS + 4;
    extern __shared__ __align__(128) unsigned char warpgroup_shared[];
    unsigned char* const shared = warpgroup_shared;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int warpgroups = blockDim.x / 128 - 1, M = warpgroups * 64;
    const Cluster cluster(cut.blocks);
    const int block = BLOCK_X >> (31 - __clz(cut.blocks));
    const int past = (c.taps - 1) * c.dilation, tiles = (streams.rows + N - 1) / N;
    const int share = cut.slices / cut.blocks, slice_channels = c.c_in / cut.slices, channels = slice_channels * share;
    const int channel_first = cluster.mine * channels;

    // Eight channels of all staged rows; an odd count of rows keeps the groups of a row on different banks.
    const int group_rows = (cut.staged + 6) / 8 * 8 + 1, buffer_bytes = cut.chunk * group_rows * 2;
    const u32 full = shared_address(shared), empty = full + MOST_BUFFERS * 8;
    int* const live = (int*)(shared + 64);  // of each buffer: whether each row of the tile lies in a window
    int* const window_of = live + MOST_BUFFERS * N;
    int* const counts = window_of + N;  // staged rows of this launch, and carried ones
    Source* const sources = (Source*)(counts + 4);  // rows of this launch from the front, carried ones from the back
    unsigned char* const stage =
        shared + (64 + (MOST_BUFFERS + 1) * N * 4 + 16 + cut.staged * 16 + 127) / 128 * 128;
    float* const sums = (float*)(share > 1 ? stage + cut.buffers * buffer_bytes : stage);

    if (tid == 0) {
        for (int i = 0; i < cut.buffers; ++i) {
            barrier_init(full + i * 8, STAGERS);
            barrier_init(empty + i * 8, warpgroups * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release_dependents();

    // Sums of slices lie as [row][output], four floats of padding a row: eight outputs of four rows are on 32 banks.
    // Each block of a cluster finishes a part of the rows.
    auto finish_rows = [&]() {
        const int parts = share == 1 ? cut.slices : cut.slices / 4;
        const int rows_each = N / cut.blocks, row_first = cluster.mine * rows_each, quads = M / 4;
        const i64 tile = (i64)BLOCK_Y * N * c.c_out + block * M;
        for (int item = tid; item < rows_each * quads; item += blockDim.x) {
            const int row = row_first + item / quads, output = item % quads * 4;
            if (!live[row] || block * M + output >= c.c_out) continue;
            float4 sum = {};
#pragma unroll 1
            for (int four = 0; four < parts; four += 4) {
                float4 p[4];
#pragma unroll
                for (int g = 0; g < 4; ++g)
                    if (four + g < parts)
                        p[g] = *(const float4*)cluster.peer(sums + row * SUM_PITCH + output, four + g);
#pragma unroll
                for (int g = 1; g < 4; ++g)
                    if (four + g < parts) p[0] = add4(p[0], p[g]);
                sum = four == 0 ? p[0] : add4(sum, p[0]);
            }
            const i64 at = tile + (i64)row * c.c_out + output;
            float4 bias = {}, before = {};
            if (e.bias) bias = *(const float4*)(e.bias + block * M + output);
            if (e.residual) before = *(const float4*)(e.residual + at);
            *(float4*)(e.out + at) =
                make_float4(finish(e, sum.x, bias.x, before.x), finish(e, sum.y, bias.y, before.y),
                            finish(e, sum.z, bias.z, before.z), finish(e, sum.w, bias.w, before.w));
        }
    };

    if (warp < STAGERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
        dependency_wait();
        const int quads = cut.chunk / 4, abreast = STAGERS / quads, within = tid % quads * 4;
        const int state_bytes = streams.state_as == AS_F32 ? 4 : 2;
        Turn turn;
        for (int tile = BLOCK_Y; tile < tiles; tile += gridDim.y) {
            // Which window each frame of the tile lies in, and where each staged row comes from.
            const int tile_first = tile * N, frame_first = tile_first / streams.rate;
            const int frames = (min(tile_first + N, streams.rows) - 1) / streams.rate - frame_first + 1;
            barrier_wait(empty + turn.at * 8, turn.parity ^ 1);
            asm volatile("bar.sync 1, 128;" ::: "memory");
            if (tid < 2) counts[tid] = 0;
            for (int i = tid; i < frames; i += STAGERS) window_of[i] = -1;
            asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll 1
            for (int i = tid; i < streams.count; i += STAGERS) {
                const Window window = read_window(streams, i);
                const int begin = max(window.first / streams.rate, frame_first);
                const int end = min((window.first + window.rows) / streams.rate, frame_first + frames);
#pragma unroll 1
                for (int frame = begin; frame < end; ++frame) window_of[frame - frame_first] = i;
            }
            asm volatile("bar.sync 1, 128;" ::: "memory");
            const auto window_at = [&](int row) {
                return tile_first + row < streams.rows
                           ? window_of[(tile_first + row) / streams.rate - frame_first]
                           : -1;
            };
            for (int row = tid; row < N; row += STAGERS) live[turn.at * N + row] = window_at(row) >= 0;
#pragma unroll 1
            for (int s = tid; s < cut.staged; s += STAGERS) {
                const int row = s / cut.pitch * ROWS, ahead = s % cut.pitch - past;
                const int i = window_at(row);
                if (i < 0) continue;  // what is computed of it goes nowhere
                const Window window = read_window(streams, i);
                const int position = tile_first + row + ahead - window.first;
                const bool carried = position < 0;
                // One addition for all rows of a kind that a warp has: their order is nobody's business.
                const u32 alike = __match_any_sync(__activemask(), (u32)carried);
                int entry = 0;
                if (lane == __ffs(alike) - 1) entry = atomicAdd(&counts[carried], __popc(alike));
                entry = __shfl_sync(alike, entry, __ffs(alike) - 1) + __popc(alike & ((1u << lane) - 1));
                const char* const from =
                    carried ? (const char*)streams.state +
                                  (window.state + (i64)(past + position) * c.c_in) * state_bytes
                            : (const char*)(x + (i64)(window.first + position) * c.c_in);
                sources[carried ? cut.staged - 1 - entry : entry] = {from, s, 0};
            }
            asm volatile("bar.sync 1, 128;" ::: "memory");

            const int recent = counts[0], carried_first = cut.staged - counts[1];
            for (int first = 0; first < channels; first += cut.chunk) {
                const int channel = channel_first + first + within;
                float4 al = {}, be = {};
                if (alpha) {
                    al = *(const float4*)(alpha + channel);
                    be = *(const float4*)(inv_beta + channel);
                }
                barrier_wait(empty + turn.at * 8, turn.parity ^ 1);
                unsigned char* const to =
                    stage + turn.at * buffer_bytes + within / 8 * group_rows * 16 + within / 4 % 2 * 8;
                // All loads of a round are on their way before the first value is used. Behind the last row it comes
                // again: no decision keeps loads apart.
                constexpr int ROUND = 8;
#pragma unroll 1
                for (int i = tid / quads; i < recent; i += ROUND * abreast) {
                    float4 v[ROUND];
#pragma unroll
                    for (int u = 0; u < ROUND; ++u)
                        v[u] = load_row(sources[min(i + u * abreast, recent - 1)].at + channel * 4);
                    if (alpha) {
#pragma unroll
                        for (int u = 0; u < ROUND; ++u) v[u] = quick_snake4(v[u], al, be);
                    }
#pragma unroll
                    for (int u = 0; u < ROUND; ++u)
                        *(uint2*)(to + sources[min(i + u * abreast, recent - 1)].place * 16) =
                            make_uint2(pack_f16(v[u].x, v[u].y), pack_f16(v[u].z, v[u].w));
                }
#pragma unroll 1
                for (int i = carried_first + tid / quads; i < cut.staged; i += ROUND * abreast) {
                    uint2 v[ROUND];
                    int place[ROUND];
                    if (streams.state_as == AS_F32) {
                        float4 wide[ROUND];
#pragma unroll
                        for (int u = 0; u < ROUND; ++u) {
                            const Source from = sources[min(i + u * abreast, cut.staged - 1)];
                            __builtin_assume(__isGlobal(from.at));
                            wide[u] = *(const float4*)(from.at + channel * 4);
                            place[u] = from.place;
                        }
#pragma unroll
                        for (int u = 0; u < ROUND; ++u)
                            v[u] = make_uint2(pack_f16(wide[u].x, wide[u].y), pack_f16(wide[u].z, wide[u].w));
                    } else {
#pragma unroll
                        for (int u = 0; u < ROUND; ++u) {
                            const Source from = sources[min(i + u * abreast, cut.staged - 1)];
                            __builtin_assume(__isGlobal(from.at));
                            v[u] = *(const uint2*)(from.at + channel * 2);
                            place[u] = from.place;
                        }
                    }
#pragma unroll
                    for (int u = 0; u < ROUND; ++u) *(uint2*)(to + place[u] * 16) = v[u];
                }
                // The products read through another proxy than these stores went.
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                barrier_arrive(full + turn.at * 8);
                turn.next(cut.buffers);
            }
        }
        if (cut.blocks > 1) {
            __syncthreads();
            cluster.barrier();
            finish_rows();
            cluster.leave();
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
    const int warpgroup = warp / 4 - 1;
    const int channel_tiles = c.c_in / 16, k_tiles = c.taps * channel_tiles;
    const int output_tile = (block * warpgroups + warpgroup) * 4 + warp % 4;
    const bool spare = output_tile * 16 >= c.c_out;  // outputs that there are not, in the last block
    const bf16_t* const weights = w + ((i64)(spare ? 0 : output_tile) * k_tiles + channel_first / 16) * 256 + lane * 8;
    // Products come in two parts, half of the channels of a pass each, whose weights are loaded while the other one's are
    // multiplied.
    constexpr int PASS = ROWS < 160 ? 64 : 32;  // channels
    constexpr int STEPS = PASS / 16 * TAPS, HALF = (STEPS + 1) / 2;
    const int tap_tiles = channel_tiles * 256;
    uint4 a[STEPS];
    const auto load_weights = [&](int channel, int begin, int end) {
        const bf16_t* const from = weights + channel * 16;
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
            if (begin <= i && i < end)
                a[i] = __ldg((const uint4*)(from + i % TAPS * tap_tiles + i / TAPS * 256));
    };
    // Weights do not depend on the kernel ahead.
    load_weights(0, 0, HALF);
    dependency_wait();

    // In units of 16 bytes, as the products count.
    const u64 layout = (u64)group_rows << 16 | (u64)8 << 32;
    // Above its own memory a shared address names the block of the cluster, of which a product's descriptor knows nothing.
    const int stage_first = (int)((shared_address(stage) & 0x3ffff) >> 4), buffer_rows = buffer_bytes / 16;
    const int quad = lane % 4, output = output_tile * 16 + lane / 4;
    float* const own_sums = sums + quad * 2 * SUM_PITCH + output - block * M;

    float acc[UNITS][REGISTERS];
    // The slices that are done, added up.
    const auto add_to_sums = [&](int slice) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int j = 0; j < REGISTERS; ++j) {
                float* to = own_sums + (u * ROWS + j / 4 * 8 + j % 2) * SUM_PITCH + j / 2 % 2 * 8;
                *to = slice == 0 ? acc[u][j] : __fadd_rn(*to, acc[u][j]);
            }
    };
    Turn turn;
    for (int tile = BLOCK_Y; tile < tiles; tile += gridDim.y) {
        u32 alive = 0;  // a bit for each eight rows: whether this thread's two are live
        int channel = 0;
#pragma unroll 1
        for (int slice = 0; slice < share; ++slice) {
            int more = 0;
#pragma unroll 1
            for (int chunk = 0; chunk < slice_channels; chunk += cut.chunk) {
                barrier_wait(full + turn.at * 8, turn.parity);
                if (channel == 0) {
#pragma unroll
                    for (int j = 0; j < N / 8; ++j)
                        alive |= (live[turn.at * N + j * 8 + quad * 2] ? 1u : 0u) << j;
                }
                int at = stage_first + turn.at * buffer_rows;
#pragma unroll 1
                for (int pass = 0; pass < cut.chunk; pass += PASS) {
                    const auto multiply = [&](int begin, int end) {
                        product_fence();
#pragma unroll
                        for (int i = 0; i < STEPS; ++i)
                            if (begin <= i && i < end) {
#pragma unroll
                                for (int u = 0; u < UNITS; ++u)
                                    product(acc[u], a[i],
                                            layout | (u64)(u32)(at + i / TAPS * 2 * group_rows + u * cut.pitch +
                                                                i % TAPS * c.dilation),
                                            i == 0 ? more : 1);
                            }
                        product_commit();
                    };
                    multiply(0, HALF);
                    product_wait<1>();
                    load_weights(channel, HALF, STEPS);
                    multiply(HALF, STEPS);
                    product_wait<1>();
                    channel += PASS;
                    if (channel == channels) channel = 0;
                    load_weights(channel, 0, HALF);
                    at += PASS / 8 * group_rows;
                    more = 1;
                }
                product_wait<0>();
                if (lane == 0) barrier_arrive(empty + turn.at * 8);
                turn.next(cut.buffers);
            }
            if (slice + 1 < share) add_to_sums(slice);
        }

        if (cut.blocks > 1) {
            __syncthreads();  // nobody reads the inputs any more, whose place the sums may take
            add_to_sums(share - 1);
            cluster.barrier();
            finish_rows();
            cluster.leave();
            return;
        }
        if (spare) continue;
        const float bias[2] = {e.bias ? e.bias[output] : 0.0f, e.bias ? e.bias[output + 8] : 0.0f};
        const i64 first = ((i64)tile * N + quad * 2) * c.c_out + output;
        const float* residual = e.residual + first;
        float* out = e.out + first;
        // BATCH times eight rows of the residual are read before any of them is written: it may be the output.
#pragma unroll
        for (int begin = 0; begin < N / 8; begin += BATCH) {
            float before[BATCH][4] = {};
            if (e.residual) {
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    if (alive >> (begin + i) & 1) {
#pragma unroll
                        for (int q = 0; q < 4; ++q) before[i][q] = residual[q % 2 * c.c_out + q / 2 * 8];
                    }
                    residual += 8 * c.c_out;
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int column = (begin + i) * 8;
                if (alive >> (begin + i) & 1) {
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        float v = acc[column / ROWS][column % ROWS / 2 + q];
                        if (share > 1) v = __fadd_rn(own_sums[(column + q % 2) * SUM_PITCH + q / 2 * 8], v);
                        out[q % 2 * c.c_out + q / 2 * 8] = finish(e, v, bias[q / 2], before[i][q]);
                    }
                }
                out += 8 * c.c_out;
            }
        }
    }
}

// conv_warpgroup_{taps}_{units}x{rows}
#define CONV_WARPGROUP(TAPS, UNITS, ROWS)                                                                           \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                            \
        conv_warpgroup_##TAPS##_##UNITS##x##ROWS(CONV_PARAMETERS, int slices, int blocks, int chunk, int buffers,   \
                                                 int staged, int pitch) {                                           \
        conv_warpgroup<TAPS, UNITS, ROWS>(                                                                          \
            x, (const bf16_t*)w, alpha, inv_beta, CONV_STREAMS, ConvShape{c_in, c_out, taps, dilation},             \
            WarpgroupCut{slices, blocks, chunk, buffers, staged, pitch}, ConvEpilogue{bias, residual, out, clamp}); \
    }
CONV_WARPGROUP(2, 1, 32)
CONV_WARPGROUP(2, 1, 160)
