/* The text of a request's grammar. One body may have a thousand prompts: their specs share it. The
 * last reference may go on the loop or on a reading thread of the front. */
#include <stdlib.h>
#include <string.h>

#include "conductor/request/request.h"

struct bt_gen_grammar *bt_gen_grammar_create(uint32_t kind, const char *text, size_t len)
{
    struct bt_gen_grammar *g = bt_calloc(1, sizeof(*g) + len + 1);
    g->refs = 1;
    g->kind = kind;
    g->len = len;
    memcpy(g->text, text, len);
    return g;
}

struct bt_gen_grammar *bt_gen_grammar_ref(struct bt_gen_grammar *g)
{
    if (g != NULL) {
        g->refs++;
    }
    return g;
}

void bt_gen_grammar_unref(struct bt_gen_grammar *g)
{
    if (g != NULL && --g->refs == 0) {
        free(g);
    }
}
