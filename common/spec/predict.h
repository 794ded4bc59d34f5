/* Drafts from a prediction: a text that the client expects to be most of the answer (OpenAI's
 * predicted outputs). The answer is followed through the prediction: as long as both say the same,
 * and again where the answer has left something out or put something in. The place follows from the
 * answer's tokens alone. PURE. */
#ifndef BT_SPEC_PREDICT_H
#define BT_SPEC_PREDICT_H

#include "common/base/base.h"
#include "common/spec/spec.h"

struct bt_spec_predict { /* all zero: no token was taken */
    uint32_t n;          /* tokens of the answer that were taken */
    uint32_t at;         /* the token of the prediction that may come next */
    uint32_t run;        /* tokens before it that the answer has as well */
    uint32_t accepted;   /* tokens of the prediction that the answer has, each counted once */
    uint32_t last;       /* token of the answer */
};

/* Takes the answer's next token. */
void bt_spec_predict_take(struct bt_spec_predict *p, const uint32_t *prediction, uint32_t n,
                          uint32_t token);
/* Fills *d with at most `most` tokens that may follow; none where the answer has left the
 * prediction. */
void bt_spec_predict_find(const struct bt_spec_predict *p, const uint32_t *prediction, uint32_t n,
                          uint32_t most, struct bt_spec_draft *d);

#endif
