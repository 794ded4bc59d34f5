/* Where the conductor is (option, environment, local cluster), and the client's certificate. */
#include "conductor/ctl/where.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/conf/conf.h"

/* Returns the folder of the local cluster's state. The caller frees it. */
static char *state_dir(const struct bt_ctl *c)
{
    if (c->opt[BT_CTL_DIR] != NULL) {
        return bt_strdup(c->opt[BT_CTL_DIR]);
    }
    const char *dir = bt_conf_env("XDG_RUNTIME_DIR");
    return bt_sprintf("%s/baton-%u", dir != NULL && dir[0] != '\0' ? dir : "/tmp",
                      (unsigned)getuid());
}

/* In a directory such as /tmp another user may have made the folder. The address and the CA in it
 * would then be that user's. */
static bool is_ours(const char *dir)
{
    struct stat st;
    if (lstat(dir, &st) != 0) {
        return true; /* nothing to read there */
    }
    bool ours = S_ISDIR(st.st_mode) && st.st_uid == getuid() && (st.st_mode & 022) == 0;
    if (!ours) {
        fprintf(
            stderr,
            "batonctl: %s is not used: it must be a directory that belongs to you, no link, and no "
            "other user may write to it; name another with --dir, or a conductor with --addr\n",
            dir);
    }
    return ours;
}

static bool read_local_addr(struct bt_ctl *c, const char *dir)
{
    char path[512];
    snprintf(path, sizeof(path), "%s/conductor.addr", dir);
    if (!is_ours(dir)) {
        return false;
    }
    const char *why;
    struct stat st;
    FILE *f = bt_file_open(path, &st, &why);
    if (f == NULL) {
        fprintf(
            stderr,
            "batonctl: no conductor address: give --addr HOST:PORT, set BATON_ADDR, or name the "
            "state directory of a local cluster with --dir; %s cannot be read: %s\n",
            path, why);
        return false;
    }
    bool ok = fgets(c->addr, sizeof(c->addr), f) != NULL;
    (void)fclose(f);
    c->addr[strcspn(c->addr, " \t\r\n")] = '\0';
    if (!ok || c->addr[0] == '\0') {
        fprintf(stderr,
                "batonctl: %s is empty; restart the local cluster: baton-local down, then up\n",
                path);
        return false;
    }
    c->addr_from = "the local cluster's state directory";
    return true;
}

static bool find_addr(struct bt_ctl *c, const char *dir)
{
    if (c->addr[0] != '\0') {
        c->addr_from = "--addr";
        return true;
    }
    if (c->opt[BT_CTL_DIR] != NULL) {
        return read_local_addr(c, dir);
    }
    const char *env = bt_conf_env("BATON_ADDR");
    if (env != NULL && env[0] != '\0') {
        snprintf(c->addr, sizeof(c->addr), "%s", env);
        c->addr_from = "BATON_ADDR";
        return true;
    }
    return read_local_addr(c, dir);
}

/* Reads ca.crt, admin.crt and admin.key of a folder. */
static bool read_tls(struct bt_ctl *c, const char *dir)
{
    char err[700];
    char *ca = bt_sprintf("%s/ca.crt", dir), *cert = bt_sprintf("%s/admin.crt", dir),
         *key = bt_sprintf("%s/admin.key", dir);
    struct bt_tls_config conf = {
        .key = "--tls", .ca = ca, .cert = cert, .private_key = key, .role = "admin"};
    bt_status_t st = bt_tls_create(&conf, &c->tls, err, sizeof(err));
    if (st != BT_OK) {
        fprintf(stderr, "batonctl: %s\n", err);
    } else {
        c->tls_dir = bt_strdup(dir);
    }
    free(ca);
    free(cert);
    free(key);
    return st == BT_OK;
}

static bool find_tls(struct bt_ctl *c, const char *state)
{
    const char *env = bt_conf_env("BATON_TLS");
    if (c->opt[BT_CTL_TLS] != NULL) {
        return read_tls(c, c->opt[BT_CTL_TLS]);
    }
    if (env != NULL && env[0] != '\0') {
        return read_tls(c, env);
    }
    char *local = bt_sprintf("%s/tls", state);
    bool ours = strncmp(c->addr_from, "the local", 9) == 0 && access(local, F_OK) == 0;
    bool ok = !ours || read_tls(c, local);
    free(local);
    return ok;
}

/* Reads the first word of a file that only its owner and group may read. */
static bool read_key(struct bt_ctl *c, const char *path)
{
    struct stat st;
    char key[600] = "", why[256];
    const char *reason;
    FILE *f = bt_file_open(path, &st, &reason);
    if (f == NULL) {
        fprintf(stderr, "batonctl: --key-file: %s cannot be read: %s\n", path, reason);
    } else if (!bt_conf_secret_private(&st, why, sizeof(why))) {
        fprintf(stderr, "batonctl: --key-file: %s: %s\n", path, why);
    } else if (fgets(key, sizeof(key), f) == NULL || key[strspn(key, " \t\r\n")] == '\0') {
        fprintf(stderr, "batonctl: --key-file: %s: the first line has no key\n", path);
        key[0] = '\0';
    }
    if (f != NULL) {
        (void)fclose(f);
    }
    char *word = key + strspn(key, " \t\r\n");
    word[strcspn(word, " \t\r\n")] = '\0';
    if (word[0] != '\0') {
        c->authorization = bt_sprintf("Bearer %s", word);
    }
    explicit_bzero(key, sizeof(key));
    return c->authorization != NULL;
}

/* Without --key-file and BATON_API_KEY: the key that baton-local has made for its cluster. */
static bool find_key(struct bt_ctl *c, const char *state)
{
    const char *env = bt_conf_env("BATON_API_KEY");
    if (c->opt[BT_CTL_KEY_FILE] != NULL) {
        return read_key(c, c->opt[BT_CTL_KEY_FILE]);
    }
    if (env != NULL && env[0] != '\0') {
        c->authorization = bt_sprintf("Bearer %s", env);
        return true;
    }
    char *local = bt_sprintf("%s/keys/admin.key", state);
    bool ours = strncmp(c->addr_from, "the local", 9) == 0 && access(local, F_OK) == 0;
    bool ok = !ours || read_key(c, local);
    free(local);
    return ok;
}

bool bt_ctl_find_conductor(struct bt_ctl *c)
{
    char *state = state_dir(c);
    bool ok = find_addr(c, state) && find_tls(c, state) && find_key(c, state);
    free(state);
    return ok;
}

char *bt_ctl_local_logs(const struct bt_ctl *c)
{
    char *state = state_dir(c), *logs = NULL;
    if (access(state, F_OK) == 0 && is_ours(state)) {
        logs = bt_sprintf("%s/logs", state);
        if (access(logs, R_OK | X_OK) != 0) {
            free(logs);
            logs = NULL;
        }
    }
    free(state);
    return logs;
}
