// Products of many rows by Hopper's warpgroup products (sm_90a only). product.cuh, block.cuh and wgmma.cuh stand in front of it.
//
// Outputs of the matrix are the rows of the product, from registers: a warp's 16 outputs are one packed tile, so that
// weights come from memory as they lie, ahead of the wait for the kernel before. Batch rows are its columns, from shared
// memory, where they lie as in memory, in blocks of rows (see product.cuh): one thread fetches them in a few copies of
// whole chunks, which is several times faster than any way to rearrange them.
//
// The order of sums is that of product.cuh: wgmma has the bits of mma.sync. A block makes MT * 64 outputs of COLS rows.
// Its KH sets of warpgroups have SEGS of the eight segments each, the cluster's other blocks the rest. What a block of a
// cluster lacks is sent to it in whole rows of sums: that takes half of the time of fetching them behind a barrier.
//
// A norm in front is split: what makes x leaves it times the norm's weight, rounded, and each row's sum of squares by parts
// (see product.cuh); a product of that then divides by the root of the whole.

#define OUT8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d[64 x N] (+)= a[64 x 16] * b[16 x N]. `more`: onto what d holds.
#define PRODUCT_OF(NAME, TYPE, N, REGISTERS, LIST, A, B, MORE, ...)                                                 \
    __device__ __forceinline__ void NAME(float (&d)[REGISTERS], const uint4& a, u64 b, int more) {                  \
        asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " MORE ", 0;\n"                                        \
                     "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST "}, {" A "}, " B      \
                     ", more, 1, 1, 0;\n}\n"                                                                        \
                     : __VA_ARGS__                                                                                  \
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(more));                                  \
    }
#define ROW_PRODUCTS(...) PRODUCT_OF(product_bf16, "bf16", __VA_ARGS__) PRODUCT_OF(product_f16, "f16", __VA_ARGS__)
ROW_PRODUCTS("16", 8, "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9,%10,%11", "%12", "%13", OUT8(0))
ROW_PRODUCTS("32", 16, TEN("") ",%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21", OUT8(0), OUT8(8))
ROW_PRODUCTS("64", 32, TEN("") "," TEN("1") "," TEN("2") ",%30,%31", "%32,%33,%34,%35", "%36", "%37", OUT8(0), OUT8(8),
         OUT8(16), OUT8(24))

// As load_tile where there is something to load, and without a branch, which would keep products apart.
__device__ __forceinline__ void load_tile_if(uint4& v, const uint4* tile, int some) {
    asm volatile(
        "{\n.reg .pred some;\nsetp.ne.b32 some, %5, 0;\n"
        "@some ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}\n"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(tile), "r"(some));
}

