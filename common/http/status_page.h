/* GET /health and GET /metrics of a daemon that has no other HTTP: kvstores and workers. Loop
 * thread. */
#ifndef BT_HTTP_STATUS_PAGE_H
#define BT_HTTP_STATUS_PAGE_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"

struct bt_status_page;

/* NULL: healthy; else the reason why not (static text, or valid until the next call). */
typedef const char *(*bt_health_fn)(void *arg);

/* Serves /health (200 "ok", or 503 and the reason) and /metrics (Prometheus text 0.0.4) on
 * "host:port" (port 0: any free; port_p gets it). health may be NULL: always healthy. metrics stays
 * the caller's. ERR_CONFIG: a bad address; ERR_IO: it cannot be bound (logged). */
bt_status_t bt_status_page_create(struct bt_loop *loop, const char *listen,
                                  struct bt_metrics *metrics, bt_health_fn health, void *arg,
                                  struct bt_status_page **page_p, int *port_p) BT_MUST_CHECK;
void bt_status_page_destroy(struct bt_status_page *page);

#endif
