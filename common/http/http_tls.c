/* TLS of HTTP connections over OpenSSL; see http_tls.h. */
#include "common/http/http_tls.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/revoked.h"
#include "common/conf/conf.h"
#include "common/conf/watch.h"
#include "common/log/log.h"

#define LOOK_MS 5000
#define SAY_NS  10000000000ull /* between lines about refused handshakes */
#define RECORD  16384          /* largest content of a TLS record, bytes */
#define READS   8              /* records of one recv: a client may send records of one byte */

#define REVOKED_MAX (1u << 20) /* bytes of revoked.txt */
#define NAME_BYTES  200        /* of a client, with the end */

enum { CERT, KEY, CLIENT_CA, REVOKED, FILES };
static const char *const names[FILES] = {"tls.crt", "tls.key", "client-ca.crt", "revoked.txt"};

struct bt_http_tls {
    char *key, *files[FILES];
    SSL_CTX *ctx;
    BIO_METHOD *bio;            /* a socket's, without SIGPIPE */
    bool asks;                  /* for clients' certificates */
    struct bt_revoked *revoked; /* NULL: none */
    uint64_t lists;             /* how often the list was read */
    uint64_t not_after_s, refused;
    struct bt_conf_expiry expiry;
    struct bt_conf_stamp stamps[FILES];
    struct bt_log_pace pace;
    struct bt_loop *loop;
    struct bt_timer timer;
};

struct bt_http_crypt {
    struct bt_http_tls *t;
    SSL *ssl;
    int fd;
    bool seen; /* the client's first byte */
    bool ready, failed;
    bool eof;               /* the client has sent FIN */
    bool wants_out;         /* the last recv or handshake */
    struct bt_http_client { /* its certificate */
        char name[NAME_BYTES];
        uint64_t not_after_s, lists; /* lists: bt_http_tls.lists when it was last looked up */
    } * client;                      /* NULL: it showed none */
};

/* ---- files ---- */

static bt_status_t fault(const struct bt_http_tls *t, int file, char *err, size_t cap,
                         const char *fmt, ...) __attribute__((format(printf, 5, 6)));

