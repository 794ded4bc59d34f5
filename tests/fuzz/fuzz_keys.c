/* libFuzzer: the file of API keys, and behind a zero byte an Authorization header and a tenant's
 * name. A file that is accepted has keys that are found by themselves, each of one tenant, whose
 * terms are within their bounds. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_priv.h"
#include "tests/fuzz/rig.h"

/* The key of an Authorization header, whatever its scopes; NULL: none. */
static const struct bt_key *find(const struct bt_front_keys *k, const char *header)
{
    struct bt_front_error e = {0};
    const struct bt_front_credentials c = {.authorization = header};
    const struct bt_key *key = bt_front_keys_check(k, &c, 0, &e);
    BT_ASSERT(key != NULL || (e.http == 401 && e.refusal != NULL));
    return key;
}

static void check_terms(const struct bt_front_keys *k, const char *tenant)
{
    const struct bt_keys_terms *t = bt_front_keys_terms(k, tenant);
    BT_ASSERT(t != NULL && bt_front_keys_owner(k, tenant) > 0);
    BT_ASSERT(t->requests_per_s >= 0 && t->requests_per_s <= 1e9);
    BT_ASSERT(t->tokens_per_s >= 0 && t->tokens_per_s <= 1e12);
    BT_ASSERT(t->concurrency >= 0 && t->concurrency <= 1e6);
    BT_ASSERT(t->weight >= 0 && t->weight <= 1e6);
    BT_ASSERT(t->slo_ttft_ms >= 0 && t->slo_ttft_ms <= 86400000);
    BT_ASSERT(t->slo_tbt_ms >= 0 && t->slo_tbt_ms <= 86400000);
}

/* What a client of this key may do: the limits say yes, or no in words. */
static void use(struct bt_front_keys *k, const char *tenant, uint64_t bytes)
{
    struct bt_front_error e = {0};
    struct bt_front_work w = {.body_bytes = bytes,
                              .body_announced = bytes / 2,
                              .generations = bytes % 97 + 1,
                              .prompt_tokens = bytes * 3,
                              .context = 8192};
    for (int i = 0; i < 4; i++) {
        if (bt_front_keys_admit_body(k, tenant, bytes, true, &e) &&
            bt_front_keys_admit(k, tenant, &w, &e)) {
            bt_front_keys_charge(k, tenant, bytes);
            bt_front_keys_end(k, tenant, w.generations);
        } else {
            BT_ASSERT((e.http == 429 || e.http == 400) && e.message[0] != '\0');
        }
        bt_front_keys_counted(k, tenant, &w);
        rig_pass_ms(i * 1000u);
    }
}

/* The first key of the file is one that is found. */
static void check_first_key(const struct bt_front_keys *k, const char *text)
{
    char header[600];
    text += strncmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    for (; *text != '\0'; text += strcspn(text, "\n"), text += *text == '\n') {
        size_t skip = strspn(text, " \t"), len = strcspn(text + skip, " \t\r\n");
        /* A digest is no key, and a key may have ended. */
        if (len > 0 && (strncmp(text + skip, "sha256:", 7) == 0 ||
                        memmem(text + skip, strcspn(text + skip, "\n"), "expires=", 8) != NULL ||
                        memmem(text + skip, strcspn(text + skip, "\n"), "revoked=", 8) != NULL)) {
            return;
        }
        if (len > 0 && text[skip] != '#') {
            snprintf(header, sizeof(header), "Bearer %.*s", (int)len, text + skip);
            /* A '\r' within a line belongs to the key, of which it may not be the end here. */
            BT_ASSERT(memchr(text + skip, '\r', strcspn(text + skip, "\n")) != NULL ||
                      find(k, header) != NULL);
            return;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bt_front_keys *k = NULL;
    char err[512] = "";
    rig_reset();
    char *text = bt_malloc(size + 2);
    memcpy(text, data, size);
    text[size] = text[size + 1] = '\0';
    size_t n = strlen(text);
    char *header = text + BT_MIN(n + 1, size);
    if (bt_front_keys_load(rig_file("keys", data, n), &k, err, sizeof(err)) != BT_OK) {
        BT_ASSERT(err[0] != '\0' && k == NULL);
        free(text);
        return 0;
    }
    check_first_key(k, text);
    const struct bt_key *key = find(k, header);
    if (key != NULL) {
        check_terms(k, key->tenant);
        use(k, key->tenant, size * size);
    }
    const char *named = bt_front_keys_tenant(k, header);
    if (named != NULL) {
        check_terms(k, named);
        use(k, named, 1ull << size % 40);
    }
    bt_front_keys_destroy(k);
    free(text);
    return 0;
}
