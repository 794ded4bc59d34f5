/* Chooses the implementation of a product: packed.h where the processor has bf16 units, otherwise
 * oneDNN in f32. For oneDNN, a primitive for each (K, N) and each step of a ladder of row counts is
 * made at its first use, which takes 0.1 to 0.5 ms. m is rounded up to the next step; the
 * additional rows are computed and ignored. Owner thread: the engine's. */
#include "common/engine/cpu/gemm.h"

#include <errno.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cpu/dnnl_api.h"
#include "common/engine/cpu/packed.h"

#define STEPS_MAX 64
/* Below it, waking the other threads costs more time than it saves. */
#define PARALLEL_FLOPS 2000000ull

struct prim {
    dnnl_primitive_t prim;
    dnnl_memory_t src, dst;
    int threads;
};

struct shape { /* shared by all weights of one (K, N) */
    struct shape *next;
    uint32_t k, n;
    bt_md_t packed;
    struct prim prims[STEPS_MAX];
};

struct bt_gemm {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    int threads;
    bt_cpu_isa_t isa;
    bool exact;
    struct shape *shapes;
};

struct bt_linear {
    struct bt_gemm *g;
    struct bt_packed *packed; /* or `s` and the next field */
    struct shape *s;
    dnnl_memory_t w;
};

/* Row counts: 1..8, then four per doubling: 10, 12, 14, 16, 20, 24, 28, 32, ... */
static uint32_t step_rows(uint32_t step)
{
    return step < 8 ? step + 1 : (10 + 2 * ((step - 8) % 4)) << (step - 8) / 4;
}

static uint32_t step_of(uint32_t m)
{
    uint32_t i = 0;
    while (step_rows(i) < m) {
        i++;
    }
    BT_ASSERT(i < STEPS_MAX);
    return i;
}

uint32_t bt_gemm_rows(uint32_t m)
{
    return m ? step_rows(step_of(m)) : 0;
}

bt_cpu_isa_t bt_gemm_isa(void)
{
    unsigned isa = (unsigned)dnnl_get_effective_cpu_isa(); /* a set of bits */
    unsigned bf16 = dnnl_cpu_isa_avx512_core_bf16, core = dnnl_cpu_isa_avx512_core,
             avx2 = dnnl_cpu_isa_avx2;
    unsigned amx = dnnl_cpu_isa_avx512_core_amx;
    if ((isa & bf16) == bf16 && __builtin_cpu_supports("avx512bf16")) {
        bool tiles = (isa & amx) == amx && __builtin_cpu_supports("amx-bf16");
        return tiles && bt_packed_amx_usable() ? BT_ISA_AMX : BT_ISA_AVX512_BF16;
    }
    if ((isa & core) == core && __builtin_cpu_supports("avx512f")) {
        return BT_ISA_AVX512;
    }
    if ((isa & avx2) == avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        return BT_ISA_AVX2;
    }
    return BT_ISA_BASE;
}

bt_status_t bt_gemm_create(uint32_t threads, bt_cpu_isa_t isa, struct bt_gemm **g_p, char *err,
                           size_t err_cap)
{
    struct bt_gemm *g = bt_calloc(1, sizeof(*g));
    g->threads = (int)threads;
    g->isa = isa;
    g->exact = true;
    if (dnnl_engine_create(&g->engine, dnnl_cpu, 0) != dnnl_success ||
        dnnl_stream_create(&g->stream, g->engine, dnnl_stream_default_flags) != dnnl_success) {
        snprintf(err, err_cap, "oneDNN: no CPU engine");
        bt_gemm_destroy(g);
        return BT_ERR_DEVICE;
    }
    *g_p = g;
    return BT_OK;
}

static void prim_cleanup(struct prim *p)
{
    dnnl_memory_destroy(p->src);
    dnnl_memory_destroy(p->dst);
    dnnl_primitive_destroy(p->prim);
    *p = (struct prim){0};
}

void bt_gemm_destroy(struct bt_gemm *g)
{
    if (!g) {
        return;
    }
    while (g->shapes) {
        struct shape *s = g->shapes;
        g->shapes = s->next;
        for (int i = 0; i < STEPS_MAX; i++) {
            if (s->prims[i].prim) {
                prim_cleanup(&s->prims[i]);
            }
        }
        bt_md_cleanup(&s->packed);
        free(s);
    }
    if (g->stream) {
        dnnl_stream_destroy(g->stream);
    }
    if (g->engine) {
        dnnl_engine_destroy(g->engine);
    }
    free(g);
}

bool bt_gemm_fuses(const struct bt_gemm *g)
{
    return g->isa >= BT_ISA_AVX512_BF16;
}

bool bt_gemm_exact(const struct bt_gemm *g)
{
    return g->exact;
}

