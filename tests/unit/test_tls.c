/* TLS of common/rpc with real certificates, made by deploy/local/baton-certs as an operator would:
 * who may talk to whom, who is refused and told what, and certificates that change meanwhile. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/cert.h"
#include "common/rpc/address.h"
#include "common/rpc/rpc.h"
#include "common/rpc/tls.h"
#include "tests/unit/loop_wait.h"
#include "tests/unit/virtual_clock.h"

static char dir[] = "/tmp/baton-test-tls-XXXXXX";

static void certs(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* baton-certs with the folder of the tests before its arguments. */
static void certs(const char *fmt, ...)
{
    char args[300], line[600];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(args, sizeof(args), fmt, ap);
    va_end(ap);
    snprintf(line, sizeof(line), "deploy/local/baton-certs --dir %s/%s", dir, args);
    assert_int_equal(system(line), 0);
}

static FILE *open_in_dir(const char *name, const char *mode)
{
    char path[200];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, mode);
    assert_non_null(f);
    return f;
}

#define LIFE_S 3600 /* of a certificate that ends in a test: no machine is so slow */

/* OpenSSL's clock: libcrypto's call comes here, as the program exports it. */
time_t time(time_t *t)
{
    time_t now_s = (time_t)(bt_real_ns() / 1000000000);
    if (t != NULL) {
        *t = now_s;
    }
    return now_s;
}

/* Signs the certificate again with an end in so many seconds. (openssl x509 makes no certificate
 * that has ended since 3.4.) */
static void end_in(const char *cert, const char *ca_key, long seconds)
{
    FILE *f = open_in_dir(cert, "r"), *k = open_in_dir(ca_key, "r");
    X509 *x = PEM_read_X509(f, NULL, NULL, NULL);
    EVP_PKEY *key = PEM_read_PrivateKey(k, NULL, NULL, NULL);
    assert_true(x != NULL && key != NULL);
    fclose(f);
    fclose(k);
    assert_non_null(X509_gmtime_adj(X509_getm_notBefore(x), -2 * 86400));
    assert_non_null(X509_gmtime_adj(X509_getm_notAfter(x), seconds));
    assert_true(X509_sign(x, key, EVP_sha256()) > 0);
    f = open_in_dir(cert, "w");
    assert_int_equal(PEM_write_X509(f, x), 1);
    assert_int_equal(fclose(f), 0);
    X509_free(x);
    EVP_PKEY_free(key);
}

/* "main/n1" becomes the paths of main's CA and of n1's certificate and key. */
static bt_status_t tls_new(const char *ca, const char *leaf, const char *role, const char *node,
                           struct bt_tls **tls_p, char *err, size_t cap)
{
    char files[4][200];
    snprintf(files[0], sizeof(files[0]), "%s/%s/ca.crt", dir, ca);
    snprintf(files[1], sizeof(files[1]), "%s/%s.crt", dir, leaf);
    snprintf(files[2], sizeof(files[2]), "%s/%s.key", dir, leaf);
    snprintf(files[3], sizeof(files[3]), "%s/%s/revoked.txt", dir, ca);
    struct bt_tls_config c = {.key = "cluster.tls",
                              .revoked = files[3],
                              .ca = files[0],
                              .cert = files[1],
                              .private_key = files[2],
                              .cluster = "t",
                              .role = role,
                              .node = node};
    return bt_tls_create(&c, tls_p, err, cap);
}

/* A server that is kvstore n1, and clients as they come. */
struct fixture {
    struct bt_loop *loop;
    struct bt_metrics *metrics;
    struct bt_tls *tls, *client_tls;
    struct bt_rpc *rpc, *client;
    struct bt_rpc_server *srv;
    char target[64];
    int calls, accepts, closes;
    bool was_n1, was_n2;
    char last[64];
};

static void on_unary(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    struct fixture *f = arg;
    f->calls++;
    bt_rpc_call_reply(call, BT_GRPC_OK, NULL, data, len);
}

static void on_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct fixture *f = arg;
    (void)s;
    snprintf(f->last, sizeof(f->last), "%.*s", (int)BT_MIN(len, 50u), (const char *)data);
}

static void on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct fixture *f = arg;
    (void)s;
    (void)code;
    (void)detail;
    f->closes++;
}

static const struct bt_rpc_stream_ops ops = {.on_message = on_message, .on_close = on_close};

