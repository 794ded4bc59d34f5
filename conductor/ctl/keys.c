/* batonctl key add, list, revoke: edits a file of API keys (conductor.api_keys_file). Conductors
 * read the file again within seconds. One edit at a time (a lock on the directory), and a reader
 * sees the old or the new file, never a part: the new one is written beside it and renamed. */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/conf/conf.h"
#include "common/keys/keys.h"
#include "conductor/ctl/ctl.h"
#include "conductor/ctl/table.h"

struct edit { /* the file while it is locked */
    const char *path;
    int dir; /* locked; -1: not */
    bool exists;
    struct stat st; /* if it exists */
    struct bt_buf text;
    struct bt_keys *keys;
};

static int failed(const char *path, const char *what)
{
    fprintf(stderr, "batonctl: %s: %s: %s\n", path, what, strerror(errno));
    return 1;
}

/* ---- the file ---- */

static struct bt_keys *parse(const char *path, const struct bt_buf *text)
{
    struct bt_keys *keys = NULL;
    char why[300], *copy = bt_malloc(text->len + 1);
    bt_copy(copy, text->data, text->len);
    if (bt_keys_parse(copy, text->len, &keys, why, sizeof(why)) != BT_OK) {
        fprintf(stderr, "batonctl: %s:%s\n", path, why);
    }
    free(copy);
    return keys;
}

static bool read_all(struct edit *e, int fd)
{
    char piece[65536];
    ssize_t n;
    while ((n = read(fd, piece, sizeof(piece))) > 0 && e->text.len <= BT_KEYS_FILE_MAX) {
        bt_buf_append(&e->text, piece, (size_t)n);
    }
    explicit_bzero(piece, sizeof(piece));
    if (n != 0) {
        errno = n > 0 ? EFBIG : errno;
    }
    return n == 0;
}

/* Locks (if it is to be changed), reads and parses the file. False: a message was printed. */
static bool edit_open(struct edit *e, const char *path, bool change)
{
    char why[256], *copy = bt_strdup(path);
    *e = (struct edit){.path = path, .dir = -1};
    bt_buf_init(&e->text);
    e->dir = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(copy);
    if (e->dir < 0) {
        return failed(path, "its directory cannot be opened") != 1;
    }
    if (change && flock(e->dir, LOCK_EX) != 0) {
        return failed(path, "its directory cannot be locked") != 1;
    }
    /* Otherwise a new file would replace the link, and the file behind the link would not
     * change. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | (change ? O_NOFOLLOW : 0));
    e->exists = fd >= 0;
    if (fd < 0 && errno == ELOOP) {
        fprintf(stderr, "batonctl: %s: it is a symbolic link; name the file itself\n", path);
        return false;
    }
    if (fd < 0 && (errno != ENOENT || !change)) {
        return failed(path, "it cannot be read") != 1;
    }
    bool ok = true;
    if (e->exists) {
        if (fstat(fd, &e->st) != 0 || !read_all(e, fd)) {
            ok = failed(path, "it cannot be read") != 1;
        } else if (!S_ISREG(e->st.st_mode) || !bt_conf_secret_private(&e->st, why, sizeof(why))) {
            fprintf(stderr, "batonctl: %s: %s\n", path,
                    S_ISREG(e->st.st_mode) ? why : "it is not a regular file");
            ok = false;
        }
        close(fd);
    }
    e->keys = ok ? parse(path, &e->text) : NULL;
    return e->keys != NULL;
}

static void edit_close(struct edit *e)
{
    if (e->text.data != NULL) {
        explicit_bzero(e->text.data, e->text.len);
    }
    bt_buf_cleanup(&e->text);
    bt_keys_destroy(e->keys);
    if (e->dir >= 0) {
        close(e->dir); /* ends the lock */
    }
}

