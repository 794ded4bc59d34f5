/* Spans of OpenTelemetry from the record of a request. Loop thread. */
#ifndef BT_CONDUCTOR_SPANS_H
#define BT_CONDUCTOR_SPANS_H

#include "common/trace/trace.h"
#include "conductor/request/record.h"
#include "conductor/request/request.h"

/* Gives the spans of a request that is over to t: one of the request, and below it one of each
 * stage of its record. model: its served name. */
void bt_spans_offer(struct bt_trace *t, const char *model, const struct bt_gen_spec *spec,
                    const struct bt_gen_usage *usage, const struct bt_record *rec);

#endif
