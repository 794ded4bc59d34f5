/* Reads traces. A line that does not fit the format ends the reading; the error names its
 * number. */
#include "conductor/sim/trace.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"
#include "conductor/sim/lines.h"
#include "conductor/sim/trace_line.h"

#define TOKENS_MAX  100000000u
#define SPAN_MAX_MS 1e12 /* thirty years */

struct reader {
    struct bt_sim_trace *t;
    uint32_t cap, blocks_cap;
    double last_ms;
    struct bt_sim_columns columns;
    struct bt_map *numbers; /* of the file's hash ids: 1 + their number here */
    const char *what;       /* the fault of the current line */
};

static struct bt_sim_request *add(struct reader *r, double at_ms, double input, double output)
{
    struct bt_sim_trace *t = r->t;
    if (!(at_ms >= r->last_ms)) {
        r->what = "its time is before the line above; sort the trace by time";
        return NULL;
    }
    if (!isfinite(at_ms) || (t->n != 0 && !(at_ms - t->requests[0].at_ms <= SPAN_MAX_MS))) {
        r->what = "its time is more than thirty years behind the first line's; timestamp is in "
                  "milliseconds";
        return NULL;
    }
    if (!(input >= 1 && input <= TOKENS_MAX && output >= 0 && output <= TOKENS_MAX) ||
        input != floor(input) || output != floor(output)) {
        r->what = "its lengths are not whole numbers of tokens: input from 1, output from 0, up to "
                  "100,000,000";
        return NULL;
    }
    if (t->n == r->cap) {
        r->cap = r->cap != 0 ? 2 * r->cap : 4096;
        t->requests = bt_realloc(t->requests, r->cap * sizeof(*t->requests));
    }
    r->last_ms = at_ms;
    struct bt_sim_request *q = &t->requests[t->n++];
    *q = (struct bt_sim_request){.at_ms = at_ms,
                                 .input = (uint32_t)input,
                                 .output = BT_MAX((uint32_t)output, 1u),
                                 .first = t->n_blocks};
    return q;
}

static void add_block(struct reader *r, uint32_t id)
{
    struct bt_sim_trace *t = r->t;
    if (t->n_blocks == r->blocks_cap) {
        r->blocks_cap = r->blocks_cap != 0 ? 2 * r->blocks_cap : 1 << 16;
        t->blocks = bt_realloc(t->blocks, (size_t)r->blocks_cap * sizeof(*t->blocks));
    }
    t->blocks[t->n_blocks++] = id;
    t->n_unique = BT_MAX(t->n_unique, id + 1);
}

/* Gives ids consecutive numbers. Only their equality matters, and tables have a place for each
 * number. */
static uint32_t number_of_id(struct reader *r, uint64_t id)
{
    uintptr_t number = (uintptr_t)bt_map_get(r->numbers, &id);
    if (number == 0) {
        number = r->t->n_unique + 1;
        bt_map_put(r->numbers, &id, (void *)number);
    }
    return (uint32_t)(number - 1);
}

/* Reads the list that p is in: whole numbers and commas. The line is known to be JSON. */
static bool add_ids(struct reader *r, struct bt_sim_request *q, const char *p)
{
    for (p += strspn(p, " \t"); *p != ']'; p += strspn(p, ", \t")) {
        char *end;
        errno = 0;
        uint64_t id = strtoull(p, &end, 10);
        if (*p < '0' || *p > '9' || errno != 0 || strchr(",] \t", *end) == NULL) {
            r->what = "hash_ids is not a list of whole numbers below 2^64";
            return false;
        }
        add_block(r, number_of_id(r, id));
        p = end;
    }
    q->n_blocks = r->t->n_blocks - q->first;
    if (q->n_blocks != BT_DIV_UP(q->input, BT_SIM_BLOCK_TOKENS)) {
        r->what = "hash_ids has not one number for each 512 tokens of input_length";
        return false;
    }
    return true;
}

/* Gives the request blocks of its own: it shares none. */
static bool add_own(struct reader *r, struct bt_sim_request *q)
{
    q->n_blocks = BT_DIV_UP(q->input, BT_SIM_BLOCK_TOKENS);
    for (uint32_t b = 0; b < q->n_blocks; b++) {
        add_block(r, r->t->n_unique);
    }
    return true;
}

static bool read_line(struct reader *r, char *line, size_t len, uint32_t no)
{
    struct bt_sim_line l;
    bool header = false;
    if (no == 1 && strncmp(line, "\x1f\x8b", 2) == 0) {
        r->what = "it is compressed; gunzip it";
        return false;
    }
    if (strlen(line) != len) {
        r->what = "it contains a zero byte, so it is not text; was the file cut off?";
        return false;
    }
    line += no == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    line += strspn(line, " \t\r\n");
    if (*line == '\0') {
        return true;
    }
    bool json = *line == '{';
    r->what = json ? bt_sim_line_json(line, &l) : bt_sim_line_csv(line, &r->columns, &header, &l);
    if (r->what != NULL || header) {
        return r->what == NULL;
    }
    struct bt_sim_request *q = add(r, l.at_ms, l.input, l.output);
    return q != NULL && (json ? add_ids(r, q, l.ids) : add_own(r, q));
}

/* Reads all lines of f. *no_p: the current line. Returns NULL, or the fault. */
static const char *read_lines(struct reader *r, FILE *f, uint32_t *no_p)
{
    struct bt_buf line;
    bool ok = true;
    const char *wrong = NULL;
    bt_buf_init(&line);
    for (*no_p = 0; ok && bt_sim_next_line(f, &line, &wrong);) {
        ok = read_line(r, line.data, line.len, ++*no_p);
    }
    bt_buf_cleanup(&line);
    *no_p += wrong != NULL;
    return ok ? wrong : r->what;
}

bt_status_t bt_sim_trace_load(const char *path, struct bt_sim_trace *t, char *err, size_t err_cap)
{
    memset(t, 0, sizeof(*t));
    bool piped = strcmp(path, "-") == 0;
    FILE *f = piped ? stdin : fopen(path, "re");
    if (f == NULL) {
        snprintf(err, err_cap, "%s: %s; give a Mooncake .jsonl or an Azure .csv trace", path,
                 strerror(errno));
        return BT_ERR_NOT_FOUND;
    }
    struct reader r = {.t = t,
                       .last_ms = -INFINITY,
                       .columns = BT_SIM_COLUMNS_AZURE,
                       .numbers = bt_map_create(sizeof(uint64_t))};
    uint32_t no;
    const char *wrong = read_lines(&r, f, &no);
    if (!piped) {
        fclose(f);
    }
    bt_map_destroy(r.numbers);
    if (wrong != NULL || t->n == 0) {
        if (wrong != NULL) {
            snprintf(err, err_cap, "%s:%u: %s", path, no, wrong);
        } else {
            snprintf(err, err_cap, "%s: no requests in it", path);
        }
        bt_sim_trace_cleanup(t);
        return BT_ERR_INVALID;
    }
    double first = t->requests[0].at_ms;
    for (uint32_t i = 0; i < t->n; i++) {
        t->requests[i].at_ms -= first;
    }
    return BT_OK;
}

void bt_sim_trace_cleanup(struct bt_sim_trace *t)
{
    free(t->requests);
    free(t->blocks);
    memset(t, 0, sizeof(*t));
}
