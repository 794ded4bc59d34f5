/* The router (a warp for each row), and the order of rows by expert.
 *
 * A chunk of 128 rows is sorted in shared memory: each expert has a mask of the rows that use it,
 * so a row's place among them is the number of bits below its own. That order is by rising row,
 * whatever the order of the atomic operations that set the bits. With more rows a first kernel
 * counts each chunk's uses, and each block of a second one begins where the chunks before it end.
 */
#include "common/engine/cuda/experts/scores.cuh"

#define ROUTED  8 /* rows of a routing block, a warp each */
#define ROUTERS (ROUTED * 32)
#define NONE    0xffffffffu
#define WORDS   (BT_CU_EXPERTS_CHUNK / 32)

struct route_args {
    struct bt_cu_experts x;
    struct bt_cu_experts_plan p;
    const float *scores, *bias;
    const int32_t *slots;
    uint32_t rows, chunks, part, granule;
};

/* ---- the router ---- */

/* Floats in their order as numbers, all above 0. NaN is none. */
static __device__ __forceinline__ uint32_t ordered(float v)
{
    uint32_t u = __float_as_uint(v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

static __device__ __forceinline__ float warp_sum(float v)
{
    for (int d = 16; d > 0; d /= 2) {
        v += __shfl_xor_sync(~0u, v, d);
    }
    return v;
}

/* A bit for each group that experts may be chosen from. choice: [n] in shared memory. Lane g knows
 * group g. */
static __device__ __forceinline__ uint32_t open_groups(const struct bt_cu_experts &x,
                                                       const float *choice)
{
    const uint32_t lane = threadIdx.x % 32, size = (x.n - x.always) / x.groups;
    uint32_t open = 0, key = 0;
    if (lane < x.groups) {
        float first = -INFINITY, second = -INFINITY;
        for (uint32_t i = lane * size; i < (lane + 1) * size; i++) {
            float v = choice[i];
            second = v > first ? first : fmaxf(second, v);
            first = fmaxf(first, v);
        }
        key = ordered(x.group_best == 2 ? first + second : first);
    }
    for (uint32_t k = 0; k < x.groups_used; k++) {
        uint32_t best = __reduce_max_sync(~0u, key);
        uint32_t at = __ffs((int)__ballot_sync(~0u, key == best)) - 1;
        open |= 1u << at;
        key = lane == at ? 0 : key;
    }
    return open;
}

/* The order of a single row, which needs no sorting: expert e, above `below` experts that the row
 * uses. */
static __device__ __forceinline__ void order_one(const struct route_args &a, uint32_t e,
                                                 uint32_t below, bool used)
{
    a.p.first[e] = below;
    if (used) {
        a.p.uses[below] = a.p.places[below] = below;
        a.p.parts[below] = {e, below, 1, 0};
        a.p.done[below] = 0;
    }
}
static __device__ __forceinline__ void end_one(const struct route_args &a, uint32_t uses)
{
    a.p.first[a.x.n] = a.p.state->parts = uses;
    a.p.state->next = a.p.state->ready = 0;
}

/* A row's scores as the router defines them: sigmoid or softmax of the product's n values. N:
 * values of a lane, numbers lane + 32 i. */
template <int N>
static __device__ __forceinline__ void score_row(const struct bt_cu_experts &x, const float *from,
                                                 uint32_t n, float (&score)[N])
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N; i++) {
        score[i] = lane + i * 32 < n ? __ldcg(from + lane + i * 32) : -INFINITY;
    }
    if (x.sigmoid) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            score[i] = 1.0f / (1.0f + expf(-score[i]));
        }
    } else {
        float most = -INFINITY, sum = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            most = fmaxf(most, score[i]); /* ignores NaN */
        }
        most = warp_max(most);
#pragma unroll
        for (int i = 0; i < N; i++) {
            bool in = lane + i * 32 < n;
            score[i] = in ? expf(score[i] - most) : 0;
            sum += score[i];
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < N; i++) {
            score[i] /= sum;
        }
    }
}

/* Routes one row. N: values of a lane, numbers lane + 32 i. shared: the row's experts in shared
 * memory, or NULL. */