static void on_accept(void *arg, struct bt_rpc_stream *s)
{
    struct fixture *f = arg;
    f->accepts++;
    f->was_n1 = bt_rpc_stream_peer_is(s, "conductor", "n1");
    f->was_n2 = bt_rpc_stream_peer_is(s, "conductor", "n2");
    bt_rpc_stream_set_arg(s, &ops, f);
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    char err[700] = "";
    int port;
    clock_skip_stalls();
    assert_int_equal(bt_loop_create(&f->loop), BT_OK);
    f->metrics = bt_metrics_create();
    if (tls_new("main", "main/n1", "kvstore", "n1", &f->tls, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    bt_tls_watch(f->tls, f->loop, f->metrics);
    assert_int_equal(bt_rpc_create(f->loop, &f->rpc), BT_OK);
    bt_rpc_set_tls(f->rpc, f->tls);
    assert_int_equal(bt_rpc_server_create(f->rpc, "127.0.0.1:0", &f->srv, &port), BT_OK);
    bt_rpc_server_unary(f->srv, "/t.T/Any", NULL, on_unary, f);
    bt_rpc_server_unary(f->srv, "/t.T/Admin", "admin", on_unary, f);
    bt_rpc_server_stream(f->srv, "/t.T/Stream", "conductor", on_accept, f);
    bt_rpc_server_start(f->srv);
    snprintf(f->target, sizeof(f->target), "127.0.0.1:%d", port);
    *state = f;
    return 0;
}

static void client_end(struct fixture *f)
{
    bt_rpc_destroy(f->client);
    bt_tls_release(f->client_tls);
    f->client = NULL;
    f->client_tls = NULL;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    client_end(f);
    bt_rpc_server_destroy(f->srv);
    bt_rpc_destroy(f->rpc);
    bt_tls_release(f->tls);
    bt_metrics_destroy(f->metrics);
    bt_loop_destroy(f->loop);
    free(f);
    atomic_store(&clock_wall_ahead_s, 0);
    return 0;
}

/* A client with this certificate (NULL: plaintext) that believes this CA. */
static void client_start(struct fixture *f, const char *ca, const char *leaf)
{
    char err[700] = "";
    client_end(f);
    if (leaf != NULL && tls_new(ca, leaf, NULL, NULL, &f->client_tls, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    assert_int_equal(bt_rpc_create(f->loop, &f->client), BT_OK);
    bt_rpc_set_tls(f->client, f->client_tls);
}

struct reply {
    int calls, code;
    char detail[700];
};

static void on_reply(void *arg, int code, const char *detail, const void *data, size_t len)
{
    struct reply *r = arg;
    (void)data;
    (void)len;
    r->calls++;
    r->code = code;
    snprintf(r->detail, sizeof(r->detail), "%s", detail);
}

/* One call on a fresh channel that wants `who`; its code. */
static int call(struct fixture *f, const char *who, const char *method, struct reply *r)
{
    struct bt_rpc_channel *ch;
    *r = (struct reply){0};
    assert_int_equal(bt_rpc_channel_create(f->client, f->target, who, &ch), BT_OK);
    bt_rpc_unary(ch, method, "x", 1, 20000, on_reply, r);
    WAIT_FOR(f, r->calls == 1);
    bt_rpc_channel_destroy(ch);
    return r->code;
}

static double metric(struct fixture *f, const char *name)
{
    struct bt_buf text;
    bt_buf_init(&text);
    bt_metrics_render(f->metrics, &text);
    const char *at = strstr(text.data, name);
    while (at != NULL && at > text.data && at[-1] != '\n') {
        at = strstr(at + 1, name);
    }
    assert_non_null(at);
    double v = strtod(strchr(at, ' '), NULL);
    bt_buf_cleanup(&text);
    return v;
}

#define REFUSED "baton_tls_peers_refused_total{"

static void assert_has(const char *text, const char *part)
{
    if (strstr(text, part) == NULL) {
        fail_msg("\"%s\" is not in \"%s\"", part, text);
    }
}

/* ---- tests ---- */

static void test_roles(void **state)
{
    struct fixture *f = *state;
    struct reply r;
    client_start(f, "main", "main/n1");
    assert_int_equal(call(f, "kvstore/n1", "/t.T/Any", &r), BT_GRPC_OK);
    assert_int_equal(call(f, "kvstore", "/t.T/Any", &r), BT_GRPC_OK);
    assert_int_equal(call(f, NULL, "/t.T/Any", &r), BT_GRPC_OK);
    assert_int_equal(f->calls, 3);
    assert_int_equal(call(f, "kvstore/n1", "/t.T/Admin", &r), BT_GRPC_PERMISSION_DENIED);
    assert_has(r.detail, "baton://t/conductor/n1 may not call /t.T/Admin; only admin may");
    assert_int_equal(f->calls, 3);
    assert_true(metric(f, REFUSED) == 1);
    client_start(f, "main", "main/admin");
    assert_int_equal(call(f, "kvstore/n1", "/t.T/Admin", &r), BT_GRPC_OK);
    assert_int_equal(f->calls, 4);
}

static void test_stream_names(void **state)
{
    struct fixture *f = *state;
    struct bt_rpc_channel *ch;
    struct bt_rpc_stream *s;
    client_start(f, "main", "main/n1");
    assert_int_equal(bt_rpc_channel_create(f->client, f->target, "kvstore/n1", &ch), BT_OK);
    assert_int_equal(bt_rpc_stream_open(ch, "/t.T/Stream", false, &ops, f, &s), BT_OK);
    assert_int_equal(bt_rpc_stream_send(s, "hello", 5), BT_OK);
    WAIT_FOR(f, strcmp(f->last, "hello") == 0);
    assert_true(f->was_n1);
    assert_false(f->was_n2); /* whatever a hello says */
    bt_rpc_stream_close(s, 0, NULL, false);
    bt_rpc_channel_destroy(ch);
    client_start(f, "main", "main/admin");
    assert_int_equal(bt_rpc_channel_create(f->client, f->target, "kvstore/n1", &ch), BT_OK);
    f->closes = 0;
    assert_int_equal(bt_rpc_stream_open(ch, "/t.T/Stream", false, &ops, f, &s), BT_OK);
    WAIT_FOR(f, f->closes > 0);
    assert_int_equal(f->accepts, 1);
    bt_rpc_channel_destroy(ch);
}

static void test_wrong_server(void **state)
{
    struct fixture *f = *state;
    struct reply r;
    client_start(f, "main", "main/n1");
    assert_int_equal(call(f, "kvstore/n2", "/t.T/Any", &r), BT_GRPC_UNAVAILABLE);
    assert_has(r.detail, "its certificate does not name baton://t/kvstore/n2");
    assert_int_equal(call(f, "admin", "/t.T/Any", &r), BT_GRPC_UNAVAILABLE);
    client_start(f, "other", "other/n1"); /* believes another CA: says so itself, sends nothing */
    assert_int_equal(call(f, "kvstore/n1", "/t.T/Any", &r), BT_GRPC_UNAVAILABLE);
    assert_has(r.detail, "another CA signed the certificate");
    assert_int_equal(f->calls, 0);
}

/* What this process logs while `run` of it is on, as text; the caller frees. */
static char *log_of(void (*run)(struct fixture *f, const char *arg), struct fixture *f,
                    const char *arg)
{
    FILE *to = tmpfile();
    assert_non_null(to);
    int old = dup(STDERR_FILENO);
    (void)fflush(stderr);
    assert_true(dup2(fileno(to), STDERR_FILENO) >= 0);
    run(f, arg);
    (void)fflush(stderr);
    assert_true(dup2(old, STDERR_FILENO) >= 0);
    close(old);
    long n = (fseek(to, 0, SEEK_END), ftell(to));
    char *text = calloc(1, (size_t)n + 1);
    rewind(to);
    assert_int_equal(fread(text, 1, (size_t)n, to), n);
    (void)fclose(to);
    (void)fputs(text, stderr);
    return text;
}

/* Somebody who is not Baton: openssl's client with these options, until the server hangs up. */
static void stranger(struct fixture *f, const char *options)
{
    char line[900];
    snprintf(line, sizeof(line),
             "cd %s && timeout 20 openssl s_client -connect %s -ign_eof -alpn h2 "
             "-CAfile main/ca.crt %s </dev/null >s_client.out 2>&1",
             dir, f->target, options);
    assert_true(system(line) >= 0); /* it fails: the server hangs up */
}

static void test_strangers(void **state)
{
    static const struct {
        const char *options, *peer, *why;
    } cases[] = {
        {"-cert other/n1.crt -key other/n1.key", "baton://t/conductor/n1",
         "another CA signed the certificate"},
        {"-cert main/late.crt -key main/late.key", "baton://t/conductor/late",
         "the certificate expired at 20"},
        {"-cert main/alien.crt -key main/alien.key", "baton://elsewhere/conductor/alien",
         "its certificate does not name baton://t/..."},
        {"-cert main/etcd.crt -key main/etcd.key", "CN=etcd",
         "its certificate does not name baton://t/..."},
        {"", "unknown", "without a certificate"},
    };
    struct fixture *f = *state;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        double before = metric(f, REFUSED);
        char *log = log_of(stranger, f, cases[i].options);
        assert_has(log, "ev=tls_refused");
        assert_has(log, cases[i].peer);
        assert_has(log, cases[i].why);
        free(log);
        assert_true(metric(f, REFUSED) == before + (cases[i].options[0] != '\0'));
    }
    assert_int_equal(f->calls, 0);
    struct reply r; /* and it serves on */
    client_start(f, "main", "main/n1");
    assert_int_equal(call(f, "kvstore/n1", "/t.T/Any", &r), BT_GRPC_OK);
}

static void plaintext(struct fixture *f, const char *method)
{
    struct reply r;
    client_start(f, NULL, NULL);
    assert_int_equal(call(f, NULL, method, &r), BT_GRPC_UNAVAILABLE);
}

static void test_plaintext(void **state)
{
    struct fixture *f = *state;
    char *log = log_of(plaintext, f, "/t.T/Any");
    assert_has(log, "set cluster.tls.* in all daemons, or in none");
    free(log);
    assert_int_equal(f->calls, 0);
}

static void shell(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

static void shell(const char *fmt, ...)
{
    char line[900];
    va_list ap;
    va_start(ap, fmt);
    size_t n = (size_t)snprintf(line, sizeof(line), "cd %s && ", dir);
    vsnprintf(line + n, sizeof(line) - n, fmt, ap);
    va_end(ap);
    assert_int_equal(system(line), 0);
}

static void test_files(void **state)
{
    static const struct {
        const char *ca, *leaf, *role, *node, *err;
    } cases[] = {
        {"main", "main/nobody", "kvstore", "n1", "nobody.crt: it cannot be read: No such file"},
        {"nowhere", "main/n1", "kvstore", "n1", "cluster.tls.ca: "},
        {"main", "main/mixed", "kvstore", "n1",
         "give a key and a certificate that belong together"},
        {"main", "main/open", "kvstore", "n1", "is open to everybody (mode 0644): chmod 0600 it"},
        {"main", "main/late", "kvstore", "late", "late.crt: the certificate expired at 20"},
        {"other", "main/n1", "kvstore", "n1", "n1.crt: another CA signed the certificate"},
        {"main", "main/n1", "kvstore", "n2",
         "must have URI:baton://t/kvstore/n2 and has baton://t/"},
        {"main", "main/admin", "kvstore", "n1", "must have URI:baton://t/kvstore/n1"},
        {"main", "main/junk", "kvstore", "n1", "it contains no certificate"},
        {"main", "main/locked", "kvstore", "n1", "PEM form without a passphrase"},
    };
    (void)state;
    shell("cp main/n1.crt main/mixed.crt && cp main/n2.key main/mixed.key");
    shell(
        "cp main/n1.crt main/open.crt && cp main/n1.key main/open.key && chmod 644 main/open.key");
    shell(
        "cp main/n1.crt main/locked.crt && openssl ec -in main/n1.key -aes128 -passout pass:secret "
        "-out main/locked.key 2>/dev/null");
    shell("echo hello >main/junk.crt && cp main/n1.key main/junk.key");
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct bt_tls *t;
        char err[700] = "";
        assert_int_equal(
            tls_new(cases[i].ca, cases[i].leaf, cases[i].role, cases[i].node, &t, err, sizeof(err)),
            BT_ERR_CONFIG);
        assert_has(err, cases[i].err);
    }
}

/* Opens a stream that shows this certificate to the server; the server has got a message. */
static struct bt_rpc_stream *stand(struct fixture *f, const char *leaf, struct bt_rpc_channel **ch)
{
    struct bt_rpc_stream *s;
    client_start(f, "main", leaf);
    assert_int_equal(bt_rpc_channel_create(f->client, f->target, "kvstore/n1", ch), BT_OK);
    assert_int_equal(bt_rpc_stream_open(*ch, "/t.T/Stream", false, &ops, f, &s), BT_OK);
    assert_int_equal(bt_rpc_stream_send(s, leaf, strlen(leaf)), BT_OK);
    WAIT_FOR(f, strcmp(f->last, leaf) == 0);
    return s;
}

/* A certificate on the list loses what stands and gets nothing new; others go on. */
static void test_revocation(void **state)
{
    struct fixture *f = *state;
    struct bt_rpc_channel *ch;
    struct reply r = {0};
    (void)stand(f, "main/n2", &ch);
    certs("main revoke n2.crt");
    PASS_UNTIL(f, f->closes == 2); /* both ends */
    bt_rpc_unary(ch, "/t.T/Any", "x", 1, 20000, on_reply, &r);
    WAIT_FOR(f, r.calls == 1); /* a call on the connection that still stands */
    assert_int_not_equal(r.code, BT_GRPC_OK);
    bt_rpc_channel_destroy(ch);
    client_start(f, "main", "main/n2"); /* a new connection */
    assert_int_not_equal(call(f, "kvstore/n1", "/t.T/Any", &r), BT_GRPC_OK);
    assert_int_equal(f->calls, 0);
    client_start(f, "main", "main/n1");
    assert_int_equal(call(f, "kvstore/n1", "/t.T/Any", &r), BT_GRPC_OK);
    assert_true(metric(f, REFUSED) >= 2);
    shell(": >main/revoked.txt");
}

/* A daemon notices too when the server that it talks to is revoked. */
static void test_revoked_server(void **state)
{
    struct fixture *f = *state;
    struct bt_rpc_channel *ch;
    (void)stand(f, "main/n2", &ch);
    bt_tls_watch(f->client_tls, f->loop, NULL);
    certs("main revoke n1.crt");
    PASS_UNTIL(f, f->closes == 2);
    bt_rpc_channel_destroy(ch);
    shell(": >main/revoked.txt");
}

static void test_expiry_ends_streams(void **state)
{
    struct fixture *f = *state;
    struct bt_rpc_channel *ch;
    shell("cp main/n2.crt main/soon.crt && cp main/n2.key main/soon.key");
    end_in("main/soon.crt", "main/ca.key", LIFE_S);
    (void)stand(f, "main/soon", &ch);
    assert_int_equal(f->closes, 0);
    atomic_store(&clock_wall_ahead_s, LIFE_S + 1);
    PASS_UNTIL(f, f->closes == 2);
    bt_rpc_channel_destroy(ch);
}

static void until_closed(struct fixture *f, const char *arg)
{
    (void)arg;
    atomic_store(&clock_wall_ahead_s, LIFE_S + 1);
    uint64_t from_ns = bt_mono_ns();
    PASS_UNTIL(f, f->closes == 2);
    assert_true(bt_mono_ns() - from_ns < 7000000000ull);
    loop_pass(f->loop, 5500); /* who holds it has looked at it too by now */
}

/* A certificate that ends while a session stands: the session ends within 5 s, both sides say whose
 * certificate it is and what to do, and with a new one in its place the client is back. */
static void test_a_short_life(void **state)
{
    struct fixture *f = *state;
    struct bt_rpc_channel *ch;
    struct reply r;
    shell("cp main/n2.crt main/short.crt && cp main/n2.key main/short.key");
    end_in("main/short.crt", "main/ca.key", LIFE_S);
    (void)stand(f, "main/short", &ch);
    bt_tls_watch(f->client_tls, f->loop, NULL);
    char *log = log_of(until_closed, f, NULL);
    assert_has(log, "ev=tls_refused peer=baton://t/conductor/n2");
    assert_has(log, "has expired\" remedy=\"its calls and streams were ended; give it a new");
    assert_has(log, "ev=tls_expired file=");
    assert_has(log, "/main/short.crt hours_left=0 remedy=\"put a new certificate");
    free(log);
    bt_rpc_channel_destroy(ch);
    assert_int_not_equal(call(f, "kvstore/n1", "/t.T/Any", &r), BT_GRPC_OK);
    shell("cp main/n2.crt main/short.crt");
    uint64_t end = clock_machine_ns() + LOOP_WAIT_MS * 1000000ull; /* gRPC pauses between dials */
    while (call(f, "kvstore/n1", "/t.T/Any", &r) != BT_GRPC_OK && clock_machine_ns() < end) {
        loop_pass(f->loop, 500);
    }
    assert_int_equal(r.code, BT_GRPC_OK);
}

static void test_revoked_lists(void **state)
{
    static const struct {
        const char *text, *err;
    } cases[] = {{"# nothing\\n\\n", NULL},
                 {"serial:00:aB:12 # comment\\n", NULL},
                 {"sha256:12", "line 1 is neither sha256: with 64"},
                 {"# a\\nn1", "line 2 is neither sha256: with 64"},
                 {"serial:", "line 1 is neither sha256: with 64"},
                 {"serial:xyz", "line 1 is neither sha256: with 64"}};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        char line[200], err[700] = "";
        struct bt_tls *t = NULL;
        snprintf(line, sizeof(line), "printf '%s' >main/revoked.txt", cases[i].text);
        shell(line);
        bt_status_t st = tls_new("main", "main/n1", "kvstore", "n1", &t, err, sizeof(err));
        assert_int_equal(st, cases[i].err != NULL ? BT_ERR_CONFIG : BT_OK);
        if (cases[i].err != NULL) {
            assert_has(err, cases[i].err);
            assert_has(err, "cluster.tls.revoked: ");
        } else {
            bt_tls_release(t);
        }
    }
    shell("rm main/revoked.txt");
    char err[700] = "";
    struct bt_tls *t = NULL;
    assert_int_equal(tls_new("main", "main/n1", "kvstore", "n1", &t, err, sizeof(err)),
                     BT_ERR_CONFIG);
    assert_has(err, "revoked.txt: it cannot be read");
    shell(": >main/revoked.txt");
}

static void test_renewal(void **state)
{
    struct fixture *f = *state;
    struct bt_rpc_channel *ch;
    struct bt_rpc_stream *s;
    struct reply r;
    client_start(f, "main", "main/n2");
    bt_tls_watch(f->client_tls, f->loop, NULL);
    assert_int_equal(bt_rpc_channel_create(f->client, f->target, "kvstore/n1", &ch), BT_OK);
    assert_int_equal(bt_rpc_stream_open(ch, "/t.T/Stream", false, &ops, f, &s), BT_OK);
    assert_int_equal(bt_rpc_stream_send(s, "one", 3), BT_OK);
    WAIT_FOR(f, strcmp(f->last, "one") == 0);
    double ends = metric(f, "baton_tls_certificate_not_after_seconds{");
    assert_true(ends > (double)bt_real_ns() / 1e9 + 80 * 86400.0);
    assert_true(ends < (double)bt_real_ns() / 1e9 + 91 * 86400.0);

    certs(
        "main --cluster t --days 200 node n1 conductor,prefill,decode,kvstore"); /* another key, and
                                                                                    it ends later */
    PASS_UNTIL(f, metric(f, "baton_tls_certificate_not_after_seconds{") > ends + 100 * 86400.0);
    assert_int_equal(bt_rpc_stream_send(s, "two", 3), BT_OK); /* what stands goes on */
    WAIT_FOR(f, strcmp(f->last, "two") == 0);

    /* All of it from another CA, which takes both sides. */
    shell("rm main/ca.key main/ca.crt");
    certs("main --cluster t ca");
    certs("main --cluster t node n1 conductor,prefill,decode,kvstore");
    certs("main --cluster t node n2 conductor,prefill,decode,kvstore");
    uint64_t end = clock_machine_ns() + LOOP_WAIT_MS * 1000000ull;
    while (call(f, "kvstore/n1", "/t.T/Any", &r) != BT_GRPC_OK && clock_machine_ns() < end) {
        loop_pass(f->loop, 500);
    }
    assert_int_equal(r.code, BT_GRPC_OK);
    loop_run_for(f->loop, 6000); /* gRPC has looked on both sides by now: the old CA is believed no
                                    more */
    assert_int_equal(call(f, "kvstore/n1", "/t.T/Any", &r), BT_GRPC_OK);
    clock_jump(60001); /* the client may have been refused so already: said once a minute */
    char *log = log_of(stranger, f, "-cert old/n2.crt -key old/n2.key");
    assert_has(log, "another CA signed the certificate");
    free(log);
    assert_int_equal(bt_rpc_stream_send(s, "three", 5), BT_OK);
    WAIT_FOR(f, strcmp(f->last, "three") == 0);
    bt_rpc_stream_close(s, 0, NULL, false);
    bt_rpc_channel_destroy(ch);
}

static void test_uris(void **state)
{
    (void)state;
    assert_true(bt_tls_uri_is("baton://t/kvstore/n1", "t", "kvstore", "n1"));
    assert_true(bt_tls_uri_is("baton://t/kvstore/n1", "t", "kvstore", NULL));
    assert_true(bt_tls_uri_is("baton://t/kvstore/n1", "t", NULL, NULL));
    assert_false(bt_tls_uri_is("baton://t/kvstore/n1", "tt", NULL, NULL));
    assert_false(bt_tls_uri_is("baton://t/kvstore/n1", "t", "kv", NULL));
    assert_false(bt_tls_uri_is("baton://t/kvstore/n1", "t", "kvstore", "n"));
    assert_false(bt_tls_uri_is("baton://t/kvstore/n1/x", "t", "kvstore", NULL));
    assert_false(bt_tls_uri_is("baton://t/kvstore/", "t", "kvstore", NULL));
    assert_false(bt_tls_uri_is("baton://t/kvstore", "t", "kvstore", NULL));
    assert_false(bt_tls_uri_is("baton:///kvstore/n1", NULL, "kvstore", NULL));
    assert_false(bt_tls_uri_is("http://t/kvstore/n1", "t", "kvstore", "n1"));
}

static void test_private_addresses(void **state)
{
    static const char *const yes[] = {
        "127.0.0.1",   "127.9.9.9", "10.0.0.1", "172.16.0.1", "172.31.9.9", "192.168.1.1",
        "169.254.1.1", "::1",       "fe80::1",  "fd00::1",    "fdff:1::2",  "::ffff:10.1.1.1"};
    static const char *const no[] = {"8.8.8.8",        "172.15.0.1", "172.32.0.1", "192.169.0.1",
                                     "11.0.0.1",       "0.0.0.0",    "fc00::1",    "2001:db8::1",
                                     "::ffff:8.8.8.8", "",           "localhost",  "10.0.0.1:80"};
    static const char *const with_port[] = {"127.0.0.1:1", "localhost:0", "[::1]:7", "[fd00::3]:1"};
    static const char *const routable[] = {"0.0.0.0:1", "[::]:1", "[2001:db8::1]:5", "a.example:1"};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(yes); i++) {
        assert_true(bt_address_private(yes[i]));
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(no); i++) {
        assert_false(bt_address_private(no[i]));
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(with_port); i++) {
        assert_true(bt_address_port_private(with_port[i]));
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(routable); i++) {
        assert_false(bt_address_port_private(routable[i]));
    }
}

static int make_all(void **state)
{
    (void)state;
    assert_non_null(mkdtemp(dir));
    certs("main --cluster t ca");
    certs("main --cluster t node n1 conductor,prefill,decode,kvstore");
    certs("main --cluster t node n2 conductor,prefill,decode,kvstore");
    certs("main --cluster t admin");
    certs("main --cluster t node late conductor,prefill");
    end_in("main/late.crt", "main/ca.key", -86400);
    certs("main --cluster elsewhere node alien conductor,prefill");
    certs("main --cluster t etcd 127.0.0.1");
    certs("other --cluster t ca");
    certs("other --cluster t node n1 conductor,prefill,decode,kvstore");
    shell("touch main/revoked.txt other/revoked.txt && cp -r main old");
    return 0;
}

static int remove_all(void **state)
{
    char line[100];
    (void)state;
    snprintf(line, sizeof(line), "rm -rf %s", dir);
    return system(line);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_uris),
        cmocka_unit_test(test_private_addresses),
        cmocka_unit_test(test_files),
        T(test_roles),
        T(test_stream_names),
        T(test_wrong_server),
        T(test_strangers),
        T(test_plaintext),
        T(test_revocation),
        T(test_revoked_server),
        T(test_expiry_ends_streams),
        T(test_a_short_life),
        cmocka_unit_test(test_revoked_lists),
        T(test_renewal), /* last: it replaces the CA */
    };
    return cmocka_run_group_tests_name("tls", tests, make_all, remove_all);
}
