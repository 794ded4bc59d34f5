/* Certificates over OpenSSL. Pure; nothing here keeps a key longer than a call. */
#include "common/base/cert.h"

#include <openssl/bn.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"

struct bt_cert_ca {
    X509_STORE *store;
};

static bt_status_t fail(bt_status_t st, char *err, size_t cap, const char *what)
{
    ERR_clear_error(); /* the errors are per thread: gRPC's calls must not find them */
    snprintf(err, cap, "%s", what);
    return st;
}

static X509 *next_cert(BIO *bio)
{
    return PEM_read_bio_X509(bio, NULL, NULL, NULL);
}

static BIO *text_bio(const char *text)
{
    BIO *bio = BIO_new_mem_buf(text, -1);
    BT_ASSERT(bio != NULL);
    return bio;
}

bt_status_t bt_cert_ca_create(const char *pem, struct bt_cert_ca **ca_p, char *err, size_t err_cap)
{
    struct bt_cert_ca *ca = bt_calloc(1, sizeof(*ca));
    ca->store = X509_STORE_new();
    BT_ASSERT(ca->store != NULL);
    BIO *bio = text_bio(pem);
    X509 *x;
    size_t n = 0;
    while ((x = next_cert(bio)) != NULL) {
        n += X509_STORE_add_cert(ca->store, x) == 1;
        X509_free(x);
    }
    BIO_free(bio);
    ERR_clear_error(); /* OpenSSL reports the end of the text as an error */
    if (n == 0) {
        bt_cert_ca_destroy(ca);
        return fail(BT_ERR_INVALID, err, err_cap, "it contains no certificate in PEM form");
    }
    *ca_p = ca;
    return BT_OK;
}

void bt_cert_ca_destroy(struct bt_cert_ca *ca)
{
    if (ca != NULL) {
        X509_STORE_free(ca->store);
        free(ca);
    }
}

static uint64_t seconds_of(const ASN1_TIME *t)
{
    struct tm tm;
    if (t == NULL || ASN1_TIME_to_tm(t, &tm) != 1) {
        return 0;
    }
    time_t s = timegm(&tm);
    return s > 0 ? (uint64_t)s : 0;
}

static void read_uris(X509 *x, struct bt_cert *c)
{
    GENERAL_NAMES *names = X509_get_ext_d2i(x, NID_subject_alt_name, NULL, NULL);
    for (int i = 0; i < sk_GENERAL_NAME_num(names); i++) {
        const GENERAL_NAME *g = sk_GENERAL_NAME_value(names, i);
        if (g->type != GEN_URI || c->n_uris == BT_CERT_URIS_MAX) {
            continue;
        }
        const ASN1_IA5STRING *uri = g->d.uniformResourceIdentifier;
        size_t len = (size_t)ASN1_STRING_length(uri);
        /* A zero byte would hide the rest of the name in comparisons. */
        if (len < BT_CERT_URI_MAX && memchr(ASN1_STRING_get0_data(uri), 0, len) == NULL) {
            memcpy(c->uris[c->n_uris], ASN1_STRING_get0_data(uri), len);
            c->uris[c->n_uris++][len] = '\0';
        }
    }
    GENERAL_NAMES_free(names);
}