template <int N>
static __device__ __forceinline__ void route_row(const struct route_args &a, uint32_t row,
                                                 float *choice_smem, uint32_t *shared)
{
    const struct bt_cu_experts &x = a.x;
    const uint32_t lane = threadIdx.x % 32, n = x.n - x.always, used = x.used - x.always;
    uint32_t *expert = a.p.expert + (size_t)row * x.used;
    float *weight = a.p.weight + (size_t)row * x.used;
    if (a.slots && a.slots[row] < 0) {
        for (uint32_t k = lane; k < x.used; k += 32) {
            expert[k] = NONE;
            weight[k] = 0;
            if (shared) {
                shared[k] = NONE;
            }
            a.p.places[(size_t)row * x.used + k] = NONE;
        }
        for (uint32_t e = lane; e < x.n && a.rows == 1; e += 32) {
            a.p.first[e] = 0;
        }
        if (a.rows == 1 && lane == 0) {
            end_one(a, 0);
        }
        return;
    }
    const float *from = a.scores + (size_t)row * n;
    float score[N], choice[N];
    uint32_t key[N];
    score_row<N>(x, from, n, score);
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t e = lane + i * 32;
        choice[i] = score[i] + (a.bias && e < n ? a.bias[e] : 0.0f);
        choice[i] = choice[i] == choice[i] ? choice[i] : -INFINITY;
        if (x.groups > 1 && e < n) {
            choice_smem[e] = choice[i];
        }
    }
    uint32_t open = 1, size = n / x.groups;
    if (x.groups > 1) {
        __syncwarp();
        open = open_groups(x, choice_smem);
    }
#pragma unroll
    for (int i = 0; i < N; i++) { /* 0: cannot be chosen */
        uint32_t e = lane + i * 32;
        key[i] = e < n && open >> e / size & 1 ? ordered(choice[i]) : 0;
    }
    uint32_t taken = 0; /* bit i: the lane's value i */
    float sum = 0;
    for (uint32_t k = 0; k < used; k++) {
        uint32_t best = 0, at = 0;
        float its = 0;
#pragma unroll
        for (int i = 0; i < N; i++) { /* the first of equals */
            at = key[i] > best ? i : at;
            its = key[i] > best ? score[i] : its;
            best = key[i] > best ? key[i] : best;
        }
        uint32_t most = __reduce_max_sync(~0u, best), e = lane + at * 32;
        uint32_t least = __reduce_min_sync(~0u, best == most ? e : NONE);
        sum += __shfl_sync(~0u, its, (int)(least % 32));
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (least == lane + i * 32) {
                key[i] = 0;
                taken |= 1u << i;
            }
        }
    }
    float factor = x.normalise ? x.scale / (sum + 1e-20f) : x.scale;
    uint32_t before = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t mask = __ballot_sync(~0u, taken >> i & 1);
        uint32_t k = before + __popc(mask & ((1u << lane) - 1));
        if (taken >> i & 1) {
            expert[k] = lane + i * 32;
            weight[k] = score[i] * factor;
            if (shared) {
                shared[k] = lane + i * 32;
            }
        }
        if (a.rows == 1 && lane + i * 32 < n) {
            order_one(a, lane + i * 32, k, taken >> i & 1);
        }
        before += __popc(mask);
    }
    if (lane < x.always) {
        expert[used + lane] = n + lane;
        weight[used + lane] = 1;
        if (shared) {
            shared[used + lane] = n + lane;
        }
        if (a.rows == 1) {
            order_one(a, n + lane, used + lane, true);
        }
    }
    if (a.rows == 1 && lane == 0) {
        end_one(a, x.used);
    }
}

/* ---- the order ---- */

/* T: threads of a sorting block. */
template <int T> struct sorting {
    uint32_t rows[BT_CU_EXPERTS_MAX][WORDS]; /* a bit for each row of the chunk */
    uint32_t at[BT_CU_EXPERTS_MAX];          /* where the chunk's uses of an expert begin */
    uint32_t all[BT_CU_EXPERTS_MAX];         /* uses of an expert, of all chunks, */
    uint32_t before[BT_CU_EXPERTS_MAX];      /* and of the chunks before this one */
    uint64_t warp[T / 32];
};

/* The experts of a chunk's uses in shared memory, or NULL: in a.p.expert, which other blocks of the
 * kernel may have written, so it is read from the L2 cache. */
static __device__ __forceinline__ uint32_t expert_of(const struct route_args &a, uint32_t row0,
                                                     uint32_t use, const uint32_t *shared)
{
    return shared ? shared[use] : __ldcg(a.p.expert + (size_t)row0 * a.x.used + use);
}

