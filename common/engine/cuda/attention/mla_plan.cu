/* Divides a decode step's latent KV over the blocks (mla_priv.h): once for all layers, and on the
 * device, so that the step's graph never changes.
 * A sequence that is cut costs more than its tiles: its parts go through memory, and one block adds
 * them up. So a block takes a whole sequence if that exceeds an even share by little. The cost of a
 * block's run counts this, and the plan has the smallest limit for which one pass over all
 * sequences needs no more blocks than there are. Thirty-two limits are tried at once, one by a
 * thread of each warp; then one thread writes the plan. */
#include "common/engine/cuda/attention/mla_priv.h"
#include "common/engine/cuda/attention/segments.cuh"

/* In tiles: what a piece of a sequence costs beside its tiles (queries, result), what it costs more
 * if the sequence is cut, and the smallest piece of a cut. */
#define PIECE    1
#define CUT      2
#define SMALLEST 2

struct planned {
    int32_t tiles[BT_MLA_MAX_BATCH];
    int32_t total, longest, sequences;
};

/* Where the runs are written; NULL: only counted. */
struct plan_out {
    struct bt_cu_decode_run *runs;
    struct bt_mla_cut *cuts;
};

/* A block's run that is being filled: the number of the run, and the cost that still fits. */
struct filling {
    struct bt_cu_decode_run run;
    int r, room, limit;
};

/* Gives all tiles of a sequence and set to runs. */
static __device__ __forceinline__ void give(struct filling &f, int seq, int set, int tiles,
                                            int item, const struct plan_out *out)
{
    int at = 0, first = 0, slot = 0;
    while (at < tiles) {
        const int rest = tiles - at, whole = rest + PIECE + (at > 0 ? CUT : 0);
        const int take = whole <= f.room ? rest : f.room - PIECE - CUT;
        if (take < SMALLEST && take < rest) { /* no room */
            if (out) {
                out->runs[f.r] = f.run;
            }
            f.run.n = 0;
            f.r++;
            f.room = f.limit;
            continue;
        }
        if (at == 0) {
            first = f.r;
            slot = f.run.n > 0;
        }
        if (f.run.n == 0) {
            f.run = {seq, set, at, 0};
        }
        f.run.n += take;
        at += take;
        f.room -= take == rest ? whole : f.room;
    }
    if (out && tiles > 0) {
        out->cuts[item] = {first, f.r, slot, 0};
    }
}

/* Gives the sequences, `sets` times each, to runs that cost at most `limit`; returns how many. It
 * stops when they are more than `most`. */
static __device__ int divide(const struct planned &p, int batch, int sets, int limit, int most,
                             const struct plan_out *out)
{
    struct filling f = {{0, 0, 0, 0}, 0, limit, limit};
    for (int seq = 0; seq < batch && f.r <= most; seq++) {
        const int tiles = p.tiles[seq];
        for (int set = 0; set < sets; set++) {
            give(f, seq, set, tiles, seq * sets + set, out);
        }
    }
    if (out && f.run.n > 0) {
        out->runs[f.r] = f.run;
    }
    return f.r + (f.run.n > 0);
}

static __global__ void __launch_bounds__(1024)
    mla_plan_kernel(const struct bt_attn_queries *queries, int batch, int sets, int blocks,
                    int pieces, struct bt_cu_decode_seq *seqs, struct bt_cu_decode_run *runs,
                    struct bt_mla_cut *cuts)
{
    __shared__ struct planned p;
    __shared__ uint32_t fits; /* a bit for each limit that is tried */
    if (threadIdx.x == 0) {
        p.total = p.longest = p.sequences = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < batch; i += 1024) {
        const struct bt_attn_queries q = queries[i];
        const int tiles = (q.len + BT_MLA_PAGE_TOKENS - 1) / BT_MLA_PAGE_TOKENS;
        seqs[i] = {0, tiles, 0, q.len, q.row, q.n, q.slot, 0};
        p.tiles[i] = tiles;
        atomicAdd(&p.total, tiles);
        atomicMax(&p.longest, tiles);
        atomicAdd(&p.sequences, tiles > 0);
    }
    for (int i = threadIdx.x; i < blocks; i += 1024) {
        runs[i] = {0, 0, 0, 0};
    }
    __syncthreads();
    int limit = ((p.total + p.sequences * PIECE) * sets + blocks - 1) / blocks;
    limit = max(limit, (p.longest + pieces - 1) / pieces + PIECE + CUT);
    limit = max(limit, SMALLEST + PIECE + CUT);
    for (;; limit += 32) {
        const int warp = threadIdx.x / 32;
        fits = 0;
        __syncthreads();
        if (threadIdx.x % 32 == 0 && divide(p, batch, sets, limit + warp, blocks, NULL) <= blocks) {
            atomicOr(&fits, 1u << warp);
        }
        __syncthreads();
        if (fits) {
            break;
        }
        __syncthreads(); /* all have read it */
    }
    if (threadIdx.x == 0) {
        const struct plan_out out = {runs, cuts};
        divide(p, batch, sets, limit + __ffs((int)fits) - 1, blocks, &out);
    }
}

