// Hopper's warpgroup products and what orders them (sm_90a only): stands in front of every source with products of
// warpgroups.

#define TEN(T) "%" T "0,%" T "1,%" T "2,%" T "3,%" T "4,%" T "5,%" T "6,%" T "7,%" T "8,%" T "9"
#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT16(i) OUT4(i), OUT4(i + 4), OUT4(i + 8), OUT4(i + 12)

// d[64 x N] (+)= a[64 x 16] * b[16 x N]. `more`: onto what d holds.
#define PRODUCTS(N, REGISTERS, LIST, A, B, MORE, ...)                                                               \
    __device__ __forceinline__ void product(float (&d)[REGISTERS], const uint4& a, u64 b, int more) {               \
        asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " MORE ", 0;\n"                                        \
                     "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.f16.f16 {" LIST "}, {" A "}, " B                \
                     ", more, 1, 1, 0;\n}\n"                                                                        \
                     : __VA_ARGS__                                                                                  \
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(more));                                  \
    }
PRODUCTS("32", 16, TEN("") ",%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21", OUT16(0))
PRODUCTS("160", 80,
         TEN("") "," TEN("1") "," TEN("2") "," TEN("3") "," TEN("4") "," TEN("5") "," TEN("6") "," TEN("7"),
         "%80,%81,%82,%83", "%84", "%85", OUT16(0), OUT16(16), OUT16(32), OUT16(48), OUT16(64))

__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int AHEAD>
__device__ __forceinline__ void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(AHEAD) : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
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

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 remote(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Arrive, and let the phase last until so many bytes have come.
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Bytes from memory, told to a barrier.
__device__ __forceinline__ void copy_here(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// The same to another block of the cluster: addresses as that block has them, see remote().
__device__ __forceinline__ void copy_across(u32 to, u32 from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Which buffer is next, and the parity of its use.
struct Turn {
    int at = 0;
    int parity = 0;
    __device__ __forceinline__ void next(int buffers) {
        if (++at == buffers) {
            at = 0;
            parity ^= 1;
        }
    }
};

// A load that the compiler leaves where it is, ahead of what other loads are waited for.
__device__ __forceinline__ float4 load_row(const char* at) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}

// What the second convolution of a unit takes beside the operands of the first one.
struct Second {
    const bf16_t* w;
    const float* bias;
    const float* alpha;
    const float* inv_beta;
};
#define SECOND_PARAMETERS const void *w2, const float *bias2, const float *alpha2, const float *inv_beta2
#define SECOND \
    Second { (const bf16_t*)w2, bias2, alpha2, inv_beta2 }
