/* What every daemon derives from the common keys (struct bt_conf_common): its log, the cluster's
 * secret, addresses and names; and the exit statuses that systemd and operators read. Files are
 * read during the call only. Control thread. */
#ifndef BT_CONF_DAEMON_H
#define BT_CONF_DAEMON_H

#include "common/base/status.h"
#include "common/conf/conf.h"
#include "common/conf/secret.h"

/* Exit statuses; systemd restarts after 1 and 4 only (deploy/systemd). */
enum {
    BT_EXIT_OK = 0,      /* told to stop, and stopped */
    BT_EXIT_FAILED = 1,  /* could not start, or go on; another try may help */
    BT_EXIT_CONFIG = 2,  /* the configuration must be changed */
    BT_EXIT_REFUSED = 3, /* does not fit the cluster or the model; another try will not help */
    BT_EXIT_DEVICE = 4   /* the device failed */
};

/* The exit status for a model whose files were not loaded, by the loader's status: files that are
 * wrong stay wrong, but another start may find memory, or a disk that answers. */
int bt_conf_model_exit(bt_status_t status);

/* Starts the log as log.level and log.format say; again after a reload. daemon as in bt_log_init.
 */
void bt_conf_log_start(const struct bt_conf_common *c, const char *daemon);
/* For SIGHUP: bt_conf_reload, then starts the log again; logs the result. conf begins with a
 * bt_conf_common. */
void bt_conf_reload_all(const struct bt_conf_schema *schema, void *conf, const char *daemon);

/* Reads the secret of kv.salt_file; without that key there is none. False: the log says why. */
bool bt_conf_secret(const struct bt_conf_common *c, struct bt_secret *s_p) BT_MUST_CHECK;
/* Only its id: the bytes are wiped already. */
bool bt_conf_secret_id(const struct bt_conf_common *c, struct bt_secret *s_p) BT_MUST_CHECK;

/* The address that others dial: advertise if it is not NULL, else the host of listen (host:port)
 * with the bound port. The caller frees it. */
char *bt_conf_dialled(const char *listen, const char *advertise, int port);
/* Name of the model: model.served_name, by default the last part of model.path. The caller frees
 * it. */
char *bt_conf_model_id(const struct bt_conf_common *c);

#endif
