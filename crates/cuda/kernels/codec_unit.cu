// A residual unit of a codec in one kernel (sm_90a only): out = residual + W2 snake2(W1 * snake1(x)), where W1 has seven
// taps and W2 one, over streams with carried state. 96 channels, f16 weights.
//
// All weights of such a unit fit a multiprocessor, so a block keeps them and goes through tiles of 128 time rows. Two
// warpgroups stage inputs: activated, in f16, eight channels of a row side by side and rows 16 bytes apart, so that a
// tap is another first row. Two warpgroups multiply, each 64 rows of a tile with all outputs: rows are the first
// operand and weights the second one. What a thread holds of the first sum is then what it gives to the second product
// from its registers: nothing in between goes to memory. The two take turns with the tensor cores: one multiplies while
// the other activates and stores.
//
// Order of a sum: channels ascending in steps of 16 and, within a step, taps ascending, in one accumulator. Which tile a
// row lies in, and which block has it, decide no bit.

// d[64 x 96] (+)= a[64 x 16] * b[16 x 96], both from shared memory or the first one from registers. `more`: onto d.
#define OUT48 OUT16(0), OUT16(16), OUT16(32)
#define LIST48 TEN("") "," TEN("1") "," TEN("2") "," TEN("3") ",%40,%41,%42,%43,%44,%45,%46,%47"
PRODUCTS("96", 48, LIST48, "%48,%49,%50,%51", "%52", "%53", OUT48)
__device__ __forceinline__ void product(float (&d)[48], u64 a, u64 b, int more) {
    asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" LIST48 "}, %48, %49, more, 1, 1, 0, 0;\n}\n"
                 : OUT48
                 : "l"(a), "l"(b), "r"(more));
}

