/* The budget of an answer's reasoning: behind so many of its tokens the tokens that end it are
 * forced. The state follows from the answer's tokens alone, as a matcher's does (mask.h). Pure. */
#ifndef BT_WORKER_THOUGHTS_H
#define BT_WORKER_THOUGHTS_H

#include "common/grammar/grammar.h"

#define BT_WMARKER_BYTES   48
#define BT_WMARKER_AS_TEXT UINT32_MAX
#define BT_WTHOUGHTS_ENDS  4  /* markers that end a reasoning */
#define BT_WTHOUGHTS_FORCE 32 /* tokens that are forced */
#define BT_WTHOUGHTS_FREE  UINT32_MAX

struct bt_wmarker {
    uint32_t id; /* the token that it is; BT_WMARKER_AS_TEXT: it is recognised in the text */
    uint32_t len;
    char text[BT_WMARKER_BYTES];
};

struct bt_wthoughts_rule { /* immutable */
    uint32_t budget;       /* tokens behind the opening marker */
    bool begun;            /* the answer begins inside the reasoning */
    struct bt_wmarker open;
    uint32_t n_ends;
    struct bt_wmarker ends[BT_WTHOUGHTS_ENDS];
    uint32_t n_force; /* 0: there is no budget */
    uint32_t force[BT_WTHOUGHTS_FORCE];
};

struct bt_wthoughts { /* of a choice; all zero: no token was taken */
    uint8_t stage;
    uint8_t rest;                           /* bytes that the last character still needs */
    uint8_t opened;                         /* bytes of the opening marker that are there */
    uint8_t matched[BT_WTHOUGHTS_ENDS];     /* ... of each marker that ends the reasoning */
    uint32_t n_tokens, n_thought, n_forced; /* taken in all, of the reasoning, of rule->force */
};

/* Takes the answer's next token. */
void bt_wthoughts_take(struct bt_wthoughts *t, const struct bt_wthoughts_rule *rule,
                       const struct bt_grammar_vocab *v, uint32_t token);
/* The token that must come next; BT_WTHOUGHTS_FREE: any. */
uint32_t bt_wthoughts_next(const struct bt_wthoughts *t, const struct bt_wthoughts_rule *rule);
/* True once no token will be forced any more. */
bool bt_wthoughts_over(const struct bt_wthoughts *t);

#endif
