/* Implements gemm.h with cuBLASLt. A row-major y = a * w^T is, in column-major order, y' = w'^T *
 * a'. */
#include "common/engine/cuda/gemm/gemm.h"

#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cuda/device.h"

#define WORKSPACE (64u << 20)
#define SHAPES    4096 /* hash table with open addressing; about 80 row counts for each product */
#define OWN       16   /* products that may use skinny.h */

struct form { /* of a product, but for its rows */
    uint32_t n, k;
    enum bt_cu_weight_kind kind;
    bool f16, half, add; /* a and w f16 instead of bf16; y of 16 bits; y += */
};

struct shape {
    uint32_t m;
    struct form of;
    bool used;
    cublasLtMatmulAlgo_t algo;
};

struct operands {
    struct bt_cu_weight w;
    const void *a;
    const float *scale; /* of e4m3 activations */
    void *y;
};

struct own {
    uint32_t n, k;
    enum bt_cu_weight_kind kind;
    enum bt_cu_skinny_end end;
    int way[BT_CU_WIDTHS]; /* index of the way + 1; 0: none */
};

struct bt_cu_gemm {
    cublasLtHandle_t lt;
    cublasLtMatmulPreference_t pref;
    void *workspace;
    struct shape *shapes;
    struct own own[OWN];
    uint32_t n_own;
};

struct plan { /* cuBLASLt descriptors of one product */
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, a, y;
};

cudaError_t bt_cu_gemm_create(struct bt_cu_gemm **g_p)
{
    struct bt_cu_gemm *g = calloc(1, sizeof(*g));
    size_t bytes = WORKSPACE;
    uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* split k must not sum in bf16 */
    if (!g) {
        return cudaErrorMemoryAllocation;
    }
    g->shapes = calloc(SHAPES, sizeof(*g->shapes));
    cudaError_t e = g->shapes ? cudaMalloc(&g->workspace, bytes) : cudaErrorMemoryAllocation;
    if (e == cudaSuccess &&
        (cublasLtCreate(&g->lt) != CUBLAS_STATUS_SUCCESS ||
         cublasLtMatmulPreferenceCreate(&g->pref) != CUBLAS_STATUS_SUCCESS ||
         cublasLtMatmulPreferenceSetAttribute(g->pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                              &bytes, sizeof(bytes)) != CUBLAS_STATUS_SUCCESS ||
         cublasLtMatmulPreferenceSetAttribute(g->pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                              &sums, sizeof(sums)) != CUBLAS_STATUS_SUCCESS)) {
        e = cudaErrorUnknown;
    }
    if (e != cudaSuccess) {
        bt_cu_gemm_destroy(g);
        return e;
    }
    *g_p = g;
    return cudaSuccess;
}

void bt_cu_gemm_destroy(struct bt_cu_gemm *g)
{
    if (g) {
        if (g->pref) {
            cublasLtMatmulPreferenceDestroy(g->pref);
        }
        if (g->lt) {
            cublasLtDestroy(g->lt);
        }
        cudaFree(g->workspace);
        free(g->shapes);
        free(g);
    }
}

static void plan_close(struct plan *p)
{
    if (p->op) {
        cublasLtMatmulDescDestroy(p->op);
    }
    cublasLtMatrixLayout_t all[] = {p->w, p->a, p->y};
    for (int i = 0; i < 3; i++) {
        if (all[i]) {
            cublasLtMatrixLayoutDestroy(all[i]);
        }
    }
}

static bool set(struct plan *p, cublasLtMatmulDescAttributes_t what, const void *v, size_t bytes)
{
    return cublasLtMatmulDescSetAttribute(p->op, what, v, bytes) == CUBLAS_STATUS_SUCCESS;
}

/* A scale for each 128 columns of a row of activations and of a block or row of weights. some: any
 * aligned address, without which cuBLASLt proposes nothing. */
static bool set_scales(struct plan *p, enum bt_cu_weight_kind kind, const void *some)
{
    const int32_t a = kind == BT_CU_WEIGHT_BLOCKS ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                                  : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    const int32_t b = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    return set(p, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &a, sizeof(a)) &&
           set(p, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &b, sizeof(b)) &&
           set(p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &some, sizeof(some)) &&
           set(p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &some, sizeof(some));
}

