/* Logprobs in the formats of OpenAI and vLLM; see front_logprobs.h. */
#include "conductor/front/front_logprobs.h"

#include <math.h>
#include <string.h>

void bt_front_names_cleanup(struct bt_front_names *n)
{
    bt_buf_cleanup(&n->piece);
    bt_buf_cleanup(&n->names);
}

void bt_front_logprobs_cleanup(struct bt_front_logprobs *lp)
{
    for (int k = 0; k < LP_PARTS; k++) {
        bt_buf_cleanup(&lp->part[k]);
    }
}

uint32_t bt_front_count_chars(const char *s, size_t len)
{
    uint32_t n = 0;
    for (size_t i = 0; i < len; i++) {
        n += ((unsigned char)s[i] & 0xc0) != 0x80;
    }
    return n;
}

/* ---- names ---- */

/* Writes the bytes of a token into n->piece. */
static void load_piece(struct bt_front_names *n, uint32_t id)
{
    bt_buf_clear(&n->piece);
    if (bt_tokenizer_piece(n->tok, id, &n->piece) != BT_OK) {
        bt_buf_clear(&n->piece); /* an id that is not in the tokenizer (padding rows) */
    }
    bt_buf_reserve(&n->piece, 0);
}

static bool is_utf8(const char *s, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n = bt_front_utf8_len(s + i, len - i);
        if (n == 0) {
            return false;
        }
        i += n;
    }
    return true;
}

/* Writes a token's name: its text; or "bytes:\xNN..." if its bytes are not text, as OpenAI's API
 * does, so that two such tokens have different names; or its id if the client asked for ids. Loads
 * piece. */
static void put_token(struct bt_front_names *n, uint32_t id, struct bt_buf *out)
{
    load_piece(n, id);
    if (n->as_ids) {
        bt_buf_printf(out, "\"token_id:%u\"", id);
    } else if (is_utf8(n->piece.data, n->piece.len)) {
        bt_front_put_str(out, n->piece.data, n->piece.len);
    } else {
        bt_buf_puts(out, "\"bytes:");
        for (size_t i = 0; i < n->piece.len; i++) {
            bt_buf_printf(out, "\\\\x%02x", (unsigned char)n->piece.data[i]);
        }
        bt_buf_puts(out, "\"");
    }
}

static void put_comma(struct bt_buf *out)
{
    if (out->len > 0) {
        bt_buf_puts(out, ",");
    }
}

/* ---- completions ---- */

/* Writes {"token": logprob, ...}: first the actual token, then the most likely ones without it,
 * which is vLLM's order. Two ids may have the same text (a special token and its spelling). Only
 * the first of them is listed, because a JSON object must not repeat a key. */
static void put_top_dict(struct bt_front_names *names, const struct bt_gen_token *t, uint32_t n_top,
                         struct bt_buf *out)
{
    size_t from[BT_ENGINE_MAX_TOP + 2]; /* where each name begins in names->names */
    uint32_t n = 0;
    bt_buf_clear(&names->names);
    bt_buf_puts(out, "{");
    for (uint32_t i = 0; i <= n_top; i++) {
        uint32_t id = i == 0 ? t->id : t->top_id[i - 1];
        if (i > 0 && id == t->id) {
            continue;
        }
        from[n] = names->names.len;
        put_token(names, id, &names->names);
        const char *name = names->names.data + from[n];
        size_t len = names->names.len - from[n];
        bool seen = false;
        for (uint32_t k = 0; k < n && !seen; k++) {
            seen =
                from[k + 1] - from[k] == len && memcmp(names->names.data + from[k], name, len) == 0;
        }
        if (seen) {
            names->names.len = from[n];
            continue;
        }
        bt_buf_puts(out, n == 0 ? "" : ",");
        bt_buf_append(out, name, len);
        bt_buf_puts(out, ":");
        bt_front_put_float(out, i == 0 ? t->logprob : t->top_logprob[i - 1]);
        from[++n] = names->names.len;
    }
    bt_buf_puts(out, "}");
}

