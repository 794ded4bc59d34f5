/* One block of a CUDA kernel on a CPU: each thread is a fiber, which runs up to the next barrier or
 * exchange of its warp. For kernels in what C and CUDA have in common; a barrier that not every
 * thread comes to ends the process. One block at a time, so shared memory is static. */
#ifndef BT_TESTS_CUDA_BLOCK_H
#define BT_TESTS_CUDA_BLOCK_H

#include <math.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __shared__ static

struct cuda_index {
    uint32_t x;
};
static struct cuda_index threadIdx, blockIdx;

/* No power of two: the tops of all stacks would share the same few lines of the cache. */
#define CUDA_BLOCK_STACK ((64u << 10) + 320)

static struct {
    uint32_t threads, arrived, done;
    uint32_t round;
    int vote, votes; /* of the barrier that is being waited at; of the last one */
    uint64_t barriers;
    ucontext_t main, *fibers;
    jmp_buf back,
        *jumps; /* jumps cost no system call; the address sanitizer does not follow them */
    uint8_t *stacks;
    bool *entered;
    uint64_t *exchanges; /* [thread] it has come to */
    uint64_t *together;  /* [warp] the sum of its threads' exchanges */
    uint64_t (*slots)[2];
    uint64_t moves; /* to see that nothing moves any more */
    void (*body)(void *);
    void *arg;
} cuda_block;

#ifdef __SANITIZE_ADDRESS__
static void cuda_block_yield(void)
{
    swapcontext(&cuda_block.fibers[threadIdx.x], &cuda_block.main);
}
static void cuda_block_enter(void)
{
    swapcontext(&cuda_block.main, &cuda_block.fibers[threadIdx.x]);
}
#else
static void cuda_block_yield(void)
{
    if (_setjmp(cuda_block.jumps[threadIdx.x]) == 0) {
        _longjmp(cuda_block.back, 1);
    }
}
static __attribute__((noinline)) void cuda_block_enter(void)
{
    if (_setjmp(cuda_block.back) != 0) {
        return;
    }
    if (cuda_block.entered[threadIdx.x]) {
        _longjmp(cuda_block.jumps[threadIdx.x], 1);
    }
    cuda_block.entered[threadIdx.x] = true;
    setcontext(&cuda_block.fibers[threadIdx.x]);
}
#endif

static inline int __syncthreads_or(int v)
{
    uint64_t now = cuda_block.barriers;
    cuda_block.vote |= v != 0;
    cuda_block.moves++;
    if (++cuda_block.arrived == cuda_block.threads) {
        cuda_block.votes = cuda_block.vote;
        cuda_block.vote = 0;
        cuda_block.arrived = 0;
        cuda_block.barriers++;
    }
    while (cuda_block.barriers == now) {
        cuda_block_yield();
    }
    return cuda_block.votes;
}
static inline void __syncthreads(void)
{
    (void)__syncthreads_or(0);
}

/* A lane may be one exchange ahead of the others of its warp, not more: two places suffice. For the
 * same reason, all 32 lanes have come to an exchange as soon as their sum says so. */
static uint64_t cuda_block_exchange(uint64_t v, uint32_t from)
{
    uint32_t me = threadIdx.x;
    uint64_t turn = ++cuda_block.exchanges[me];
    cuda_block.slots[me][turn % 2] = v;
    cuda_block.moves++;
    cuda_block.together[me / 32]++;
    while (cuda_block.together[me / 32] < 32 * turn) {
        cuda_block_yield();
    }
    return cuda_block.slots[from][turn % 2];
}
static inline unsigned long long __shfl_xor_sync(unsigned mask, unsigned long long v, int d)
{
    (void)mask;
    return cuda_block_exchange(v, threadIdx.x ^ (uint32_t)d);
}
static inline unsigned long long __shfl_up_sync(unsigned mask, unsigned long long v, unsigned d)
{
    (void)mask;
    uint32_t me = threadIdx.x;
    return cuda_block_exchange(v, me % 32 >= d ? me - d : me);
}

