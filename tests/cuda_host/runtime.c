/* A device without a device: queues of work per stream, done when the host asks for an event or
 * waits, a few pieces at a time, of streams in random order. So what the host reads or overwrites
 * too early, and what two streams do without an event between them, comes out wrong here as well.
 * As CUDA does, a copy from pageable memory takes its bytes within the call, one from pinned memory
 * when it runs; a copy must not cross the end of a registration; new device memory is full of NaN.
 * One thread, but for registrations. */
#include "cuda_runtime.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct work {
    struct work *next;
    void (*fn)(const void *args);
    cudaEvent_t event; /* to be recorded, or waited for: a turn of it */
    uint64_t turn;
    bool wait;
    size_t bytes;
    uint8_t args[];
};
struct cuda_graph {
    struct work *first, *last;
    bool ran;
};
struct cuda_stream {
    struct cuda_graph queue;
    struct cuda_graph *capture;
    struct cuda_stream *next;
};
struct cuda_event {
    uint64_t asked, done;
    bool timed;
};
struct pinned {
    struct pinned *next;
    uint8_t *p;
    size_t bytes;
};

static struct cuda_stream *streams;
static struct pinned *pins;
static pthread_mutex_t pins_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t rng = 88172645463325252ull;

static uint32_t random_below(uint32_t n)
{
    rng = rng * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(rng >> 33) % n;
}

/* ---- queues ---- */

static struct work *append(struct cuda_graph *q, const struct work *like, const void *args)
{
    struct work *w = malloc(sizeof(*w) + like->bytes);
    *w = *like;
    w->next = NULL;
    if (args && like->bytes) {
        memcpy(w->args, args, like->bytes);
    }
    *(q->last ? &q->last->next : &q->first) = w;
    q->last = w;
    return w;
}

static void enqueue(cudaStream_t s, const struct work *w, const void *args)
{
    append(s->capture ? s->capture : &s->queue, w, args);
}

void cuda_host_launch(cudaStream_t s, void (*fn)(const void *args), const void *args, size_t bytes)
{
    enqueue(s, &(struct work){.fn = fn, .bytes = bytes}, args);
}

/* Does the stream's first piece of work; false: there is none, or it waits. */
static bool advance(struct cuda_stream *s)
{
    struct work *w = s->queue.first;
    if (!w || (w->wait && w->event->done < w->turn)) {
        return false;
    }
    s->queue.first = w->next;
    s->queue.last = w->next ? s->queue.last : NULL;
    if (w->fn) {
        w->fn(w->args);
    } else if (!w->wait) {
        w->event->done = w->turn > w->event->done ? w->turn : w->event->done;
    }
    free(w);
    return true;
}

/* Some work of a random stream; false: nothing can go on. */
static bool some_work(void)
{
    uint32_t n = 0;
    for (struct cuda_stream *s = streams; s; s = s->next) {
        n++;
    }
    uint32_t skip = n ? random_below(n) : 0, least = 1 + random_below(6), did = 0;
    for (uint32_t k = 0; k < 2 * n && did == 0; k++) {
        struct cuda_stream *s = streams;
        for (uint32_t i = 0; i < (skip + k) % n; i++) {
            s = s->next;
        }
        while (did < least && advance(s)) {
            did++;
        }
    }
    return did > 0;
}

