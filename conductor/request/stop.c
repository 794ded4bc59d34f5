/* Finds stop strings with one Knuth-Morris-Pratt automaton each, byte by byte. So the result does
 * not depend on how the text is divided into pieces. */
#include "conductor/request/stop.h"

#include <stdlib.h>
#include <string.h>

struct pattern {
    char *text;
    uint32_t len;
    uint32_t state; /* how many bytes of the pattern the text so far ends with */
    uint32_t *fail; /* [len] length of the longest proper border of text[0..i] */
};

struct bt_stop {
    struct pattern *p;
    size_t n;
    bool include;
    bool matched;
    struct bt_buf held; /* text that is not released yet */
};

static void pattern_init(struct pattern *p, const char *s)
{
    p->text = bt_strdup(s);
    p->len = (uint32_t)strlen(s);
    p->state = 0;
    p->fail = bt_calloc(p->len, sizeof(*p->fail));
    for (uint32_t i = 1, k = 0; i < p->len; i++) {
        while (k > 0 && s[i] != s[k]) {
            k = p->fail[k - 1];
        }
        if (s[i] == s[k]) {
            k++;
        }
        p->fail[i] = k;
    }
}

static bool pattern_step(struct pattern *p, char c)
{
    uint32_t k = p->state;
    while (k > 0 && p->text[k] != c) {
        k = p->fail[k - 1];
    }
    if (p->text[k] == c) {
        k++;
    }
    p->state = k;
    return k == p->len;
}

struct bt_stop *bt_stop_create(char *const *strings, bool include)
{
    struct bt_stop *s = bt_calloc(1, sizeof(*s));
    bt_buf_init(&s->held);
    s->include = include;
    size_t n = 0;
    while (strings != NULL && strings[n] != NULL) {
        n++;
    }
    s->p = n != 0 ? bt_calloc(n, sizeof(*s->p)) : NULL;
    for (size_t i = 0; i < n; i++) {
        if (strings[i][0] != '\0') {
            pattern_init(&s->p[s->n++], strings[i]);
        }
    }
    return s;
}

void bt_stop_destroy(struct bt_stop *s)
{
    if (s == NULL) {
        return;
    }
    for (size_t i = 0; i < s->n; i++) {
        free(s->p[i].text);
        free(s->p[i].fail);
    }
    free(s->p);
    bt_buf_cleanup(&s->held);
    free(s);
}

/* Advances all patterns. Returns the longest pattern that is complete now. */
static const struct pattern *step_all(struct bt_stop *s, char c)
{
    const struct pattern *best = NULL;
    for (size_t i = 0; i < s->n; i++) {
        if (pattern_step(&s->p[i], c) && (best == NULL || s->p[i].len > best->len)) {
            best = &s->p[i];
        }
    }
    return best;
}

const char *bt_stop_feed(struct bt_stop *s, const char *text, size_t len, struct bt_buf *out)
{
    if (s->matched || len == 0) {
        return NULL;
    }
    if (s->n == 0) {
        bt_buf_append(out, text, len);
        return NULL;
    }
    size_t before = s->held.len;
    bt_buf_append(&s->held, text, len);
    for (size_t i = 0; i < len; i++) {
        const struct pattern *hit = step_all(s, text[i]);
        if (hit != NULL) {
            size_t end = before + i + 1;
            bt_buf_append(out, s->held.data, s->include ? end : end - hit->len);
            bt_buf_clear(&s->held);
            s->matched = true;
            return hit->text;
        }
    }
    size_t keep = 0;
    for (size_t i = 0; i < s->n; i++) {
        keep = BT_MAX(keep, (size_t)s->p[i].state);
    }
    bt_buf_append(out, s->held.data, s->held.len - keep);
    bt_buf_consume(&s->held, s->held.len - keep);
    return NULL;
}

void bt_stop_pass(struct bt_stop *s, const char *text, size_t len, struct bt_buf *out)
{
    bt_stop_flush(s, out);
    if (!s->matched) {
        bt_buf_append(out, text, len);
    }
}

void bt_stop_flush(struct bt_stop *s, struct bt_buf *out)
{
    if (s->held.len != 0) {
        bt_buf_append(out, s->held.data, s->held.len);
        bt_buf_clear(&s->held);
    }
    for (size_t i = 0; i < s->n; i++) {
        s->p[i].state = 0;
    }
}