static inline uint32_t cuda_block_add_u32(uint32_t *p, uint32_t v)
{
    uint32_t old = *p;
    *p += v;
    return old;
}
static inline float cuda_block_add_f32(float *p, float v)
{
    float old = *p;
    *p += v;
    return old;
}
#define atomicAdd(p, v)                                                                            \
    _Generic((p), uint32_t * : cuda_block_add_u32, float * : cuda_block_add_f32)(p, v)

static inline uint32_t __float_as_uint(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float __uint_as_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
    return (uint32_t)((uint64_t)a * b >> 32);
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fsub_rn(float a, float b)
{
    return a - b;
}

static void cuda_block_fiber(void)
{
    cuda_block.body(cuda_block.arg);
    cuda_block.done++;
    cuda_block.moves++;
    for (;;) {
        cuda_block_yield();
    }
}

/* Puts thread i at its beginning. Not in the loop over threads: getcontext counts as returning
 * twice, and gcc says of an inlined loop counter that it may be clobbered. */
static void cuda_block_prepare(uint32_t i)
{
    ucontext_t *fiber = &cuda_block.fibers[i];
    cuda_block.exchanges[i] = 0;
    cuda_block.together[i / 32] = 0;
    cuda_block.entered[i] = false;
    getcontext(fiber);
    fiber->uc_stack.ss_sp = cuda_block.stacks + (size_t)i * CUDA_BLOCK_STACK;
    fiber->uc_stack.ss_size = CUDA_BLOCK_STACK;
    makecontext(fiber, cuda_block_fiber, 0);
}

/* Runs body(arg) in every thread of block `block`. threads: a multiple of 32, the same each time.
 */
static void cuda_block_run(void (*body)(void *), void *arg, uint32_t threads, uint32_t block)
{
    if (!cuda_block.fibers) {
        cuda_block.threads = threads;
        cuda_block.fibers = calloc(threads, sizeof(*cuda_block.fibers));
        cuda_block.stacks = calloc(threads, CUDA_BLOCK_STACK);
        cuda_block.jumps = calloc(threads, sizeof(*cuda_block.jumps));
        cuda_block.entered = calloc(threads, sizeof(*cuda_block.entered));
        cuda_block.exchanges = calloc(threads, sizeof(*cuda_block.exchanges));
        cuda_block.together = calloc(threads / 32, sizeof(*cuda_block.together));
        cuda_block.slots = calloc(threads, sizeof(*cuda_block.slots));
    }
    cuda_block.done = 0;
    cuda_block.body = body;
    cuda_block.arg = arg;
    blockIdx.x = block;
    for (uint32_t i = 0; i < threads; i++) {
        cuda_block_prepare(i);
    }
    while (cuda_block.done < threads) {
        uint64_t moves = cuda_block.moves;
        uint64_t barriers = cuda_block.barriers;
        cuda_block.round = cuda_block.round * 1664525u + 1013904223u;
        for (uint32_t i = 0; i < threads; i++) { /* in another order each time: races show */
            threadIdx.x = (i * (cuda_block.round >> 8 | 1) + (cuda_block.round >> 4)) % threads;
            cuda_block_enter();
        }
        if (moves == cuda_block.moves && barriers == cuda_block.barriers &&
            cuda_block.done < threads) {
            fprintf(stderr, "cuda_block: %u threads wait at a barrier, %u have ended\n",
                    cuda_block.arrived, cuda_block.done);
            abort();
        }
    }
}

static void cuda_block_free(void)
{
    free(cuda_block.fibers);
    free(cuda_block.stacks);
    free(cuda_block.jumps);
    free(cuda_block.entered);
    free(cuda_block.exchanges);
    free(cuda_block.together);
    free(cuda_block.slots);
    cuda_block.fibers = NULL;
}

#endif