static bool plan_open(struct bt_cu_gemm *g, struct plan *p, uint32_t m, const struct form *f)
{
    const cublasOperation_t t = CUBLAS_OP_T;
    const bool e4m3 = f->kind != BT_CU_WEIGHT_BF16;
    const cudaDataType_t of_16 = f->f16 ? CUDA_R_16F : CUDA_R_16BF;
    const cudaDataType_t in = e4m3 ? CUDA_R_8F_E4M3 : of_16, out = f->half ? of_16 : CUDA_R_32F;
    *p = (struct plan){0};
    bool ok =
        cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
        set(p, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof(t)) &&
        (!e4m3 || set_scales(p, f->kind, g->workspace)) &&
        cublasLtMatrixLayoutCreate(&p->w, in, f->k, f->n, f->k) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatrixLayoutCreate(&p->a, in, f->k, m, f->k) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatrixLayoutCreate(&p->y, out, f->n, m, f->n) == CUBLAS_STATUS_SUCCESS;
    if (!ok) {
        plan_close(p);
    }
    return ok;
}

static bool same(const struct form *x, const struct form *y)
{
    return x->n == y->n && x->k == y->k && x->kind == y->kind && x->f16 == y->f16 &&
           x->half == y->half && x->add == y->add;
}

/* The shape's entry, or a free one for it. A full table is emptied. */
static struct shape *find(struct bt_cu_gemm *g, uint32_t m, const struct form *f)
{
    uint32_t h = (m * 2654435761u ^ f->n * 40503u ^ f->k * 2246822519u) + f->kind * 16u +
                 f->f16 * 8u + f->half * 2u + f->add;
    struct shape *s = NULL;
    for (uint32_t i = 0; i < 16; i++) {
        s = &g->shapes[(h + i) % SHAPES];
        if (!s->used || (s->m == m && same(&s->of, f))) {
            return s;
        }
    }
    s->used = false;
    return s;
}

static cublasStatus_t run(struct bt_cu_gemm *g, struct plan *p, const struct operands *o, bool add,
                          const cublasLtMatmulAlgo_t *algo, cudaStream_t s)
{
    const float one = 1, beta = add ? 1 : 0;
    if (o->scale && !(set(p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &o->w.scale, sizeof(float *)) &&
                      set(p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &o->scale, sizeof(float *)))) {
        return CUBLAS_STATUS_INTERNAL_ERROR;
    }
    return cublasLtMatmul(g->lt, p->op, &one, o->w.w, p->w, o->a, p->a, &beta, o->y, p->y, o->y,
                          p->y, algo, g->workspace, WORKSPACE, s);
}

/* The number of rows whose algorithm is used for m rows. Almost every step has another number of
 * rows, and a new shape takes 0.3 to 3 ms: cuBLASLt must propose an algorithm and load it. */
uint32_t bt_cu_gemm_bucket(uint32_t m)
{
    uint32_t step = m <= 16                  ? 1
                    : m <= BT_CU_SKINNY_ROWS ? 8
                    : m <= BT_CU_CLOSE_ROWS  ? BT_CU_CLOSE_STEP
                    : m <= 4096              ? 128
                                             : 512;
    return (m + step - 1) / step * step;
}

/* The shape with an algorithm; NULL: cuBLASLt has none. */
static struct shape *algo_for(struct bt_cu_gemm *g, uint32_t m, const struct form *f)
{
    struct shape *sh = find(g, m, f);
    struct plan p;
    if (sh->used) {
        return sh;
    }
    if (!plan_open(g, &p, m, f)) {
        return NULL;
    }
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    if (cublasLtMatmulAlgoGetHeuristic(g->lt, p.op, p.w, p.a, p.y, p.y, g->pref, 1, &best,
                                       &found) == CUBLAS_STATUS_SUCCESS &&
        found > 0) {
        *sh = (struct shape){m, *f, true, best.algo};
    }
    plan_close(&p);
    return sh->used ? sh : NULL;
}