extern "C" cudaError_t bt_mla_plan(struct bt_mla *m, const struct bt_attn_queries *queries,
                                   uint32_t n, const struct bt_mla_shape *shape, uint32_t pieces,
                                   cudaStream_t s)
{
    mla_plan_kernel<<<1, 1024, 0, s>>>(queries, (int)n, (int)shape->sets,
                                       (int)(shape->blocks == 2 ? m->clusters : m->blocks),
                                       (int)pieces, m->seqs, m->runs, m->cuts);
    return cudaGetLastError();
}

/* ---- bt_mla_invariant: sequences are cut at segments alone ---- */

struct planned_items {
    int32_t tiles[BT_MLA_MAX_BATCH];
    int32_t total, longest, n, unit; /* unit: of segments, in tiles */
    int32_t blocks, parts;           /* the most runs, and parts of segments */
};

/* As divide(). A sequence for whose segments there is no room among the parts goes to one run, and
 * so does one that the limit need not cut. */
static __device__ int divide_items(const struct planned_items &p, int limit,
                                   const struct plan_out *out)
{
    struct bt_cu_decode_run run = {0, 0, 0, 0};
    int r = 0, room = limit, parts = 0;
    for (int item = 0; item < p.n && r <= p.blocks; item++) {
        const int tiles = p.tiles[item], segments = segment_of(tiles - 1, p.unit) + 1;
        const bool cuts = segments > 1 && parts + segments <= p.parts;
        int at = 0, first = 0;
        while (at < tiles) {
            const int rest = tiles - at, whole = rest + PIECE + (at > 0 ? CUT : 0);
            int take = max(room - PIECE - CUT, 0);
            take = segment_begin(segment_of(at + take, p.unit), p.unit) - at;
            take = whole <= room ? rest : cuts ? min(take, rest) : room == limit ? rest : 0;
            if (take <= 0) { /* no room */
                if (out) {
                    out->runs[r] = run;
                }
                run.n = 0;
                r++;
                room = limit;
                continue;
            }
            first = at == 0 ? r : first;
            if (run.n == 0) {
                run = {item, 0, at, 0};
            }
            run.n += take;
            at += take;
            room -= take == rest ? min(whole, room) : room;
        }
        if (out) {
            out->cuts[item] = {first, r, parts, 0};
        }
        parts += first < r ? segments : 0;
    }
    if (out && run.n > 0 && r < p.blocks) {
        out->runs[r] = run;
    }
    return r + (run.n > 0);
}

/* Tiles of the largest segment of a sequence. */
static __device__ int largest_segment(int tiles, int unit)
{
    return tiles <= 4 * unit    ? min(tiles, unit)
           : tiles <= 16 * unit ? max(unit, min(tiles - 4 * unit, 2 * unit))
                                : max(2 * unit, min(tiles - 16 * unit, 4 * unit));
}

static __global__ void __launch_bounds__(1024)
    mla_items_plan_kernel(const struct bt_attn_item *items, int n, int unit, int blocks, int parts,
                          struct bt_cu_decode_seq *seqs, struct bt_cu_decode_run *runs,
                          struct bt_mla_cut *cuts)
{
    __shared__ struct planned_items p;
    if (threadIdx.x == 0) {
        p.total = p.longest = 0;
        p.n = n;
        p.unit = unit;
        p.blocks = blocks;
        p.parts = parts;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 1024) {
        const struct bt_attn_item it = items[i];
        const int len = it.pos + it.n, tiles = (len + BT_MLA_PAGE_TOKENS - 1) / BT_MLA_PAGE_TOKENS;
        seqs[i] = {0, tiles, 0, len, it.row, it.n, it.slot, 0};
        p.tiles[i] = tiles;
        atomicAdd(&p.total, tiles);
        atomicMax(&p.longest, tiles);
    }
    for (int i = threadIdx.x; i < blocks; i += 1024) {
        runs[i] = {0, 0, 0, 0};
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    /* A run must be able to take any segment. */
    int limit = max((p.total + n * PIECE + blocks - 1) / blocks,
                    largest_segment(p.longest, unit) + PIECE + CUT);
    uint32_t fit = 0;
    for (;; limit += 32) {
        fit = __ballot_sync(~0u, divide_items(p, limit + (int)threadIdx.x, NULL) <= blocks);
        if (fit) {
            break;
        }
    }
    if (threadIdx.x == 0) {
        const struct plan_out out = {runs, cuts};
        divide_items(p, limit + __ffs((int)fit) - 1, &out);
    }
}

extern "C" cudaError_t bt_mla_items_plan(struct bt_mla *m, const struct bt_attn_item *items,
                                         uint32_t n, const struct bt_mla_shape *shape,
                                         cudaStream_t s)
{
    const uint32_t blocks = shape->blocks == 2 ? m->clusters : m->blocks;
    mla_items_plan_kernel<<<1, 1024, 0, s>>>(
        items, (int)n, (int)m->pool.segment / BT_MLA_PAGE_TOKENS, (int)blocks,
        (int)(BT_MLA_SEGMENT_PARTS / shape->blocks), m->seqs, m->runs, m->cuts);
    return cudaGetLastError();
}
