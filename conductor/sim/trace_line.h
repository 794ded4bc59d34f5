/* Reads one line of a trace: Mooncake's JSON object, or a row of Azure's CSV. Text only; trace.c
 * checks the ranges of the numbers. */
#ifndef BT_CONDUCTOR_SIM_TRACE_LINE_H
#define BT_CONDUCTOR_SIM_TRACE_LINE_H

#include "common/base/base.h"

struct bt_sim_line {
    double at_ms, input, output;
    const char *ids; /* JSON: within hash_ids' brackets, a list of values and commas */
};

/* Columns of a CSV file, by its header. */
struct bt_sim_columns {
    uint32_t n, at, input, output;
};
#define BT_SIM_COLUMNS_AZURE                                                                       \
    (struct bt_sim_columns)                                                                        \
    {                                                                                              \
        3, 0, 1, 2                                                                                 \
    }

/* Both functions return NULL, or a text that describes the fault. */
const char *bt_sim_line_json(const char *line, struct bt_sim_line *l);
/* Changes the text. *header_p: the line was a header, and sets the columns. */
const char *bt_sim_line_csv(char *line, struct bt_sim_columns *columns, bool *header_p,
                            struct bt_sim_line *l);

#endif