static cudaError_t run_form(struct bt_cu_gemm *g, uint32_t m, const struct form *f,
                            const struct operands *o, cudaStream_t s)
{
    struct plan p;
    /* The timed algorithm; the bucket's after a refusal. */
    struct shape *sh = find(g, m, f);
    sh = sh->used ? sh : algo_for(g, bt_cu_gemm_bucket(m), f);
    if (!plan_open(g, &p, m, f)) {
        return cudaErrorUnknown;
    }
    cublasStatus_t st = sh ? run(g, &p, o, f->add, &sh->algo, s) : CUBLAS_STATUS_NOT_SUPPORTED;
    if (st != CUBLAS_STATUS_SUCCESS) {
        sh = algo_for(g, m, f);
        st = sh ? run(g, &p, o, f->add, &sh->algo, s) : st;
    }
    plan_close(&p);
    return st == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t bt_cu_gemm_run(struct bt_cu_gemm *g, const void *w, const void *a, void *y, uint32_t m,
                           uint32_t n, uint32_t k, bool bf16, bool add, cudaStream_t s)
{
    const struct form f = {n, k, BT_CU_WEIGHT_BF16, false, bf16, add};
    const struct operands o = {bt_cu_bf16(w), a, NULL, y};
    return run_form(g, m, &f, &o, s);
}

cudaError_t bt_cu_gemm_run_f16(struct bt_cu_gemm *g, const void *w, const void *a, void *y,
                               uint32_t m, uint32_t n, uint32_t k, cudaStream_t s)
{
    const struct form f = {n, k, BT_CU_WEIGHT_BF16, true, true, false};
    const struct operands o = {bt_cu_bf16(w), a, NULL, y};
    return run_form(g, m, &f, &o, s);
}

/* ---- timing ---- */

struct tuned { /* the product with which algorithms are timed */
    const struct bt_cu_weight *w;
    uint32_t layers;
    struct operands o;
    bool add;
};

/* Time in ms of some runs of one algorithm; negative: it does not run. */
static float time_algo(struct bt_cu_gemm *g, struct plan *p, const struct tuned *t,
                       const cublasLtMatmulAlgo_t *algo, cudaEvent_t *ev, cudaStream_t s)
{
    enum { ROUNDS = 8 };
    struct operands o = t->o;
    float ms = -1;
    for (uint32_t i = 0; i <= ROUNDS; i++) {
        if (i == 1 && cudaEventRecord(ev[0], s) != cudaSuccess) {
            return -1;
        }
        o.w = t->w[i % t->layers];
        if (run(g, p, &o, t->add, algo, s) != CUBLAS_STATUS_SUCCESS) {
            return -1;
        }
    }
    if (cudaEventRecord(ev[1], s) != cudaSuccess || cudaEventSynchronize(ev[1]) != cudaSuccess ||
        cudaEventElapsedTime(&ms, ev[0], ev[1]) != cudaSuccess) {
        return -1;
    }
    return ms;
}

/* Times all proposals until the GPU's clock has settled, and returns the fastest of the last round;
 * -1: none runs. Long products draw so much power that the clock falls within 0.2 s: without this,
 * the proposal that is timed first would win by up to 10 %. */
static int fastest(struct bt_cu_gemm *g, struct plan *p, const struct tuned *t,
                   const cublasLtMatmulHeuristicResult_t *proposals, int n, cudaEvent_t *ev,
                   cudaStream_t s)
{
    const float warm = 300, few = 5; /* ms; `few`: a round this short does not heat the GPU */
    for (float spent = 0;;) {
        float best = 0, round = 0;
        int found = -1;
        for (int i = 0; i < n; i++) {
            float ms = time_algo(g, p, t, &proposals[i].algo, ev, s);
            if (ms > 0 && (best == 0 || ms < best)) {
                best = ms;
                found = i;
            }
            round += ms > 0 ? ms : 0;
        }
        if (spent >= warm || round < few * (float)n || found < 0) {
            return found;
        }
        spent += round;
    }
}

static cudaError_t tune_form(struct bt_cu_gemm *g, uint32_t m, const struct form *f,
                             const struct tuned *t, uint32_t proposals, cudaStream_t s)
{
    struct plan p;
    cublasLtMatmulHeuristicResult_t proposed[BT_CU_GEMM_PROPOSALS];
    cudaEvent_t ev[2];
    int found = 0;
    if (!plan_open(g, &p, m, f)) {
        return cudaErrorUnknown;
    }
    if (cublasLtMatmulAlgoGetHeuristic(g->lt, p.op, p.w, p.a, p.y, p.y, g->pref, (int)proposals,
                                       proposed, &found) != CUBLAS_STATUS_SUCCESS ||
        cudaEventCreate(&ev[0]) != cudaSuccess) {
        plan_close(&p);
        return cudaErrorUnknown;
    }
    cudaError_t e = cudaEventCreate(&ev[1]);
    int best = e == cudaSuccess ? fastest(g, &p, t, proposed, found, ev, s) : -1;
    if (best >= 0) {
        *find(g, m, f) = (struct shape){m, *f, true, proposed[best].algo};
    }
    cudaEventDestroy(ev[0]);
    if (e == cudaSuccess) {
        cudaEventDestroy(ev[1]);
    }
    plan_close(&p);
    return best >= 0 ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t bt_cu_gemm_tune(struct bt_cu_gemm *g, const void *const *w, uint32_t layers,
                            const void *a, void *y, uint32_t m, uint32_t n, uint32_t k, bool bf16,
                            bool add, uint32_t proposals, cudaStream_t s)
{
    enum { MOST = 8 };
    const struct form f = {n, k, BT_CU_WEIGHT_BF16, false, bf16, add};
    struct bt_cu_weight of[MOST];
    layers = layers < MOST ? layers : MOST;
    for (uint32_t i = 0; i < layers; i++) {
        of[i] = bt_cu_bf16(w[i]);
    }
    const struct tuned t = {of, layers, {.a = a, .y = y}, add};
    return tune_form(g, m, &f, &t, proposals, s);
}

/* ---- e4m3 ---- */

bool bt_cu_gemm_e4m3_fits(uint32_t n, uint32_t k)
{
    return bt_cu_hopper() && n % 16 == 0 && k % BT_CU_WEIGHT_BLOCK == 0;
}

static struct form form_of(const struct bt_cu_e4m3_product *p, enum bt_cu_weight_kind kind)
{
    return (struct form){p->n, p->k, kind, false, p->bf16, p->add};
}

cudaError_t bt_cu_gemm_e4m3_run(struct bt_cu_gemm *g, const struct bt_cu_e4m3_product *p,
                                cudaStream_t s)
{
    const struct form f = form_of(p, p->w.kind);
    const struct operands o = {p->w, p->a.v, p->a.scale, p->y};
    return run_form(g, bt_cu_e4m3_stride(p->m), &f, &o, s);
}

cudaError_t bt_cu_gemm_e4m3_tune(struct bt_cu_gemm *g, const struct bt_cu_e4m3_product *p,
                                 const struct bt_cu_weight *w, uint32_t layers, uint32_t proposals,
                                 cudaStream_t s)
{
    const struct form f = form_of(p, w[0].kind);
    const struct tuned t = {w, layers, {.a = p->a.v, .scale = p->a.scale, .y = p->y}, p->add};
    return tune_form(g, bt_cu_e4m3_stride(p->m), &f, &t, proposals, s);
}

/* ---- ways ---- */

static uint32_t own_at(const struct bt_cu_gemm *g, uint32_t n, uint32_t k,
                       enum bt_cu_weight_kind kind, enum bt_cu_skinny_end end)
{
    uint32_t i = 0;
    while (i < g->n_own && (g->own[i].n != n || g->own[i].k != k || g->own[i].kind != kind ||
                            g->own[i].end != end)) {
        i++;
    }
    return i;
}

int bt_cu_gemm_way(const struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                   enum bt_cu_weight_kind kind, enum bt_cu_skinny_end end)
{
    uint32_t i = own_at(g, n, k, kind, end);
    int way = m <= BT_CU_SKINNY_ROWS && i < g->n_own ? g->own[i].way[bt_cu_width(m)] - 1 : -1;
    /* cuBLASLt has no product of f16 and e4m3. gemv.cu has those of up to 8 rows. */
    bool needed = kind != BT_CU_WEIGHT_BF16 && m > 8 && m <= BT_CU_F16_ROWS;
    return way < 0 && needed ? 0 : way;
}

void bt_cu_gemm_set_way(struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                        enum bt_cu_weight_kind kind, enum bt_cu_skinny_end end, int way)
{
    uint32_t i = own_at(g, n, k, kind, end);
    if (m > BT_CU_SKINNY_ROWS || i >= OWN) {
        return;
    }
    if (i == g->n_own) {
        g->own[g->n_own++] = (struct own){n, k, kind, end, {0}};
    }
    g->own[i].way[bt_cu_width(m)] = way + 1;
}
