/* Intrusive doubly linked list with a sentinel head. */
#ifndef BT_BASE_LIST_H
#define BT_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct bt_list {
    struct bt_list *prev, *next;
};

static inline void bt_list_init(struct bt_list *l)
{
    l->prev = l->next = l;
}
static inline bool bt_list_empty(const struct bt_list *l)
{
    return l->next == l;
}
static inline void bt_list_insert_tail(struct bt_list *head, struct bt_list *n)
{
    n->prev = head->prev;
    n->next = head;
    head->prev->next = n;
    head->prev = n;
}
static inline void bt_list_insert_head(struct bt_list *head, struct bt_list *n)
{
    bt_list_insert_tail(head->next, n);
}
/* Removes n and leaves it as an empty list, so that removing twice is harmless. */
static inline void bt_list_remove(struct bt_list *n)
{
    n->prev->next = n->next;
    n->next->prev = n->prev;
    bt_list_init(n);
}

#define bt_list_for_each(pos, head) for ((pos) = (head)->next; (pos) != (head); (pos) = (pos)->next)
#define bt_list_for_each_safe(pos, tmp, head)                                                      \
    for ((pos) = (head)->next, (tmp) = (pos)->next; (pos) != (head);                               \
         (pos) = (tmp), (tmp) = (pos)->next)

#endif
