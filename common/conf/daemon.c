/* See daemon.h. */
#include "common/conf/daemon.h"

#include <string.h>

#include "common/log/log.h"

static bt_log_level_t level_of(const char *name)
{
    static const struct {
        const char *name;
        bt_log_level_t level;
    } levels[] = {{"error", BT_LOG_ERROR}, {"warn", BT_LOG_WARN}, {"debug", BT_LOG_DEBUG}};
    for (size_t i = 0; i < BT_ARRAY_LEN(levels); i++) {
        if (strcmp(levels[i].name, name) == 0) {
            return levels[i].level;
        }
    }
    return BT_LOG_INFO;
}

void bt_conf_log_start(const struct bt_conf_common *c, const char *daemon)
{
    bt_log_set_journal(bt_conf_env("JOURNAL_STREAM"));
    bt_log_init(daemon, c->node_id, level_of(c->log_level), strcmp(c->log_format, "json") == 0);
}

void bt_conf_reload_all(const struct bt_conf_schema *schema, void *conf, const char *daemon)
{
    const struct bt_conf_common *c = conf;
    if (bt_conf_reload(schema, conf) == BT_OK) {
        bt_conf_log_start(c, daemon);
        BT_INFO("reloaded", "log_level=%s", c->log_level);
    } else {
        BT_ERROR("reload_failed", "why=%s",
                 "no file was given at start, or it has the mistakes listed above; "
                 "nothing has changed");
    }
}

/* ---- the secret ---- */

bool bt_conf_secret(const struct bt_conf_common *c, struct bt_secret *s)
{
    char err[512];
    memset(s, 0, sizeof(*s));
    if (c->kv_salt_file != NULL &&
        bt_conf_secret_read(c->kv_salt_file, s, err, sizeof(err)) != BT_OK) {
        BT_ERROR("config", "key=kv.salt_file why=%s", err);
        return false;
    }
    return true;
}

bool bt_conf_secret_id(const struct bt_conf_common *c, struct bt_secret *s)
{
    bool good = bt_conf_secret(c, s);
    explicit_bzero(s->bytes, sizeof(s->bytes));
    s->len = 0;
    return good;
}

int bt_conf_model_exit(bt_status_t status)
{
    if (status == BT_ERR_DEVICE) {
        return BT_EXIT_DEVICE;
    }
    bool files = status == BT_ERR_INVALID || status == BT_ERR_UNSUPPORTED ||
                 status == BT_ERR_NOT_FOUND || status == BT_ERR_TOO_LARGE;
    return files ? BT_EXIT_REFUSED : BT_EXIT_FAILED;
}

/* ---- addresses and names ---- */

char *bt_conf_dialled(const char *listen, const char *advertise, int port)
{
    if (advertise != NULL) {
        return bt_strdup(advertise);
    }
    const char *colon = strrchr(listen, ':');
    return bt_sprintf("%.*s:%d", colon != NULL ? (int)(colon - listen) : (int)strlen(listen),
                      listen, port);
}

char *bt_conf_model_id(const struct bt_conf_common *c)
{
    if (c->model_served_name != NULL && c->model_served_name[0] != '\0') {
        return bt_strdup(c->model_served_name);
    }
    const char *path = c->model_path, *end = path + strlen(path);
    while (end > path + 1 && end[-1] == '/') {
        end--;
    }
    const char *start = end;
    while (start > path && start[-1] != '/') {
        start--;
    }
    return bt_sprintf("%.*s", (int)(end - start), start);
}
