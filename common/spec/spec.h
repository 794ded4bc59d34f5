/* Speculation: a source proposes drafts, tokens that may follow a sequence; the engine checks them
 * in one step (engine.h, n_draft) and accepts those that it would have drawn. So a source can
 * change the speed of an answer and never its tokens. PURE plain values. */
#ifndef BT_SPEC_SPEC_H
#define BT_SPEC_SPEC_H

#include "common/base/base.h"

#define BT_SPEC_MAX 16 /* drafts of a sequence in a step */

typedef enum {                   /* the numbers are those of Submit.speculation */
               BT_SPEC_AUTO = 0, /* of a request: as the worker is configured */
               BT_SPEC_OFF = 1,
               BT_SPEC_SUFFIX = 2, /* the longest suffix that occurred before (match.h) */
               BT_SPEC_NGRAM = 3,  /* the last three tokens (match.h) */
               BT_SPEC_MODEL = 4,  /* a small model with the same tokens */
               BT_SPEC_MTP = 5,    /* the model's own MTP layer */
               BT_SPEC_KINDS
} bt_spec_kind_t;

/* auto, off, suffix, ngram, draft, mtp; BT_SPEC_KINDS: another name. */
bt_spec_kind_t bt_spec_kind(const char *name);

struct bt_spec_draft { /* what every source fills */
    uint32_t n;
    uint32_t match; /* length of the common suffix; of a model: 0 */
    uint32_t tokens[BT_SPEC_MAX];
};

#endif
