/* Readers of traces. A line that is not as described ends the reading with its number. */
#include "conductor/sim/trace.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS_MAX 100000000u
#define IDS_MAX    (1u << 28)

struct reader {
    struct bt_sim_trace *t;
    uint32_t cap, blocks_cap;
    double last_ms;
    const char *what; /* of the line at hand: what is wrong */
};

static struct bt_sim_request *add(struct reader *r, double at_ms, double input, double output)
{
    if (!(at_ms >= r->last_ms)) {
        r->what = "its time is before the line above; sort the trace by time";
        return NULL;
    }
    if (!(input >= 1 && input <= TOKENS_MAX && output >= 0 && output <= TOKENS_MAX)) {
        r->what = "its length is not between 1 and 100,000,000 tokens";
        return NULL;
    }
    struct bt_sim_trace *t = r->t;
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

static const char *value_of(const char *line, const char *key)
{
    const char *p = strstr(line, key);
    if (p == NULL) {
        return NULL;
    }
    p += strlen(key);
    p += strspn(p, " \t");
    return *p == ':' ? p + 1 + strspn(p + 1, " \t") : NULL;
}

static bool number_of(const char *line, const char *key, double *out)
{
    const char *p = value_of(line, key);
    char *end;
    if (p == NULL) {
        return false;
    }
    *out = strtod(p, &end);
    return end != p;
}

static bool read_json_line(struct reader *r, const char *line)
{
    double at, in, out;
    const char *p = value_of(line, "\"hash_ids\"");
    if (!number_of(line, "\"timestamp\"", &at) || !number_of(line, "\"input_length\"", &in) ||
        !number_of(line, "\"output_length\"", &out) || p == NULL || *p != '[') {
        r->what = "not a line with timestamp, input_length, output_length and hash_ids";
        return false;
    }
    struct bt_sim_request *q = add(r, at, in, out);
    if (q == NULL) {
        return false;
    }
    for (p++;;) {
        p += strspn(p, " ,\t");
        if (*p == ']') {
            break;
        }
        char *end;
        errno = 0;
        unsigned long id = strtoul(p, &end, 10);
        if (end == p || errno != 0 || id >= IDS_MAX) {
            r->what = "hash_ids is not a list of numbers below 2^28";
            return false;
        }
        add_block(r, (uint32_t)id);
        p = end;
    }
    q->n_blocks = r->t->n_blocks - q->first;
    if (q->n_blocks != BT_DIV_UP(q->input, BT_SIM_BLOCK_TOKENS)) {
        r->what = "hash_ids has not one number for each 512 tokens of input_length";
        return false;
    }
    return true;
}

/* Days since 1970-01-01 of a date (Howard Hinnant's civil calendar). */
static double days_of(int y, unsigned m, unsigned d)
{
    y -= m <= 2;
    int era = y / 400;
    unsigned yoe = (unsigned)(y - era * 400);
    unsigned doy = (153 * (m + (m > 2 ? -3u : 9u)) + 2) / 5 + d - 1;
    return era * 146097.0 + (yoe * 365.0 + yoe / 4 - yoe / 100 + doy) - 719468;
}

static bool read_csv_line(struct reader *r, const char *line)
{
    int y, in, out;
    unsigned mo, d, h, mi;
    double s;
    if (sscanf(line, "%d-%u-%u %u:%u:%lf,%d,%d", &y, &mo, &d, &h, &mi, &s, &in, &out) != 8 ||
        mo < 1 || mo > 12) {
        r->what = "not TIMESTAMP,ContextTokens,GeneratedTokens";
        return false;
    }
    double at = 1e3 * (((days_of(y, mo, d) * 24 + h) * 60 + mi) * 60 + s);
    struct bt_sim_request *q = add(r, at, in, out);
    if (q == NULL) {
        return false;
    }
    for (uint32_t b = 0; b < BT_DIV_UP(q->input, BT_SIM_BLOCK_TOKENS); b++) {
        add_block(r, r->t->n_unique);
    }
    q->n_blocks = r->t->n_blocks - q->first;
    return true;
}

bt_status_t bt_sim_trace_load(const char *path, struct bt_sim_trace *t, char *err, size_t err_cap)
{
    memset(t, 0, sizeof(*t));
    FILE *f = fopen(path, "r");
    if (f == NULL) {
        snprintf(err, err_cap, "%s: %s; give a Mooncake .jsonl or an Azure .csv trace", path,
                 strerror(errno));
        return BT_ERR_NOT_FOUND;
    }
    struct reader r = {.t = t, .last_ms = -1e300};
    char *line = NULL;
    size_t cap = 0;
    uint32_t no = 0;
    bool ok = true;
    while (ok && getline(&line, &cap, f) > 0) {
        no++;
        const char *p = line + strspn(line, " \t\r\n");
        if (*p == '\0' || strncmp(p, "TIMESTAMP", 9) == 0) {
            continue;
        }
        ok = *p == '{' ? read_json_line(&r, p) : read_csv_line(&r, p);
    }
    free(line);
    fclose(f);
    if (!ok || t->n == 0) {
        snprintf(err, err_cap, "%s:%u: %s", path, no, ok ? "no requests in it" : r.what);
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
