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
    if (t->n == t->cap) {
        t->cap = t->cap != 0 ? t->cap * 2 : 64;
        t->cells = bt_realloc(t->cells, t->cap * sizeof(char *));
    }
    t->cells[t->n++] = bt_strdup(text);
}

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
