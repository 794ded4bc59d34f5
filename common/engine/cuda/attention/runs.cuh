/* How a block of a decode kernel walks through its run of tiles (attention_priv.h), piece by piece.
 * The kernel's arguments (ARGS) have the plan's seqs, and kv_heads. Device code only. */
#ifndef BT_CUDA_ATTN_RUNS_CUH
#define BT_CUDA_ATTN_RUNS_CUH

#include "common/engine/cuda/attention/attention_priv.h"

/* Which of `runs` even cuts of the list has tile x, and where a cut begins. */
static __device__ __forceinline__ int run_of(int x, int total, int runs)
{
    int base = total / runs, more = total % runs, wide = more * (base + 1);
    return x < wide ? x / (base + 1) : more + (x - wide) / base;
}
static __device__ __forceinline__ int run_begin(int i, int total, int runs)
{
    return i * (total / runs) + min(i, total % runs);
}

/* Reads what kernels have written, bypassing the L1 cache: before early_wait() the L1 cache may
 * still have the values of an earlier step. */
static __device__ __forceinline__ struct bt_cu_decode_run run_at(const struct bt_cu_decode_run *p)
{
    int4 v = __ldcg((const int4 *)p);
    return {v.x, v.y, v.z, v.w};
}
static __device__ __forceinline__ struct bt_cu_decode_seq seq_at(const struct bt_cu_decode_seq *p)
{
    int4 v = __ldcg((const int4 *)p), q = __ldcg((const int4 *)p + 1);
    return {v.x, v.y, v.z, v.w, q.x, q.y, q.z, 0};
}

/* The walk through a run, piece by piece. A piece is tiles of one sequence and head. */
struct walk {
    int seq, head, tile, left; /* tile: counted from the sequence's tile0 */
    int n;                     /* tiles of this piece */
    struct bt_cu_decode_seq s;
};
template <class ARGS> static __device__ __forceinline__ void walk_seq(const ARGS &a, struct walk &w)
{
    w.s = seq_at(a.seqs + w.seq);
}
static __device__ __forceinline__ bool walk_piece(struct walk &w)
{
    if (w.left == 0) {
        return false;
    }
    w.n = min(w.left, w.s.tiles - w.tile);
    return true;
}
template <class ARGS>
static __device__ __forceinline__ void walk_next(const ARGS &a, struct walk &w)
{
    w.left -= w.n;
    w.tile += w.n;
    if (w.tile == w.s.tiles) {
        w.tile = 0;
        if (++w.head == (int)a.kv_heads && w.left > 0) {
            w.head = 0;
            do { /* skips sequences of length 0, which have no tiles */
                w.seq++;
                walk_seq(a, w);
            } while (w.s.tiles == 0);
        }
    }
}

#endif
