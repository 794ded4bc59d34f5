/* C++ functions for Hopper's asynchronous units: the tensor copy engine (TMA), which arrives at
 * mbarriers, and warpgroup matrix products (WGMMA), as the PTX manual describes them. Device code
 * only. */
#ifndef BT_CUDA_HOPPER_CUH
#define BT_CUDA_HOPPER_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/engine/cuda/ring.cuh"

/* True in one thread of a warp, all threads of which run this together. */
static __device__ __forceinline__ bool elect_one(void)
{
    uint32_t one;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(one));
    return one != 0;
}

/* ---- TMA ---- */

/* Makes inits visible to the copy engine. */
static __device__ __forceinline__ void bar_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ __forceinline__ void bar_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

#define TMA_EVICT_FIRST  0x12F0000000000000ull
#define TMA_EVICT_NORMAL 0x1000000000000000ull

static __device__ __forceinline__ void tma_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"((uint64_t)map) : "memory");
}
static __device__ __forceinline__ void tma_load_2d(uint32_t dst, const CUtensorMap *map,
                                                   uint32_t bar, int x, int y, uint64_t hint)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
                 "l"((uint64_t)map), "r"(bar), "r"(x), "r"(y), "l"(hint)
                 : "memory");
}
static __device__ __forceinline__ void tma_load_3d(uint32_t dst, const CUtensorMap *map,
                                                   uint32_t bar, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
                 "l"((uint64_t)map), "r"(bar), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

static __device__ __forceinline__ void tma_load_4d(uint32_t dst, const CUtensorMap *map,
                                                   uint32_t bar, int x, int y, int z, int w,
                                                   uint64_t hint)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
                 "l"((uint64_t)map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w), "l"(hint)
                 : "memory");
}

static __device__ __forceinline__ void tma_load_5d(uint32_t dst, const CUtensorMap *map,
                                                   uint32_t bar, int x, int y, int z, int w, int v,
                                                   uint64_t hint)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
                 "l"((uint64_t)map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(hint)
                 : "memory");
}

/* Copies the same bytes to the same place in both blocks of a cluster of two; signals the barrier
 * at the place of `bar` in each block. */
static __device__ __forceinline__ void tma_load_2d_both(uint32_t dst, const CUtensorMap *map,
                                                        uint32_t bar, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
                 "l"((uint64_t)map), "r"(bar), "r"(x), "r"(y), "h"((uint16_t)3)
                 : "memory");
}

/* Copies `bytes` in one piece; the size and both addresses are multiples of 16. */
static __device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t bytes,
                                                 uint32_t bar, uint64_t hint)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"((uint64_t)src), "r"(bytes), "r"(bar), "l"(hint)
                 : "memory");
}
static __device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t bytes,
                                                 uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"((uint64_t)src), "r"(bytes), "r"(bar)
                 : "memory");
}

/* ---- clusters: blocks that run at once and read each other's shared memory ---- */

static __device__ __forceinline__ uint32_t cluster_rank(void)
{
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
/* Waits for all threads of all blocks; after it each sees what the others wrote before. */
static __device__ __forceinline__ void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
/* Arrives at the barrier of block `rank` that has the place of `bar` in this block. It orders
 * memory only within this block: a release for the cluster is a fence of all memory, which costs
 * about a microsecond. */
static __device__ __forceinline__ void cluster_arrive(uint32_t bar, uint32_t rank)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(bar),
                 "r"(rank)
                 : "memory");
}
/* Writes 16 bytes into block `rank`, at the place that is `addr` in this block, and completes as
 * many bytes at its barrier. */
static __device__ __forceinline__ void cluster_store4(uint32_t addr, uint32_t bar, uint32_t rank,
                                                      const uint32_t (&v)[4])
{
    asm volatile("{\n"
                 ".reg .b32 to, there;\n"
                 "mapa.shared::cluster.u32 to, %0, %2;\n"
                 "mapa.shared::cluster.u32 there, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], "
                 "{%3, %4, %5, %6}, [there];\n"
                 "}" ::"r"(addr),
                 "r"(bar), "r"(rank), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}
/* Reads 16 bytes of block `rank`, from the place that is `addr` in this block. */
static __device__ __forceinline__ float4 cluster_load4(uint32_t addr, uint32_t rank)
{
    uint32_t there;
    float4 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(addr), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(there)
                 : "memory");
    return v;
}

