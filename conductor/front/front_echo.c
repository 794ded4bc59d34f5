/* A prompt's own logprobs on their way into the answer. Thousands of tokens with twenty
 * alternatives each take a tenth of a second to write; that is done on the jobs' thread, while the
 * request holds back the tokens behind them. Loop thread but for run. */
#include "conductor/front/front_echo.h"

#include <stdlib.h>
#include <string.h>

#define INLINE_NAMES 512 /* tokens and alternatives: ~1 ms of writing */

struct front_echo {
    struct front_task task;
    void (*taken)(void *arg); /* loop only; NULL: nobody waits */
    void *arg;
    struct front_answer *a;
    uint32_t prompt;
    struct front_options opt;
    struct front_names names;
    struct bt_buf text;
    size_t n;
    struct bt_gen_token *tokens; /* [n], their top arrays in ids and lps */
    uint32_t *ids;
    float *lps;
    struct front_logprobs lp;
    struct bt_buf logprobs;
};

static void echo_free(struct front_task *t)
{
    struct front_echo *e = BT_CONTAINER_OF(t, struct front_echo, task);
    front_names_cleanup(&e->names);
    bt_buf_cleanup(&e->text);
    front_logprobs_cleanup(&e->lp);
    bt_buf_cleanup(&e->logprobs);
    free(e->tokens);
    free(e->ids);
    free(e->lps);
    free(e);
}

static void run(const struct front_model *m, struct front_task *t)
{
    struct front_echo *e = BT_CONTAINER_OF(t, struct front_echo, task);
    e->names.tok = m->tok;
    front_prompt_format(&e->opt, &e->names, e->tokens, e->n, &e->text, &e->lp, &e->logprobs);
}

static void done(struct front_task *t)
{
    struct front_echo *e = BT_CONTAINER_OF(t, struct front_echo, task);
    void (*taken)(void *arg) = e->taken;
    void *arg = e->arg;
    if (taken != NULL) {
        front_answer_prompt(e->a, e->prompt, &e->lp, &e->logprobs);
    }
    echo_free(t);
    if (taken != NULL) {
        taken(arg);
    }
}

/* tokens are the caller's: a copy. */
static void copy_tokens(struct front_echo *e, const struct bt_gen_token *tokens, size_t n_top)
{
    size_t at = 0;
    e->tokens = bt_malloc(e->n * sizeof(*e->tokens));
    memcpy(e->tokens, tokens, e->n * sizeof(*e->tokens));
    e->ids = bt_malloc((n_top + 1) * sizeof(*e->ids));
    e->lps = bt_malloc((n_top + 1) * sizeof(*e->lps));
    for (size_t i = 0; i < e->n; i++) {
        struct bt_gen_token *t = &e->tokens[i];
        if (t->n_top > 0) {
            memcpy(e->ids + at, t->top_id, t->n_top * sizeof(*e->ids));
            memcpy(e->lps + at, t->top_logprob, t->n_top * sizeof(*e->lps));
        }
        t->top_id = e->ids + at;
        t->top_logprob = e->lps + at;
        at += t->n_top;
    }
}

struct front_echo *front_echo_start(struct bt_front *f, struct front_answer *a, uint32_t prompt,
                                    const struct bt_gen_token *tokens, size_t n,
                                    void (*taken)(void *arg), void *arg)
{
    size_t n_top = 0;
    for (size_t i = 0; i < n; i++) {
        n_top += tokens[i].n_top;
    }
    if (n + n_top <= INLINE_NAMES) {
        struct front_logprobs lp = {0};
        struct bt_buf logprobs = {0};
        front_prompt_format(&a->opt, &a->names, tokens, n, &a->prompts[prompt].text, &lp,
                            &logprobs);
        front_answer_prompt(a, prompt, &lp, &logprobs);
        return NULL;
    }
    struct front_echo *e = bt_calloc(1, sizeof(*e));
    e->task.run = run;
    e->task.done = done;
    e->task.drop = echo_free;
    e->taken = taken;
    e->arg = arg;
    e->a = a;
    e->prompt = prompt;
    e->opt = a->opt;
    e->names.as_ids = a->names.as_ids;
    e->names.skip_special = a->names.skip_special;
    bt_buf_append(&e->text, a->prompts[prompt].text.data, a->prompts[prompt].text.len);
    e->n = n;
    copy_tokens(e, tokens, n_top);
    front_task_start(f, &e->task);
    return e;
}

void front_echo_forget(struct front_echo *e)
{
    e->taken = NULL;
    e->task.gone = true;
}