/* Describes the product for m rows. wei: a given layout, or NULL to let oneDNN choose one. */
static dnnl_status_t describe(struct bt_gemm *g, const struct shape *s, uint32_t m, bt_md_t *src,
                              bt_md_t *dst, const bt_md_t *wei, dnnl_primitive_desc_t *pd)
{
    const dnnl_dims_t sd = {m, s->k}, wd = {s->k, s->n}, dd = {m, s->n};
    bt_md_t any;
    dnnl_status_t st = bt_md_init(src, sd, dnnl_f32, dnnl_ab);
    if (st != dnnl_success) {
        return st;
    }
    st = bt_md_init(dst, dd, dnnl_f32, dnnl_ab);
    if (st == dnnl_success) {
        st = bt_md_init(&any, wd, dnnl_f32, dnnl_format_tag_any);
        if (st == dnnl_success) {
            st = bt_matmul_pd(pd, g->engine, BT_MD_REF(*src),
                              wei ? BT_MD_REF(*wei) : BT_MD_REF(any), BT_MD_REF(*dst));
            bt_md_cleanup(&any);
        }
        if (st != dnnl_success) {
            bt_md_cleanup(dst);
        }
    }
    if (st != dnnl_success) {
        bt_md_cleanup(src);
    }
    return st;
}

static int threads_for(const struct bt_gemm *g, const struct shape *s, uint32_t m)
{
    return 2ull * m * s->k * s->n < PARALLEL_FLOPS ? 1 : g->threads;
}

static dnnl_status_t prim_make(struct bt_gemm *g, struct shape *s, uint32_t step)
{
    struct prim p = {0};
    bt_md_t src, dst;
    dnnl_primitive_desc_t pd;
    p.threads = threads_for(g, s, step_rows(step));
    omp_set_num_threads(p.threads); /* oneDNN plans for the current number of OpenMP threads */
    dnnl_status_t st = describe(g, s, step_rows(step), &src, &dst, &s->packed, &pd);
    if (st != dnnl_success) {
        return st;
    }
    const char *impl = "";
    dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, (void *)&impl);
    if (strncmp(impl, "brg", 3) != 0) {
        g->exact = false;
    }
    st = dnnl_primitive_create(&p.prim, pd);
    if (st == dnnl_success) {
        st = dnnl_memory_create(&p.src, BT_MD_REF(src), g->engine, DNNL_MEMORY_NONE);
    }
    if (st == dnnl_success) {
        st = dnnl_memory_create(&p.dst, BT_MD_REF(dst), g->engine, DNNL_MEMORY_NONE);
    }
    dnnl_primitive_desc_destroy(pd);
    bt_md_cleanup(&src);
    bt_md_cleanup(&dst);
    if (st == dnnl_success) {
        s->prims[step] = p;
    } else {
        prim_cleanup(&p);
    }
    return st;
}

static dnnl_status_t shape_get(struct bt_gemm *g, uint32_t k, uint32_t n, struct shape **s_p)
{
    for (struct shape *s = g->shapes; s; s = s->next) {
        if (s->k == k && s->n == n) {
            *s_p = s;
            return dnnl_success;
        }
    }
    struct shape *s = bt_calloc(1, sizeof(*s));
    s->k = k;
    s->n = n;
    bt_md_t src, dst;
    dnnl_primitive_desc_t pd;
    omp_set_num_threads(g->threads);
    dnnl_status_t st = describe(g, s, 64, &src, &dst, NULL, &pd);
    if (st == dnnl_success) {
        st = bt_md_copy(&s->packed, dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0));
        dnnl_primitive_desc_destroy(pd);
        bt_md_cleanup(&src);
        bt_md_cleanup(&dst);
    }
    if (st != dnnl_success) {
        free(s);
        return st;
    }
    s->next = g->shapes;
    g->shapes = s;
    *s_p = s;
    return dnnl_success;
}

static dnnl_status_t pack(struct bt_gemm *g, struct bt_linear *l, const float *w_nk)
{
    const dnnl_dims_t wd = {l->s->k, l->s->n};
    bt_md_t plain;
    dnnl_memory_t from = NULL;
    dnnl_primitive_desc_t pd = NULL;
    dnnl_primitive_t reorder = NULL;
    dnnl_status_t st = bt_md_init(&plain, wd, dnnl_f32, dnnl_ba);
    if (st != dnnl_success) {
        return st;
    }
    st = dnnl_memory_create(&from, BT_MD_REF(plain), g->engine, (void *)w_nk);
    if (st == dnnl_success) {
        st = dnnl_memory_create(&l->w, BT_MD_REF(l->s->packed), g->engine, DNNL_MEMORY_ALLOCATE);
    }
    if (st == dnnl_success) {
        st = dnnl_reorder_primitive_desc_create(&pd, BT_MD_REF(plain), g->engine,
                                                BT_MD_REF(l->s->packed), g->engine, NULL);
    }
    if (st == dnnl_success) {
        st = dnnl_primitive_create(&reorder, pd);
    }
    if (st == dnnl_success) {
        dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, l->w}};
        st = dnnl_primitive_execute(reorder, g->stream, 2, args);
        dnnl_stream_wait(g->stream);
    }
    dnnl_primitive_destroy(reorder);
    dnnl_primitive_desc_destroy(pd);
    dnnl_memory_destroy(from);
    bt_md_cleanup(&plain);
    return st;
}