static bt_status_t fault(const struct bt_http_tls *t, int file, char *err, size_t cap,
                         const char *fmt, ...)
{
    char what[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    ERR_clear_error(); /* errors are per thread: gRPC must not find them */
    snprintf(err, cap, "%s: %s: %s", t->key, t->files[file], what);
    return BT_ERR_CONFIG;
}

/* A key with a passphrase is refused; without this OpenSSL would ask on the terminal. */
static int no_passphrase(char *buf, int size, int rwflag, void *arg)
{
    (void)buf;
    (void)size;
    (void)rwflag;
    (void)arg;
    return 0;
}

/* Takes http/1.1 from the client's list of protocols (RFC 7301). A client without http/1.1 would
 * speak another protocol, so its handshake fails. */
static int on_alpn(SSL *ssl, const unsigned char **out, unsigned char *out_len,
                   const unsigned char *in, unsigned in_len, void *arg)
{
    static const unsigned char ours[] = "\x08http/1.1";
    (void)ssl;
    (void)arg;
    return SSL_select_next_proto((unsigned char **)(uintptr_t)out, out_len, ours, sizeof(ours) - 1,
                                 in, in_len) == OPENSSL_NPN_NEGOTIATED
               ? SSL_TLSEXT_ERR_OK
               : SSL_TLSEXT_ERR_ALERT_FATAL;
}

static SSL_CTX *make_ctx(void)
{
    SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
    BT_ASSERT(ctx != NULL);
    bool ok = SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION) == 1 &&
              SSL_CTX_set_cipher_list(ctx, "ECDHE+AESGCM:ECDHE+CHACHA20") == 1 &&
              SSL_CTX_set1_groups_list(ctx, "X25519:P-256:P-384") == 1;
    BT_ASSERT(ok);
    SSL_CTX_set_options(ctx, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION |
                                 SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA |
                                 /* HTTP's framing shows whether a request is whole */
                                 SSL_OP_IGNORE_UNEXPECTED_EOF);
    SSL_CTX_set_session_cache_mode(ctx, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_num_tickets(ctx, 0);
    /* Without AUTO_RETRY, a read returns after each record that has no content, such as a key
     * update: a flood of them must not hold the loop. */
    SSL_CTX_clear_mode(ctx, SSL_MODE_AUTO_RETRY);
    SSL_CTX_set_mode(ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                              SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_read_ahead(ctx, 0); /* epoll does not see bytes that OpenSSL has read ahead */
    SSL_CTX_set_default_passwd_cb(ctx, no_passphrase);
    SSL_CTX_set_alpn_select_cb(ctx, on_alpn, NULL);
    return ctx;
}

/* Reads the CA's certificates. False: there is none. */
static bool add_client_ca(SSL_CTX *ctx, BIO *file)
{
    X509 *x;
    size_t n = 0;
    while ((x = PEM_read_bio_X509(file, NULL, no_passphrase, NULL)) != NULL) {
        n += X509_STORE_add_cert(SSL_CTX_get_cert_store(ctx), x) == 1 &&
             SSL_CTX_add_client_CA(ctx, x) == 1;
        X509_free(x);
    }
    ERR_clear_error(); /* OpenSSL reports the end of the file as an error */
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    return n > 0;
}

static uint64_t end_of(const SSL_CTX *ctx)
{
    struct tm tm;
    X509 *x = SSL_CTX_get0_certificate(ctx);
    time_t s = ASN1_TIME_to_tm(X509_get0_notAfter(x), &tm) == 1 ? timegm(&tm) : 0;
    return s > 0 ? (uint64_t)s : 0;
}

/* Reads revoked.txt, which may be missing unless there was one before. */
static bt_status_t read_revoked(const struct bt_http_tls *t, struct bt_revoked **list_p, char *err,
                                size_t cap)
{
    char why[200];
    const char *reason;
    struct stat st_file;
    FILE *f = bt_file_open(t->files[REVOKED], &st_file, &reason);
    if (f == NULL) {
        bool none = errno == ENOENT && lstat(t->files[REVOKED], &st_file) != 0;
        return none && t->revoked == NULL
                   ? BT_OK
                   : fault(t, REVOKED, err, cap,
                           "it cannot be read: %s; put it back, or restart to use none", reason);
    }
    char *text = bt_calloc(1, REVOKED_MAX + 1);
    size_t n = fread(text, 1, REVOKED_MAX, f);
    bool bad = ferror(f) != 0 || n == REVOKED_MAX || strlen(text) != n;
    (void)fclose(f);
    bt_status_t st = BT_ERR_INVALID;
    snprintf(why, sizeof(why), "it is not a text file of less than 1 MiB");
    if (!bad) {
        st = bt_revoked_parse(text, list_p, why, sizeof(why));
    }
    free(text);
    return st == BT_OK ? BT_OK : fault(t, REVOKED, err, cap, "%s", why);
}

/* What is made of the files. */
struct reading {
    SSL_CTX *ctx;
    bool asks;
    struct bt_revoked *revoked;
};

static bt_status_t read_files(const struct bt_http_tls *t, struct reading *r, char *err, size_t cap)
{
    struct stat st;
    char why[200];
    SSL_CTX *ctx = make_ctx();
    bt_status_t status = BT_OK;
    BIO *ca = NULL;
    /* A link to nothing is a file that is lost: without it everybody could enter. */
    bool asks = lstat(t->files[CLIENT_CA], &st) == 0;
    ERR_clear_error();
    if (stat(t->files[CERT], &st) != 0) {
        status = fault(t, CERT, err, cap, "it cannot be read: %s; baton-certs http makes one",
                       strerror(errno));
    } else if (SSL_CTX_use_certificate_chain_file(ctx, t->files[CERT]) != 1) {
        status = fault(t, CERT, err, cap, "it has no certificate in PEM form that can be used (%s)",
                       ERR_reason_error_string(ERR_peek_error()));
    } else if (stat(t->files[KEY], &st) != 0) {
        status = fault(t, KEY, err, cap, "it cannot be read: %s", strerror(errno));
    } else if (!bt_conf_secret_private(&st, why, sizeof(why))) {
        status = fault(t, KEY, err, cap, "%s", why);
    } else if (SSL_CTX_use_PrivateKey_file(ctx, t->files[KEY], SSL_FILETYPE_PEM) != 1 ||
               SSL_CTX_check_private_key(ctx) != 1) {
        status = fault(t, KEY, err, cap,
                       "it is not the private key, in PEM form and without a passphrase, of %s",
                       t->files[CERT]);
    } else if (asks &&
               ((ca = BIO_new_file(t->files[CLIENT_CA], "r")) == NULL || !add_client_ca(ctx, ca))) {
        status = fault(t, CLIENT_CA, err, cap,
                       "it has no certificate in PEM form; remove it if clients need none");
    } else if (!asks && t->asks) {
        status = fault(t, CLIENT_CA, err, cap,
                       "it was removed, but clients still need certificates; put it back, or "
                       "restart if clients need none");
    }
    BIO_free(ca);
    if (status == BT_OK) {
        status = read_revoked(t, &r->revoked, err, cap);
    }
    if (status != BT_OK) {
        SSL_CTX_free(ctx);
        return status;
    }
    r->ctx = ctx;
    r->asks = asks;
    return BT_OK;
}

static void take_stamps(const struct bt_http_tls *t, struct bt_conf_stamp to[FILES])
{
    for (int i = 0; i < FILES; i++) {
        bt_conf_stamp_read(t->files[i], &to[i]);
    }
}

static void take(struct bt_http_tls *t, const struct reading *r)
{
    t->ctx = r->ctx;
    t->asks = r->asks;
    t->revoked = r->revoked;
    t->lists++;
    t->not_after_s = end_of(t->ctx);
}

static void on_look(void *arg)
{
    struct bt_http_tls *t = arg;
    struct bt_conf_stamp now[FILES];
    struct reading r = {0};
    char err[600];
    bt_conf_expiry_warn(&t->expiry, t->files[CERT], t->not_after_s);
    take_stamps(t, now);
    if (memcmp(now, t->stamps, sizeof(now)) == 0) {
        return;
    }
    memcpy(t->stamps, now, sizeof(now));
    if (read_files(t, &r, err, sizeof(err)) != BT_OK) {
        BT_WARN("tls_not_renewed", "why=%s remedy=%s", err,
                "the files that were read before stay in use; correct the new ones");
        return;
    }
    SSL_CTX_free(t->ctx); /* connections that stand have references of their own */
    free(t->revoked);
    take(t, &r);
    t->expiry = (struct bt_conf_expiry){0};
    BT_INFO("tls_renewed", "file=%s not_after_s=%llu client_certificates=%s", t->files[CERT],
            (unsigned long long)t->not_after_s, t->asks ? "required" : "no");
    bt_conf_expiry_warn(&t->expiry, t->files[CERT], t->not_after_s);
}

/* ---- the socket as OpenSSL sees it ---- */

static int bio_write(BIO *b, const char *data, int len)
{
    const struct bt_http_crypt *s = BIO_get_data(b);
    BIO_clear_retry_flags(b);
    ssize_t n = send(s->fd, data, (size_t)len, MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        BIO_set_retry_write(b);
    }
    return (int)n;
}

static int bio_read(BIO *b, char *data, int len)
{
    struct bt_http_crypt *s = BIO_get_data(b);
    BIO_clear_retry_flags(b);
    ssize_t n = recv(s->fd, data, (size_t)len, 0);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        BIO_set_retry_read(b);
    }
    s->eof = s->eof || n == 0;
    return (int)n;
}

static long bio_ctrl(BIO *b, int command, long num, void *ptr)
{
    const struct bt_http_crypt *s = BIO_get_data(b);
    (void)num;
    (void)ptr;
    return command == BIO_CTRL_FLUSH || (command == BIO_CTRL_EOF && s->eof);
}

static int bio_create(BIO *b)
{
    BIO_set_init(b, 1);
    return 1;
}

/* ---- life ---- */

bt_status_t bt_http_tls_create(const char *key, const char *dir, struct bt_http_tls **tls_p,
                               char *err, size_t err_cap)
{
    struct bt_http_tls *t = bt_calloc(1, sizeof(*t));
    t->key = bt_strdup(key);
    for (int i = 0; i < FILES; i++) {
        t->files[i] = bt_sprintf("%s/%s", dir, names[i]);
    }
    take_stamps(t,
                t->stamps); /* before reading, so that files that change meanwhile are read again */
    struct reading r = {0};
    bt_status_t st = read_files(t, &r, err, err_cap);
    if (st != BT_OK) {
        bt_http_tls_destroy(t);
        return st;
    }
    take(t, &r);
    t->bio = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "baton http");
    BT_ASSERT(t->bio != NULL);
    BIO_meth_set_write(t->bio, bio_write);
    BIO_meth_set_read(t->bio, bio_read);
    BIO_meth_set_ctrl(t->bio, bio_ctrl);
    BIO_meth_set_create(t->bio, bio_create);
    *tls_p = t;
    return BT_OK;
}

