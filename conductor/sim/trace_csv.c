/* Reads a line of an Azure trace: TIMESTAMP,ContextTokens,GeneratedTokens, or as the header
 * says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "conductor/sim/trace_line.h"

#define COLUMNS_MAX 32u

/* Splits the line at its commas and removes quotes around fields. Returns the number of fields; 0:
 * a quote does not end. */
static uint32_t split(char *p, char *fields[COLUMNS_MAX])
{
    uint32_t n = 0;
    for (bool more = true; more && n < COLUMNS_MAX; n++) {
        p += strspn(p, " \t\r\n");
        bool quoted = *p == '"';
        fields[n] = quoted ? ++p : p;
        char *end = quoted ? strchr(p, '"') : p + strcspn(p, ",");
        if (end == NULL) {
            return 0;
        }
        p = quoted ? end + 1 + strspn(end + 1, " \t\r\n") : end;
        more = *p == ',';
        if (!more && *p != '\0') {
            return 0;
        }
        p++;
        *end = '\0';
        while (end > fields[n] && strchr(" \t\r\n", end[-1]) != NULL) {
            *--end = '\0';
        }
    }
    return n;
}

static bool begins(const char *text, const char *with)
{
    return strncasecmp(text, with, strlen(with)) == 0;
}

static const char *read_header(char *const fields[], uint32_t n, struct bt_sim_columns *c)
{
    struct bt_sim_columns found = {n, n, n, n};
    for (uint32_t i = n; i-- > 0;) {
        uint32_t *column_p = begins(fields[i], "timestamp")   ? &found.at
                             : begins(fields[i], "context")   ? &found.input
                             : begins(fields[i], "generated") ? &found.output
                                                              : NULL;
        if (column_p != NULL) {
            *column_p = i;
        }
    }
    if (found.at == n || found.input == n || found.output == n) {
        return "its columns are not TIMESTAMP, ContextTokens, GeneratedTokens and others; rename "
               "them";
    }
    *c = found;
    return NULL;
}

/* ---- numbers and times ---- */

/* Reads n digits as a number. -1: these are not n digits. */
static int digits(const char *p, int n)
{
    int v = 0;
    for (int i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9') {
            return -1;
        }
        v = 10 * v + p[i] - '0';
    }
    return v;
}

static bool read_number(const char *text, double *out)
{
    char *end;
    bool decimal = text[strspn(text, "0123456789+-.eE")] == '\0'; /* no nan, no hexadecimal */
    *out = strtod(text, &end);
    return decimal && end != text && *end == '\0';
}

/* Days from 1970-01-01 to a date (Howard Hinnant's civil calendar). */
static double days_of(int y, int m, int d)
{
    y -= m <= 2;
    int era = y / 400, yoe = y - era * 400;
    int doy = (153 * (m > 2 ? m - 3 : m + 9) + 2) / 5 + d - 1;
    return era * 146097.0 + (yoe * 365.0 + yoe / 4 - yoe / 100 + doy) - 719468;
}

static int days_in(int y, int m)
{
    static const int days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    return days[m - 1] + (m == 2 && y % 4 == 0 && (y % 100 != 0 || y % 400 == 0));
}

/* Reads Z, +HH:MM or nothing, in minutes. */
static bool read_offset(const char *p, int *minutes_p)
{
    *minutes_p = 0;
    if (*p == '\0' || strcmp(p, "Z") == 0) {
        return true;
    }
    int h = *p == '+' || *p == '-' ? digits(p + 1, 2) : -1;
    int m = h >= 0 && p[3] == ':' ? digits(p + 4, 2) : -1;
    if (h < 0 || h > 23 || m < 0 || m > 59 || p[6] != '\0') {
        return false;
    }
    *minutes_p = (*p == '-' ? -1 : 1) * (60 * h + m);
    return true;
}

/* Reads a time as in Azure's traces: 2023-11-16 18:15:46.68, in 2024 with an offset from UTC. In ms
 * since 1970. */
static bool read_time(const char *p, double *at_ms_p)
{
    static const struct {
        int at, n, lo, hi;
        const char *behind;
    } parts[] = {{0, 4, 1, 9999, "-"}, {5, 2, 1, 12, "-"},  {8, 2, 1, 31, " T"},
                 {11, 2, 0, 23, ":"},  {14, 2, 0, 59, ":"}, {17, 2, 0, 59, ".Z+-"}};
    int v[BT_ARRAY_LEN(parts)], minutes;
    for (size_t i = 0; i < BT_ARRAY_LEN(parts); i++) {
        v[i] = digits(p + parts[i].at, parts[i].n);
        /* The text may end here: strchr also finds its zero byte. */
        if (v[i] < parts[i].lo || v[i] > parts[i].hi ||
            strchr(parts[i].behind, p[parts[i].at + parts[i].n]) == NULL) {
            return false;
        }
        if (p[parts[i].at + parts[i].n] == '\0' && i + 1 < BT_ARRAY_LEN(parts)) {
            return false;
        }
    }
    if (v[2] > days_in(v[0], v[1])) {
        return false;
    }
    p += 19;
    double fraction = 0;
    if (*p == '.') {
        size_t n = strspn(p + 1, "0123456789");
        char text[24];
        snprintf(text, sizeof(text), "0%.*s", (int)BT_MIN(n + 1, (size_t)20), p);
        fraction = strtod(text, NULL);
        p += 1 + n;
        if (n == 0) {
            return false;
        }
    }
    if (!read_offset(p, &minutes)) {
        return false;
    }
    double days = days_of(v[0], v[1], v[2]);
    *at_ms_p = 1e3 * (((days * 24 + v[3]) * 60 + v[4] - minutes) * 60 + v[5] + fraction);
    return true;
}

const char *bt_sim_line_csv(char *line, struct bt_sim_columns *c, bool *header_p,
                            struct bt_sim_line *l)
{
    char *fields[COLUMNS_MAX];
    uint32_t n = split(line, fields);
    *header_p = false;
    for (uint32_t i = 0; i < n; i++) {
        *header_p |= begins(fields[i], "timestamp");
    }
    if (*header_p) {
        return read_header(fields, n, c);
    }
    *l = (struct bt_sim_line){0};
    if (n != c->n || !read_time(fields[c->at], &l->at_ms) ||
        !read_number(fields[c->input], &l->input) || !read_number(fields[c->output], &l->output)) {
        return "neither TIMESTAMP,ContextTokens,GeneratedTokens of an Azure trace, as in "
               "2023-11-16 18:15:46.68,374,44, nor a JSON object of a Mooncake trace";
    }
    return NULL;
}
