/* Constrained output on a worker: grammars, and budgets of reasoning (thoughts.h). The grammar of a
 * submission is compiled and masks are made on threads of their own: compiling threads, which also
 * read the model's vocabulary once, and mask threads, which work while the engine computes the
 * forward pass. The engine thread waits only for a mask that is not ready when the forward pass has
 * been launched, and only a part of a step: a row whose mask takes longer sits out, and its mask is
 * made by a thread for slow ones.
 *
 * What a row's mask allows follows from its grammar and its tokens behind the prompt. So a fork, a
 * preempted row, a hand-off and a later epoch need no state: a matcher that is behind its row
 * catches up when the next mask is made. */
#ifndef BT_WORKER_MASK_H
#define BT_WORKER_MASK_H

#include <stdatomic.h>

#include "common/base/list.h"
#include "common/engine/sampling.h"
#include "common/grammar/grammar.h"
#include "common/loop/loop.h"
#include "common/spec/spec.h"
#include "common/worker/thoughts.h"
#include "common/worker/worker.h"

#define BT_WMASK_DETAIL 192 /* bytes of a message */

/* Work of a row's masks in a step, in units of bt_matcher_limit: about 1 ms. What needs more is
 * made ahead of a later step (struct bt_wahead), and the row sits out until then. */
#define BT_WMASK_STEP_WORK 100000u

struct bt_tokenizer;
struct bt_wctl;
struct bt_wstats;
struct bt_wmask_pool;

/* A mask that is made ahead of its row's step, so that no step's limit applies: the first mask of a
 * lead, which the compiling thread makes, and masks that need more work than a step gives. The
 * thread that makes it owns it (a compiling thread or the slow thread); afterwards the row's
 * bt_wmatch does. */
struct bt_wahead {
    uint64_t request;
    uint32_t epoch;
    uint32_t n, *tokens;         /* behind the prompt */
    struct bt_wgrammar *grammar; /* a reference; NULL in a lead's first mask */
    struct bt_matcher *matcher;  /* NULL: from the beginning */
    uint32_t *bits;              /* the mask behind them; NULL: not wanted */
    bt_status_t status;
    struct bt_task task;
    struct bt_wmask_pool *pool;
    struct bt_list link; /* waits for the slow thread */
};
/* Copies the tokens. words: of the mask; 0: only the matcher is to catch up. */
struct bt_wahead *bt_wahead_create(const uint32_t *tokens, uint32_t n, uint32_t words);
void bt_wahead_destroy(struct bt_wahead *a); /* may be NULL */

/* What constrains a submission: its grammar, first as text and then compiled, and the budget of its
 * reasoning. The submission and the compiling threads each have a reference. A compiling thread
 * writes it; others read it after `done` has run. */
struct bt_wgrammar {
    _Atomic uint32_t refs;
    enum bt_grammar_kind kind; /* BT_GRAMMAR_ANY: there is a budget only */
    char *text;                /* until it is compiled */
    size_t len;
    uint32_t min_new; /* no EOS before so many generated tokens, unless nothing else is allowed */
    uint32_t n_stop, stop[BT_ENGINE_MAX_EOS]; /* what ends the sequence */
    uint64_t request;
    uint32_t epoch, tenant;
    struct bt_wahead *first; /* of the lead; the engine thread takes it once it is compiled */
    bt_status_t status;
    char detail[BT_WMASK_DETAIL];
    struct bt_grammar *grammar; /* NULL: none */
    struct bt_wthoughts_rule thoughts;
    /* done runs on the loop once it is compiled, and takes over the compiling threads' reference.
     */
    void (*done)(void *arg, struct bt_wgrammar *g);
    void *arg;
    struct bt_task task;
    struct bt_list link; /* waits for a compiling thread */
};
/* Copies the text; the budget is to be set. */
struct bt_wgrammar *bt_wgrammar_create(enum bt_grammar_kind kind, const void *text, size_t len);
void bt_wgrammar_unref(struct bt_wgrammar *g); /* may be NULL */

/* Where a choice is in its grammar. Owned by the engine thread, and by a mask thread while the
 * choice's job runs. */
struct bt_wmatch {
    struct bt_matcher *matcher;   /* NULL: no mask was made yet, or it is away */
    struct bt_wahead *ahead;      /* a mask that was made ahead; NULL: none */
    const struct bt_wahead *away; /* the slow thread has it: the row is in no step meanwhile */
    struct bt_wthoughts thoughts; /* as far as masks were made */
    bool late, slow; /* of this step: a mask is missing; it needs more work than a step gives */
    uint32_t made;   /* ... behind this many that were made */
    bool compiled;   /* of a lead: the grammar may be used */
    bool queue_due;  /* of a lead: queue it once `compiled` is set */
    /* Text that the grammar forces behind forced_at tokens, as the tokenizer splits it. */
    uint32_t n_forced, forced_at;
    uint32_t forced[BT_SPEC_MAX + 1];
};

/* One row of a step: the masks behind its last known token and behind each draft that follows. */
struct bt_wmask_job {
    struct bt_wreq *r;
    uint32_t at; /* place of the first mask */
    uint32_t n_draft;
    const uint32_t *drafts;
    /* AGAIN: the masks behind the first n_made are missing. Then begun says why: they need more
     * work than a step gives, or no thread came to them in time. */
    bt_status_t status;
    uint32_t n_made;
    bool begun;
    bool must; /* it begins even after the step's limit */
};