/* Sets the masks of a chunk. */
template <int T>
static __device__ __forceinline__ void mark(const struct route_args &a, uint32_t chunk,
                                            const uint32_t *shared, struct sorting<T> *s)
{
    const uint32_t row0 = chunk * BT_CU_EXPERTS_CHUNK;
    const uint32_t uses = min(BT_CU_EXPERTS_CHUNK, a.rows - row0) * a.x.used;
    for (uint32_t i = threadIdx.x; i < a.x.n * WORDS; i += T) {
        (&s->rows[0][0])[i] = 0;
    }
    __syncthreads();
    for (uint32_t u = threadIdx.x; u < uses; u += T) {
        uint32_t e = expert_of(a, row0, u, shared), row = u / a.x.used;
        if (e < a.x.n) {
            atomicOr(&s->rows[e][row / 32], 1u << row % 32);
        }
    }
    __syncthreads();
}

template <int T>
static __device__ __forceinline__ uint32_t marked(const struct sorting<T> *s, uint32_t e)
{
    uint32_t n = 0;
#pragma unroll
    for (uint32_t i = 0; i < WORDS; i++) {
        n += __popc(s->rows[e][i]);
    }
    return n;
}

/* The sum of the values of all threads before this one. */
template <int T>
static __device__ __forceinline__ uint64_t sum_before(uint64_t v, struct sorting<T> *s)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = v, before = 0;
    __syncthreads(); /* the sums before this one have been read */
    for (uint32_t d = 1; d < 32; d *= 2) {
        uint64_t u = __shfl_up_sync(~0u, (unsigned long long)sum, d);
        sum += lane >= d ? u : 0;
    }
    if (lane == 31) {
        s->warp[warp] = sum;
    }
    __syncthreads();
    for (uint32_t i = 0; i < warp; i++) {
        before += s->warp[i];
    }
    return before + sum - v;
}

/* Adds up the chunks' counts: each thread some chunks of one expert, many loads at a time. */
template <int T>
static __device__ __forceinline__ void add_chunks(const struct route_args &a, uint32_t chunk,
                                                  struct sorting<T> *s)
{
    const uint32_t n = a.x.n, wide = min(n, (uint32_t)T), step = T / wide;
    for (uint32_t e = threadIdx.x; e < n; e += T) {
        s->all[e] = s->before[e] = 0;
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x % wide; e < n && threadIdx.x < step * wide; e += wide) {
        uint32_t all = 0, before = 0;
#pragma unroll 8
        for (uint32_t c = threadIdx.x / wide; c < a.chunks; c += step) {
            uint32_t count = a.p.counts[(size_t)c * n + e];
            all += count;
            before += c < chunk ? count : 0;
        }
        atomicAdd(&s->all[e], all);
        atomicAdd(&s->before[e], before);
    }
    __syncthreads();
}

/* Writes the places of a chunk's uses; the first chunk's block also what does not depend on the
 * chunk. */
template <int T>
static __device__ __forceinline__ void place(const struct route_args &a, uint32_t chunk,
                                             const uint32_t *shared, struct sorting<T> *s)
{
    constexpr uint32_t PER = BT_CU_EXPERTS_MAX / T; /* experts of a thread */
    const uint32_t n = a.x.n, row0 = chunk * BT_CU_EXPERTS_CHUNK;
    const uint32_t uses = min(BT_CU_EXPERTS_CHUNK, a.rows - row0) * a.x.used;
    uint32_t total[PER], before[PER];
    uint64_t mine = 0;
    mark(a, chunk, shared, s);
    if (a.chunks > 1) {
        add_chunks(a, chunk, s);
    }
#pragma unroll
    for (uint32_t i = 0; i < PER; i++) { /* neighbouring experts */
        uint32_t e = threadIdx.x * PER + i;
        total[i] = before[i] = 0;
        if (e < n && a.chunks == 1) {
            total[i] = marked(s, e);
        } else if (e < n) {
            total[i] = s->all[e];
            before[i] = s->before[e];
        }
        mine += (uint64_t)((total[i] + a.part - 1) / a.part) << 32 | total[i];
    }
    uint64_t at = sum_before(mine, s); /* parts, uses */
#pragma unroll
    for (uint32_t i = 0; i < PER; i++) {
        uint32_t e = threadIdx.x * PER + i, first = (uint32_t)at, part = (uint32_t)(at >> 32);
        uint32_t parts = (total[i] + a.part - 1) / a.part;
        if (e >= n) {
            break;
        }
        s->at[e] = first + before[i];
        const uint32_t granules = (total[i] + a.granule - 1) / a.granule;
        for (uint32_t k = 0; k < parts && chunk == 0; k++) { /* equal ones */
            uint32_t from = granules * k / parts * a.granule;
            uint32_t to = min(granules * (k + 1) / parts * a.granule, total[i]);
            a.p.parts[part + k] = {e, first + from, to - from, 0};
            a.p.done[part + k] = 0;
        }
        at += (uint64_t)parts << 32 | total[i];
        if (chunk == 0) {
            a.p.first[e] = first;
        }
        if (chunk == 0 && e == n - 1) {
            a.p.first[n] = (uint32_t)at;
            a.p.state->parts = (uint32_t)(at >> 32);
            a.p.state->next = 0;
            a.p.state->ready = 0;
        }
    }
    __syncthreads();
    for (uint32_t u = threadIdx.x; u < uses; u += T) {
        uint32_t e = expert_of(a, row0, u, shared), row = u / a.x.used;
        uint32_t *mine = a.p.places + (size_t)row0 * a.x.used + u;
        if (e >= n) {
            *mine = NONE;
            continue;
        }
        uint32_t to = s->at[e];
#pragma unroll
        for (uint32_t i = 0; i < WORDS; i++) {
            uint32_t below = i < row / 32 ? ~0u : i == row / 32 ? (1u << row % 32) - 1 : 0;
            to += __popc(s->rows[e][i] & below);
        }
        a.p.uses[to] = row0 * a.x.used + u;
        *mine = to;
    }
}