/* Compares small products with the same rows of a product of 64 rows, bit for bit. */
static bool trial(struct bt_linear *l)
{
    const struct shape *s = l->s;
    float *src = aligned_alloc(64, BT_ALIGN_UP(64 * sizeof(float) * s->k, (size_t)64));
    float *all = aligned_alloc(64, 64 * sizeof(float) * s->n);
    float *some = aligned_alloc(64, 64 * sizeof(float) * s->n);
    BT_ASSERT(src && all && some);
    uint32_t x = 1;
    for (size_t i = 0; i < 64 * (size_t)s->k; i++) {
        x = x * 1664525u + 1013904223u;
        src[i] = (float)(int32_t)x * 0x1p-31f;
    }
    static const uint32_t ms[] = {1, 2, 5, 8, 14, 28};
    bool same = bt_linear_run(l, src, 64, all) == BT_OK;
    for (size_t i = 0; same && i < BT_ARRAY_LEN(ms); i++) {
        uint32_t first = 64 - ms[i];
        same = bt_linear_run(l, src + (size_t)first * s->k, ms[i], some) == BT_OK &&
               memcmp(some, all + (size_t)first * s->n, ms[i] * sizeof(float) * s->n) == 0;
    }
    free(src);
    free(all);
    free(some);
    return same;
}

bt_status_t bt_linear_create(struct bt_gemm *g, const struct bt_linear_spec *spec,
                             const float *w_nk, struct bt_linear **l_p, char *err, size_t err_cap)
{
    uint32_t k = spec->k, n = spec->n;
    struct bt_linear *l = bt_calloc(1, sizeof(*l));
    struct shape *before = g->shapes;
    l->g = g;
    if (bt_gemm_fuses(g)) {
        const struct bt_packed_spec how = {.k = k,
                                           .n = n,
                                           .acts = spec->acts,
                                           .amx = g->isa == BT_ISA_AMX,
                                           .swiglu = spec->swiglu};
        bt_status_t packed = bt_packed_create(&how, w_nk, &l->packed);
        if (packed != BT_OK) {
            snprintf(err, err_cap, "no memory to pack a %u x %u matrix", k, n);
            free(l);
            return packed;
        }
        *l_p = l;
        return BT_OK;
    }
    dnnl_status_t st = shape_get(g, k, n, &l->s);
    if (st == dnnl_success) {
        st = pack(g, l, w_nk);
    }
    if (st != dnnl_success) {
        snprintf(err, err_cap, "oneDNN: cannot pack a %u x %u matrix (status %d%s)", k, n, (int)st,
                 st == dnnl_out_of_memory ? ", out of memory" : "");
        bt_linear_destroy(l);
        return st == dnnl_out_of_memory ? BT_ERR_NO_MEMORY : BT_ERR_DEVICE;
    }
    if (before != g->shapes && g->exact && !trial(l)) {
        g->exact = false;
    }
    *l_p = l;
    return BT_OK;
}

void bt_linear_destroy(struct bt_linear *l)
{
    if (l) {
        if (l->w) {
            dnnl_memory_destroy(l->w);
        }
        bt_packed_destroy(l->packed);
        free(l);
    }
}

/* Without memory the process ends, as with bt_malloc(): the device has not failed. */
static bt_status_t ran(dnnl_status_t st)
{
    if (st == dnnl_out_of_memory) {
        errno = ENOMEM; /* so the assertion says that memory was missing */
        BT_ASSERT(st != dnnl_out_of_memory);
    }
    return st == dnnl_success ? BT_OK : BT_ERR_DEVICE;
}

bt_status_t bt_linear_run(struct bt_linear *l, const void *src, uint32_t m, float *dst)
{
    if (l->packed) {
        bt_packed_run(l->packed, src, m, BT_PACKED_STORE, dst, l->g->threads);
        return BT_OK;
    }
    uint32_t step = step_of(m);
    struct prim *p = &l->s->prims[step];
    dnnl_status_t st = p->prim ? dnnl_success : prim_make(l->g, l->s, step);
    if (st != dnnl_success) {
        return ran(st);
    }
    omp_set_num_threads(p->threads);
    if (dnnl_memory_set_data_handle(p->src, (void *)src) != dnnl_success ||
        dnnl_memory_set_data_handle(p->dst, dst) != dnnl_success) {
        return BT_ERR_DEVICE;
    }
    dnnl_exec_arg_t args[] = {
        {DNNL_ARG_SRC, p->src}, {DNNL_ARG_WEIGHTS, l->w}, {DNNL_ARG_DST, p->dst}};
    st = dnnl_primitive_execute(p->prim, l->g->stream, 3, args);
    if (st == dnnl_success) {
        st = dnnl_stream_wait(l->g->stream);
    }
    return ran(st);
}

void bt_linear_add(struct bt_linear *l, const void *src, uint32_t m, float *x)
{
    bt_packed_run(l->packed, src, m, BT_PACKED_ADD, x, l->g->threads);
}

void bt_linear_swiglu(struct bt_linear *l, const void *src, uint32_t m, void *act)
{
    bt_packed_run(l->packed, src, m, BT_PACKED_SWIGLU, act, l->g->threads);
}
