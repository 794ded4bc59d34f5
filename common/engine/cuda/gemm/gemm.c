/* Implements gemm.h with cuBLASLt. A row-major y = a * w^T is, in column-major order, y' = w'^T *
 * a'. */
#include "common/engine/cuda/gemm/gemm.h"

#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

#define WORKSPACE (64u << 20)
#define SHAPES    4096 /* hash table with open addressing; about 80 row counts for each product */
#define OWN       8    /* products that may use skinny.h */
#define WIDTHS    8    /* rows 1, 2, up to 4, 8, ... 128 */

/* Types of a product: a and w, then y. */
enum form { BF16_F32, BF16_BF16, F16_F16 };

struct shape {
    uint32_t m, n, k;
    enum form form;
    bool add, used;
    cublasLtMatmulAlgo_t algo;
};

struct own {
    uint32_t n, k;
    enum bt_cu_skinny_end end;
    int way[WIDTHS]; /* index of the way + 1; 0: none */
};

struct bt_cu_gemm {
    cublasLtHandle_t lt;
    cublasLtMatmulPreference_t pref;
    void *workspace;
    struct shape *shapes;
    struct own own[OWN];
    uint32_t n_own;
};

struct tuned { /* the product with which algorithms are timed */
    const void *const *w;
    uint32_t layers;
    const void *a;
    void *y;
    bool add;
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

static enum form form_of(bool bf16)
{
    return bf16 ? BF16_BF16 : BF16_F32;
}

static bool plan_open(struct plan *p, uint32_t m, uint32_t n, uint32_t k, enum form form)
{
    const cudaDataType in = form == F16_F16 ? CUDA_R_16F : CUDA_R_16BF;
    const cudaDataType out = form == BF16_F32 ? CUDA_R_32F : in;
    const cublasOperation_t t = CUBLAS_OP_T;
    *p = (struct plan){0};
    bool ok =
        cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof(t)) ==
            CUBLAS_STATUS_SUCCESS &&
        cublasLtMatrixLayoutCreate(&p->w, in, k, n, k) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatrixLayoutCreate(&p->a, in, k, m, k) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatrixLayoutCreate(&p->y, out, n, m, n) == CUBLAS_STATUS_SUCCESS;
    if (!ok) {
        plan_close(p);
    }
    return ok;
}

/* The shape's entry, or a free one for it. A full table is emptied. */
static struct shape *find(struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k, enum form form,
                          bool add)
{
    uint32_t h = (m * 2654435761u ^ n * 40503u ^ k * 2246822519u) + form * 2u + add;
    struct shape *s = NULL;
    for (uint32_t i = 0; i < 16; i++) {
        s = &g->shapes[(h + i) % SHAPES];
        if (!s->used || (s->m == m && s->n == n && s->k == k && s->form == form && s->add == add)) {
            return s;
        }
    }
    s->used = false;
    return s;
}