/* Writes one of a token's four arrays. A NaN logprob is null: the prompt's first token has none.
 * LP_TOKENS leaves the token's bytes in names->piece. */
static void put_completion_part(struct bt_front_names *names, const struct bt_gen_token *t,
                                uint32_t n_top, uint32_t offset, int part, struct bt_buf *out)
{
    if (part == LP_TOKENS) {
        put_token(names, t->id, out);
    } else if (part == LP_OFFSETS) {
        bt_front_put_uint(out, offset);
    } else if (isnan(t->logprob)) {
        bt_buf_puts(out, "null");
    } else if (part == LP_LOGPROBS) {
        bt_front_put_float(out, t->logprob);
    } else {
        put_top_dict(names, t, BT_MIN(n_top, t->n_top), out);
    }
}

static void add_completion_token(struct bt_front_logprobs *lp, struct bt_front_names *names,
                                 const struct bt_gen_token *t, uint32_t n_top, uint32_t offset)
{
    for (int k = LP_PARTS - 1; k >= 0; k--) { /* LP_TOKENS last: it sets piece */
        put_comma(&lp->part[k]);
        put_completion_part(names, t, n_top, offset, k, &lp->part[k]);
    }
}

/* Moves `at` behind a token in the echoed text. */
static void pass_token(struct bt_front_names *names, uint32_t id, const struct bt_buf *text,
                       uint32_t all, struct bt_front_prompt_place *at)
{
    load_piece(names, id);
    const struct bt_buf *p = &names->piece;
    bool here = p->len == 0 || (p->len <= text->len - at->bytes &&
                                memcmp(text->data + at->bytes, p->data, p->len) == 0);
    /* A special token may stand in the text, or the tokenizer may have added it (BOS). */
    if (here || !bt_tokenizer_is_special(names->tok, id)) {
        at->bytes = BT_MIN(at->bytes + p->len, text->len);
        at->chars = BT_MIN(at->chars + bt_front_count_chars(p->data, p->len), all);
    }
}

bool bt_front_logprobs_put_prompt(struct bt_front_names *names, const struct bt_gen_token *tokens,
                                  size_t n, uint32_t n_top, const struct bt_buf *text, uint32_t all,
                                  int part, struct bt_front_prompt_place *at,
                                  struct bt_front_slice *slice, struct bt_buf *out)
{
    for (; at->token < n && front_slice_has_room(slice, out); at->token++) {
        const struct bt_gen_token *t = &tokens[at->token];
        bt_buf_puts(out, at->token == 0 ? "" : ",");
        put_completion_part(names, t, n_top, at->chars, part, out);
        if (part == LP_OFFSETS) {
            pass_token(names, t->id, text, all, at);
        }
        slice->names += part == LP_TOP ? BT_MIN(n_top, t->n_top) + 1 : 1;
    }
    return at->token == n;
}

/* ---- chat ---- */

static void put_chat_token(struct bt_front_names *names, uint32_t id, float logprob,
                           struct bt_buf *out)
{
    bt_buf_puts(out, "{\"token\":");
    put_token(names, id, out);
    bt_buf_puts(out, ",\"logprob\":");
    bt_front_put_float(out, logprob);
    bt_buf_puts(out, ",\"bytes\":[");
    for (size_t i = 0; i < names->piece.len; i++) {
        bt_buf_puts(out, i == 0 ? "" : ",");
        bt_front_put_uint(out, (unsigned char)names->piece.data[i]);
    }
    bt_buf_puts(out, "]");
}

