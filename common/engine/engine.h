/* The engine: runs a model's forward steps over paged KV and samples. A back end is a plugin
 * (build/lib/baton-engine-<name>.so) that exports bt_engine_plugin. One owner thread calls
 * everything; only open, poll and close may block. forward and sample are asynchronous and
 * separate: a grammar mask may arrive while forward runs, the next forward may be launched before
 * the last result is read. A back end without a device may finish them inside the call; the caller
 * cannot tell. */
#ifndef BT_ENGINE_ENGINE_H
#define BT_ENGINE_ENGINE_H

#include "common/base/base.h"
#include "common/engine/sampling.h"
#include "common/kv/flow.h"
#include "common/kv/layout.h"

#define BT_ENGINE_ABI 10

struct bt_engine;
typedef uint64_t bt_engine_ticket_t; /* increasing; 0: none */

enum {                           /* bt_engine_info.caps */
       BT_ENGINE_CAP_EXACT = 1,  /* row results do not depend on neighbours, chunking or cache */
       BT_ENGINE_CAP_MIXED = 2,  /* prompt chunks and single tokens in one step */
       BT_ENGINE_CAP_DRAFTS = 4, /* rows with drafts; without it they are ERR_UNSUPPORTED */
       BT_ENGINE_CAP_HIDDEN = 8, /* params.dola, penalty_alpha; else slot_open: ERR_UNSUPPORTED */
       BT_ENGINE_CAP_MTP = 16    /* config.mtp was set: the last layer of KV is the MTP layer's */
};

struct bt_engine_config {
    uint32_t size; /* sizeof this struct, for plugins built apart */
    const char *model_dir;
    const char *load_format; /* "auto" or "dummy" (random weights of the config's shape) */
    uint32_t threads;        /* CPU: compute threads; 0: all cores this process may use */
    uint32_t page_tokens;    /* = kv.block_tokens */
    uint32_t pages;          /* KV pages; 0: as many as fit mem_limit */
    uint32_t max_slots;      /* sequences at once */
    uint32_t max_rows;       /* tokens of one step over all rows */
    uint64_t mem_limit;      /* bytes for KV pages when pages is 0 */
    uint32_t rank, ranks;    /* tensor parallelism; one rank today: 0 of 1 */
    void *slab; /* a slab as slab_open takes one, pinned before open returns; may be NULL */
    uint64_t slab_bytes;
    void (*progress)(void *arg, const char *what, double fraction); /* while opening; may be NULL */
    void *progress_arg;
    /* CPU: what its bf16 products read of an activation. "split": two bf16, 16 bits;
     * "bf16-mlp" (NULL): gate, up and down read one, half their work. Part of the KV root key. */
    const char *activations;
    /* "none" (NULL), or "fp8": matrices of 16-bit checkpoints become e4m3 (decoder.h). Part of the
     * KV root key. */
    const char *quantize;
    /* A row's result depends on no other row, and not on chunks, cache or worker, as
     * BT_ENGINE_CAP_EXACT says. A back end that cannot do this refuses. Part of the KV root key. */
    bool deterministic;
    const char *kv_dtype; /* "f16" (NULL) or "fp8": what KV is kept as, see model_config.h */
    /* The model's MTP layer is loaded, and its KV kept for all tokens; a back end that cannot do
     * that refuses. Part of the KV layout. */
    bool mtp;
};

struct bt_engine_info {
    uint32_t size, abi;
    uint32_t caps;
    uint32_t vocab, max_model_len;
    uint32_t pages, max_slots, max_rows;
    uint32_t max_drafts;   /* of a step, over all its rows; 0 without CAP_DRAFTS */
    uint32_t hidden_bytes; /* that a slot with params.penalty_alpha keeps of a token */
    struct bt_kv_layout layout;
    char device[96]; /* "cpu avx512_core_bf16 2 threads" */
};

/* A place in a flow: item numbers (common/kv/flow.h). flow 0: none. */
struct bt_engine_at {
    uint32_t flow, seq;
};

/* SAMPLE: samples the token after the row's last. PROMPT_LOGPROBS: the event of the forward ticket
 * reports logprobs of prompt tokens. For each token of the row that a prompt token follows (by
 * slot_open's tokens and n_prompt) it has the logprob of that next token; params.logprobs says how
 * many alternatives come with it. A prompt computed without cache, in any chunks, reports its
 * tokens 1 to n_prompt - 1 once each. BEAM: a row of a beam search, which has no drafts: what its
 * slot knows may be another beam's text, so its KV of an MTP layer is zeros. */
enum { BT_ROW_SAMPLE = 1, BT_ROW_PROMPT_LOGPROBS = 2, BT_ROW_BEAM = 4 };
#define BT_ENGINE_POS_NEXT UINT32_MAX

