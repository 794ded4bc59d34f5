/* Follows an answer through its prediction. Pure: see predict.h. */
#include "common/spec/predict.h"

#include <string.h>

#include "common/spec/match.h"

#define WINDOW 512 /* tokens of its prediction that an answer may skip at once */

/* The place behind `at` where the answer's last two tokens stand; 0: they are not near. */
static uint32_t find(const struct bt_spec_predict *p, const uint32_t *prediction, uint32_t n,
                     uint32_t token)
{
    uint32_t end = BT_MIN(n, p->at + BT_MIN(n - p->at, (uint32_t)WINDOW));
    for (uint32_t i = p->at; p->n > 0 && i + 1 < end; i++) {
        if (prediction[i] == p->last && prediction[i + 1] == token) {
            return i + 2;
        }
    }
    return 0;
}

void bt_spec_predict_take(struct bt_spec_predict *p, const uint32_t *prediction, uint32_t n,
                          uint32_t token)
{
    if (p->at < n && prediction[p->at] == token) {
        p->at++;
        p->run++;
        p->accepted++;
    } else {
        uint32_t to = find(p, prediction, n, token);
        p->run = to > 0 ? 2 : 0;
        p->accepted += p->run;
        p->at = to > 0 ? to : p->at;
    }
    p->last = token;
    p->n++;
}

void bt_spec_predict_find(const struct bt_spec_predict *p, const uint32_t *prediction, uint32_t n,
                          uint32_t most, struct bt_spec_draft *d)
{
    bool sure = p->run >= 2 || p->run == p->n; /* a single token in common may be chance */
    d->n = sure ? BT_MIN(BT_MIN(most, (uint32_t)BT_SPEC_MAX), n - p->at) : 0;
    d->match = d->n > 0 ? BT_MIN(BT_MAX(p->run, 2u), (uint32_t)BT_SPEC_MATCH_MAX) : 0;
    memcpy(d->tokens, prediction + p->at, d->n * sizeof(d->tokens[0]));
}