static cublasStatus_t run(struct bt_cu_gemm *g, const struct plan *p, const void *w, const void *a,
                          void *y, bool add, const cublasLtMatmulAlgo_t *algo, cudaStream_t s)
{
    const float one = 1, beta = add ? 1 : 0;
    return cublasLtMatmul(g->lt, p->op, &one, w, p->w, a, p->a, &beta, y, p->y, y, p->y, algo,
                          g->workspace, WORKSPACE, s);
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
static struct shape *algo_for(struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                              enum form form, bool add)
{
    struct shape *sh = find(g, m, n, k, form, add);
    struct plan p;
    if (sh->used) {
        return sh;
    }
    if (!plan_open(&p, m, n, k, form)) {
        return NULL;
    }
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    if (cublasLtMatmulAlgoGetHeuristic(g->lt, p.op, p.w, p.a, p.y, p.y, g->pref, 1, &best,
                                       &found) == CUBLAS_STATUS_SUCCESS &&
        found > 0) {
        *sh = (struct shape){m, n, k, form, add, true, best.algo};
    }
    plan_close(&p);
    return sh->used ? sh : NULL;
}

static cudaError_t run_form(struct bt_cu_gemm *g, const void *w, const void *a, void *y, uint32_t m,
                            uint32_t n, uint32_t k, enum form form, bool add, cudaStream_t s)
{
    struct plan p;
    /* The timed algorithm; the bucket's after a refusal. */
    struct shape *sh = find(g, m, n, k, form, add);
    sh = sh->used ? sh : algo_for(g, bt_cu_gemm_bucket(m), n, k, form, add);
    if (!plan_open(&p, m, n, k, form)) {
        return cudaErrorUnknown;
    }
    cublasStatus_t st = sh ? run(g, &p, w, a, y, add, &sh->algo, s) : CUBLAS_STATUS_NOT_SUPPORTED;
    if (st != CUBLAS_STATUS_SUCCESS) {
        sh = algo_for(g, m, n, k, form, add);
        st = sh ? run(g, &p, w, a, y, add, &sh->algo, s) : st;
    }
    plan_close(&p);
    return st == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t bt_cu_gemm_run(struct bt_cu_gemm *g, const void *w, const void *a, void *y, uint32_t m,
                           uint32_t n, uint32_t k, bool bf16, bool add, cudaStream_t s)
{
    return run_form(g, w, a, y, m, n, k, form_of(bf16), add, s);
}

cudaError_t bt_cu_gemm_run_f16(struct bt_cu_gemm *g, const void *w, const void *a, void *y,
                               uint32_t m, uint32_t n, uint32_t k, cudaStream_t s)
{
    return run_form(g, w, a, y, m, n, k, F16_F16, false, s);
}

/* Time in ms of some runs of one algorithm; negative: it does not run. */
static float time_algo(struct bt_cu_gemm *g, const struct plan *p, const struct tuned *t,
                       const cublasLtMatmulAlgo_t *algo, cudaEvent_t *ev, cudaStream_t s)
{
    enum { ROUNDS = 8 };
    float ms = -1;
    for (uint32_t i = 0; i <= ROUNDS; i++) {
        if (i == 1 && cudaEventRecord(ev[0], s) != cudaSuccess) {
            return -1;
        }
        if (run(g, p, t->w[i % t->layers], t->a, t->y, t->add, algo, s) != CUBLAS_STATUS_SUCCESS) {
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
static int fastest(struct bt_cu_gemm *g, const struct plan *p, const struct tuned *t,
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

cudaError_t bt_cu_gemm_tune(struct bt_cu_gemm *g, const void *const *w, uint32_t layers,
                            const void *a, void *y, uint32_t m, uint32_t n, uint32_t k, bool bf16,
                            bool add, uint32_t proposals, cudaStream_t s)
{
    struct plan p;
    cublasLtMatmulHeuristicResult_t proposed[BT_CU_GEMM_PROPOSALS];
    const struct tuned t = {w, layers, a, y, add};
    cudaEvent_t ev[2];
    int found = 0;
    if (!plan_open(&p, m, n, k, form_of(bf16))) {
        return cudaErrorUnknown;
    }
    if (cublasLtMatmulAlgoGetHeuristic(g->lt, p.op, p.w, p.a, p.y, p.y, g->pref, (int)proposals,
                                       proposed, &found) != CUBLAS_STATUS_SUCCESS ||
        cudaEventCreate(&ev[0]) != cudaSuccess) {
        plan_close(&p);
        return cudaErrorUnknown;
    }
    cudaError_t e = cudaEventCreate(&ev[1]);
    int best = e == cudaSuccess ? fastest(g, &p, &t, proposed, found, ev, s) : -1;
    if (best >= 0) {
        *find(g, m, n, k, form_of(bf16), add) =
            (struct shape){m, n, k, form_of(bf16), add, true, proposed[best].algo};
    }
    cudaEventDestroy(ev[0]);
    if (e == cudaSuccess) {
        cudaEventDestroy(ev[1]);
    }
    plan_close(&p);
    return best >= 0 ? cudaSuccess : cudaErrorUnknown;
}

/* ---- ways ---- */

static uint32_t width_of(uint32_t m)
{
    uint32_t width = 0;
    while (1u << width < m) {
        width++;
    }
    return width;
}

static uint32_t own_at(const struct bt_cu_gemm *g, uint32_t n, uint32_t k,
                       enum bt_cu_skinny_end end)
{
    uint32_t i = 0;
    while (i < g->n_own && (g->own[i].n != n || g->own[i].k != k || g->own[i].end != end)) {
        i++;
    }
    return i;
}

int bt_cu_gemm_way(const struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                   enum bt_cu_skinny_end end)
{
    uint32_t i = own_at(g, n, k, end);
    return m <= BT_CU_SKINNY_ROWS && i < g->n_own ? g->own[i].way[width_of(m)] - 1 : -1;
}

void bt_cu_gemm_set_way(struct bt_cu_gemm *g, uint32_t m, uint32_t n, uint32_t k,
                        enum bt_cu_skinny_end end, int way)
{
    uint32_t i = own_at(g, n, k, end);
    if (m > BT_CU_SKINNY_ROWS || i >= OWN) {
        return;
    }
    if (i == g->n_own) {
        g->own[g->n_own++] = (struct own){n, k, end, {0}};
    }
    g->own[i].way[width_of(m)] = way + 1;
}
