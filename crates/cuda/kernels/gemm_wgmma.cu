// Products of many rows by Hopper's warpgroup products (sm_90a only). product.cuh and block.cuh stand in front of it.
//
// Outputs of the matrix are the rows of the product, from registers: a warp's 16 outputs are one packed tile, so that
// weights come from memory as they lie, ahead of the wait for the kernel before. Batch rows are its columns, from shared
// memory, where they lie as in memory, in blocks of rows (see product.cuh): a warp of its own fetches them in a few
// copies of whole chunks, which is several times faster than any way to rearrange them.
//
// The order of sums is that of product.cuh: wgmma has the bits of mma.sync. A block makes MT * 64 outputs of COLS rows.
// Its KH sets of warpgroups have SEGS of the eight segments each, the cluster's other blocks the rest. What a block of a
// cluster lacks is sent to it in whole rows of sums: that takes half of the time of fetching them behind a barrier.

#define TEN(T) "%" T "0,%" T "1,%" T "2,%" T "3,%" T "4,%" T "5,%" T "6,%" T "7,%" T "8,%" T "9"
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
#define PRODUCTS(...) PRODUCT_OF(product_bf16, "bf16", __VA_ARGS__) PRODUCT_OF(product_f16, "f16", __VA_ARGS__)
PRODUCTS("16", 8, "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9,%10,%11", "%12", "%13", OUT8(0))
PRODUCTS("32", 16, TEN("") ",%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21", OUT8(0), OUT8(8))
PRODUCTS("64", 32, TEN("") "," TEN("1") "," TEN("2") ",%30,%31", "%32,%33,%34,%35", "%36", "%37", OUT8(0), OUT8(8),
         OUT8(16), OUT8(24))

__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int AHEAD>
__device__ __forceinline__ void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(AHEAD) : "memory");
}