/* Replaces the file by e->text. Exit status. */
static int edit_write(struct edit *e)
{
    struct bt_keys *good =
        /* checks the new text: a file that no conductor would read must not be written */
        parse(e->path, &e->text);
    if (good == NULL) {
        return 1;
    }
    bt_keys_destroy(good);
    char *next = bt_sprintf("%s.new", e->path);
    (void)unlink(next); /* of an edit that was killed; the lock is ours */
    int fd = open(next, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600), rc = 0;
    if (fd < 0) {
        rc = failed(next, "it cannot be written");
        free(next);
        return rc;
    }
    size_t at = 0;
    ssize_t n = 0;
    while (at < e->text.len && (n = write(fd, e->text.data + at, e->text.len - at)) > 0) {
        at += (size_t)n;
    }
    bool same = !e->exists || ((e->st.st_uid == geteuid() && e->st.st_gid == getegid()) ||
                               fchown(fd, e->st.st_uid, e->st.st_gid) == 0);
    same = same && (!e->exists || fchmod(fd, e->st.st_mode & 0777) == 0);
    if (at < e->text.len) {
        rc = failed(next, "it cannot be written");
    } else if (!same) {
        rc = failed(e->path, "owner and mode of the file cannot be kept; run this as its owner");
    } else if (fsync(fd) != 0 || rename(next, e->path) != 0 || fsync(e->dir) != 0) {
        rc = failed(e->path, "it cannot be replaced");
    }
    close(fd);
    if (rc != 0) {
        (void)unlink(next);
    }
    free(next);
    return rc;
}

/* ---- add ---- */

/* Reads "90d" from now, or a time as in the file. Returns false for any other text. */
static bool read_expires(const char *text, char out[32])
{
    char *end = NULL;
    unsigned long days = text[0] >= '0' && text[0] <= '9' ? strtoul(text, &end, 10) : 0;
    uint64_t s = 0, now_s = bt_real_ns() / 1000000000;
    if (end != NULL && strcmp(end, "d") == 0 && days > 0 && days <= 36500) {
        s = now_s + days * 86400;
    } else if (!bt_keys_time_read(text, &s)) {
        return false;
    }
    if (s <= now_s) {
        return false;
    }
    bt_keys_time_put(s, out);
    return true;
}

/* Appends the new key's line. */
static void put_line(struct bt_buf *b, const struct bt_ctl *c, const char *secret, const char *id,
                     const char *expires)
{
    uint8_t digest[BT_SHA256_LEN];
    char hex[2 * BT_SHA256_LEN + 1];
    bt_sha256(secret, strlen(secret), digest);
    bt_hex(digest, sizeof(digest), hex);
    if (b->len > 0 && b->data[b->len - 1] != '\n') {
        bt_buf_puts(b, "\n");
    }
    bt_buf_printf(b, "sha256:%s id=%s scopes=%s", hex, id,
                  c->opt[BT_CTL_SCOPE] != NULL ? c->opt[BT_CTL_SCOPE] : "inference");
    if (c->opt[BT_CTL_TENANT] != NULL) {
        bt_buf_printf(b, " tenant=%s", c->opt[BT_CTL_TENANT]);
    }
    if (c->opt[BT_CTL_EXPIRES] != NULL) {
        bt_buf_printf(b, " expires=%s", expires);
    }
    const char *terms = c->opt[BT_CTL_TERMS];
    for (const char *t = terms; t != NULL && *t != '\0'; t += strcspn(t, ","), t += *t == ',') {
        bt_buf_printf(b, " %.*s", (int)strcspn(t, ","), t);
    }
    bt_buf_puts(b, "\n");
}