// Of some warps of a block.
__device__ __forceinline__ void barrier_of(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

constexpr int FETCH_TILES = 8;  // k tiles of inputs fetched at once
constexpr int FETCH_K = FETCH_TILES * 16;
constexpr int MOST_BUFFERS = 8;  // of each set of warpgroups
constexpr int BARRIER_BYTES = 512, HEAD_BYTES = BARRIER_BYTES + ROW_BLOCK * 4;

template <int MT, int KH, int SEGS, int COLS, bool F16>
__device__ __forceinline__ void gemm_warpgroup_body(const bf16_t* x, const uint4* w, int n, int k, int rows, int gated,
                                                    int buffers, const Normed& normed, const Next& next,
                                                    const Epilogue& e) {
    constexpr int OUTPUTS = MT * 64, SET_THREADS = MT * 128, THREADS = KH * SET_THREADS;
    constexpr int BLOCKS = SEGMENTS / (KH * SEGS), REGISTERS = COLS / 2;
    constexpr int LEVELS = SEGS == 4 ? 2 : SEGS == 2 ? 1 : 0;
    constexpr int PITCH = OUTPUTS + 4, MY_COLS = COLS / BLOCKS;
    constexpr int RECEIVED = (BLOCKS - 1) * MY_COLS * PITCH;  // floats
    constexpr int WAITING = LEVELS * SET_THREADS * REGISTERS, TILE = COLS * PITCH;
    extern __shared__ __align__(128) unsigned char warpgroup_shared[];
    const u32 full = shared_address(warpgroup_shared), empty = full + KH * MOST_BUFFERS * 8;
    const u32 sums_in = empty + KH * MOST_BUFFERS * 8;
    float* const inverse = (float*)(warpgroup_shared + BARRIER_BYTES);  // of the rows that this block finishes
    float* const received = (float*)(warpgroup_shared + HEAD_BYTES);
    // The last set's tree of sums and, over it, the sums as [row][output]; then the first set's tree.
    float* const sums = received + RECEIVED;
    constexpr int LAST = WAITING > TILE ? WAITING : TILE;
    unsigned char* const inputs =
        warpgroup_shared + (HEAD_BYTES + (RECEIVED + LAST + (KH - 1) * WAITING) * 4 + 127) / 128 * 128;

    const int part = BLOCK_X % BLOCKS, block = BLOCK_X / BLOCKS, first_row = BLOCK_Y * COLS;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int m = warp / 4 % MT, h = warp / 4 / MT, place = m * 4 + warp % 4;
    const int k_tiles = k / 16, n_tiles = (n + 15) / 16, segment_tiles = k_tiles / SEGMENTS;
    int tile;
    if (gated) tile = place < MT * 2 ? block * MT * 2 + place : n_tiles / 2 + block * MT * 2 + place - MT * 2;
    else tile = block * MT * 4 + place;
    const int chunks = SEGS * segment_tiles / FETCH_TILES, first_tile = (part * KH + h) * SEGS * segment_tiles;
    const uint4* const tiles = w + ((i64)min(tile, n_tiles - 1) * k_tiles + first_tile) * 32 + lane;
    uint4 a[2 * FETCH_TILES] = {};
    const auto load_set = [&](int set, int chunk) {
#pragma unroll
        for (int i = 0; i < FETCH_TILES; i++)
            load_tile_if(a[set * FETCH_TILES + i], tiles + (chunk * FETCH_TILES + i) * 32, chunk < chunks);
    };
    load_set(0, 0);
    load_set(1, 1);

    if (tid == 0) {
        for (int i = 0; i < KH * MOST_BUFFERS; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, MT * 4);
        }
        if (BLOCKS > 1) {
            barrier_init(sums_in, 1);
            barrier_expect(sums_in, RECEIVED * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    // What the others send may come once everybody has got here, which is looked at much later.
    if (BLOCKS > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    // With one block of rows no block waits for room, so that those of the kernel behind may take what is left, and ask
    // for their weights.
    const bool early = gridDim.y == 1;
    if (early) release_dependents();
    dependency_wait();

    // Of a block of rows the k lie eight by eight, all rows of eight together.
    const int row_block = first_row / ROW_BLOCK * ROW_BLOCK, pitch = min(ROW_BLOCK, rows - row_block);
    const int buffer_bytes = FETCH_K * 2 * pitch;
    const bf16_t* const from = x + (i64)row_block * k + (i64)first_tile * 16 * pitch;
    const u32 my_inputs = shared_address(inputs) + h * buffers * buffer_bytes;
    const u32 my_full = full + h * MOST_BUFFERS * 8, my_empty = empty + h * MOST_BUFFERS * 8;
    const bool leader = tid % SET_THREADS == 0;
    const auto fetch_chunk = [&](int chunk, int buffer) {
        barrier_expect(my_full + buffer * 8, buffer_bytes);
        copy_here(my_inputs + buffer * buffer_bytes, from + (i64)chunk * FETCH_K * pitch, buffer_bytes, my_full + buffer * 8);
    };
    if (leader)
        for (int chunk = 0; chunk < min(chunks, buffers); chunk++) fetch_chunk(chunk, chunk);

    // The rows' norms, while the first inputs come.
    if (normed.squares) {
        constexpr int ROUNDS = (MY_COLS + THREADS / 32 - 1) / (THREADS / 32);
        float parts[ROUNDS];
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            const int column = j * (THREADS / 32) + warp, row = first_row + part * MY_COLS + column;
            parts[j] = column < MY_COLS && row < rows ? square_part(normed, row, k) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            const int column = j * (THREADS / 32) + warp;
            const float inv = inverse_rms(warp_sum(parts[j]), k, normed.eps);
            if (lane == 0 && column < MY_COLS) inverse[column] = inv;
        }
    }

    float acc[REGISTERS] = {};
    float* const waiting = sums + (h + 1 == KH ? 0 : LAST) + tid % SET_THREADS;
    // In units of 16 bytes, as the products count. Above its own memory a shared address names the block of the
    // cluster, of which a product's descriptor knows nothing.
    const u64 layout = (u64)pitch << 16 | (u64)8 << 32;
    const u32 inputs_at = (my_inputs & 0x3ffff) >> 4;
    int more = 0, left = segment_tiles / FETCH_TILES, closed = 0, buffer = 0, parity = 0;
    const auto multiply = [&](int set, int chunk) {
        barrier_wait(my_full + buffer * 8, parity);
        const u32 at = inputs_at + buffer * (buffer_bytes >> 4);
        product_fence();
#pragma unroll
        for (int i = 0; i < FETCH_TILES; i++) {
            const u64 b = layout | (u64)(at + i * 2 * pitch);
            if (F16) product_f16(acc, a[set * FETCH_TILES + i], b, i == 0 ? more : 1);
            else product_bf16(acc, a[set * FETCH_TILES + i], b, i == 0 ? more : 1);
        }
        product_commit();
        more = 1;
        // The other set of weights has been used: its next ones, and the inputs' next ones in their place.
        product_wait<1>();
        if (chunk > 0) {
            load_set(set ^ 1, chunk + 1);
            const int used = buffer == 0 ? buffers - 1 : buffer - 1;
            if (chunk - 1 + buffers < chunks) {
                if (lane == 0) barrier_arrive(my_empty + used * 8);
                if (leader) {
                    barrier_wait(my_empty + used * 8, buffer == 0 ? parity ^ 1 : parity);
                    fetch_chunk(chunk - 1 + buffers, used);
                }
                __syncwarp();
            }
        }
        if (++buffer == buffers) {
            buffer = 0;
            parity ^= 1;
        }
        if (SEGS > 1 && --left == 0 && closed + 1 < SEGS) {
            // The tree of sums as a binary counter.
            product_wait<0>();
#pragma unroll
            for (int i = 0; i < REGISTERS; i++) {
                float* const lower = waiting + i * SET_THREADS;
                if (SEGS == 4 && closed == 1) lower[REGISTERS * SET_THREADS] = __fadd_rn(*lower, acc[i]);
                else *lower = acc[i];
            }
            closed++;
            left = segment_tiles / FETCH_TILES;
            more = 0;
        }
    };
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk += 2) {
        multiply(0, chunk);
        if (chunk + 1 < chunks) multiply(1, chunk + 1);
    }
    product_wait<0>();
    if (!early) release_dependents();
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
        if (SEGS >= 2) acc[i] = __fadd_rn(waiting[i * SET_THREADS], acc[i]);
        if (SEGS == 4) acc[i] = __fadd_rn(waiting[(REGISTERS + i) * SET_THREADS], acc[i]);
    }
    // The last set leaves its sums, the first one adds them to its own.
    float* const own = sums + (lane % 4) * 2 * PITCH + place * 16 + lane / 4;
    if (KH == 2 && h == 1) {
        if (LEVELS > 0) barrier_of(2, SET_THREADS);  // all have read what the sums lie over
#pragma unroll
        for (int i = 0; i < REGISTERS; i++) own[(i / 4 * 8 + i % 2) * PITCH + i / 2 % 2 * 8] = acc[i];
    }
    if (KH == 2) barrier_of(1, THREADS);
    if (h == 0)
#pragma unroll
        for (int i = 0; i < REGISTERS; i++) {
            float* const to = own + (i / 4 * 8 + i % 2) * PITCH + i / 2 % 2 * 8;
            *to = KH == 2 ? __fadd_rn(acc[i], *to) : acc[i];
        }
    if (BLOCKS > 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

    // Each block of the cluster finishes a part of the rows, four outputs of one at a time.
    constexpr int ITERATIONS = (MY_COLS * (OUTPUTS / 4) + THREADS - 1) / THREADS;
    constexpr int QUADS_LOG = OUTPUTS == 64 ? 4 : 5;
    const int quads_log = gated ? QUADS_LOG - 1 : QUADS_LOG, width = 4 << quads_log;
    const bool blocked = e.out_kept == KEPT_BLOCKED;
    float4 before[ITERATIONS] = {};
    const auto place_of = [&](int j, int& column, int& output) {
        const int item = j * THREADS + tid;
        // Side by side what lies so in memory.
        column = blocked ? item / 2 % MY_COLS : item >> quads_log;
        output = (blocked ? item / 2 / MY_COLS * 2 + item % 2 : item & ((1 << quads_log) - 1)) * 4;
        return item < MY_COLS << quads_log && first_row + part * MY_COLS + column < rows && block * width + output < e.n;
    };
#pragma unroll
    for (int j = 0; j < ITERATIONS; j++) {
        int column, output;
        if (e.accumulate && place_of(j, column, output))
            before[j] = *(const float4*)((float*)e.out + (i64)(first_row + part * MY_COLS + column) * e.n +
                                         block * width + output);
    }
    barrier_of(1, THREADS);
    if (BLOCKS > 1) {
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        if (tid < BLOCKS && tid != part) {
            // Ranks count as blockIdx does, which the checking build turns round.
            const int rank = (int)(blockIdx.x % BLOCKS) == part ? tid : BLOCKS - 1 - tid;
            const int place_there = part < tid ? part : part - 1;
            copy_across(remote(shared_address(received + place_there * MY_COLS * PITCH), rank),
                 shared_address(sums + tid * MY_COLS * PITCH), MY_COLS * PITCH * 4, remote(sums_in, rank));
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        barrier_wait(sums_in, 0);
    }
#pragma unroll
    for (int j = 0; j < ITERATIONS; j++) {
        int column, output;
        if (!place_of(j, column, output)) continue;
        const auto total = [&](int output) {
            float4 v[BLOCKS];
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                const float* row = b == part ? sums + part * MY_COLS * PITCH
                                             : received + (b < part ? b : b - 1) * MY_COLS * PITCH;
                v[b] = *(const float4*)(row + column * PITCH + output);
            }
#pragma unroll
            for (int step = 1; step < BLOCKS; step *= 2)
#pragma unroll
                for (int b = 0; b < BLOCKS; b += 2 * step) v[b] = add4(v[b], v[b + step]);
            return v[0];
        };
        float4 v = total(output);
        const float inv = normed.squares ? inverse[column] : 1.0f;
        if (normed.squares) v = scaled4(v, inv);
        if (gated) {
            float4 up = total(output + width);
            if (normed.squares) up = scaled4(up, inv);
            v = make_float4(gate(v.x, up.x), gate(v.y, up.y), gate(v.z, up.z), gate(v.w, up.w));
        }
        const int row = first_row + part * MY_COLS + column;
        v = store_four<F16>(e, row, rows, block * width + output, v, before[j]);
        if (next.weight) leave_for_next<F16>(next, row, rows, block * width + output, e.n, v);
    }
    // What was sent must have been read before the block ends.
    if (BLOCKS > 1) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// gemm_warpgroup_{outputs}_{batch rows}_{blocks of a cluster}: n / (outputs) clusters of them, `buffers` chunks of inputs
// of each set of warpgroups at a time.
#define GEMM_WARPGROUP(NAME, MT, KH, SEGS, COLS, RESIDENT, F16)                                                     \
    extern "C" __global__ void __launch_bounds__(MT * KH * 128, RESIDENT)                                      \
        NAME(const bf16_t* x, const float* squares, float eps, const uint4* w, int n, int k, int rows, int gated,   \
             int buffers, const float* next_weight, bf16_t* next_x, float* next_squares, const float* bias,         \
             const float* scale, void* out, int activation, int accumulate, int out_kept) {                         \
        Epilogue e = {bias, scale, out, gated ? n / 2 : n, activation, accumulate, out_kept};                       \
        gemm_warpgroup_body<MT, KH, SEGS, COLS, F16>(x, w, n, k, rows, gated, buffers, Normed{squares, eps},        \
                                                     Next{next_weight, next_x, next_squares}, e);                   \
    }
#define GEMM_WARPGROUP_TYPES(OUTPUTS, BLOCKS, MT, KH, SEGS, COLS, RESIDENT)                                         \
    GEMM_WARPGROUP(gemm_warpgroup_##OUTPUTS##_##COLS##_##BLOCKS##_bf16, MT, KH, SEGS, COLS, RESIDENT, false)        \
    GEMM_WARPGROUP(gemm_warpgroup_##OUTPUTS##_##COLS##_##BLOCKS##_f16, MT, KH, SEGS, COLS, RESIDENT, true)
#define GEMM_WARPGROUP_COLS(OUTPUTS, BLOCKS, MT, KH, SEGS, RESIDENT)           \
    GEMM_WARPGROUP_TYPES(OUTPUTS, BLOCKS, MT, KH, SEGS, 16, RESIDENT)          \
    GEMM_WARPGROUP_TYPES(OUTPUTS, BLOCKS, MT, KH, SEGS, 32, RESIDENT)          \
    GEMM_WARPGROUP_TYPES(OUTPUTS, BLOCKS, MT, KH, SEGS, 64, RESIDENT)
GEMM_WARPGROUP_COLS(64, 4, 1, 2, 1, 2)
GEMM_WARPGROUP_COLS(64, 2, 1, 2, 2, 2)
GEMM_WARPGROUP_COLS(64, 1, 1, 2, 4, 2)
GEMM_WARPGROUP_COLS(128, 1, 2, 2, 4, 1)