/* The engine thread's. */
struct bt_wmasks {
    struct bt_wmask_pool *pool; /* set before the first request exists */
    uint32_t places, words;     /* masks, and words of one */
    uint32_t *bits;             /* [places][words] */
    bool *free;                 /* [places] all of its bits are set */
    struct bt_wmask_job *jobs;  /* [places] of the step */
    uint32_t n_jobs;
};

/* ---- mask.c: engine thread ---- */
void bt_wmask_init(struct bt_wmasks *m, uint32_t places, uint32_t vocab);
void bt_wmask_cleanup(struct bt_wmasks *m);
/* Do r's next tokens need masks? */
bool bt_wmask_needed(const struct bt_wreq *r);
/* May r be queued now? If not, it is queued once its grammar is compiled. */
bool bt_wmask_ready(struct bt_wreq *r);
/* The grammar of the lead r is compiled, or cannot be. */
void bt_wmask_compiled(struct bt_wcore *c, struct bt_wreq *r, bt_status_t st, const char *detail);
/* r, which needs masks, is sampled in this step: its masks go to the places from `at` on. r's
 * tokens and the drafts stay as they are until bt_wmask_wait. */
void bt_wmask_row(struct bt_wcore *c, struct bt_wreq *r, uint32_t at, const uint32_t *drafts,
                  uint32_t n_draft);
/* Begins to make the masks of the rows. */
void bt_wmask_start(struct bt_wcore *c);
/* Fills d with the tokens of text that r's grammar or budget forces to follow, at most `most`;
 * returns their number. They are only drafts, because the model may write the same text with other
 * tokens. */
uint32_t bt_wmask_forced(const struct bt_wreq *r, uint32_t most, struct bt_spec_draft *d);
/* Waits for the masks, for a part of a step's time at most. Returns those of all n places of the
 * step, as vt->sample takes them; NULL: no row needs a mask. Ends requests whose mask cannot be
 * made. Where a mask is late, all its bits are 0: nothing is drawn there. */
const uint32_t *bt_wmask_wait(struct bt_wcore *c, uint32_t n);
/* The step of r, whose mask was late, is over, and nothing was drawn at its end. r goes on in the
 * next step, or when its mask was made ahead. */
void bt_wmask_late(struct bt_wcore *c, struct bt_wreq *r);
/* The mask a, for a choice of lead, is made, or a->status says why not. Takes a. */
void bt_wmask_made(struct bt_wcore *c, struct bt_wreq *lead, struct bt_wahead *a);

/* ---- vocab.c ---- */
struct bt_wvocab {
    struct bt_grammar_vocab *vocab;
    uint32_t n_eos, eos[BT_ENGINE_MAX_EOS]; /* the model's */
    struct bt_tokenizer *tok;               /* one thread's; NULL: forced text is not looked for */
};
/* Reads the model's tokenizer and end-of-text ids, for an engine of `vocab` ids. err names file and
 * remedy. */
bt_status_t bt_wvocab_load(const char *model_path, uint32_t vocab, struct bt_wvocab *v, char *err,
                           size_t err_cap) BT_MUST_CHECK;
void bt_wvocab_cleanup(struct bt_wvocab *v);
/* A copy for another thread. It must be given back before v is cleaned up. */
struct bt_wvocab bt_wvocab_share(const struct bt_wvocab *v);
void bt_wvocab_give_back(struct bt_wvocab *shared);
/* The tokens of text[0..n), at most cap, without the last one: text that follows may change that
 * one. Returns their number. */
uint32_t bt_wvocab_tokens(const struct bt_wvocab *v, const void *text, size_t n, uint32_t *tokens,
                          uint32_t cap);

/* ---- mask_make.c: a mask thread, for a row ---- */
/* Fills the masks of j in bits, and looks for text that its grammar forces. AGAIN: j->n_made of
 * them are made, the others are 0. */
bt_status_t bt_wmask_make(struct bt_wmask_job *j, const struct bt_wvocab *v, uint32_t *bits,
                          uint32_t words) BT_MUST_CHECK;
/* Makes a, of grammar g. */
void bt_wahead_make(struct bt_wahead *a, const struct bt_wgrammar *g, const struct bt_wvocab *v,
                    uint32_t words);

/* ---- mask_pool.c ---- */
struct bt_wmask_pool_conf {
    struct bt_loop *loop;
    struct bt_wstats *stats;
    const char *model_path;
    uint32_t vocab;                               /* of the engine */
    void (*made)(void *arg, struct bt_wahead *a); /* on the loop; takes a */
    void *arg;
};
/* Starts the threads; reading the vocabulary begins at once. NULL: no thread can be started. */
struct bt_wmask_pool *bt_wmask_pool_create(const struct bt_wmask_pool_conf *conf);
/* No masks are made any more. Tasks for the loop may still be posted. */
void bt_wmask_pool_destroy(struct bt_wmask_pool *p);
/* Any thread: compiles g, of which the pool takes a reference. */
void bt_wmask_pool_compile(struct bt_wmask_pool *p, struct bt_wgrammar *g);
/* Engine thread: begins jobs[n]. jobs and bits must stay valid until bt_wmask_pool_wait returns. */
void bt_wmask_pool_start(struct bt_wmask_pool *p, struct bt_wmask_job *jobs, uint32_t n,
                         uint32_t *bits, uint32_t words);
/* Waits until the jobs are done. After wait_ns no job begins but the step's first one; the status
 * of those that have not begun is AGAIN. */
void bt_wmask_pool_wait(struct bt_wmask_pool *p, uint64_t wait_ns);
/* Engine thread: gives a to the slow thread. That takes next what belongs to the row with the least
 * work so far. */
void bt_wmask_pool_slow(struct bt_wmask_pool *p, struct bt_wahead *a);

#endif