/* ---- kernels ---- */

/* Whether this is the last of n blocks to come here, and sees what the others have written. One
 * thread. */
static __device__ __forceinline__ bool last_of(uint32_t *ticket, uint32_t n)
{
    if (n == 1) {
        return true;
    }
    __threadfence(); /* also for the block's other threads, which passed a barrier before */
    const bool last = atomicInc(ticket, n - 1) == n - 1;
    __threadfence();
    return last;
}

/* With one chunk, the last block to finish its rows sorts all of them. */
template <int N>
static __global__ void __launch_bounds__(ROUTERS)
    route_kernel(const __grid_constant__ struct route_args a)
{
    __shared__ union {
        float choice[ROUTED][N * 32];
        struct sorting<ROUTERS> sorting;
    } s;
    __shared__ bool last;
    const uint32_t warp = threadIdx.x / 32, row = blockIdx.x * ROUTED + warp;
    early_next();
    early_wait();
    if (row < a.rows) {
        route_row<N>(a, row, s.choice[warp], NULL);
    }
    if (a.chunks > 1 || a.rows == 1) {
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last = last_of(&a.p.state->ticket, gridDim.x);
    }
    __syncthreads();
    if (last) {
        place<ROUTERS>(a, 0, NULL, &s.sorting);
    }
}

/* Few rows in one launch. The blocks of 16 rows make their scores; the last of them routes the
 * rows, one in each warp; the last of all sorts them. */
template <int N>
static __global__ void __launch_bounds__(few_cut::THREADS)
    choose_kernel(const __grid_constant__ struct scores_args c,
                  const __grid_constant__ struct route_args a)
{
    static_assert(few_cut::MT == 1 && few_cut::WARPS == 16, "a warp routes a row");
    constexpr uint32_t ROWS = 16;
    extern __shared__ __align__(16) uint8_t raw[]; /* of the scores, then of the rest */
    __shared__ uint32_t experts[ROWS * BT_CU_EXPERTS_USED_MAX];
    __shared__ bool last;
    const uint32_t warp = threadIdx.x / 32, tile = blockIdx.x / c.tiles, row = tile * ROWS + warp;
    const uint32_t tiles = (a.rows + ROWS - 1) / ROWS;
    early_next();
    const float *factor = scores_block<few_cut>(c, raw);
    __syncthreads();
    if (threadIdx.x == 0) { /* while the others write what the experts read */
        last = last_of(&a.p.state->tickets[tile], c.tiles);
    } else if (warp > 0) {
        write_norm(c, tile * ROWS, ROWS, factor, threadIdx.x - 32, few_cut::THREADS - 32);
    }
    __syncthreads();
    if (!last) {
        return;
    }
    if (row < a.rows) {
        route_row<N>(a, row, (float *)raw + warp * (N * 32), experts + warp * a.x.used);
    }
    if (a.rows == 1) { /* it is in order */
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last = last_of(&a.p.state->ticket, tiles);
    }
    __syncthreads();
    if (last) {
        place<few_cut::THREADS>(a, 0, tiles == 1 ? experts : NULL,
                                (struct sorting<few_cut::THREADS> *)raw);
    }
}

static __global__ void __launch_bounds__(ROUTERS)
    count_kernel(const __grid_constant__ struct route_args a)
{
    __shared__ struct sorting<ROUTERS> s;
    early_next();
    early_wait();
    mark<ROUTERS>(a, blockIdx.x, NULL, &s);
    for (uint32_t e = threadIdx.x; e < a.x.n; e += ROUTERS) {
        a.p.counts[(size_t)blockIdx.x * a.x.n + e] = marked(&s, e);
    }
}