void bt_http_tls_watch(struct bt_http_tls *t, struct bt_loop *loop)
{
    t->loop = loop;
    BT_INFO("http_tls", "file=%s client_certificates=%s", t->files[CERT],
            t->asks ? "required" : "no");
    bt_conf_expiry_warn(&t->expiry, t->files[CERT], t->not_after_s);
    bt_timer_start(loop, &t->timer, LOOK_MS, LOOK_MS, on_look, t);
}

void bt_http_tls_destroy(struct bt_http_tls *t)
{
    if (t == NULL) {
        return;
    }
    if (t->loop != NULL) {
        bt_timer_stop(t->loop, &t->timer);
    }
    SSL_CTX_free(t->ctx);
    free(t->revoked);
    BIO_meth_free(t->bio);
    for (int i = 0; i < FILES; i++) {
        free(t->files[i]);
    }
    free(t->key);
    free(t);
}

uint64_t bt_http_tls_not_after_s(const struct bt_http_tls *t)
{
    return t->not_after_s;
}

uint64_t bt_http_tls_refused(const struct bt_http_tls *t)
{
    return t->refused;
}

/* ---- a connection ---- */

struct bt_http_crypt *bt_http_crypt_create(struct bt_http_tls *t, int fd)
{
    struct bt_http_crypt *s = bt_calloc(1, sizeof(*s));
    BIO *bio = BIO_new(t->bio);
    s->t = t;
    s->fd = fd;
    s->ssl = SSL_new(t->ctx);
    BT_ASSERT(bio != NULL && s->ssl != NULL); /* as malloc's failure: the process ends */
    BIO_set_data(bio, s);
    SSL_set_bio(s->ssl, bio, bio);
    SSL_set_accept_state(s->ssl);
    return s;
}