struct bt_engine_row { /* n consecutive tokens of one sequence */
    uint32_t slot;
    uint32_t pos; /* absolute position of the first; BT_ENGINE_POS_NEXT: after the last one run */
    uint32_t n;
    /* With BT_ROW_BEAM they may differ from those that the slot knows: the beam of a beam search
     * continues another one. Such a slot may have no penalties and no min_new. */
    const uint32_t *tokens; /* NULL (n = 1): the token this slot sampled last, on the device */
    uint32_t flags;
    /* Of a SAMPLE row: how many of its last tokens are drafts, which the slot does not know yet;
     * below n. The engine samples at the token before them and at each of them. It goes on, as
     * single rows would, as long as the token drawn equals the next draft. So the row has 1 to
     * n_draft + 1 results: accepted drafts, then one more token. KV of refused drafts stays behind
     * the sequence's end, where its next row overwrites it. 0 in slots with params.dola or
     * penalty_alpha. */
    uint32_t n_draft;
    struct bt_engine_at wait; /* layer l waits until the LOAD flow has loaded item wait.seq + l */
    struct bt_engine_at
        fire; /* when layer l of this row is done, STORE items up to fire.seq + l go */
};

struct bt_engine_batch {
    uint32_t n_rows; /* 0 is legal: lock-step of expert parallelism */
    const struct bt_engine_row *rows;
};

struct bt_engine_out { /* one token: sampled, or of a prompt */
    uint32_t slot;
    uint32_t pos; /* its position in the sequence */
    uint32_t token;
    float logprob; /* of the model's own distribution, before mask, bias, penalties, temperature
                      and truncation (raw logprobs); of a sampled token 0 unless
                      params.logprobs >= 0 */
    uint32_t rank; /* of a prompt token among those that could be drawn, from 1; sampled: 0 */
    uint32_t n_top;
    uint32_t top_id[BT_ENGINE_MAX_TOP]; /* by falling logprob */
    float top_logprob[BT_ENGINE_MAX_TOP];
    bool bad;  /* logits were NaN, or the token is outside the vocabulary: fail the request */
    bool more; /* an accepted draft: the next result is of the same row */
};

struct bt_engine_event {
    bt_engine_ticket_t ticket;
    bt_status_t status; /* ERR_DEVICE is sticky: the worker goes out of service */
    uint32_t n_out;     /* sample tickets: results in the order of the SAMPLE rows of the batch
                           (several of a row with drafts), then of forks; forward tickets: prompt tokens
                           in the order of the     PROMPT_LOGPROBS rows, rising positions in each */
    const struct bt_engine_out *out; /* valid until release(ticket) */
    float run_us;
};

/* Blocks of a flow. The segments of block `mem` (one per layer) are items seq .. seq + n_layers
 * - 1. toks < page_tokens: a partial block; STORE writes zeros behind them, LOAD ignores what is
 * there. */
struct bt_engine_block {
    void *mem; /* the slot's data in the mapped slab, block_bytes long */
    uint32_t page;
    uint32_t toks;
    uint32_t seq;
};
enum { BT_ENGINE_LOAD = 0, BT_ENGINE_STORE = 1 };
enum { BT_ENGINE_PRIO_LAND = 0, BT_ENGINE_PRIO_PREEMPT = 1, BT_ENGINE_PRIO_WRITEBACK = 2 };

struct bt_engine_vtable {
    uint32_t abi;
    const char *name;
    /* Loads the model. err names file, tensor and remedy. ERR_INVALID: model; ERR_DEVICE: no
     * device. */
    bt_status_t (*open)(const struct bt_engine_config *, struct bt_engine **,
                        const struct bt_engine_info **, char *err, size_t err_cap);
    void (*close)(struct bt_engine *);

    /* Flows copy from and to this memory from now on, until slab_close reports that no copy uses it
     * and it may be unmapped. A device pins it in the background; copies before that are slower.
     * Both NULL: an engine that needs no pinning. */
    void (*slab_open)(struct bt_engine *, void *mem, uint64_t bytes);
    void (*slab_close)(struct bt_engine *, void *mem);

    /* Opens a sequence. tokens[0..n) are the tokens known so far (prompt and generated), of which
     * n_prompt are the prompt. Penalties and the random position are rebuilt from them. Computes no
     * KV. ERR_NO_MEMORY: there is no memory for hidden_max hidden states. */
    bt_status_t (*slot_open)(struct bt_engine *, uint32_t slot, const struct bt_engine_params *,
                             const uint32_t *tokens, uint32_t n, uint32_t n_prompt);
    /* Tells the sequence's page table: pages[i] holds tokens [(first+i)*page_tokens, ...). Also in
     * place of pages that it had. */
    bt_status_t (*slot_pages)(struct bt_engine *, uint32_t slot, uint32_t first,
                              const uint32_t *pages, uint32_t n);
    /* Opens `to` as another choice of `from`: the same parameters except choice, the same tokens
     * and page table. Pages are shared by reference. The engine does not count references: the
     * caller keeps a page until each slot that uses it is closed and quiet. Both slots write only
     * pages that no other slot has, so the caller must replace the page of a partial block, with
     * slot_pages and page_copy. A fork between a forward and its sample is sampled with it: its
     * first token comes from the same logits, and its results follow those of the rows, in order of
     * forking; it has no part in the drafts of a row. ERR_UNSUPPORTED with params.penalty_alpha. */
    bt_status_t (*slot_fork)(struct bt_engine *, uint32_t from, uint32_t to, uint32_t choice);
    /* Copies the KV of the first toks tokens of a page, all layers, behind the forwards before it
     * and before those after it. */
    bt_status_t (*page_copy)(struct bt_engine *, uint32_t from, uint32_t to, uint32_t toks);
    /* Sets a token that was chosen elsewhere (the first token of a hand-off), as if it had been
     * sampled here. */
    bt_status_t (*slot_accept)(struct bt_engine *, uint32_t slot, uint32_t token);
    /* Pages and slot may be reused once `quiet_p` has been polled. */
    bt_status_t (*slot_close)(struct bt_engine *, uint32_t slot, bt_engine_ticket_t *quiet_p);

