/* Slabs, pinned so that copies to and from them run asynchronously; copies of pageable memory go
 * through a buffer of the driver while the caller waits. Pinning takes a third of a second per GiB,
 * so each slab has a thread that pins it in pieces. Flows split their copies where two pieces meet,
 * as one copy must not cross two registrations. Copies of a piece that is not pinned yet are slow,
 * but correct. The driver launches nothing while it registers memory, so pieces are small and the
 * thread pins one while a step runs. Owner thread: the engine's; the pinning thread uses its slab's
 * counters, and reads when the engine was used (bt_engine.use). */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/engine/cuda/cuda_priv.h"
#include "common/log/log.h"

struct bt_cu_slab {
    struct bt_list link;
    uint8_t *mem;
    uint64_t bytes;
    _Atomic uint64_t pinned; /* bytes from the start, in whole pieces */
    _Atomic bool stop;
    bool threaded;
    pthread_t thread;
    int device;
    const struct bt_engine *engine; /* whose steps the thread gives way to: its field use */
};

/* The engine counts as used for this long after a call: more calls may come. */
#define USED_NS 1000000000ull

/* A step is longer than the registration of a piece, so one that begins as the step starts delays
 * no launch. Where steps take longer than this, a launch may wait for a piece. */
#define STEP_WAIT_NS 3000000ull
#define LOOK_US      50

static void sleep_us(uint64_t us)
{
    struct timespec t = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000};
    (void)nanosleep(&t, NULL);
}

/* While the engine is used: waits for the next step's launch. took_us: of the last piece. The
 * driver's lock is not fair: a thread that takes it again at once keeps it for seconds. So the
 * thread sleeps as long as it has held the lock, at least. */
static void give_way(const struct bt_engine *e, uint64_t took_us)
{
    if (bt_mono_ns() >= e->use.asked_ns + USED_NS) {
        return;
    }
    sleep_us(took_us);
    uint64_t until = bt_mono_ns() + STEP_WAIT_NS;
    uint32_t seen = e->use.launched;
    while (e->use.launched == seen && bt_mono_ns() < until) {
        sleep_us(LOOK_US);
    }
}

static cudaError_t pin(struct bt_cu_slab *s)
{
    cudaError_t ce = cudaSetDevice(s->device);
    for (uint64_t at = 0; ce == cudaSuccess && at < s->bytes && !s->stop;) {
        uint64_t n = BT_MIN((uint64_t)BT_CU_SLAB_PIECE, s->bytes - at), began = bt_mono_ns();
        ce = cudaHostRegister(s->mem + at, n, cudaHostRegisterPortable);
        at += n;
        s->pinned = ce == cudaSuccess ? at : s->pinned;
        if (s->engine != NULL) {
            give_way(s->engine, (bt_mono_ns() - began) / 1000);
        }
    }
    return ce;
}

static void *pin_thread(void *arg)
{
    struct bt_cu_slab *s = arg;
    cudaError_t ce = pin(s);
    if (ce != cudaSuccess) {
        BT_WARN("engine_slab_not_pinned", "engine=cuda pinned=%llu bytes=%llu why=%s remedy=%s",
                (unsigned long long)s->pinned, (unsigned long long)s->bytes, cudaGetErrorString(ce),
                "copies of the rest are slow: raise the limit on locked memory (LimitMEMLOCK)");
    }
    return NULL;
}

static struct bt_cu_slab *slab_new(struct bt_engine *e, void *mem, uint64_t bytes)
{
    struct bt_cu_slab *s = bt_calloc(1, sizeof(*s));
    s->mem = mem;
    s->bytes = bytes;
    s->device = e->device;
    bt_list_insert_tail(&e->slabs, &s->link);
    return s;
}

bt_status_t bt_cu_slab_pin(struct bt_engine *e, void *mem, uint64_t bytes)
{
    BT_CU_TRY(e, pin(slab_new(e, mem, bytes)));
    return BT_OK;
}

void bt_cu_slab_open(struct bt_engine *e, void *mem, uint64_t bytes)
{
    struct bt_cu_slab *s = slab_new(e, mem, bytes);
    s->engine = e;
    s->threaded = pthread_create(&s->thread, NULL, pin_thread, s) == 0;
    if (!s->threaded) {
        (void)pin_thread(s);
    }
}

static void slab_free(struct bt_cu_slab *s)
{
    s->stop = true;
    if (s->threaded) {
        pthread_join(s->thread, NULL);
    }
    for (uint64_t at = 0; at < s->pinned; at += BT_CU_SLAB_PIECE) {
        cudaHostUnregister(s->mem + at);
    }
    bt_list_remove(&s->link);
    free(s);
}

void bt_cu_slab_close(struct bt_engine *e, void *mem)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &e->slabs) {
        struct bt_cu_slab *s = BT_CONTAINER_OF(l, struct bt_cu_slab, link);
        if (s->mem == mem) {
            slab_free(s);
            return;
        }
    }
}

void bt_cu_slabs_close(struct bt_engine *e)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &e->slabs) {
        slab_free(BT_CONTAINER_OF(l, struct bt_cu_slab, link));
    }
}

uint64_t bt_cu_slab_run(const struct bt_engine *e, const void *at, uint64_t bytes)
{
    struct bt_list *l;
    bt_list_for_each (l, &e->slabs) {
        const struct bt_cu_slab *s = BT_CONTAINER_OF(l, struct bt_cu_slab, link);
        uint64_t off = (uint64_t)((const uint8_t *)at - s->mem);
        if ((const uint8_t *)at >= s->mem && off < s->bytes) {
            return BT_MIN(bytes, BT_CU_SLAB_PIECE - off % BT_CU_SLAB_PIECE);
        }
    }
    return bytes;
}