void bt_http_crypt_destroy(struct bt_http_crypt *s)
{
    if (s != NULL) {
        SSL_free(s->ssl);
        free(s->client);
        free(s);
    }
}

bool bt_http_crypt_ready(const struct bt_http_crypt *s)
{
    return s->ready;
}

const char *bt_http_crypt_client(const struct bt_http_crypt *s)
{
    return s->client != NULL ? s->client->name : NULL;
}

bool bt_http_crypt_wants_out(const struct bt_http_crypt *s)
{
    return s->wants_out;
}

/* What an operation that returned n <= 0 means: EAGAIN, or the connection's end. */
static int failure(struct bt_http_crypt *s, int n)
{
    int e = SSL_get_error(s->ssl, n);
    s->wants_out = e == SSL_ERROR_WANT_WRITE;
    if (e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE) {
        return EAGAIN;
    }
    s->failed = e != SSL_ERROR_ZERO_RETURN;
    return ECONNRESET;
}

/* Reads the client's certificate as common/base has it. False: it shows none. */
static bool read_client(struct bt_http_crypt *s, struct bt_cert *c)
{
    char why[100], *pem = NULL;
    X509 *x = SSL_get1_peer_certificate(s->ssl);
    BIO *bio = x != NULL ? BIO_new(BIO_s_mem()) : NULL;
    bool ok = bio != NULL && PEM_write_bio_X509(bio, x) == 1 && BIO_write(bio, "", 1) == 1 &&
              BIO_get_mem_data(bio, &pem) > 0 && bt_cert_read(pem, c, why, sizeof(why)) == BT_OK;
    BIO_free(bio);
    X509_free(x);
    return ok;
}

/* May the client go on? Looks its certificate up when the list has changed. */
static bool client_counts(struct bt_http_crypt *s, const char **why_p)
{
    struct bt_http_client *k = s->client;
    struct bt_cert c;
    if (k == NULL) {
        return true;
    }
    if (bt_real_ns() / 1000000000 >= k->not_after_s) {
        *why_p = "its certificate has expired";
        return false;
    }
    if (k->lists != s->t->lists && read_client(s, &c) && bt_revoked_has(s->t->revoked, &c)) {
        *why_p = "its certificate was revoked";
        return false;
    }
    k->lists = s->t->lists;
    return true;
}

