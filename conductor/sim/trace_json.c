/* Reads the JSON object on a line strictly. A line that is not JSON may be half a line or two
 * lines, and would be counted wrongly. */
#include <stdlib.h>
#include <string.h>

#include "conductor/sim/trace_line.h"

#define DEPTH_MAX 64

#define NO_JSON "not one JSON object, or it does not end on the line; was the file cut off?"

static const char *blank(const char *p)
{
    return p + strspn(p, " \t\r\n");
}

static const char *skip_string(const char *p)
{
    for (p++; *p != '"'; p++) {
        p += *p == '\\';
        if (*p == '\0') {
            return NULL;
        }
    }
    return p + 1;
}

static const char *skip_digits(const char *p)
{
    size_t n = strspn(p, "0123456789");
    return n > 0 ? p + n : NULL;
}

static const char *skip_number(const char *p)
{
    p += *p == '-';
    p = *p == '0' ? p + 1 : skip_digits(p);
    if (p != NULL && *p == '.') {
        p = skip_digits(p + 1);
    }
    if (p != NULL && (*p == 'e' || *p == 'E')) {
        p += 1 + (p[1] == '+' || p[1] == '-');
        p = skip_digits(p);
    }
    return p;
}

static const char *skip_value(const char *p, int depth);

/* Skips [values] or {"key": values}. */
static const char *skip_list(const char *p, int depth)
{
    char end = *p == '{' ? '}' : ']';
    p = blank(p + 1);
    if (*p == end) {
        return p + 1;
    }
    for (;;) {
        if (end == '}') {
            p = *p == '"' ? skip_string(p) : NULL;
            p = p != NULL ? blank(p) : NULL;
            if (p == NULL || *p != ':') {
                return NULL;
            }
            p = blank(p + 1);
        }
        p = skip_value(p, depth + 1);
        if (p == NULL) {
            return NULL;
        }
        p = blank(p);
        if (*p == end) {
            return p + 1;
        }
        if (*p != ',') {
            return NULL;
        }
        p = blank(p + 1);
    }
}

/* Returns the text behind a value. NULL: there is no value. */
static const char *skip_value(const char *p, int depth)
{
    static const char *const words[] = {"true", "false", "null", "NaN", "Infinity", "-Infinity"};
    if (depth > DEPTH_MAX) {
        return NULL;
    }
    if (*p == '"') {
        return skip_string(p);
    }
    if (*p == '{' || *p == '[') {
        return skip_list(p, depth);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        if (strncmp(p, words[i], strlen(words[i])) == 0) {
            return p + strlen(words[i]);
        }
    }
    return skip_number(p);
}

enum { TIMESTAMP, INPUT, OUTPUT, IDS, FIELDS };
static const char *const fields[FIELDS] = {"timestamp", "input_length", "output_length",
                                           "hash_ids"};

static int field_of(const char *key, size_t len)
{
    int f = 0;
    while (f < FIELDS && (strlen(fields[f]) != len || memcmp(fields[f], key, len) != 0)) {
        f++;
    }
    return f;
}

/* Finds the object's own members, not those of objects inside it. If a name occurs twice, the last
 * one counts. */
static const char *find_fields(const char *line, const char *at[FIELDS])
{
    const char *end = *line == '{' ? skip_list(line, 0) : NULL;
    if (end == NULL || *blank(end) != '\0') {
        return NO_JSON;
    }
    for (const char *p = blank(line + 1); *p == '"';) {
        const char *key = p + 1;
        p = skip_string(p);
        int f = field_of(key, (size_t)(p - 1 - key));
        p = blank(blank(p) + 1);
        if (f < FIELDS) {
            at[f] = p;
        }
        p = blank(skip_value(p, 1));
        p = *p == ',' ? blank(p + 1) : p;
    }
    return NULL;
}

const char *bt_sim_line_json(const char *line, struct bt_sim_line *l)
{
    const char *at[FIELDS] = {NULL};
    const char *wrong = find_fields(line, at);
    double numbers[IDS];
    if (wrong != NULL) {
        return wrong;
    }
    for (int f = 0; f < FIELDS; f++) {
        /* 'I': Python writes Infinity. */
        if (at[f] == NULL || (f == IDS ? *at[f] != '[' : strchr("-0123456789I", *at[f]) == NULL)) {
            return "not a line with timestamp, input_length, output_length and hash_ids";
        }
        if (f < IDS) {
            numbers[f] = strtod(at[f], NULL);
        }
    }
    *l = (struct bt_sim_line){numbers[TIMESTAMP], numbers[INPUT], numbers[OUTPUT], at[IDS] + 1};
    return NULL;
}