static void read_ids(X509 *x, struct bt_cert *c)
{
    unsigned char md[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    if (X509_digest(x, EVP_sha256(), md, &n) == 1) {
        for (unsigned i = 0; i < n; i++) {
            snprintf(c->sha256 + (size_t)2 * i, 3, "%02x", md[i]);
        }
    }
    BIGNUM *number = ASN1_INTEGER_to_BN(X509_get0_serialNumber(x), NULL);
    char *hex = number != NULL ? BN_bn2hex(number) : NULL;
    const char *digits = hex != NULL ? hex + strspn(hex, "0") : "";
    if (strlen(digits) < BT_CERT_ID_MAX) {
        for (size_t i = 0; digits[i] != '\0'; i++) {
            c->serial[i] = (char)tolower((unsigned char)digits[i]);
        }
    }
    OPENSSL_free(hex);
    BN_free(number);
}

static X509 *first_cert(const char *pem)
{
    BIO *bio = text_bio(pem);
    X509 *x = next_cert(bio);
    BIO_free(bio);
    return x;
}

bt_status_t bt_cert_read(const char *pem, struct bt_cert *c, char *err, size_t err_cap)
{
    X509 *x = first_cert(pem);
    if (x == NULL) {
        return fail(BT_ERR_INVALID, err, err_cap, "it contains no certificate in PEM form");
    }
    *c = (struct bt_cert){.not_before_s = seconds_of(X509_get0_notBefore(x)),
                          .not_after_s = seconds_of(X509_get0_notAfter(x))};
    X509_NAME_oneline(X509_get_subject_name(x), c->subject, sizeof(c->subject));
    read_uris(x, c);
    read_ids(x, c);
    X509_free(x);
    ERR_clear_error();
    return BT_OK;
}

static void read_chain(const char *pem, STACK_OF(X509) * to)
{
    BIO *bio = text_bio(pem);
    X509 *x;
    while ((x = next_cert(bio)) != NULL) {
        BT_ASSERT(sk_X509_push(to, x) > 0);
    }
    BIO_free(bio);
    ERR_clear_error();
}

static void explain(X509_STORE_CTX *ctx, char *err, size_t cap)
{
    int code = X509_STORE_CTX_get_error(ctx);
    X509 *at = X509_STORE_CTX_get_current_cert(ctx);
    const char *whose =
        X509_STORE_CTX_get_error_depth(ctx) == 0 ? "the certificate" : "a CA above the certificate";
    char when[40] = "?";
    if (at != NULL &&
        (code == X509_V_ERR_CERT_HAS_EXPIRED || code == X509_V_ERR_CERT_NOT_YET_VALID)) {
        bool ended = code == X509_V_ERR_CERT_HAS_EXPIRED;
        time_t t = (time_t)seconds_of(ended ? X509_get0_notAfter(at) : X509_get0_notBefore(at));
        struct tm tm;
        strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S UTC", gmtime_r(&t, &tm));
        snprintf(err, cap, "%s %s %s", whose, ended ? "expired at" : "is valid only from", when);
    } else if (code == X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY ||
               code == X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE ||
               code == X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT ||
               code == X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN ||
               code == X509_V_ERR_CERT_SIGNATURE_FAILURE) {
        snprintf(err, cap, "another CA signed the certificate");
    } else {
        snprintf(err, cap, "%s", X509_verify_cert_error_string(code));
    }
}

bt_status_t bt_cert_verify(struct bt_cert_ca *ca, const char *pem, const char *more,
                           bt_cert_use_t use, uint64_t now_s, char *err, size_t err_cap)
{
    X509 *x = first_cert(pem);
    if (x == NULL) {
        return fail(BT_ERR_INVALID, err, err_cap, "it contains no certificate in PEM form");
    }
    STACK_OF(X509) *chain = sk_X509_new_null();
    X509_STORE_CTX *ctx = X509_STORE_CTX_new();
    BT_ASSERT(chain != NULL && ctx != NULL);
    read_chain(pem, chain);
    if (more != NULL) {
        read_chain(more, chain);
    }
    bt_status_t st = BT_OK;
    bool ready = X509_STORE_CTX_init(ctx, ca->store, x, chain) == 1 &&
                 X509_STORE_CTX_set_purpose(ctx, use == BT_CERT_CLIENT ? X509_PURPOSE_SSL_CLIENT
                                                                       : X509_PURPOSE_SSL_SERVER);
    if (ready) {
        X509_VERIFY_PARAM_set_time(X509_STORE_CTX_get0_param(ctx), (time_t)now_s);
    }
    if (!ready || X509_verify_cert(ctx) != 1) {
        st = BT_ERR_MISMATCH;
        explain(ctx, err, err_cap);
    }
    X509_STORE_CTX_free(ctx);
    sk_X509_pop_free(chain, X509_free);
    X509_free(x);
    ERR_clear_error();
    return st;
}

/* Never asks for a passphrase: a daemon must not wait for a terminal. */
static int no_passphrase(char *buf, int size, int writing, void *arg)
{
    (void)buf;
    (void)size;
    (void)writing;
    (void)arg;
    return -1;
}

bt_status_t bt_cert_key_fits(const char *pem, const char *key_pem, char *err, size_t err_cap)
{
    BIO *bio = text_bio(key_pem);
    EVP_PKEY *key = PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL);
    BIO_free(bio);
    if (key == NULL) {
        return fail(BT_ERR_INVALID, err, err_cap,
                    "it contains no private key in PEM form without a passphrase");
    }
    X509 *x = first_cert(pem);
    bool fits = x != NULL && X509_check_private_key(x, key) == 1;
    X509_free(x);
    EVP_PKEY_free(key);
    ERR_clear_error();
    return fits ? BT_OK
                : fail(BT_ERR_MISMATCH, err, err_cap, "it is not the key of the certificate");
}
