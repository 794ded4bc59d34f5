/* The Admin service's part about pins: batonctl pin, unpin, pins. Loop thread. */
#ifndef BT_CONDUCTOR_ADMIN_PINS_H
#define BT_CONDUCTOR_ADMIN_PINS_H

#include "conductor/admin_gate.h"
#include "conductor/front/front.h"
#include "conductor/pin_table.h"
#include "conductor/request/requests.h"
#include "conductor/view/view.h"

struct bt_admin_pins;

struct bt_admin_pins_config { /* everything outlives it */
    struct bt_view *view;
    struct bt_requests *requests;
    struct bt_front *front; /* tokenizes; may be destroyed before this service */
    struct bt_pin_table *pins;
    uint32_t block_tokens;
    struct bt_kv_key root; /* shared (saltless) root */
    const uint8_t *secret; /* cluster secret of tenant salts */
    size_t secret_len;
};

/* Serves the calls behind the gate (before its server's start). */
struct bt_admin_pins *bt_admin_pins_create(struct bt_admin_gate *gate,
                                           const struct bt_admin_pins_config *conf);
/* Call it after the front and etcd were destroyed. */
void bt_admin_pins_destroy(struct bt_admin_pins *a);

#endif
