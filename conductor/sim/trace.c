/* Readers of traces. A line that is not as described ends the reading with its number. */
#include "conductor/sim/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/base/map.h"

#define TOKENS_MAX  100000000u
#define SPAN_MAX_MS 1e12 /* thirty years */

struct reader {
    struct bt_sim_trace *t;
    uint32_t cap, blocks_cap;
    double last_ms;
    struct bt_map *numbers; /* of the file's hash ids: 1 + their number here */
    const char *what;       /* of the line at hand: what is wrong */
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

/* Ids are numbered as they come: only which are equal matters, and tables have a place for each. */
static uint32_t number_of_id(struct reader *r, uint64_t id)
{
    uintptr_t number = (uintptr_t)bt_map_get(r->numbers, &id);
    if (number == 0) {
        number = r->t->n_unique + 1;
        bt_map_put(r->numbers, &id, (void *)number);
    }
    return (uint32_t)(number - 1);
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
    return end != p && !isnan(*out);
}

static bool read_json_line(struct reader *r, const char *line)
{
    double at, in, out;
    size_t len = strlen(line);
    while (len > 0 && strchr(" \t\r\n", line[len - 1]) != NULL) {
        len--;
    }
    if (len == 0 || line[len - 1] != '}') {
        r->what = "its object does not end on the line; was the file cut off?";
        return false;
    }
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
        uint64_t id = strtoull(p, &end, 10);
        if (*p < '0' || *p > '9' || errno != 0) {
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

/* Days since 1970-01-01 of a date (Howard Hinnant's civil calendar). */
static double days_of(int y, unsigned m, unsigned d)
{
    y -= m <= 2;
    int era = y / 400;
    unsigned yoe = (unsigned)(y - era * 400);
    unsigned doy = (153 * (m + (m > 2 ? -3u : 9u)) + 2) / 5 + d - 1;
    return era * 146097.0 + (yoe * 365.0 + yoe / 4 - yoe / 100 + doy) - 719468;
}

/* TIMESTAMP as Azure writes it, of 2023 without and of 2024 with an offset from UTC, in ms since
 * 1970; returns what stands behind it, NULL: it is none. */
static const char *read_time(const char *p, double *at_ms_p)
{
    int y, n = 0;
    unsigned mo, d, h, mi, oh = 0, om = 0;
    double s;
    if (sscanf(p, "%d-%u-%u%*1[ T]%u:%u:%lf%n", &y, &mo, &d, &h, &mi, &s, &n) != 6 || mo < 1 ||
        mo > 12 || d < 1 || d > 31 || h > 23 || mi > 59 || !(s >= 0 && s < 61)) {
        return NULL;
    }
    p += n;
    double sign = *p == '-' ? -1 : 1;
    if (*p == 'Z') {
        p++;
    } else if (*p == '+' || *p == '-') {
        n = 0;
        if (sscanf(p + 1, "%2u:%2u%n", &oh, &om, &n) != 2 || n == 0) {
            return NULL;
        }
        p += 1 + n;
    }
    *at_ms_p = 1e3 * (((days_of(y, mo, d) * 24 + h - sign * oh) * 60 + mi - sign * om) * 60 + s);
    return p;
}

static bool read_csv_line(struct reader *r, const char *line)
{
    double at, in, out;
    int n = 0;
    const char *p = read_time(line, &at);
    if (p == NULL || sscanf(p, " , %lf , %lf %n", &in, &out, &n) != 2 || p[n] != '\0') {
        r->what = "neither TIMESTAMP,ContextTokens,GeneratedTokens of an Azure trace, as in "
                  "2023-11-16 18:15:46.68,374,44, nor a JSON object of a Mooncake trace";
        return false;
    }
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

/* Behind TIMESTAMP: other columns would be taken for these. */
static bool read_header(struct reader *r, const char *rest)
{
    const char *second = strchr(rest, ',');
    if (second == NULL || strncasecmp(rest, "context", 7) != 0 ||
        strncasecmp(second + 1 + strspn(second + 1, " "), "generated", 9) != 0) {
        r->what = "its columns are not TIMESTAMP,ContextTokens,GeneratedTokens in this order; "
                  "rename or reorder them";
        return false;
    }
    return true;
}

static bool read_line(struct reader *r, const char *line, uint32_t no)
{
    if (no == 1 && strncmp(line, "\x1f\x8b", 2) == 0) {
        r->what = "it is compressed; gunzip it";
        return false;
    }
    const char *p = line + (no == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0 ? 3 : 0);
    p += strspn(p, " \t\r\n");
    if (*p == '\0') {
        return true;
    }
    if (strncasecmp(p, "TIMESTAMP,", 10) == 0) {
        return read_header(r, p + 10);
    }
    return *p == '{' ? read_json_line(r, p) : read_csv_line(r, p);
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
    struct reader r = {.t = t, .last_ms = -INFINITY, .numbers = bt_map_create(sizeof(uint64_t))};
    char *line = NULL;
    size_t cap = 0;
    uint32_t no = 0;
    bool ok = true;
    while (ok && getline(&line, &cap, f) > 0) {
        ok = read_line(&r, line, ++no);
    }
    int broken = ferror(f) ? errno : 0;
    free(line);
    fclose(f);
    bt_map_destroy(r.numbers);
    if (!ok || broken != 0 || t->n == 0) {
        if (!ok) {
            snprintf(err, err_cap, "%s:%u: %s", path, no, r.what);
        } else {
            snprintf(err, err_cap, "%s: %s", path,
                     broken != 0 ? strerror(broken) : "no requests in it");
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
