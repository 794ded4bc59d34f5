/* X.509 certificates through OpenSSL: reads them, checks whether a CA has signed one and whether a
 * private key belongs to it. Pure: PEM text and the time are arguments. Any thread, one at a time
 * per object. */
#ifndef BT_BASE_CERT_H
#define BT_BASE_CERT_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define BT_CERT_URIS_MAX 32
#define BT_CERT_URI_MAX  200 /* bytes with the end; longer ones are not read */
#define BT_CERT_ID_MAX                                                                             \
    72 /* bytes of a fingerprint or serial number in hexadecimal, with the end                     \
        */

struct bt_cert_ca; /* trusted certificates */

struct bt_cert {
    uint64_t not_before_s, not_after_s; /* since 1970 */
    char subject[160];                  /* for logs */
    /* Lower-case hexadecimal digits: the SHA-256 fingerprint (64) and the serial number (without
     * leading zeros; empty if it is longer than RFC 5280 allows). */
    char sha256[BT_CERT_ID_MAX], serial[BT_CERT_ID_MAX];
    uint32_t n_uris; /* of the subject alternative name */
    char uris[BT_CERT_URIS_MAX][BT_CERT_URI_MAX];
};

typedef enum { BT_CERT_CLIENT, BT_CERT_SERVER } bt_cert_use_t;

/* One or more CA certificates in PEM. ERR_INVALID with err ("no certificate in it"). */
bt_status_t bt_cert_ca_create(const char *pem, struct bt_cert_ca **ca_p, char *err,
                              size_t err_cap) BT_MUST_CHECK;
void bt_cert_ca_destroy(struct bt_cert_ca *ca);

/* Reads the first certificate of the text. ERR_INVALID with err. */
bt_status_t bt_cert_read(const char *pem, struct bt_cert *c, char *err,
                         size_t err_cap) BT_MUST_CHECK;

/* Has the CA signed the first certificate of pem, and is it valid at now_s for this use?
 * Intermediate certificates may follow it in pem and be in more (NULL: none). ERR_MISMATCH with err
 * that says why not, ERR_INVALID if it cannot be read. */
bt_status_t bt_cert_verify(struct bt_cert_ca *ca, const char *pem, const char *more,
                           bt_cert_use_t use, uint64_t now_s, char *err,
                           size_t err_cap) BT_MUST_CHECK;

/* Does the private key belong to the first certificate? ERR_INVALID (no key in the text, or one
 * with a passphrase), ERR_MISMATCH. */
bt_status_t bt_cert_key_fits(const char *pem, const char *key_pem, char *err,
                             size_t err_cap) BT_MUST_CHECK;

#endif
