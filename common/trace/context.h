/* The position of a request in a trace (W3C Trace Context). Plain values; pure. */
#ifndef BT_TRACE_CONTEXT_H
#define BT_TRACE_CONTEXT_H

#include <stdbool.h>
#include <stdint.h>

struct bt_trace_context {
    bool sampled;         /* its spans are wanted; false: the rest is not used */
    bool has_parent;      /* the client sent a valid traceparent */
    uint8_t trace_id[16]; /* of the client's trace, or a new one */
    uint8_t parent_id[8]; /* the client's span, if has_parent */
};

/* Reads the header traceparent. False: it is not valid, and the receiver has to act as if it were
 * absent (W3C Trace Context, section 3.2). sampled is the flag that the client sent. */
bool bt_traceparent_read(const char *text, struct bt_trace_context *out);

#endif
