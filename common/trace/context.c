/* The header traceparent: VERSION-TRACE_ID-PARENT_ID-FLAGS in lower-case hexadecimal. Pure. */
#include "common/trace/context.h"

#include <string.h>

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Reads n bytes. NULL: they are not there. *any_p: one of them is not 0. */
static const char *bytes(const char *at, uint8_t *out, size_t n, bool *any_p)
{
    *any_p = false;
    for (size_t i = 0; i < n; i++) {
        int high = digit(at[0]), low = high >= 0 ? digit(at[1]) : -1;
        if (low < 0) {
            return NULL;
        }
        out[i] = (uint8_t)(high << 4 | low);
        *any_p = *any_p || out[i] != 0;
        at += 2;
    }
    return at;
}

bool bt_traceparent_read(const char *text, struct bt_trace_context *out)
{
    struct bt_trace_context c = {.has_parent = true};
    uint8_t version, flags;
    bool any;
    const char *at = bytes(text, &version, 1, &any);
    if (at == NULL || version == 0xff || *at++ != '-') {
        return false;
    }
    at = bytes(at, c.trace_id, sizeof(c.trace_id), &any);
    if (at == NULL || !any || *at++ != '-') {
        return false;
    }
    at = bytes(at, c.parent_id, sizeof(c.parent_id), &any);
    if (at == NULL || !any || *at++ != '-') {
        return false;
    }
    at = bytes(at, &flags, 1, &any);
    /* Later versions may have more fields behind the flags. */
    if (at == NULL || (*at != '\0' && (version == 0 || *at != '-'))) {
        return false;
    }
    c.sampled = (flags & 1) != 0;
    *out = c;
    return true;
}