static int key_add(const struct bt_ctl *c)
{
    struct edit e;
    uint8_t random[32], short_id[4];
    char secret[BT_KEYS_SECRET_BYTES], id[BT_KEYS_NAME_BYTES + 1], hex[65], expires[32], why[200];
    uint32_t scopes;
    if ((c->opt[BT_CTL_ID] != NULL && !bt_keys_name_good(c->opt[BT_CTL_ID])) ||
        (c->opt[BT_CTL_TENANT] != NULL && !bt_keys_name_good(c->opt[BT_CTL_TENANT]))) {
        return bt_ctl_usage("--id and --tenant need 1 to 32 letters, digits and the signs . _ -",
                            NULL);
    }
    if (c->opt[BT_CTL_SCOPE] != NULL &&
        !bt_keys_scopes_read(c->opt[BT_CTL_SCOPE], &scopes, why, sizeof(why))) {
        return bt_ctl_usage(
            "--scope needs inference, metrics, admin, or several with commas between",
            c->opt[BT_CTL_SCOPE]);
    }
    if (c->opt[BT_CTL_EXPIRES] != NULL && !read_expires(c->opt[BT_CTL_EXPIRES], expires)) {
        return bt_ctl_usage(
            "--expires needs a time to come: 2027-01-31, 2027-01-31T12:00:00Z or 90d",
            c->opt[BT_CTL_EXPIRES]);
    }
    const char *terms = c->opt[BT_CTL_TERMS];
    if (terms != NULL &&
        (strspn(terms, "abcdefghijklmnopqrstuvwxyz_=0123456789.,-+") != strlen(terms) ||
         strstr(terms, "revoked=") != NULL || strstr(terms, "expires=") != NULL)) {
        return bt_ctl_usage("--terms needs NAME=N, or several with commas between", terms);
    }
    bt_random(random, sizeof(random));
    bt_hex(random, sizeof(random), hex);
    snprintf(secret, sizeof(secret), BT_KEYS_PREFIX "%s", hex);
    bt_random(short_id, sizeof(short_id));
    bt_hex(short_id, sizeof(short_id), hex);
    snprintf(id, sizeof(id), "%.32s", c->opt[BT_CTL_ID] != NULL ? c->opt[BT_CTL_ID] : hex);
    int rc = 1;
    if (edit_open(&e, c->opt[BT_CTL_FILE], true)) {
        put_line(&e.text, c, secret, id, expires);
        rc = edit_write(&e);
    }
    if (rc == 0) {
        fprintf(stderr, "batonctl: the key %s is in %s; the key itself is shown only now:\n", id,
                c->opt[BT_CTL_FILE]);
        puts(secret);
    }
    edit_close(&e);
    explicit_bzero(secret, sizeof(secret));
    explicit_bzero(random, sizeof(random));
    return rc;
}

/* ---- list and revoke ---- */

static const char *state_of(const struct bt_key *k)
{
    switch (bt_key_state(k, bt_real_ns() / 1000000000)) {
    case BT_KEY_EXPIRED: return "expired";
    case BT_KEY_REVOKED: return "revoked";
    case BT_KEY_VALID: break;
    }
    return "valid";
}

static json_t *time_json(uint64_t s)
{
    char text[32];
    if (s == 0) {
        return json_null();
    }
    bt_keys_time_put(s, text);
    return json_string(text);
}

static int key_list(const struct bt_ctl *c)
{
    static const char *const head[] = {"ID", "TENANT", "SCOPES", "EXPIRES", "STATE", "STORED"};
    struct edit e;
    if (!edit_open(&e, c->opt[BT_CTL_FILE], false)) {
        edit_close(&e);
        return 1;
    }
    json_t *all = json_array();
    struct bt_ctl_table t;
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < e.keys->n; i++) {
        const struct bt_key *k = &e.keys->all[i];
        struct bt_buf scopes;
        char expires[32] = "-";
        bt_buf_init(&scopes);
        bt_keys_scopes_put(k->scopes, &scopes);
        if (k->expires_s != 0) {
            bt_keys_time_put(k->expires_s, expires);
        }
        json_array_append_new(all,
                              json_pack("{s:s,s:s,s:s,s:o,s:o,s:s,s:b}", "id", k->id, "tenant",
                                        k->tenant, "scopes", scopes.data, "expires",
                                        time_json(k->expires_s), "revoked", time_json(k->revoked_s),
                                        "state", state_of(k), "digest_only", !k->plain));
        bt_ctl_table_cell(&t, "%s", k->id);
        bt_ctl_table_cell(&t, "%s", k->tenant);
        bt_ctl_table_cell(&t, "%s", scopes.data);
        bt_ctl_table_cell(&t, "%s", expires);
        bt_ctl_table_cell(&t, "%s", state_of(k));
        bt_ctl_table_cell(&t, "%s", k->plain ? "as it is" : "digest");
        bt_buf_cleanup(&scopes);
    }
    int rc = 0;
    if (c->json) {
        rc = bt_ctl_print_json(all);
        bt_ctl_table_cleanup(&t);
    } else {
        rc = bt_ctl_print_table(c, &t);
        json_decref(all);
    }
    edit_close(&e);
    return rc;
}

