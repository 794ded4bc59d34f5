/* A few sums by class. Pure: see classes.h. */
#include "conductor/view/classes.h"

uint32_t bt_view_classes_add(struct bt_view_classes *c, int32_t priority, double amount)
{
    uint32_t place = BT_VIEW_CLASSES;
    for (uint32_t i = 0; i < BT_VIEW_CLASSES; i++) {
        if (c->of[i].n > 0 && c->of[i].priority == priority) {
            place = i;
            break;
        }
        place = c->of[i].n == 0 && place == BT_VIEW_CLASSES ? i : place;
    }
    if (place < BT_VIEW_CLASSES) {
        c->of[place].priority = priority;
        c->of[place].sum = c->of[place].n > 0 ? c->of[place].sum + amount : amount;
        c->of[place].n++;
    }
    return place;
}

void bt_view_classes_remove(struct bt_view_classes *c, uint32_t place, double amount)
{
    if (place < BT_VIEW_CLASSES) {
        c->of[place].n--;
        c->of[place].sum -= amount;
    }
}

double bt_view_classes_below(const struct bt_view_classes *c, int32_t priority)
{
    double sum = 0;
    for (uint32_t i = 0; i < BT_VIEW_CLASSES; i++) {
        sum += c->of[i].n > 0 && c->of[i].priority > priority ? c->of[i].sum : 0;
    }
    return sum;
}
