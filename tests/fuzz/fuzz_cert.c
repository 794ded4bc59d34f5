/* libFuzzer: certificates, keys, CAs and the list of revoked ones. The first byte chooses: a DER
 * certificate, a PEM text, a list, or the names of a certificate (a URI, a cluster, a role and a
 * node, with zero bytes between). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/cert.h"
#include "common/rpc/tls.h"
#include "common/rpc/tls_priv.h"
#include "tests/fuzz/rig.h"

#define NOW_S 1790000000u

/* As openssl writes it. */
static char *pem_of(const uint8_t *der, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *out = bt_malloc(n * 2 + 128), *p = out;
    p += sprintf(p, "-----BEGIN CERTIFICATE-----\n");
    for (size_t i = 0; i < n; i += 3) {
        uint32_t v = (uint32_t)der[i] << 16 | (i + 1 < n ? der[i + 1] << 8 : 0) |
                     (i + 2 < n ? der[i + 2] : 0);
        *p++ = digits[v >> 18];
        *p++ = digits[v >> 12 & 63];
        *p++ = i + 1 < n ? digits[v >> 6 & 63] : '=';
        *p++ = i + 2 < n ? digits[v & 63] : '=';
        if (i % 48 == 45) {
            *p++ = '\n';
        }
    }
    sprintf(p, "\n-----END CERTIFICATE-----\n");
    return out;
}

static void try_cert(const char *pem, const struct bt_revoked *list)
{
    struct bt_cert c;
    struct bt_cert_ca *ca = NULL;
    char err[300] = "";
    if (bt_cert_read(pem, &c, err, sizeof(err)) == BT_OK) {
        BT_ASSERT(c.n_uris <= BT_CERT_URIS_MAX && strlen(c.sha256) == 64);
        BT_ASSERT(strlen(c.subject) < sizeof(c.subject) && strlen(c.serial) < sizeof(c.serial));
        for (uint32_t i = 0; i < c.n_uris; i++) {
            BT_ASSERT(strlen(c.uris[i]) < BT_CERT_URI_MAX);
            (void)bt_tls_uri_is(c.uris[i], "c", "kvstore", NULL);
        }
        (void)bt_revoked_has(list, &c);
    } else {
        BT_ASSERT(err[0] != '\0');
    }
    if (bt_cert_ca_create(pem, &ca, err, sizeof(err)) == BT_OK) {
        bt_status_t st = bt_cert_verify(ca, pem, pem, BT_CERT_CLIENT, NOW_S, err, sizeof(err));
        BT_ASSERT(st == BT_OK || err[0] != '\0');
        st = bt_cert_verify(ca, pem, NULL, BT_CERT_SERVER, NOW_S, err, sizeof(err));
        BT_ASSERT(st == BT_OK || err[0] != '\0');
        bt_cert_ca_destroy(ca);
    }
    (void)bt_cert_key_fits(pem, pem, err, sizeof(err));
}

static void try_list(const char *text)
{
    struct bt_revoked *list = NULL;
    char err[200] = "";
    struct bt_cert c = {.serial = "2a", .sha256 = "00"};
    if (bt_revoked_parse(text, &list, err, sizeof(err)) == BT_OK) {
        bool all = strstr(text, "serial:2a\n") == text; /* its first line */
        BT_ASSERT(!all || bt_revoked_has(list, &c));
        free(list);
    } else {
        BT_ASSERT(list == NULL && strncmp(err, "line ", 5) == 0);
    }
}

/* A name is accepted if and only if it is written as we write it. */
static void try_names(char *text, size_t n)
{
    const char *part[4] = {"", "", "", ""};
    char want[1200];
    for (size_t i = 0, k = 0; i <= n && k < 4; k++) {
        part[k] = text + i;
        i += strlen(text + i) + 1;
    }
    snprintf(want, sizeof(want), "baton://%.300s/%.300s/%.300s", part[1], part[2], part[3]);
    bool plain = part[1][0] != '\0' && part[2][0] != '\0' && part[3][0] != '\0' &&
                 strchr(part[1], '/') == NULL && strchr(part[2], '/') == NULL &&
                 strchr(part[3], '/') == NULL;
    bool same = strcmp(part[0], want) == 0;
    bool is = bt_tls_uri_is(part[0], part[1], part[2], part[3]);
    BT_ASSERT(is == (plain && same) || strlen(text) > 300);
    BT_ASSERT(!is || bt_tls_uri_is(part[0], part[1], NULL, NULL));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    rig_reset();
    char *text = bt_malloc(size + 4);
    memcpy(text, data + 1, size - 1);
    memset(text + size - 1, 0, 5);
    switch (data[0] % 4) {
    case 0: {
        char *pem = pem_of(data + 1, size - 1);
        try_cert(pem, NULL);
        free(pem);
        break;
    }
    case 1: try_cert(text, NULL); break;
    case 2: try_list(text); break;
    default: try_names(text, size - 1); break;
    }
    free(text);
    return 0;
}