// Threads of one half of the block come together, see PTX's bar.
__device__ __forceinline__ void turn_wait(int barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void turn_give(int barrier) {
    asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory");
}

// Where the parts of a block's shared memory begin, see lower/codec/unit.rs.
constexpr int UNIT_STAGERS = 256, UNIT_ROWS = 128, UNIT_BUFFERS = 2;  // threads, rows of a tile, tiles
constexpr int UNIT_TABLES = 128;

template <int C, int TAPS>
__device__ __forceinline__ void unit_warpgroup(const float* x, const bf16_t* w, const float* bias, const float* alpha,
                                               const float* inv_beta, const Streams& streams, int dilation,
                                               const Second& second, const float* residual, float* out) {
    constexpr int TILES = C / 16, STEPS = TILES * TAPS, STEP_BYTES = C * 32;
    constexpr int QUADS = C / 4, ABREAST = UNIT_STAGERS / QUADS, ROUND = 10;
    extern __shared__ __align__(128) unsigned char unit_shared[];
    unsigned char* const shared = unit_shared;
    float* const tables = (float*)(shared + UNIT_TABLES);  // bias, alpha2, inv_beta2, bias2
    unsigned char* const weights = shared + (UNIT_TABLES + 4 * C * 4 + 127) / 128 * 128;
    unsigned char* const stage = weights + (STEPS + TILES) * STEP_BYTES;
    const u32 full = shared_address(shared), empty = full + UNIT_BUFFERS * 8;
    int* const window_of = (int*)(shared + 64);  // of each buffer: the window that its tile lies in, or -1
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int past = (TAPS - 1) * dilation, staged = UNIT_ROWS + past;
    const int tiles = (streams.rows + UNIT_ROWS - 1) / UNIT_ROWS;
    // An odd count of rows keeps the groups of a row on different banks.
    const int group_rows = staged | 1, buffer_bytes = group_rows * C * 2;

    if (tid == 0) {
        for (int i = 0; i < UNIT_BUFFERS; ++i) {
            barrier_init(full + i * 8, UNIT_STAGERS);
            barrier_init(empty + i * 8, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    release_dependents();

    // Weights do not depend on the kernel ahead. A packed tile of 16 outputs and 16 channels becomes four matrices of
    // eight outputs, each with eight channels: [step][half of its channels][eight outputs].
    constexpr int LOADS = 6;
    static_assert((STEPS + TILES) * TILES % (16 * LOADS) == 0, "every warp has whole rounds");
#pragma unroll 1
    for (int first = warp; first < (STEPS + TILES) * TILES; first += 16 * LOADS) {
        uint4 a[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const int step = (first + 16 * u) / TILES, output = (first + 16 * u) % TILES;
            const bf16_t* from = step < STEPS ? w + (i64)((output * TAPS + step % TAPS) * TILES + step / TAPS) * 256
                                              : second.w + (i64)(output * TILES + step - STEPS) * 256;
            a[u] = __ldg((const uint4*)(from + lane * 8));
        }
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const int step = (first + 16 * u) / TILES, output = (first + 16 * u) % TILES;
            const int matrix = lane / 8;  // of a tile: outputs of 0..8 and 8..16, and then the other eight channels
            const u32 to = shared_address(weights + step * STEP_BYTES + matrix / 2 * (C * 16) +
                                          (output * 2 + matrix % 2) * 128 + lane % 8 * 16);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a[u].x),
                         "r"(a[u].y), "r"(a[u].z), "r"(a[u].w)
                         : "memory");
        }
    }
    for (int i = tid; i < C; i += blockDim.x) {
        tables[i] = bias ? bias[i] : 0.0f;
        tables[C + i] = second.alpha[i];
        tables[2 * C + i] = second.inv_beta[i];
        tables[3 * C + i] = second.bias ? second.bias[i] : 0.0f;
    }
    // The products read through another proxy than these stores went.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    if (warp < UNIT_STAGERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        const int within = tid % QUADS * 4, row_begin = tid / QUADS;
        const bool idle = row_begin >= ABREAST;  // rows divide among the others
        const float4 al = *(const float4*)(alpha + within), be = *(const float4*)(inv_beta + within);
        dependency_wait();
        Turn turn;
        for (int tile = BLOCK_X; tile < tiles; tile += gridDim.x) {
            // The rate is a multiple of a tile's rows: a tile lies in one window.
            const int tile_first = tile * UNIT_ROWS;
            int found = -1;
            Window window = {0, 0, 0};
            for (int i = lane; i < (streams.count + 31) / 32 * 32 && found < 0; i += 32) {
                if (i < streams.count) window = read_window(streams, i);
                const bool here =
                    i < streams.count && window.first <= tile_first && tile_first < window.first + window.rows;
                const u32 lanes = __ballot_sync(0xffffffffu, here);
                if (lanes) found = i - lane + __ffs(lanes) - 1;
            }
            barrier_wait(empty + turn.at * 8, turn.parity ^ 1);
            if (tid == 0) window_of[turn.at] = found;
            if (found >= 0 && !idle) {
                window = read_window(streams, found);
                unsigned char* const to =
                    stage + turn.at * buffer_bytes + within / 8 * group_rows * 16 + within / 4 % 2 * 8;
                const int before = tile_first - window.first;  // rows of the window ahead of the tile
                const int old = max(past - before, 0);         // staged rows that are carried ones
                const i64 carried_first = window.state + (i64)before * C + within;
                // All loads of a round are on their way before the first value is used. Behind the last row it comes
                // again: no decision keeps loads apart.
#pragma unroll 1
                for (int first = row_begin; first < old; first += 6 * ABREAST) {
                    uint2 v[6] = {};
                    if (streams.state_as == AS_F32) {
                        float4 wide[6];
#pragma unroll
                        for (int u = 0; u < 6; ++u)
                            wide[u] = *(const float4*)((const float*)streams.state + carried_first +
                                                       (i64)min(first + u * ABREAST, old - 1) * C);
#pragma unroll
                        for (int u = 0; u < 6; ++u)
                            v[u] = make_uint2(pack_f16(wide[u].x, wide[u].y), pack_f16(wide[u].z, wide[u].w));
                    } else {
#pragma unroll
                        for (int u = 0; u < 6; ++u)
                            v[u] = *(const uint2*)((const bf16_t*)streams.state + carried_first +
                                                   (i64)min(first + u * ABREAST, old - 1) * C);
                    }
#pragma unroll
                    for (int u = 0; u < 6; ++u) *(uint2*)(to + min(first + u * ABREAST, old - 1) * 16) = v[u];
                }
                const char* const from = (const char*)(x + (i64)(tile_first - past) * C + within);
#pragma unroll 1
                for (int first = old + row_begin; first < staged; first += ROUND * ABREAST) {
                    float4 v[ROUND];
#pragma unroll
                    for (int u = 0; u < ROUND; ++u)
                        v[u] = load_row(from + (i64)min(first + u * ABREAST, staged - 1) * (C * 4));
#pragma unroll
                    for (int u = 0; u < ROUND; ++u) v[u] = quick_snake4(v[u], al, be);
#pragma unroll
                    for (int u = 0; u < ROUND; ++u)
                        *(uint2*)(to + min(first + u * ABREAST, staged - 1) * 16) =
                            make_uint2(pack_f16(v[u].x, v[u].y), pack_f16(v[u].z, v[u].w));
                }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            barrier_arrive(full + turn.at * 8);
            turn.next(UNIT_BUFFERS);
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    dependency_wait();
    // Of the warp and not of the thread, or every product's descriptor would be computed by all threads.
    const int half = __shfl_sync(0xffffffffu, warp / 4 - UNIT_STAGERS / 128, 0);
    const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
    // Above its own memory a shared address may name a block of a cluster, of which a descriptor knows nothing.
    const int stage_first = (int)((shared_address(stage) & 0x3ffff) >> 4) + half * 64;
    const u64 rows_layout = (u64)group_rows << 16 | (u64)8 << 32;
    const u64 weights_at = (u64)C << 16 | (u64)8 << 32 | (u64)((shared_address(weights) & 0x3ffff) >> 4);
    // Turns 2 and 3: one for each half. The first one is there to be taken.
    const int my_turn = 2 + half, other_turn = 3 - half;
    if (half == 1 && BLOCK_X < tiles) turn_give(other_turn);
    Turn turn;
    for (int tile = BLOCK_X; tile < tiles; tile += gridDim.x) {
        barrier_wait(full + turn.at * 8, turn.parity);
        const bool live = window_of[turn.at] >= 0;
        float acc[C / 2];
        turn_wait(my_turn);
        // Also of a tile in no window: a decision here would keep products apart. What is computed of it goes nowhere.
        const u64 rows_at = rows_layout | (u64)(u32)(stage_first + turn.at * (buffer_bytes / 16));
        product_fence();
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
            product(acc, rows_at + (u32)(i / TAPS * 2 * group_rows + i % TAPS * dilation),
                    weights_at + i * (STEP_BYTES / 16), i > 0);
        product_commit();
        if (half == 0 || tile + gridDim.x < tiles) turn_give(other_turn);
        const i64 at = ((i64)tile * UNIT_ROWS + half * 64 + row) * C + column;
        float2 before[C / 4] = {};
        if (live) {
#pragma unroll
            for (int j = 0; j < C / 8; ++j) {
                before[2 * j] = *(const float2*)(residual + at + j * 8);
                before[2 * j + 1] = *(const float2*)(residual + at + 8 * C + j * 8);
            }
        }
        product_wait<0>();
        if (lane == 0) barrier_arrive(empty + turn.at * 8);
        turn.next(UNIT_BUFFERS);

        // Rows `row` and `row + 8` of eight outputs each are, of sixteen, what a thread gives to a product.
        uint4 a[TILES];
#pragma unroll
        for (int s = 0; s < TILES; ++s) {
            u32 packed[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float* table = tables + s * 16 + j * 8 + column;
                const float2 b = *(const float2*)table, al = *(const float2*)(table + C);
                const float2 be = *(const float2*)(table + 2 * C);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float* v = acc + s * 8 + j * 4 + r * 2;
                    packed[j * 2 + r] = pack_f16(quick_snake(__fadd_rn(v[0], b.x), al.x, be.x),
                                                 quick_snake(__fadd_rn(v[1], b.y), al.y, be.y));
                }
            }
            a[s] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
        float sum[C / 2];
        product_fence();
#pragma unroll
        for (int s = 0; s < TILES; ++s)
            product(sum, a[s], weights_at + (STEPS + s) * (STEP_BYTES / 16), s > 0);
        product_commit();
        product_wait<0>();
        if (!live) continue;
#pragma unroll
        for (int j = 0; j < C / 8; ++j) {
            const float2 b = *(const float2*)(tables + 3 * C + j * 8 + column);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float2 kept = before[2 * j + r];
                *(float2*)(out + at + r * 8 * C + j * 8) =
                    make_float2(__fadd_rn(kept.x, __fadd_rn(sum[j * 4 + r * 2], b.x)),
                                __fadd_rn(kept.y, __fadd_rn(sum[j * 4 + r * 2 + 1], b.y)));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    unit_warpgroup_96(CONV_PARAMETERS, SECOND_PARAMETERS) {
    unit_warpgroup<96, 7>(x, (const bf16_t*)w, bias, alpha, inv_beta, CONV_STREAMS, dilation, SECOND,
                          residual, out);
}
