/* Aligned text tables for batonctl. */
#ifndef BT_CONDUCTOR_CTL_TABLE_H
#define BT_CONDUCTOR_CTL_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#define CTL_TABLE_COLUMNS_MAX 12

struct bt_ctl_table {
    const char *const *head;
    size_t columns;
    char **cells; /* row by row */
    size_t n, cap;
};

void bt_ctl_table_init(struct bt_ctl_table *t, const char *const *head, size_t columns);
/* Adds the next cell; a row is full after `columns` of them. Control characters in it become '?':
 * names and ids come from others, and must not steer the reader's terminal. */
void bt_ctl_table_cell(struct bt_ctl_table *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Sorts the rows by the column with this title; "-TITLE": the largest first. Numbers in a text
 * count as numbers. Returns false if there is no such column. */
bool bt_ctl_table_sort(struct bt_ctl_table *t, const char *column);
void bt_ctl_table_print(const struct bt_ctl_table *t, FILE *f);
void bt_ctl_table_cleanup(struct bt_ctl_table *t);

#endif
