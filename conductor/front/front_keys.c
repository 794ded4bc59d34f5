/* API keys: a file of one key a line ('#' comments). Only SHA-256 digests are kept, compared in
 * constant time. The digest also names the tenant, whose caches are kept apart. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "common/base/sha256.h"
#include "conductor/front/front_priv.h"

#define KEY_BYTES_MAX 512

struct front_keys {
    uint8_t (*digests)[BT_SHA256_LEN];
    size_t n;
};

static bt_status_t keys_error(struct front_keys *k, FILE *file, char *err, size_t cap,
                              const char *path, const char *what)
{
    snprintf(err, cap, "%s: %s", path, what);
    if (file != NULL) {
        fclose(file);
    }
    front_keys_destroy(k);
    return BT_ERR_CONFIG;
}

bt_status_t front_keys_load(const char *path, struct front_keys **keys_p, char *err, size_t err_cap)
{
    struct stat st;
    char line[KEY_BYTES_MAX + 2];
    struct front_keys *k = bt_calloc(1, sizeof(*k));
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return keys_error(k, NULL, err, err_cap, path, strerror(errno));
    }
    if (fstat(fileno(file), &st) != 0 || !S_ISREG(st.st_mode)) {
        return keys_error(k, file, err, err_cap, path, "not a regular file");
    }
    if ((st.st_mode & (S_IROTH | S_IWOTH)) != 0) {
        return keys_error(k, file, err, err_cap, path,
                          "API keys must not be readable by everybody; chmod 0600 or 0640");
    }
    while (fgets(line, sizeof(line), file) != NULL) {
        size_t n = strcspn(line, "\r\n");
        if (line[n] == '\0' && !feof(file)) {
            explicit_bzero(line, sizeof(line));
            return keys_error(k, file, err, err_cap, path, "a key is longer than 512 bytes");
        }
        while (n > 0 && (line[n - 1] == ' ' || line[n - 1] == '\t')) {
            n--;
        }
        size_t from = strspn(line, " \t");
        if (from >= n || line[from] == '#') {
            continue;
        }
        k->digests = bt_realloc(k->digests, (k->n + 1) * sizeof(k->digests[0]));
        bt_sha256(line + from, n - from, k->digests[k->n++]);
    }
    explicit_bzero(line, sizeof(line));
    if (k->n == 0) {
        return keys_error(k, file, err, err_cap, path,
                          "holds no key; write one a line, or remove conductor.api_keys_file");
    }
    fclose(file);
    *keys_p = k;
    return BT_OK;
}

void front_keys_destroy(struct front_keys *k)
{
    if (k != NULL) {
        free(k->digests);
        free(k);
    }
}

bool front_keys_check(const struct front_keys *k, const char *authorization, char tenant[33])
{
    uint8_t mine[BT_SHA256_LEN];
    if (authorization == NULL || strncasecmp(authorization, "Bearer ", 7) != 0) {
        return false;
    }
    const char *key = authorization + 7 + strspn(authorization + 7, " ");
    bt_sha256(key, strlen(key), mine);
    bool found = false;
    for (size_t i = 0; i < k->n; i++) { /* all of them, all of their bytes */
        uint8_t differ = 0;
        for (size_t b = 0; b < BT_SHA256_LEN; b++) {
            differ |= (uint8_t)(mine[b] ^ k->digests[i][b]);
        }
        found |= differ == 0;
    }
    if (found) {
        bt_hex(mine, 16, tenant);
    }
    return found;
}