static void add_chat_token(struct bt_buf *out, struct bt_front_names *names,
                           const struct bt_gen_token *t, uint32_t n_top)
{
    put_comma(out);
    put_chat_token(names, t->id, t->logprob, out);
    bt_buf_puts(out, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < BT_MIN(n_top, t->n_top); i++) {
        bt_buf_puts(out, i == 0 ? "" : ",");
        put_chat_token(names, t->top_id[i], t->top_logprob[i], out);
        bt_buf_puts(out, "}");
    }
    bt_buf_puts(out, "]}");
}

/* ---- both ---- */

void bt_front_logprobs_add(struct bt_front_logprobs *lp, bool chat, struct bt_front_names *names,
                           const struct bt_gen_token *t, uint32_t n_top, uint32_t *chars)
{
    if (chat) {
        add_chat_token(&lp->part[LP_TOKENS], names, t, n_top);
        return;
    }
    add_completion_token(lp, names, t, n_top, *chars);
    if (!(names->skip_special && bt_tokenizer_is_special(names->tok, t->id))) {
        *chars += bt_front_count_chars(names->piece.data, names->piece.len);
    }
}

const char *bt_front_logprobs_part(bool chat, int part)
{
    static const char *const names[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    return chat ? "content" : names[part];
}

void bt_front_logprobs_put(struct bt_front_logprobs *lp, bool chat, struct bt_buf *out)
{
    bt_buf_puts(out, "{");
    for (int k = 0; k < (chat ? 1 : LP_PARTS); k++) {
        bt_buf_puts(out, k == 0 ? "\"" : ",\"");
        bt_buf_puts(out, bt_front_logprobs_part(chat, k));
        bt_buf_puts(out, "\":[");
        bt_buf_append(out, lp->part[k].data, lp->part[k].len);
        bt_buf_puts(out, "]");
        bt_buf_clear(&lp->part[k]);
    }
    bt_buf_puts(out, "}");
}

/* ---- vLLM's field ---- */

/* rank 0: unknown. */
static void put_ranked(struct bt_front_names *names, uint32_t id, float logprob, uint32_t rank,
                       struct bt_buf *out)
{
    bt_buf_printf(out, "\"%u\":{\"logprob\":", id);
    bt_front_put_float(out, logprob);
    bt_buf_puts(out, ",\"rank\":");
    if (rank > 0) {
        bt_front_put_uint(out, rank);
    } else {
        bt_buf_puts(out, "null");
    }
    bt_buf_puts(out, ",\"decoded_token\":");
    put_token(names, id, out);
    bt_buf_puts(out, "}");
}

/* Writes the actual token first, then the most likely ones. */
static void put_prompt_token(struct bt_front_names *names, const struct bt_gen_token *t,
                             uint32_t n_top, struct bt_buf *out)
{
    uint32_t rank = t->rank;
    if (isnan(t->logprob)) {
        bt_buf_puts(out, "null");
        return;
    }
    for (uint32_t k = 0; k < t->n_top && rank == 0; k++) {
        rank = t->top_id[k] == t->id ? k + 1 : 0;
    }
    bt_buf_puts(out, "{");
    put_ranked(names, t->id, t->logprob, rank, out);
    for (uint32_t k = 0; k < BT_MIN(n_top, t->n_top); k++) {
        if (t->top_id[k] != t->id) {
            bt_buf_puts(out, ",");
            put_ranked(names, t->top_id[k], t->top_logprob[k], k + 1, out);
        }
    }
    bt_buf_puts(out, "}");
}

bool bt_front_prompt_logprobs_put(struct bt_front_names *names, const struct bt_gen_token *tokens,
                                  size_t n, uint32_t n_top, struct bt_front_prompt_place *at,
                                  struct bt_front_slice *slice, struct bt_buf *out)
{
    for (; at->token < n && front_slice_has_room(slice, out); at->token++) {
        bt_buf_puts(out, at->token == 0 ? "" : ",");
        put_prompt_token(names, &tokens[at->token], n_top, out);
        slice->names += 2 * BT_MIN(n_top, tokens[at->token].n_top) + 2;
    }
    return at->token == n;
}