    /* A flow of copies between pages and slab. word (may be NULL): STORE raises it to (epoch, seq)
     * when all items below seq are visible in the slab, then calls bell (may be NULL, any thread).
     * LOAD: items become loadable when their word (raised by somebody else) has passed them; with
     * word NULL everything added is loadable at once. */
    bt_status_t (*flow_open)(struct bt_engine *, int dir, int prio, bt_flow_word_t *word,
                             uint32_t epoch, void (*bell)(void *arg), void *bell_arg,
                             uint32_t *flow_p);
    /* Adds blocks. Items are released in order of seq; LOAD items start by themselves, STORE items
     * when a row fires them (or flow_release does). */
    bt_status_t (*flow_add)(struct bt_engine *, uint32_t flow, const struct bt_engine_block *,
                            uint32_t n);
    /* STORE: releases items below seq without a row (write-back of whole pages); *done_p is the
     * ticket of the copies, after which the slab holds the bytes. LOAD: *done_p is polled once all
     * added items below seq are loaded. */
    bt_status_t (*flow_release)(struct bt_engine *, uint32_t flow, uint32_t seq,
                                bt_engine_ticket_t *done_p);
    /* quiet_p: after it was polled, no copy touches slab or pages. Without abort, a LOAD first
     * loads the added blocks, whenever its word allows it; a STORE drops items that were not
     * released. */
    bt_status_t (*flow_close)(struct bt_engine *, uint32_t flow, bool abort,
                              bt_engine_ticket_t *quiet_p);

    bt_status_t (*forward)(struct bt_engine *, const struct bt_engine_batch *,
                           bt_engine_ticket_t *fwd_p);
    /* Samples for the SAMPLE rows of a forward. mask: one bit a token, [sampled positions][vocab /
     * 32 rounded up] in the order of the rows, 1 + n_draft of each; or NULL. It is not read after
     * the call. Where no bit is set nothing is drawn: the result is bad, it is the row's last one,
     * and the sequence stays as it is. */
    bt_status_t (*sample)(struct bt_engine *, bt_engine_ticket_t fwd, const uint32_t *mask,
                          bt_engine_ticket_t *out_p);
    /* NULL or ERR_UNSUPPORTED without BT_ENGINE_CAP_MTP. Makes drafts: for each of n slots up to k
     * tokens that may follow its known ones. They are drawn as its next tokens will be, but without
     * a mask. outs: [n][k] results, of which slot i has counts[i]. A slot has none until the token
     * before its last one has run in it, so none in the first step behind loaded KV. The slot does
     * not change. The MTP layer writes KV into the pages of the slot's last token and of the k - 1
     * positions behind it; their rows write it again. Blocks until the drafts are there.
     * ERR_INVALID, ERR_DEVICE; ERR_TOO_LARGE for n above max_rows. Not for slots with params.dola
     * or penalty_alpha, and not for beams. */
    bt_status_t (*draft)(struct bt_engine *, const uint32_t *slots, uint32_t n, uint32_t k,
                         struct bt_engine_out *outs, uint32_t *counts);
    /* Finished tickets, in order of their number; blocks at most timeout_us. Returns the count. */
    uint32_t (*poll)(struct bt_engine *, struct bt_engine_event *, uint32_t max,
                     uint32_t timeout_us);
    void (*release)(struct bt_engine *, bt_engine_ticket_t);
};

/* Layers of the model itself, without an MTP layer. */
static inline uint32_t bt_engine_layers(const struct bt_engine_info *info)
{
    return info->layout.n_layers - (info->caps & BT_ENGINE_CAP_MTP ? 1 : 0);
}

typedef const struct bt_engine_vtable *(*bt_engine_plugin_fn)(uint32_t abi);
/* Exported by each plugin; NULL if it does not speak this ABI. */
const struct bt_engine_vtable *bt_engine_plugin(uint32_t abi);

/* Loads build/lib or <prefix>/lib/baton/baton-engine-<name>.so (name: cpu|cuda|null; "auto": cuda
 * if a device answers, otherwise cpu). err names the files that were tried. The plugin stays
 * loaded. */
bt_status_t bt_engine_load(const char *name, const struct bt_engine_vtable **vt_p, char *err,
                           size_t err_cap) BT_MUST_CHECK;

#endif