/* After the handshake. */
static void meet_client(struct bt_http_crypt *s)
{
    struct bt_cert c;
    if (!read_client(s, &c)) {
        return;
    }
    s->client =
        bt_calloc(1, sizeof(*s->client)); /* lists 0: it is looked up at the first request */
    snprintf(s->client->name, sizeof(s->client->name), "%s", c.n_uris > 0 ? c.uris[0] : c.subject);
    s->client->not_after_s = c.not_after_s;
}

/* The log gets a line from time to time: a scanner may try thousands of handshakes. */
static void say_refused(struct bt_http_crypt *s, const char *client, const char *why)
{
    struct bt_http_tls *t = s->t;
    t->refused++;
    uint32_t times = bt_log_due(&t->pace, bt_mono_ns(), SAY_NS);
    if (times > 0) {
        const char *reason = ERR_reason_error_string(ERR_peek_last_error());
        why = why != NULL ? why : reason;
        BT_WARN("http_tls_refused", "client=%s why=%s times=%u", client,
                why != NULL ? why : "the client left during the handshake", times);
    }
    ERR_clear_error();
}

bt_http_shake_t bt_http_crypt_shake(struct bt_http_crypt *s, const char *client)
{
    unsigned char first;
    ERR_clear_error();
    ssize_t peeked = s->seen ? -1 : recv(s->fd, &first, 1, MSG_PEEK);
    if (peeked == 0) { /* a load balancer's check: it connects and leaves */
        return BT_HTTP_SHAKE_FAILED;
    }
    if (peeked == 1 && first >= 'A' && first <= 'Z') { /* a method of HTTP is in capitals */
        return BT_HTTP_SHAKE_PLAIN;
    }
    s->seen = s->seen || peeked == 1;
    int n = SSL_do_handshake(s->ssl);
    if (n == 1) {
        s->ready = true;
        s->wants_out = false;
        meet_client(s);
        return BT_HTTP_SHAKE_DONE;
    }
    if (failure(s, n) == EAGAIN) {
        return BT_HTTP_SHAKE_MORE;
    }
    say_refused(s, client, NULL);
    return BT_HTTP_SHAKE_FAILED;
}

ssize_t bt_http_crypt_recv(struct bt_http_crypt *s, void *buf, size_t cap)
{
    size_t got = 0;
    BT_ASSERT(cap >= RECORD); /* so that nothing of a record stays in OpenSSL */
    const char *why = NULL;
    if (!s->failed && !client_counts(s, &why)) {
        say_refused(s, s->client->name, why);
        s->failed = true;
    }
    if (s->failed) {
        errno = ECONNRESET;
        return -1;
    }
    for (int i = 0; i < READS && cap - got >= RECORD; i++) {
        ERR_clear_error();
        int n = SSL_read(s->ssl, (char *)buf + got, (int)BT_MIN(cap - got, (size_t)INT_MAX));
        if (n > 0) {
            s->wants_out = false;
            got += (size_t)n;
            continue;
        }
        int e = failure(s, n);
        ERR_clear_error();
        if (got > 0) {
            break; /* the next call finds the same */
        }
        if (e != EAGAIN && !s->failed) {
            return 0; /* the client sends no more */
        }
        errno = e;
        return -1;
    }
    return (ssize_t)got;
}

ssize_t bt_http_crypt_send(struct bt_http_crypt *s, const void *buf, size_t len)
{
    if (s->failed || !s->ready) {
        errno = s->failed ? ECONNRESET : EAGAIN;
        return -1;
    }
    ERR_clear_error();
    int n = SSL_write(s->ssl, buf, (int)BT_MIN(len, (size_t)INT_MAX));
    if (n > 0) {
        return n;
    }
    bool wants_out = s->wants_out; /* of a read: not changed here */
    int e = failure(s, n);
    s->wants_out = wants_out;
    s->failed = e != EAGAIN;
    ERR_clear_error();
    errno = e;
    return -1;
}

void bt_http_crypt_close(struct bt_http_crypt *s)
{
    if (s->ready && !s->failed && (SSL_get_shutdown(s->ssl) & SSL_SENT_SHUTDOWN) == 0) {
        ERR_clear_error();
        (void)SSL_shutdown(s->ssl);
        ERR_clear_error();
    }
}