/* Orders normal writes to shared memory before later accesses by the copy engine and tensor
 * cores. */
static __device__ __forceinline__ void fence_async_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Orders normal accesses of all memory before later ones by the copy engine, or the reverse. */
static __device__ __forceinline__ void fence_async(void)
{
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* Stores four 8 x 8 matrices of 16-bit values. A thread has two values of row lane / 4 of each;
 * lane l gives the address of row l % 8 of matrix l / 8. */
static __device__ __forceinline__ void stmatrix4(uint32_t addr, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
/* The same, each transposed. A thread has two values of row lane / 4
 * of each; lane l gives the address of column l % 8 of matrix l / 8. */
static __device__ __forceinline__ void stmatrix4_t(uint32_t addr, const uint32_t (&r)[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/* ---- WGMMA ---- */

static __device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> static __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Prevents the compiler from using a product's registers before the wait in front of this. */
template <int N> static __device__ __forceinline__ void wgmma_hold(float (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(r[i])::"memory");
    }
}

/* Descriptor of a tile with 128-byte swizzle, in 1024-aligned atoms of 8 rows of 128 bytes. lead:
 * bytes between runs of 64 columns if columns are the product's M or N (else unused); stride: bytes
 * between groups of 8 rows. */
static __device__ __forceinline__ uint64_t wgmma_desc(uint32_t addr, uint32_t lead, uint32_t stride)
{
    return (uint64_t)((addr & 0x3FFFF) >> 4) | (uint64_t)(lead >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}

#define WG_REGS4  "%0,%1,%2,%3"
#define WG_REGS8  WG_REGS4 ",%4,%5,%6,%7"
#define WG_REGS16 WG_REGS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_REGS32                                                                                  \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                       \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_REGS48 WG_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_REGS64                                                                                  \
    WG_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                  \
              "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_REGS80 WG_REGS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WG_REGS96 WG_REGS80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WG_REGS112                                                                                 \
    WG_REGS96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WG_REGS128                                                                                 \
    WG_REGS112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WG_F8(d, i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WG_F4(d, i)   "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WG_F16(d, i)  WG_F8(d, i), WG_F8(d, i + 8)
#define WG_F32(d, i)  WG_F8(d, i), WG_F8(d, i + 8), WG_F8(d, i + 16), WG_F8(d, i + 24)
#define WG_F48(d, i)  WG_F32(d, i), WG_F16(d, i + 32)
#define WG_F64(d, i)  WG_F32(d, i), WG_F32(d, i + 32)
#define WG_F80(d, i)  WG_F64(d, i), WG_F16(d, i + 64)
#define WG_F96(d, i)  WG_F64(d, i), WG_F32(d, i + 64)
#define WG_F112(d, i) WG_F96(d, i), WG_F16(d, i + 96)
#define WG_F128(d, i) WG_F64(d, i), WG_F64(d, i + 64)

/* D[64 x N] (+)= A[64 x 16] * B[16 x N] in shared memory; in A the dimension 16 is contiguous
 * (M_RUNS 0) or M is (M_RUNS 1), in B the dimension 16 (N_RUNS 0) or N (N_RUNS 1). */
#define WG_SS_AS(N, TYPE, M_RUNS, N_RUNS, REGS, FREGS, A, B, P)                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS         \
                 "}, %" #A ", %" #B ", p, 1, 1, " #M_RUNS ", " #N_RUNS ";\n}"                      \
                 : FREGS(d, 0)                                                                     \
                 : "l"(a), "l"(b), "r"(accumulate))
#define WG_SS(N, TYPE, REGS, FREGS, A, B, P) WG_SS_AS(N, TYPE, 0, 0, REGS, FREGS, A, B, P)
/* D[64 x N] += A[64 x 16] in registers * B[16 x N] in shared memory, N contiguous. */
#define WG_RS(N, TYPE, REGS, FREGS, A0, A1, A2, A3, B)                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS         \
                 "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", 1, 1, 1, 1;"                  \
                 : FREGS(d, 0)                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* D[64 x N] (+)= A[64 x 16] in registers * B[16 x N] in shared memory, the dimension 16 contiguous.
 */
#define WG_RS_K(N, TYPE, REGS, FREGS, A0, A1, A2, A3, B, P)                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS         \
                 "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, 0;\n}"               \
                 : FREGS(d, 0)                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

static __device__ __forceinline__ void wgmma_rs_f16(float (&d)[4], const uint32_t (&a)[4],
                                                    uint64_t b, int accumulate)
{
    WG_RS_K(8, "f16", WG_REGS4, WG_F4, 4, 5, 6, 7, 8, 9);
}
static __device__ __forceinline__ void wgmma_rs_f16(float (&d)[8], const uint32_t (&a)[4],
                                                    uint64_t b, int accumulate)
{
    WG_RS_K(16, "f16", WG_REGS8, WG_F8, 8, 9, 10, 11, 12, 13);
}
static __device__ __forceinline__ void wgmma_rs_f16(float (&d)[16], const uint32_t (&a)[4],
                                                    uint64_t b, int accumulate)
{
    WG_RS_K(32, "f16", WG_REGS16, WG_F16, 16, 17, 18, 19, 20, 21);
}
static __device__ __forceinline__ void wgmma_rs_f16(float (&d)[32], const uint32_t (&a)[4],
                                                    uint64_t b, int accumulate)
{
    WG_RS_K(64, "f16", WG_REGS32, WG_F32, 32, 33, 34, 35, 36, 37);
}
static __device__ __forceinline__ void wgmma_rs_f16(float (&d)[64], const uint32_t (&a)[4],
                                                    uint64_t b, int accumulate)
{
    WG_RS_K(128, "f16", WG_REGS64, WG_F64, 64, 65, 66, 67, 68, 69);
}

/* The widths of the products in this project, only for bf16. */
static __device__ __forceinline__ void wgmma_ss_bf16(float (&d)[4], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_SS(8, "bf16", WG_REGS4, WG_F4, 4, 5, 6);
}
static __device__ __forceinline__ void wgmma_ss_bf16(float (&d)[8], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_SS(16, "bf16", WG_REGS8, WG_F8, 8, 9, 10);
}
static __device__ __forceinline__ void wgmma_ss_bf16(float (&d)[16], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_SS(32, "bf16", WG_REGS16, WG_F16, 16, 17, 18);
}
static __device__ __forceinline__ void wgmma_ss_bf16(float (&d)[32], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_SS(64, "bf16", WG_REGS32, WG_F32, 32, 33, 34);
}
static __device__ __forceinline__ void wgmma_ss_bf16(float (&d)[64], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_SS(128, "bf16", WG_REGS64, WG_F64, 64, 65, 66);
}

static __device__ __forceinline__ void wgmma_ss_bf16(float (&d)[128], uint64_t a, uint64_t b,
                                                     int accumulate)
{
    WG_SS(256, "bf16", WG_REGS128, WG_F128, 128, 129, 130);
}

/* N columns, in the first N / 2 values of d. */
template <int N>
static __device__ __forceinline__ void wgmma_part_bf16(float (&d)[128], uint64_t a, uint64_t b,
                                                       int accumulate)
{
    static_assert(N % 32 == 0 && N <= 256, "not made");
    if constexpr (N == 32) {
        WG_SS(32, "bf16", WG_REGS16, WG_F16, 16, 17, 18);
    } else if constexpr (N == 64) {
        WG_SS(64, "bf16", WG_REGS32, WG_F32, 32, 33, 34);
    } else if constexpr (N == 96) {
        WG_SS(96, "bf16", WG_REGS48, WG_F48, 48, 49, 50);
    } else if constexpr (N == 128) {
        WG_SS(128, "bf16", WG_REGS64, WG_F64, 64, 65, 66);
    } else if constexpr (N == 160) {
        WG_SS(160, "bf16", WG_REGS80, WG_F80, 80, 81, 82);
    } else if constexpr (N == 192) {
        WG_SS(192, "bf16", WG_REGS96, WG_F96, 96, 97, 98);
    } else if constexpr (N == 224) {
        WG_SS(224, "bf16", WG_REGS112, WG_F112, 112, 113, 114);
    } else {
        WG_SS(256, "bf16", WG_REGS128, WG_F128, 128, 129, 130);
    }
}

template <class T>
static __device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b,
                                                int accumulate)
{
    if constexpr (!__is_same(T, __half)) {
        WG_SS(128, "bf16", WG_REGS64, WG_F64, 64, 65, 66);
    } else {
        WG_SS(128, "f16", WG_REGS64, WG_F64, 64, 65, 66);
    }
}
template <class T>
static __device__ __forceinline__ void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b,
                                                int accumulate)
{
    if constexpr (!__is_same(T, __half)) {
        WG_SS(64, "bf16", WG_REGS32, WG_F32, 32, 33, 34);
    } else {
        WG_SS(64, "f16", WG_REGS32, WG_F32, 32, 33, 34);
    }
}
static __device__ __forceinline__ void wgmma_ss_f16(float (&d)[8], uint64_t a, uint64_t b,
                                                    int accumulate)
{
    WG_SS(16, "f16", WG_REGS8, WG_F8, 8, 9, 10);
}
static __device__ __forceinline__ void wgmma_ss_f16(float (&d)[16], uint64_t a, uint64_t b,
                                                    int accumulate)
{
    WG_SS(32, "f16", WG_REGS16, WG_F16, 16, 17, 18);
}
static __device__ __forceinline__ void wgmma_ss_f16(float (&d)[32], uint64_t a, uint64_t b,
                                                    int accumulate)
{
    WG_SS(64, "f16", WG_REGS32, WG_F32, 32, 33, 34);
}

/* The same with B transposed in memory: N is contiguous. */
static __device__ __forceinline__ void wgmma_st_f16(float (&d)[64], uint64_t a, uint64_t b,
                                                    int accumulate)
{
    WG_SS_AS(128, "f16", 0, 1, WG_REGS64, WG_F64, 64, 65, 66);
}

/* The same with A transposed in memory: M is contiguous. */
static __device__ __forceinline__ void wgmma_ts_f16(float (&d)[8], uint64_t a, uint64_t b,
                                                    int accumulate)
{
    WG_SS_AS(16, "f16", 1, 0, WG_REGS8, WG_F8, 8, 9, 10);
}
static __device__ __forceinline__ void wgmma_ts_f16(float (&d)[16], uint64_t a, uint64_t b,
                                                    int accumulate)
{
    WG_SS_AS(32, "f16", 1, 0, WG_REGS16, WG_F16, 16, 17, 18);
}
template <class T>
static __device__ __forceinline__ void wgmma_rs(float (&d)[32], const uint32_t *a, uint64_t b)
{
    if constexpr (!__is_same(T, __half)) {
        WG_RS(64, "bf16", WG_REGS32, WG_F32, 32, 33, 34, 35, 36);
    } else {
        WG_RS(64, "f16", WG_REGS32, WG_F32, 32, 33, 34, 35, 36);
    }
}
template <class T>
static __device__ __forceinline__ void wgmma_rs(float (&d)[64], const uint32_t *a, uint64_t b)
{
    if constexpr (!__is_same(T, __half)) {
        WG_RS(128, "bf16", WG_REGS64, WG_F64, 64, 65, 66, 67, 68);
    } else {
        WG_RS(128, "f16", WG_REGS64, WG_F64, 64, 65, 66, 67, 68);
    }
}
template <class T>
static __device__ __forceinline__ void wgmma_rs(float (&d)[128], const uint32_t *a, uint64_t b)
{
    if constexpr (!__is_same(T, __half)) {
        WG_RS(256, "bf16", WG_REGS128, WG_F128, 128, 129, 130, 131, 132);
    } else {
        WG_RS(256, "f16", WG_REGS128, WG_F128, 128, 129, 130, 131, 132);
    }
}

template <int N> static __device__ __forceinline__ void regs_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void regs_give(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
