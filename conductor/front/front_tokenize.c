/* POST /tokenize and /detokenize, as in vLLM, and the other APIs' counts of tokens. */
#include "conductor/front/front_jobs.h"

/* The most bytes of text that /detokenize makes. A body of 4 MiB has about 700,000 ids of a
 * large vocabulary. Their usual text is 3 MiB, but with the longest tokens it would be
 * hundreds of MiB. */
#define TEXT_MAX (8 * 1024 * 1024)

/* Writes the tokens as tokenizer.json spells them. That spelling differs even for tokens whose
 * bytes are not whole characters. */
static void put_token_strings(const struct bt_front_model *m, const struct bt_tokens *ids,
                              struct bt_buf *out)
{
    struct bt_buf piece;
    bt_buf_init(&piece);
    bt_buf_puts(out, "[");
    for (size_t i = 0; i < ids->n; i++) {
        bt_buf_clear(&piece);
        if (bt_tokenizer_string(m->tok, ids->ids[i], &piece) != BT_OK) {
            bt_buf_clear(&piece); /* an id without a token (common/engine/ids.h) */
        }
        bt_buf_puts(out, i == 0 ? "" : ",");
        bt_front_put_str(out, piece.data, piece.len);
    }
    bt_buf_puts(out, "]");
    bt_buf_cleanup(&piece);
}

static void run_tokenize(const struct bt_front_model *m, struct bt_front_job *j)
{
    struct bt_tokens ids = {0};
    struct bt_buf *out = &j->out;
    bool strings = false;
    j->ok = bt_front_parse_tokenize(m, j->body, j->len, &ids, &strings, &j->e);
    j->n_tokens = ids.n;
    if (j->ok) {
        bt_buf_printf(out, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", ids.n,
                      m->max_model_len);
        for (size_t i = 0; i < ids.n; i++) {
            bt_buf_puts(out, i == 0 ? "" : ",");
            bt_front_put_uint(out, ids.ids[i]);
        }
        bt_buf_puts(out, "],\"token_strs\":");
        if (strings) {
            put_token_strings(m, &ids, out);
        } else {
            bt_buf_puts(out, "null");
        }
        bt_buf_puts(out, "}");
    }
    bt_tokens_cleanup(&ids);
}

/* Decodes within TEXT_MAX: the text of ids may be many times as long as the body. */
static bool decode(const struct bt_front_model *m, const struct bt_tokens *ids, struct bt_buf *text,
                   struct bt_front_error *e)
{
    struct bt_buf piece;
    size_t bytes = 0;
    bt_buf_init(&piece);
    for (size_t i = 0; i < ids->n && bytes <= TEXT_MAX; i++) {
        bt_buf_clear(&piece);
        if (bt_tokenizer_piece(m->tok, ids->ids[i], &piece) == BT_OK) {
            bytes += piece.len;
        }
    }
    bt_buf_cleanup(&piece);
    if (bytes > TEXT_MAX) {
        return bt_front_fail(e, 400, "tokens", "invalid_value",
                             "the text of 'tokens' is longer than %d MiB, the limit of one answer "
                             "of /detokenize; send fewer ids at once",
                             TEXT_MAX >> 20);
    }
    if (bt_tokenizer_decode(m->tok, ids->ids, ids->n, false, text) != BT_OK) {
        return bt_front_fail(e, 400, "tokens", "invalid_value",
                             "'tokens' has an id that the tokenizer does not know");
    }
    return true;
}

static void count(const struct bt_front_model *m, struct bt_front_job *j, enum bt_front_api api,
                  const char *object)
{
    struct bt_tokens ids = {0};
    j->ok = bt_front_parse_count(m, api, j->body, j->len, &ids, &j->e);
    j->n_tokens = ids.n;
    if (j->ok) {
        bt_buf_printf(&j->out, "{%s\"input_tokens\":%zu}", object, ids.n);
    }
    bt_tokens_cleanup(&ids);
}

static void run_count(const struct bt_front_model *m, struct bt_front_job *j)
{
    count(m, j, FRONT_API_MESSAGES, "");
}

static void run_input_tokens(const struct bt_front_model *m, struct bt_front_job *j)
{
    count(m, j, FRONT_API_RESPONSES, "\"object\":\"response.input_tokens\",");
}

static void run_detokenize(const struct bt_front_model *m, struct bt_front_job *j)
{
    struct bt_tokens ids = {0};
    struct bt_buf text;
    bt_buf_init(&text);
    j->ok = bt_front_parse_detokenize(m, j->body, j->len, &ids, &j->e);
    j->n_tokens = ids.n;
    j->ok = j->ok && decode(m, &ids, &text, &j->e);
    if (j->ok) {
        bt_buf_puts(&j->out, "{\"prompt\":");
        bt_front_put_str(&j->out, text.data, text.len);
        bt_buf_puts(&j->out, "}");
    }
    bt_buf_cleanup(&text);
    bt_tokens_cleanup(&ids);
}

static void done(struct bt_front_job *j)
{
    struct bt_front_work w = bt_front_work_of(j);
    w.prompt_tokens = j->n_tokens;
    bt_front_keys_counted(j->f->keys, j->tenant, &w);
    bt_front_respond_long(j->f, j->req, j->tenant, &j->out);
}

void bt_front_post_tokenize(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    bt_front_job_start(f, req, tenant, NULL, run_tokenize, done);
}

void bt_front_post_detokenize(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    bt_front_job_start(f, req, tenant, NULL, run_detokenize, done);
}

void bt_front_post_count(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    bt_front_job_start(f, req, tenant, NULL, run_count, done);
}

void bt_front_post_input_tokens(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    bt_front_job_start(f, req, tenant, NULL, run_input_tokens, done);
}
