/* Aligned text tables for batonctl. */
#include "conductor/ctl/table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"

void bt_ctl_table_init(struct bt_ctl_table *t, const char *const *head, size_t columns)
{
    BT_ASSERT(columns != 0 && columns <= CTL_TABLE_COLUMNS_MAX);
    *t = (struct bt_ctl_table){.head = head, .columns = columns};
}

void bt_ctl_table_cell(struct bt_ctl_table *t, const char *fmt, ...)
{
    char text[600];
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    for (char *p = text; *p != '\0'; p++) {
        *p = (unsigned char)*p < ' ' || *p == 0x7f ? '?' : *p;
    }
    if (t->n == t->cap) {
        t->cap = t->cap != 0 ? t->cap * 2 : 64;
        t->cells = bt_realloc(t->cells, t->cap * sizeof(char *));
    }
    t->cells[t->n++] = bt_strdup(text);
}

/* ---- order ---- */

struct order {
    size_t column;
    bool down;
};

static int compare_rows(const void *a, const void *b, void *arg)
{
    const struct order *o = arg;
    const char *const *x = a, *const *y = b;
    int by = strverscmp(x[o->column], y[o->column]);
    return o->down ? -by : by;
}

bool bt_ctl_table_sort(struct bt_ctl_table *t, const char *column)
{
    struct order o = {.down = column[0] == '-'};
    column += o.down;
    while (o.column < t->columns && strcasecmp(t->head[o.column], column) != 0) {
        o.column++;
    }
    if (o.column == t->columns) {
        return false;
    }
    qsort_r(t->cells, t->n / t->columns, t->columns * sizeof(char *), compare_rows, &o);
    return true;
}

/* ---- output ---- */

static void print_row(const struct bt_ctl_table *t, const char *const *row, const size_t *width,
                      FILE *f)
{
    for (size_t c = 0; c < t->columns; c++) {
        bool last = c + 1 == t->columns;
        fprintf(f, "%-*s%s", last ? 0 : (int)width[c], row[c], last ? "\n" : "  ");
    }
}

void bt_ctl_table_print(const struct bt_ctl_table *t, FILE *f)
{
    BT_ASSERT(t->n % t->columns == 0);
    size_t width[CTL_TABLE_COLUMNS_MAX];
    for (size_t c = 0; c < t->columns; c++) {
        width[c] = strlen(t->head[c]);
        for (size_t i = c; i < t->n; i += t->columns) {
            width[c] = BT_MAX(width[c], strlen(t->cells[i]));
        }
    }
    print_row(t, t->head, width, f);
    for (size_t i = 0; i < t->n; i += t->columns) {
        print_row(t, (const char *const *)&t->cells[i], width, f);
    }
}

void bt_ctl_table_cleanup(struct bt_ctl_table *t)
{
    for (size_t i = 0; i < t->n; i++) {
        free(t->cells[i]);
    }
    free(t->cells);
}