/* Adds a word at the end of a line of the text. */
static void add_word(struct bt_buf *text, uint32_t line, const char *word)
{
    struct bt_buf out;
    const char *at = text->data, *end = text->data + text->len;
    bt_buf_init(&out);
    for (uint32_t number = 1; at < end; number++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t n = (size_t)((stop != NULL ? stop : end) - at), body = n;
        while (body > 0 && strchr(" \t\r", at[body - 1]) != NULL) {
            body--;
        }
        bt_buf_append(&out, at, number == line ? body : n);
        if (number == line) {
            bt_buf_printf(&out, " %s", word);
        }
        bt_buf_puts(&out, "\n");
        at += n + 1;
    }
    explicit_bzero(text->data, text->len);
    bt_buf_cleanup(text);
    *text = out;
}

static int key_revoke(const struct bt_ctl *c)
{
    struct edit e;
    const struct bt_key *found = NULL;
    int rc = 1;
    if (!edit_open(&e, c->opt[BT_CTL_FILE], true)) {
        edit_close(&e);
        return 1;
    }
    for (size_t i = 0; i < e.keys->n; i++) {
        found = strcmp(e.keys->all[i].id, c->arg2) == 0 ? &e.keys->all[i] : found;
    }
    if (found == NULL) {
        fprintf(stderr, "batonctl: %s has no key %s; 'batonctl key list' shows the ids\n",
                c->opt[BT_CTL_FILE], c->arg2);
    } else if (found->revoked_s != 0) {
        fprintf(stderr, "batonctl: the key %s is already revoked\n", c->arg2);
        rc = 0;
    } else {
        char word[48] = "revoked=";
        bt_keys_time_put(bt_real_ns() / 1000000000, word + strlen(word));
        add_word(&e.text, found->line, word);
        rc = edit_write(&e);
    }
    if (rc == 0 && found->revoked_s == 0) {
        fprintf(stderr,
                "batonctl: the key %s is revoked; conductors refuse it within seconds, and answers "
                "that have begun go on\n",
                c->arg2);
    }
    edit_close(&e);
    return rc;
}

int bt_ctl_key(const struct bt_ctl *c)
{
    bool adds = strcmp(c->arg, "add") == 0, revokes = strcmp(c->arg, "revoke") == 0;
    if (!adds && !revokes && strcmp(c->arg, "list") != 0) {
        return bt_ctl_usage("key has add, list and revoke, not", c->arg);
    }
    if (c->opt[BT_CTL_FILE] == NULL) {
        return bt_ctl_usage("key needs --file FILE, the conductor's api_keys_file", NULL);
    }
    if (!adds && (c->opt[BT_CTL_ID] != NULL || c->opt[BT_CTL_SCOPE] != NULL ||
                  c->opt[BT_CTL_EXPIRES] != NULL || c->opt[BT_CTL_TENANT] != NULL ||
                  c->opt[BT_CTL_TERMS] != NULL)) {
        return bt_ctl_usage("--id, --scope, --expires, --tenant and --terms are options of key add",
                            NULL);
    }
    if (revokes != (c->arg2 != NULL)) {
        return bt_ctl_usage(revokes ? "key revoke needs the ID of a key"
                                    : "this action takes no such argument",
                            c->arg2);
    }
    return adds ? key_add(c) : revokes ? key_revoke(c) : key_list(c);
}