// As load_tile where there is something to load, and without a branch, which would keep products apart.
__device__ __forceinline__ void load_tile_if(uint4& v, const uint4* tile, int some) {
    asm volatile(
        "{\n.reg .pred some;\nsetp.ne.b32 some, %5, 0;\n"
        "@some ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}\n"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(tile), "r"(some));
}

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrive, and let the phase last until so many bytes have come.
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended; that before the first one counts as odd.
__device__ __forceinline__ void barrier_wait(u32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra behind;\nbra again;\nbehind:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Of some warps of a block.
__device__ __forceinline__ void barrier_of(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void fetch(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// To another block's shared memory; addresses as that block's.
__device__ __forceinline__ void send(u32 to, u32 from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ u32 address_in(u32 local, int rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    return remote;
}

constexpr int CHUNK_K = 128;     // of the inputs, fetched at once
constexpr int MOST_BUFFERS = 8;  // of each set of warpgroups
constexpr int BARRIER_BYTES = 512;

template <int MT, int KH, int SEGS, int COLS, bool F16>
__device__ __forceinline__ void gemm_warpgroup_body(const bf16_t* x, const uint4* w, int n, int k, int rows, int gated,
                                                    int buffers, int early, const Epilogue& e) {
    constexpr int OUTPUTS = MT * 64, WORKERS = MT * KH * 128, BLOCKS = SEGMENTS / (KH * SEGS), REGISTERS = COLS / 2;
    constexpr int SET = MT * KH == 1 ? 8 : 4;  // k tiles whose weights a warp holds twice over
    constexpr int LEVELS = SEGS == 4 ? 2 : SEGS == 2 || KH == 2 ? 1 : 0;
    constexpr int PITCH = OUTPUTS + 4, MY_COLS = COLS / BLOCKS;
    constexpr int RECEIVED = (BLOCKS - 1) * MY_COLS * PITCH;  // floats
    constexpr int WAITING = LEVELS * WORKERS * REGISTERS, TILE = COLS * PITCH;
    extern __shared__ __align__(128) unsigned char warpgroup_shared[];
    const u32 full = shared_address(warpgroup_shared), empty = full + KH * MOST_BUFFERS * 8;
    const u32 sums_in = empty + KH * MOST_BUFFERS * 8;
    float* const received = (float*)(warpgroup_shared + BARRIER_BYTES);
    float* const sums = received + RECEIVED;  // the tree's levels, then the tile [row][output]
    unsigned char* const inputs =
        warpgroup_shared + (BARRIER_BYTES + (RECEIVED + (WAITING > TILE ? WAITING : TILE)) * 4 + 127) / 128 * 128;

    const int part = BLOCK_X % BLOCKS, block = BLOCK_X / BLOCKS, first_row = BLOCK_Y * COLS;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int k_tiles = k / 16, n_tiles = (n + 15) / 16, segment_tiles = k_tiles / SEGMENTS;
    const int chunks = SEGS * segment_tiles * 16 / CHUNK_K;
    const int pitch = min(ROW_BLOCK, rows - BLOCK_Y * COLS / ROW_BLOCK * ROW_BLOCK);  // rows of the block of inputs
    const int buffer_bytes = CHUNK_K * 2 * pitch;
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
    const auto all_have_begun = [&]() {
        if (BLOCKS > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    };
    if (early) release_dependents();

    if (warp == WORKERS / 32) {
        dependency_wait();
        if (lane == 0) {
            // Of a block of rows the k lie eight by eight, all rows of eight together.
            const i64 row_block = (i64)(first_row / ROW_BLOCK) * ROW_BLOCK * k;
            const bf16_t* const from = x + row_block + first_row % ROW_BLOCK * 8;
            for (int chunk = 0; chunk < chunks; chunk++)
#pragma unroll
                for (int h = 0; h < KH; h++) {
                    const int b = h * MOST_BUFFERS + chunk % buffers;
                    if (chunk >= buffers) barrier_wait(empty + b * 8, (chunk / buffers - 1) & 1);
                    barrier_expect(full + b * 8, buffer_bytes);
                    const int first_k = (part * KH + h) * SEGS * segment_tiles * 16 + chunk * CHUNK_K;
                    fetch(shared_address(inputs) + (h * buffers + chunk % buffers) * buffer_bytes,
                          from + (i64)first_k * pitch, buffer_bytes, full + b * 8);
                }
        }
        __syncwarp();
        all_have_begun();
        if (!early) release_dependents();
        return;
    }

    const int m = warp / 4 % MT, h = warp / 4 / MT, place = m * 4 + warp % 4;
    int tile;
    if (gated) tile = place < MT * 2 ? block * MT * 2 + place : n_tiles / 2 + block * MT * 2 + place - MT * 2;
    else tile = block * MT * 4 + place;
    const int units = SEGS * segment_tiles / SET;
    const uint4* const tiles =
        w + ((i64)min(tile, n_tiles - 1) * k_tiles + (part * KH + h) * SEGS * segment_tiles) * 32 + lane;
    uint4 a[2 * SET] = {};
    const auto load_set = [&](int set, int unit) {
#pragma unroll
        for (int i = 0; i < SET; i++) load_tile_if(a[set * SET + i], tiles + (unit * SET + i) * 32, unit < units);
    };
    load_set(0, 0);
    load_set(1, 1);
    dependency_wait();

    float acc[REGISTERS] = {};
    float* const waiting = sums + tid;
    // In units of 16 bytes, as the products count. Above its own memory a shared address names the block of the
    // cluster, of which a product's descriptor knows nothing.
    const u64 layout = (u64)pitch << 16 | (u64)8 << 32;
    const u32 inputs_at = ((shared_address(inputs) & 0x3ffff) + h * buffers * buffer_bytes) >> 4;
    int more = 0, left = segment_tiles / SET, closed = 0, buffer = 0, parity = 0, used = -1;
    u32 at = 0;
    const auto half = [&](int set, int unit) {
        if (unit * SET % (CHUNK_K / 16) == 0) {
            barrier_wait(full + (h * MOST_BUFFERS + buffer) * 8, parity);
            at = inputs_at + buffer * (buffer_bytes >> 4);
        }
        product_fence();
#pragma unroll
        for (int i = 0; i < SET; i++) {
            const u64 b = layout | (u64)(at + i * 2 * pitch);
            if (F16) product_f16(acc, a[set * SET + i], b, i == 0 ? more : 1);
            else product_bf16(acc, a[set * SET + i], b, i == 0 ? more : 1);
        }
        product_commit();
        more = 1;
        at += SET * 2 * pitch;
        // The other set's products have ended: its next weights, and room for the next inputs.
        product_wait<1>();
        if (used >= 0 && lane == 0) barrier_arrive(empty + (h * MOST_BUFFERS + used) * 8);
        used = -1;
        if (unit > 0) load_set(set ^ 1, unit + 1);
        if ((unit + 1) * SET % (CHUNK_K / 16) == 0) {
            used = buffer;
            if (++buffer == buffers) {
                buffer = 0;
                parity ^= 1;
            }
        }
        if (SEGS > 1 && --left == 0 && closed + 1 < SEGS) {
            // The tree of sums as a binary counter.
            product_wait<0>();
#pragma unroll
            for (int i = 0; i < REGISTERS; i++) {
                float* const lower = waiting + i * WORKERS;
                if (SEGS == 4 && closed == 1) lower[REGISTERS * WORKERS] = __fadd_rn(*lower, acc[i]);
                else *lower = acc[i];
            }
            closed++;
            left = segment_tiles / SET;
            more = 0;
        }
    };
#pragma unroll 1
    for (int unit = 0; unit < units; unit += 2) {
        half(0, unit);
        if (unit + 1 < units) half(1, unit + 1);
    }
    product_wait<0>();
    if (!early) release_dependents();
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
        if (SEGS >= 2) acc[i] = __fadd_rn(waiting[i * WORKERS], acc[i]);
        if (SEGS == 4) acc[i] = __fadd_rn(waiting[(REGISTERS + i) * WORKERS], acc[i]);
    }
    // The second set hands its sums to the first one, thread by thread.
    if (KH == 2) {
        if (h == 1)
#pragma unroll
            for (int i = 0; i < REGISTERS; i++) waiting[i * WORKERS] = acc[i];
        barrier_of(1, WORKERS);
        if (h == 0)
#pragma unroll
            for (int i = 0; i < REGISTERS; i++) acc[i] = __fadd_rn(acc[i], waiting[i * WORKERS + MT * 128]);
    }
    if (h == 0) {
        if (LEVELS > 0) barrier_of(2, MT * 128);  // all have read what the tile lies over
        float* const own = sums + (lane % 4) * 2 * PITCH + place * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < REGISTERS; i++) own[(i / 4 * 8 + i % 2) * PITCH + i / 2 % 2 * 8] = acc[i];
        if (BLOCKS > 1) {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            barrier_of(2, MT * 128);
        }
    }
    all_have_begun();
    if (BLOCKS > 1 && tid < BLOCKS && tid != part) {
        // Ranks count as blockIdx does, which the checking build turns round.
        const int rank = (int)(blockIdx.x % BLOCKS) == part ? tid : BLOCKS - 1 - tid;
        const int place_there = part < tid ? part : part - 1;
        send(address_in(shared_address(received + place_there * MY_COLS * PITCH), rank),
             shared_address(sums + tid * MY_COLS * PITCH), MY_COLS * PITCH * 4, address_in(sums_in, rank));
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    // Each block of the cluster finishes a part of the rows, four outputs of one at a time.
    constexpr int ITERATIONS = (MY_COLS * (OUTPUTS / 4) + WORKERS - 1) / WORKERS;
    const int width = gated ? OUTPUTS / 2 : OUTPUTS, quads = width / 4;
    const bool blocked = e.out_kept == KEPT_BLOCKED;
    float4 before[ITERATIONS] = {};
    const auto place_of = [&](int j, int& column, int& output) {
        const int item = j * WORKERS + tid;
        // Side by side what lies so in memory.
        column = blocked ? item / 2 % MY_COLS : item / quads;
        output = (blocked ? item / 2 / MY_COLS * 2 + item % 2 : item % quads) * 4;
        return item < MY_COLS * quads && first_row + part * MY_COLS + column < rows && block * width + output < e.n;
    };
#pragma unroll
    for (int j = 0; j < ITERATIONS; j++) {
        int column, output;
        if (e.accumulate && place_of(j, column, output))
            before[j] = *(const float4*)((float*)e.out + (i64)(first_row + part * MY_COLS + column) * e.n +
                                         block * width + output);
    }
    barrier_of(1, WORKERS);
    if (BLOCKS > 1) barrier_wait(sums_in, 0);
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
        if (gated) {
            const float4 up = total(output + width);
            v = make_float4(gate(v.x, up.x), gate(v.y, up.y), gate(v.z, up.z), gate(v.w, up.w));
        }
        store_four<F16>(e, first_row + part * MY_COLS + column, rows, block * width + output, v, before[j]);
    }
    if (BLOCKS > 1) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// gemm_warpgroup_{outputs}_{batch rows}_{blocks of a cluster}: n / (outputs) clusters of them, `buffers` chunks of inputs
// of each set of warpgroups at a time.
#define GEMM_WARPGROUP(NAME, MT, KH, SEGS, COLS, RESIDENT, F16)                                                     \
    extern "C" __global__ void __launch_bounds__(MT * KH * 128 + 32, RESIDENT)                                      \
        NAME(const bf16_t* x, const uint4* w, int n, int k, int rows, int gated, int buffers, int early,            \
             const float* bias, const float* scale, void* out, int activation, int accumulate, int out_kept) {      \
        Epilogue e = {bias, scale, out, gated ? n / 2 : n, activation, accumulate, out_kept};                       \
        gemm_warpgroup_body<MT, KH, SEGS, COLS, F16>(x, w, n, k, rows, gated, buffers, early, e);                   \
    }
#define GEMM_WARPGROUP_TYPES(OUTPUTS, BLOCKS, MT, KH, SEGS, COLS, RESIDENT)                                         \
    GEMM_WARPGROUP(gemm_warpgroup_##OUTPUTS##_##COLS##_##BLOCKS##_bf16, MT, KH, SEGS, COLS, RESIDENT, false)        \
    GEMM_WARPGROUP(gemm_warpgroup_##OUTPUTS##_##COLS##_##BLOCKS##_f16, MT, KH, SEGS, COLS, RESIDENT, true)
#define GEMM_WARPGROUP_COLS(OUTPUTS, BLOCKS, MT, KH, SEGS, RESIDENT)           \
    GEMM_WARPGROUP_TYPES(OUTPUTS, BLOCKS, MT, KH, SEGS, 16, RESIDENT)          \
    GEMM_WARPGROUP_TYPES(OUTPUTS, BLOCKS, MT, KH, SEGS, 32, RESIDENT)          \
    GEMM_WARPGROUP_TYPES(OUTPUTS, BLOCKS, MT, KH, SEGS, 64, RESIDENT)
GEMM_WARPGROUP_COLS(64, 8, 1, 1, 1, 2)
GEMM_WARPGROUP_COLS(64, 4, 1, 2, 1, 2)
GEMM_WARPGROUP_COLS(64, 2, 1, 2, 2, 2)
GEMM_WARPGROUP_COLS(64, 1, 1, 2, 4, 2)
GEMM_WARPGROUP_COLS(128, 8, 2, 1, 1, 2)
GEMM_WARPGROUP_COLS(128, 4, 2, 2, 1, 1)
GEMM_WARPGROUP_COLS(128, 2, 2, 2, 2, 1)
GEMM_WARPGROUP_COLS(128, 1, 2, 2, 4, 1)