static __global__ void __launch_bounds__(ROUTERS)
    place_kernel(const __grid_constant__ struct route_args a)
{
    __shared__ struct sorting<ROUTERS> s;
    early_next();
    early_wait();
    place<ROUTERS>(a, blockIdx.x, NULL, &s);
}

/* ---- launches ---- */

static struct route_args route_args_of(const struct bt_cu_experts *x, const float *scores,
                                       const float *bias, const int32_t *slots, uint32_t rows,
                                       void *scratch)
{
    const bool few = bt_cu_experts_few_rows(x, rows);
    struct route_args a = {};
    a.x = *x;
    a.p = bt_cu_experts_plan(x, rows, scratch);
    a.scores = scores;
    a.bias = bias;
    a.slots = slots;
    a.rows = rows;
    a.chunks = (rows + BT_CU_EXPERTS_CHUNK - 1) / BT_CU_EXPERTS_CHUNK;
    a.part = few ? BT_CU_EXPERTS_FEW_PART : BT_CU_EXPERTS_MANY_PART;
    a.granule = few ? BT_CU_EXPERTS_FEW_PART : BT_CU_EXPERTS_GRANULE;
    return a;
}

extern "C" cudaError_t bt_cu_experts_route(const struct bt_cu_experts *x, const float *scores,
                                           const float *bias, const int32_t *slots, uint32_t rows,
                                           void *scratch, cudaStream_t s)
{
    if (!bt_cu_experts_fits(x) || rows == 0 || rows > bt_cu_experts_rows(x)) {
        return cudaErrorInvalidValue;
    }
    const struct route_args a = route_args_of(x, scores, bias, slots, rows, scratch);
    void (*kernel)(struct route_args) = x->n <= 64    ? route_kernel<2>
                                        : x->n <= 128 ? route_kernel<4>
                                        : x->n <= 256 ? route_kernel<8>
                                        : x->n <= 512 ? route_kernel<16>
                                                      : route_kernel<32>;
    cudaError_t e =
        launch_early(kernel, (rows + ROUTED - 1) / ROUTED, rows == 1 ? 32 : ROUTERS, 0, s, a);
    if (e == cudaSuccess && a.chunks > 1) {
        e = launch_early(count_kernel, a.chunks, ROUTERS, 0, s, a);
        e = e == cudaSuccess ? launch_early(place_kernel, a.chunks, ROUTERS, 0, s, a) : e;
    }
    return e;
}

template <int N>
static cudaError_t launch_choose(const struct scores_args &c, const struct route_args &a,
                                 cudaStream_t s)
{
    constexpr size_t scores = scores_smem<few_cut>(), choices = few_cut::WARPS * N * 32 * 4;
    constexpr size_t sorts = sizeof(struct sorting<few_cut::THREADS>);
    constexpr size_t most = scores > choices ? scores : choices, smem = most > sorts ? most : sorts;
    cudaError_t e = cudaFuncSetAttribute(choose_kernel<N>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    return e == cudaSuccess ? launch_early(choose_kernel<N>, scores_grid<few_cut>(c),
                                           few_cut::THREADS, smem, s, c, a)
                            : e;
}

extern "C" cudaError_t bt_cu_experts_choose(const struct bt_cu_experts *x,
                                            const struct bt_cu_experts_norm *norm,
                                            const struct bt_cu_experts_router *router,
                                            const int32_t *slots, uint32_t rows, void *a,
                                            float *scores, void *scratch, cudaStream_t s)
{
    if (rows > BT_CU_EXPERTS_FEW || x->invariant) {
        cudaError_t e = bt_cu_experts_scores(x, norm, router->w, rows, a, scores, s);
        return e == cudaSuccess
                   ? bt_cu_experts_route(x, scores, router->bias, slots, rows, scratch, s)
                   : e;
    }
    if (!bt_cu_experts_fits(x) || rows == 0) {
        return cudaErrorInvalidValue;
    }
    struct scores_args c = scores_args_of(x, norm, router->w, rows, a, scores);
    c.tiles = scores_tiles<few_cut>(c.n);
    const struct route_args r = route_args_of(x, scores, router->bias, slots, rows, scratch);
    return x->n <= 64    ? launch_choose<2>(c, r, s)
           : x->n <= 128 ? launch_choose<4>(c, r, s)
           : x->n <= 256 ? launch_choose<8>(c, r, s)
           : x->n <= 512 ? launch_choose<16>(c, r, s)
                         : launch_choose<32>(c, r, s);
}