static void need_work(void)
{
    if (!some_work()) {
        fprintf(stderr, "cuda_host: streams wait for each other\n");
        abort();
    }
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    (void)flags;
    (void)priority;
    *s = calloc(1, sizeof(**s));
    (*s)->next = streams;
    streams = *s;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    while (s->queue.first) {
        need_work();
    }
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    cudaStreamSynchronize(s);
    for (struct cuda_stream **p = &streams; *p; p = &(*p)->next) {
        if (*p == s) {
            *p = s->next;
            break;
        }
    }
    free(s);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void)
{
    for (struct cuda_stream *s = streams; s; s = s->next) {
        cudaStreamSynchronize(s);
    }
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    *e = calloc(1, sizeof(**e));
    (*e)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e)
{
    return cudaEventCreateWithFlags(e, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    cudaDeviceSynchronize();
    free(e);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    enqueue(s, &(struct work){.event = e, .turn = ++e->asked}, NULL);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    (void)flags;
    enqueue(s, &(struct work){.event = e, .turn = e->asked, .wait = true}, NULL);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    if (e->done < e->asked && random_below(2)) {
        some_work();
    }
    return e->done < e->asked ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    while (e->done < e->asked) {
        need_work();
    }
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    *ms = 0.01f;
    return from->done < from->asked || to->done < to->asked ? cudaErrorNotReady : cudaSuccess;
}

struct call {
    cudaHostFn_t fn;
    void *arg;
};
static void run_call(const void *args)
{
    const struct call *c = args;
    c->fn(c->arg);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *arg)
{
    cuda_host_launch(s, run_call, &(struct call){fn, arg}, sizeof(struct call));
    return cudaSuccess;
}

/* ---- graphs ---- */

static void empty(struct cuda_graph *g)
{
    for (struct work *w = g->first, *next; w; w = next) {
        next = w->next;
        free(w);
    }
    free(g);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, int mode)
{
    (void)mode;
    s->capture = calloc(1, sizeof(*s->capture));
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g)
{
    *g = s->capture;
    s->capture = NULL;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags)
{
    (void)flags;
    *x = calloc(1, sizeof(**x));
    for (const struct work *w = g->first; w; w = w->next) {
        append(*x, w, w->args);
    }
    return cudaSuccess;
}
/* A graph that the engine launches again just to time it (an event with a time stands before it)
 * does its work once: a repetition finds nothing new, and there are thousands of them. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s)
{
    const struct work *before = s->queue.last;
    const bool timed = before && before->event && !before->wait && before->event->timed;
    if (timed && x->ran) {
        return cudaSuccess;
    }
    x->ran = true;
    for (const struct work *w = x->first; w; w = w->next) {
        enqueue(s, w, w->args);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    empty(g);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x)
{
    cudaDeviceSynchronize();
    empty(x);
    return cudaSuccess;
}

/* ---- memory ---- */

static bool pin(void *p, size_t bytes)
{
    struct pinned *x = malloc(sizeof(*x));
    pthread_mutex_lock(&pins_lock);
    *x = (struct pinned){pins, p, bytes};
    pins = x;
    pthread_mutex_unlock(&pins_lock);
    return true;
}
static bool unpin(const void *p)
{
    struct pinned *gone = NULL;
    pthread_mutex_lock(&pins_lock);
    for (struct pinned **x = &pins; *x && !gone; x = *x ? &(*x)->next : x) {
        if ((*x)->p == p) {
            gone = *x;
            *x = gone->next;
        }
    }
    pthread_mutex_unlock(&pins_lock);
    free(gone);
    return gone != NULL;
}
/* Pinned bytes from p on; 0: p is not pinned. */
static size_t pinned_from(const void *p)
{
    size_t n = 0;
    pthread_mutex_lock(&pins_lock);
    for (const struct pinned *x = pins; x && n == 0; x = x->next) {
        if ((const uint8_t *)p >= x->p && (const uint8_t *)p < x->p + x->bytes) {
            n = (size_t)(x->p + x->bytes - (const uint8_t *)p);
        }
    }
    pthread_mutex_unlock(&pins_lock);
    return n;
}
static bool is_pinned(const void *p)
{
    return pinned_from(p) > 0;
}
static bool crosses(const void *p, size_t bytes)
{
    size_t n = pinned_from(p);
    return n > 0 && n < bytes;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!*p) {
        return cudaErrorMemoryAllocation;
    }
    memset(*p, 0xff, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void *p)
{
    cudaDeviceSynchronize();
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    *p = malloc(bytes);
    return *p && pin(*p, bytes) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *p)
{
    cudaDeviceSynchronize();
    if (p && !unpin(p)) {
        return cudaErrorInvalidValue;
    }
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
    (void)flags;
    pin(p, bytes);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p)
{
    cudaDeviceSynchronize();
    return unpin(p) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    (void)kind;
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int v, size_t bytes)
{
    memset(p, v, bytes);
    return cudaSuccess;
}

struct copy {
    void *to;
    const void *from; /* NULL: the bytes lie behind */
    size_t bytes;
    uint8_t taken[];
};
static void run_copy(const void *args)
{
    const struct copy *c = args;
    memmove(c->to, c->from ? c->from : c->taken, c->bytes);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    bool take = kind == cudaMemcpyHostToDevice && !is_pinned(from);
    struct copy *c = malloc(sizeof(*c) + (take ? bytes : 0));
    *c = (struct copy){to, take ? NULL : from, bytes};
    if (take) {
        memcpy(c->taken, from, bytes);
    }
    cuda_host_launch(s, run_copy, c, sizeof(*c) + (take ? bytes : 0));
    free(c);
    return kind == cudaMemcpyDeviceToHost && !is_pinned(to) ? cudaStreamSynchronize(s)
                                                            : cudaSuccess;
}
cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes,
                                 size_t n, struct cudaMemcpyAttributes *attrs, size_t *first,
                                 size_t n_attrs, cudaStream_t s)
{
    (void)attrs;
    (void)first;
    (void)n_attrs;
    for (size_t i = 0; i < n; i++) { /* device memory or pinned */
        if (crosses(to[i], bytes[i]) || crosses(from[i], bytes[i])) {
            return cudaErrorInvalidValue;
        }
        cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDeviceToDevice, s);
    }
    return cudaSuccess;
}

struct fill {
    void *p;
    int v;
    size_t bytes;
};
static void run_fill(const void *args)
{
    const struct fill *f = args;
    memset(f->p, f->v, f->bytes);
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t bytes, cudaStream_t s)
{
    cuda_host_launch(s, run_fill, &(struct fill){p, v, bytes}, sizeof(struct fill));
    return cudaSuccess;
}

/* ---- the device ---- */

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device)
{
    return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    (void)device;
    *p = (struct cudaDeviceProp){.name = "none: on the host", .major = 9};
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most)
{
    *least = 0;
    *most = -1;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = (size_t)8 << 30;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaSuccess ? "no error" : "an error";
}
