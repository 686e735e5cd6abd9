// What products by whole blocks have in common: copies to shared memory, sums over a cluster, and the end of a product.
// product.cuh stands in front of it.

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float4 cluster_load(const float* mine, int rank) {
    u32 local = (u32)__cvta_generic_to_shared(mine), remote;
    float4 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(remote)
                 : "memory");
    return v;
}
#endif

// Four neighbouring sums over all blocks of the cluster, as a balanced tree in the order of the blocks.
template <int BLOCKS>
__device__ __forceinline__ float4 block_sum(const float* p) {
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) {
        float4 v[BLOCKS];
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
#ifdef SHUFFLE_BLOCKS
            v[block] = cluster_load(p, BLOCKS - 1 - block);
#else
            v[block] = cluster_load(p, block);
#endif
        }
#pragma unroll
        for (int step = 1; step < BLOCKS; step *= 2)
#pragma unroll
            for (int block = 0; block < BLOCKS; block += 2 * step) {
                v[block] = add4(v[block], v[block + step]);
            }
        return v[0];
    }
#endif
    return *(const float4*)p;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, in the background; with `bytes` 0: zeros.
__device__ __forceinline__ void copy_async_to(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
    copy_async_to(shared_address(to), from, bytes);
}

__device__ __forceinline__ uint4 load_shared(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The end of a block's product: sums of its OUTPUTS outputs lie as [batch row][output] in `partial`, a part of each in
// every block of the cluster. Each block finishes a part of the rows, four outputs of one at a time, as store_output
// does one. What they are added to is asked for before the barrier.
template <int COLS, int BLOCKS, int OUTPUTS, int THREADS, bool F16>
__device__ __forceinline__ void finish_block(const float* partial, int part, int block, int first_row, int rows,
                                             int gated, const Epilogue& e) {
    constexpr int PITCH = OUTPUTS + 4, MY_COLS = COLS / BLOCKS;
    constexpr int ITERATIONS = (MY_COLS * (OUTPUTS / 4) + THREADS - 1) / THREADS;
    const int width = gated ? OUTPUTS / 2 : OUTPUTS, quads = width / 4;
    const bool fours = e.n % 4 == 0;
    float4 before[ITERATIONS] = {}, bias[ITERATIONS] = {}, scale[ITERATIONS] = {};
    auto place = [&](int j, int& column, int& output) {
        const int item = j * THREADS + threadIdx.x;
        column = part * MY_COLS + item / quads;
        output = block * width + item % quads * 4;
        return item < MY_COLS * quads && first_row + column < rows && output < e.n;
    };
#pragma unroll
    for (int j = 0; j < ITERATIONS; j++) {
        int column, output;
        if (!place(j, column, output) || !fours) continue;
        if (e.accumulate && e.out_kept == KEPT_F32)
            before[j] = *(const float4*)((float*)e.out + (i64)(first_row + column) * e.n + output);
        if (e.bias) bias[j] = *(const float4*)(e.bias + output);
        if (e.scale) scale[j] = *(const float4*)(e.scale + output);
    }
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) cluster_barrier();
    else __syncthreads();
#else
    __syncthreads();
#endif
#pragma unroll
    for (int j = 0; j < ITERATIONS; j++) {
        int column, output;
        if (!place(j, column, output)) continue;
        const float* sums = partial + column * PITCH + output - block * width;
        float4 v = block_sum<BLOCKS>(sums);
        if (gated) {
            const float4 up = block_sum<BLOCKS>(sums + width);
            v = make_float4(gate(v.x, up.x), gate(v.y, up.y), gate(v.z, up.z), gate(v.w, up.w));
        }
        if (!fours) {
            const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int q = 0; q < 4; q++)
                if (output + q < e.n) store_output<F16>(e, first_row + column, rows, output + q, values[q]);
            continue;
        }
        if (e.bias) v = add4(v, bias[j]);
        if (e.activation)
            v = make_float4(activate(e.activation, v.x), activate(e.activation, v.y), activate(e.activation, v.z),
                            activate(e.activation, v.w));
        if (e.scale)
            v = make_float4(__fmul_rn(v.x, scale[j].x), __fmul_rn(v.y, scale[j].y), __fmul_rn(v.z, scale[j].z),
                            __fmul_rn(v.w, scale[j].w));
        const i64 at = e.at(first_row + column, rows, output);
        if (e.out_kept != KEPT_F32) {
            *(uint2*)((bf16_t*)e.out + at) = make_uint2(pack_pair<F16>(v.x, v.y), pack_pair<F16>(v.z, v.w));
            continue;
        }
        if (e.accumulate) v = add4(before[j], v);
        *(float4*)((float*)e.out + at) = v;
    }
#if __CUDA_ARCH__ >= 900
    // Shared memory must live until the others have read it.
    if (BLOCKS > 1) cluster_barrier();
#endif
}
