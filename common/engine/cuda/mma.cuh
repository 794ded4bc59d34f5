/* Warp-level matrix products (mma.sync, sm_80 and newer) and helpers shared by all kernels. */
#ifndef BT_CUDA_MMA_CUH
#define BT_CUDA_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

template <class T> struct pair_of;
template <> struct pair_of<__half> {
    typedef __half2 type;
};
template <> struct pair_of<__nv_bfloat16> {
    typedef __nv_bfloat162 type;
};

/* Two floats as two 16-bit values, the first in the low half. */
template <class T> static __device__ __forceinline__ uint32_t pack2(float lo, float hi)
{
    typename pair_of<T>::type v;
    if constexpr (__is_same(T, __half)) {
        v = __floats2half2_rn(lo, hi);
    } else {
        v = __floats2bfloat162_rn(lo, hi);
    }
    uint32_t r;
    memcpy(&r, &v, 4);
    return r;
}

/* The same for a type known only at run time: for a kernel's results. */
static __device__ __forceinline__ uint32_t pack2_as(bool bf16, float lo, float hi)
{
    return bf16 ? pack2<__nv_bfloat16>(lo, hi) : pack2<__half>(lo, hi);
}

/* C[16 x 8] += A[16 x 16] * B[16 x 8]; fragments as the PTX manual numbers them. */
template <class T>
static __device__ __forceinline__ void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1)
{
    if constexpr (__is_same(T, __half)) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}
/* Volatile: they read data that the copy engine wrote, after a barrier that the compiler does not
 * know. */
static __device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
static __device__ __forceinline__ void ldmatrix4_t(uint32_t (&r)[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
/* Transposes an 8 x 8 matrix of 16-bit values, of which each thread has two in row lane / 4. */
static __device__ __forceinline__ uint32_t transpose8(uint32_t v)
{
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

/* Programmatic dependent launch: such a kernel may begin while the one before it still runs. Each
 * kernel waits for the end of the previous one before it uses its results, and lets the next kernel
 * begin early. */
static __device__ __forceinline__ void early_next(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
static __device__ __forceinline__ void early_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The number of multiprocessors of the device that the engine uses. */
static inline uint32_t multiprocessors(void)
{
    static int n;
    int device = 0;
    if (n == 0 && cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        n = 0;
    }
    return (uint32_t)n;
}

/* Code compiled for older targets does not wait, so it must not begin early on any device. */
template <class... P> static bool waits_early(void (*kernel)(P...))
{
    static int target; /* all kernels of a file are compiled for the same target */
    cudaFuncAttributes f;
    if (target == 0 && cudaFuncGetAttributes(&f, kernel) == cudaSuccess) {
        target = f.ptxVersion;
    }
    return target >= 90;
}
template <class... P, class... A>
static cudaError_t launch_early(void (*kernel)(P...), uint32_t grid, uint32_t block, size_t shared,
                                cudaStream_t s, A... args)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute early[1];
    early[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early[0].val.programmaticStreamSerializationAllowed = waits_early(kernel);
    c.gridDim = dim3(grid);
    c.blockDim = dim3(block);
    c.dynamicSmemBytes = shared;
    c.stream = s;
    c.attrs = early;
    c.numAttrs = 1;
    return cudaLaunchKernelEx(&c, kernel, static_cast<P>(args)...);
}

/* Loads what other blocks of the same kernel wrote: never from the cache of constant data, and
 * after the flag that says so. */
static __device__ __forceinline__ uint4 load_written(const uint4 *p)
{
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
static __device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

static __device__ __forceinline__ float ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* silu(gate) * up. Deterministic engines need one definition for all kernels. */
static __device__ __forceinline__ float swiglu_fast(float gate, float up)
{
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

#endif
