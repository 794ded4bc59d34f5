/* HTTPS: the server over real TLS, with a client of OpenSSL's, certificates as baton-certs makes
 * them, and clients that do what they should not. */
#include "tests/unit/http_fixture.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/stat.h>

#include "common/http/http_tls.h"

static char dir[] = "/tmp/test_http_tls_XXXXXX";
static struct bt_http_tls *tls;
static SSL_CTX *client_ctx;

/* A shell command in the tests' directory. */
static void sh(const char *command)
{
    char line[1024];
    snprintf(line, sizeof(line), "b=$PWD/deploy/local/baton-certs; cd %s && { %s; } 2>/dev/null",
             dir, command);
    if (system(line) != 0) {
        fail_msg("%s", command);
    }
}

static int make_files(void **state)
{
    (void)state;
    strcpy(dir + sizeof(dir) - 7, "XXXXXX");
    assert_non_null(mkdtemp(dir));
    sh("$b ca && $b http localhost,127.0.0.1 && $b --dir other ca && $b --dir other http localhost "
       "&& $b client shop && $b --dir other client shop");
    return 0;
}

static int remove_files(void **state)
{
    (void)state;
    sh("rm -rf ../${PWD##*/}");
    return 0;
}

static int start(void **state)
{
    char err[512] = "", ca[128];
    struct bt_http_options o;
    (void)state;
    bt_http_options_default(&o);
    o.listen = "127.0.0.1:0";
    snprintf(ca, sizeof(ca), "%s/http", dir);
    if (bt_http_tls_create("key", ca, &tls, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    o.tls = tls;
    open_with(&o);
    bt_http_tls_watch(tls, loop);
    client_ctx = SSL_CTX_new(TLS_client_method());
    snprintf(ca, sizeof(ca), "%s/ca.crt", dir);
    assert_int_equal(SSL_CTX_load_verify_locations(client_ctx, ca, NULL), 1);
    SSL_CTX_set_verify(client_ctx, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_mode(client_ctx, SSL_MODE_ENABLE_PARTIAL_WRITE);
    return 0;
}

static int stop(void **state)
{
    SSL_CTX_free(client_ctx);
    bt_http_destroy(http);
    bt_http_tls_destroy(tls);
    http = NULL;
    return teardown(state);
}

/* ---- the client ---- */

struct client {
    int fd;
    SSL *ssl;
};

static bool again(struct client *c, int n)
{
    int e = SSL_get_error(c->ssl, n);
    turn(1);
    return e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE;
}

/* False: the handshake failed. */
static bool try_connect(struct client *c)
{
    uint64_t until = clock_machine_ns() + PATIENCE_MS * 1000000ull;
    int n;
    c->fd = dial();
    c->ssl = SSL_new(client_ctx);
    SSL_set_fd(c->ssl, c->fd);
    SSL_set1_host(c->ssl, "localhost");
    SSL_set_tlsext_host_name(c->ssl, "localhost");
    while ((n = SSL_connect(c->ssl)) != 1) {
        if (!again(c, n)) {
            return false;
        }
        assert_true(clock_machine_ns() < until);
    }
    return true;
}

static void hang_up(struct client *c)
{
    SSL_free(c->ssl);
    close(c->fd);
    ERR_clear_error();
}

static void say(struct client *c, const char *data, size_t len)
{
    while (len > 0) {
        int n = SSL_write(c->ssl, data, (int)len);
        if (n > 0) {
            data += n;
            len -= (size_t)n;
        } else if (!again(c, n)) {
            return;
        }
    }
}

static void says(struct client *c, const char *text)
{
    say(c, text, strlen(text));
}

/* Reads until `what` has come; NULL: until the server says that nothing more comes. */
static const char *hear(struct client *c, const char *what)
{
    static char text[4 * 1024 * 1024];
    size_t len = 0;
    uint64_t until = clock_machine_ns() + PATIENCE_MS * 1000000ull;
    text[0] = '\0';
    while (what == NULL || strstr(text, what) == NULL) {
        int n = SSL_read(c->ssl, text + len, (int)(sizeof(text) - 1 - len));
        if (n > 0) {
            len += (size_t)n;
            text[len] = '\0';
        } else if (SSL_get_error(c->ssl, n) == SSL_ERROR_ZERO_RETURN && what == NULL) {
            return text;
        } else if (!again(c, n) || clock_machine_ns() > until) {
            fail_msg("no %s in \"%.200s\"", what != NULL ? what : "close_notify", text);
        }
    }
    return text;
}

#define GET_STREAM "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n"

/* ---- what works ---- */

static void both_versions(void **state)
{
    static const int versions[] = {TLS1_2_VERSION, TLS1_3_VERSION};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(versions); i++) {
        struct client c;
        SSL_CTX_set_min_proto_version(client_ctx, versions[i]);
        SSL_CTX_set_max_proto_version(client_ctx, versions[i]);
        assert_true(try_connect(&c));
        assert_int_equal(SSL_version(c.ssl), versions[i]);
        says(&c, GET_STREAM);
        assert_non_null(strstr(hear(&c, "0\r\n\r\n"), "three\n"));
        says(&c, GET_STREAM GET_STREAM); /* sent ahead */
        const char *two = strstr(hear(&c, "0\r\n\r\nHTTP/1.1"), "three");
        assert_non_null(two);
        hang_up(&c);
    }
    SSL_CTX_set_min_proto_version(client_ctx, TLS1_VERSION);
    SSL_CTX_set_max_proto_version(client_ctx, TLS1_1_VERSION);
    SSL_CTX_set_cipher_list(client_ctx, "ALL:@SECLEVEL=0");
    struct client old;
    assert_false(try_connect(&old));
    hang_up(&old);
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* Many records in both directions, more than the kernel takes at once. */
static void large_bodies(void **state)
{
    enum { BYTES = 3 * 1024 * 1024 };
    struct client c;
    char *body = malloc(BYTES), head[128];
    (void)state;
    for (size_t i = 0; i < BYTES; i++) {
        body[i] = (char)('a' + i * 7 % 26);
    }
    body[BYTES - 1] = '!';
    snprintf(head, sizeof(head),
             "POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n",
             BYTES);
    assert_true(try_connect(&c));
    says(&c, head);
    say(&c, body, BYTES);
    const char *answer = hear(&c, NULL);
    const char *got = strstr(answer, "\r\n\r\n");
    assert_non_null(got);
    assert_int_equal(strlen(got + 4), BYTES);
    assert_memory_equal(got + 4, body, BYTES);
    hang_up(&c);
    free(body);
}

/* A request in records of one byte each. */
static void small_records(void **state)
{
    struct client c;
    (void)state;
    assert_true(try_connect(&c));
    for (const char *p = GET_STREAM; *p != '\0'; p++) {
        say(&c, p, 1);
    }
    assert_non_null(strstr(hear(&c, "0\r\n\r\n"), "three\n"));
    hang_up(&c);
}

static void alpn(void **state)
{
    static const struct {
        const char *list, *chosen; /* chosen NULL: the handshake fails */
    } cases[] = {{"\x02h2\x08http/1.1", "http/1.1"}, {"\x02h2", NULL}, {"\x08http/1.0", NULL}};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct client c;
        const unsigned char *chosen = NULL;
        unsigned n = 0;
        SSL_CTX_set_alpn_protos(client_ctx, (const unsigned char *)cases[i].list,
                                (unsigned)strlen(cases[i].list));
        assert_int_equal(try_connect(&c), cases[i].chosen != NULL);
        SSL_get0_alpn_selected(c.ssl, &chosen, &n);
        assert_int_equal(n, cases[i].chosen != NULL ? strlen(cases[i].chosen) : 0);
        hang_up(&c);
    }
    assert_int_equal(bt_http_tls_refused(tls), 2);
}

/* ---- strange clients ---- */

static void plain_http_is_told(void **state)
{
    (void)state;
    int fd = dial();
    puts_to(fd, "GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    const char *text = get(fd, NULL);
    expect_status(text, 400);
    assert_non_null(strstr(text, "use https://"));
    close(fd);
    assert_int_equal(bt_http_tls_refused(tls), 0);
}

#define WITH_SIZE(text) text, sizeof(text) - 1

static void garbage_ends(void **state)
{
    static const struct {
        const char *bytes;
        size_t n;
    } bad[] = {{WITH_SIZE("\x16\x03\x01\xff\xff garbage garbage")},
               {WITH_SIZE("\0\0\0\0\0\0\0\0\0\0\0")},
               {WITH_SIZE("\x16\x03\x01\0\x05\x01\0\0\x01\xff")},
               {WITH_SIZE("\x80\x0b\x01\x03\x01\0\0\0\0\0\0\0\0")},
               {WITH_SIZE("get / HTTP/1.1\r\n\r\n")}};
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        int fd = dial();
        put(fd, bad[i].bytes, bad[i].n);
        WAIT_FOR(bt_http_tls_refused(tls) == i + 1);
        (void)get(fd, NULL); /* an alert, or nothing */
        close(fd);
    }
    WAIT_FOR(bt_http_conns(http) == 0);
    int fd = dial(); /* a check that only connects is no refusal */
    turn(1);
    close(fd);
    WAIT_FOR(bt_http_conns(http) == 0);
    assert_int_equal(bt_http_tls_refused(tls), BT_ARRAY_LEN(bad));
}

/* A client that begins a handshake and stops, or sends a byte a second, has the header's time. */
static void slow_handshakes_end(void **state)
{
    static const char hello[] = "\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03";
    (void)state;
    int none = dial(), half = dial(), slow = dial();
    put(half, hello, sizeof(hello) - 1);
    WAIT_FOR(bt_http_conns(http) == 3);
    for (int i = 0; i < 10; i++) {
        put(slow, hello + i, 1);
        loop_pass(loop, 1100);
    }
    WAIT_FOR(bt_http_conns(http) == 0);
    close(none);
    close(half);
    close(slow);
    /* One that has shaken hands and asks nothing is idle: it has more. */
    struct client c;
    assert_true(try_connect(&c));
    loop_pass(loop, 12000);
    assert_int_equal(bt_http_conns(http), 1);
    says(&c, GET_STREAM);
    (void)hear(&c, "0\r\n\r\n");
    hang_up(&c);
}

static void no_renegotiation(void **state)
{
    struct client c;
    (void)state;
    SSL_CTX_set_max_proto_version(client_ctx, TLS1_2_VERSION);
    assert_true(try_connect(&c));
    says(&c, GET_STREAM);
    (void)hear(&c, "0\r\n\r\n");
    if (SSL_renegotiate(c.ssl) == 1) {
        uint64_t until = bt_mono_ns() + 200 * 1000000ull;
        int n = 0;
        while (bt_mono_ns() < until && (n = SSL_do_handshake(c.ssl)) != 1 && again(&c, n)) {
        }
        assert_int_not_equal(n, 1);
    }
    hang_up(&c);
    WAIT_FOR(bt_http_conns(http) == 0);
}

/* Key updates have no content. They must not keep the server from others, nor end anything. */
static void key_updates(void **state)
{
    struct client c, other;
    (void)state;
    assert_true(try_connect(&c));
    assert_true(try_connect(&other));
    for (int i = 0; i < 200; i++) {
        assert_int_equal(SSL_key_update(c.ssl, SSL_KEY_UPDATE_NOT_REQUESTED), 1);
        assert_int_equal(SSL_do_handshake(c.ssl), 1);
    }
    says(&other, GET_STREAM);
    (void)hear(&other, "0\r\n\r\n");
    says(&c, GET_STREAM);
    (void)hear(&c, "0\r\n\r\n");
    assert_int_equal(SSL_key_update(c.ssl, SSL_KEY_UPDATE_REQUESTED), 1); /* asks for one */
    says(&c, GET_STREAM);
    (void)hear(&c, "0\r\n\r\n");
    hang_up(&c);
    hang_up(&other);
}

/* A client that leaves is noticed while its answer is made, as without TLS. */
static void a_client_that_leaves(void **state)
{
    struct client c;
    (void)state;
    assert_true(try_connect(&c));
    says(&c, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    hang_up(&c);
    WAIT_FOR(n_gone == 1);
}

/* ---- certificates ---- */

/* The server looks at its files. */
static void look(void)
{
    loop_pass(loop, 6000);
}

static void new_files_leave_streams_alone(void **state)
{
    struct client c, d;
    (void)state;
    assert_true(try_connect(&c));
    says(&c, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    WAIT_FOR(n_held == 1);
    bt_http_start(held[0], 200, "text/plain");
    bt_http_write(held[0], "before ", 7);
    (void)hear(&c, "before");
    sh("cp -r http good && cp other/http/tls.crt http/"); /* half of the pair */
    look();
    assert_true(try_connect(&d)); /* the old pair */
    hang_up(&d);
    sh("cp other/http/tls.key http/");
    look();
    assert_false(try_connect(&d)); /* of another CA */
    assert_int_equal(SSL_get_verify_result(d.ssl), X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY);
    hang_up(&d);
    bt_http_write(held[0], "after", 5);
    bt_http_end(held[0]);
    held[0] = NULL;
    assert_non_null(strstr(hear(&c, "0\r\n\r\n"), "after"));
    sh("rm http/tls.key");
    look();
    sh("cp good/tls.* http/");
    look();
    assert_true(try_connect(&d));
    hang_up(&d);
    hang_up(&c);
}

static bool accepted(struct client *c)
{
    if (!try_connect(c)) {
        return false;
    }
    /* With TLS 1.3 the client has finished before the server has seen its certificate. */
    int n;
    says(c, GET_STREAM);
    char byte;
    while ((n = SSL_read(c->ssl, &byte, 1)) <= 0 && again(c, n)) {
    }
    return n == 1;
}

static void clients_show_certificates(void **state)
{
    char crt[128], key[128];
    struct client c;
    (void)state;
    sh("cp ca.crt http/client-ca.crt");
    look();
    assert_false(accepted(&c));
    hang_up(&c);
    sh("rm http/client-ca.crt"); /* a file that is lost does not open the door */
    look();
    assert_false(accepted(&c));
    hang_up(&c);
    sh("cp ca.crt http/client-ca.crt");
    look();
    static const struct {
        const char *name;
        bool good;
    } certs[] = {{"shop", true}, {"other/shop", false}, {"http/tls", false}};
    for (size_t i = 0; i < BT_ARRAY_LEN(certs); i++) { /* the last one is a server's */
        snprintf(crt, sizeof(crt), "%s/%s.crt", dir, certs[i].name);
        snprintf(key, sizeof(key), "%s/%s.key", dir, certs[i].name);
        assert_int_equal(SSL_CTX_use_certificate_file(client_ctx, crt, SSL_FILETYPE_PEM), 1);
        assert_int_equal(SSL_CTX_use_PrivateKey_file(client_ctx, key, SSL_FILETYPE_PEM), 1);
        if (accepted(&c) != certs[i].good) {
            fail_msg("%s: %d", certs[i].name, certs[i].good);
        }
        hang_up(&c);
    }
    /* One that is revoked gets no further request, also on a connection that stands. */
    snprintf(crt, sizeof(crt), "%s/shop.crt", dir);
    snprintf(key, sizeof(key), "%s/shop.key", dir);
    assert_int_equal(SSL_CTX_use_certificate_file(client_ctx, crt, SSL_FILETYPE_PEM), 1);
    assert_int_equal(SSL_CTX_use_PrivateKey_file(client_ctx, key, SSL_FILETYPE_PEM), 1);
    struct client stands;
    assert_true(try_connect(&stands));
    says(&stands, GET_STREAM);
    (void)hear(&stands, "0\r\n\r\n");
    sh("cp revoked.txt http/");
    look();
    says(&stands, GET_STREAM);
    (void)hear(&stands, "0\r\n\r\n");
    sh("$b revoke shop.crt && cp revoked.txt http/");
    look();
    int n = 0, before = n_requests;
    char byte;
    says(&stands, GET_STREAM);
    while ((n = SSL_read(stands.ssl, &byte, 1)) <= 0 && again(&stands, n)) {
    }
    assert_true(n <= 0);
    assert_int_equal(n_requests, before);
    hang_up(&stands);
    assert_false(accepted(&c));
    hang_up(&c);
    sh("echo sha256:12 >http/revoked.txt"); /* a wrong list leaves the last one in force */
    look();
    assert_false(accepted(&c));
    hang_up(&c);
    sh("rm http/revoked.txt"); /* so does one that is lost */
    look();
    assert_false(accepted(&c));
    hang_up(&c);
}

static void files_are_checked(void **state)
{
    static const struct {
        const char *make, *why;
    } bad[] = {
        {"rm x/tls.crt", "tls.crt: it cannot be read"},
        {"echo no >x/tls.crt", "tls.crt: it has no certificate in PEM form"},
        {"rm x/tls.key", "tls.key: it cannot be read"},
        {"chmod 644 x/tls.key", "tls.key: "},
        {"cp other/http/tls.key x/", "tls.key: it is not the private key"},
        {"openssl ec -in http/tls.key -aes128 -passout pass:a -out x/tls.key && chmod 600 "
         "x/tls.key",
         "without a passphrase"},
        {"echo no >x/client-ca.crt", "client-ca.crt: it has no certificate"},
        {"ln -sf nowhere x/client-ca.crt", "client-ca.crt: it has no certificate"},
        {"ln -sf nowhere x/revoked.txt", "revoked.txt: it cannot be read"},
        {"echo sha256:1 >x/revoked.txt", "revoked.txt: line 1"},
    };
    struct bt_http_tls *t = NULL;
    char err[512], at[128];
    (void)state;
    snprintf(at, sizeof(at), "%s/x", dir);
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        sh("rm -rf x && cp -r http x && chmod 600 x/tls.key");
        sh(bad[i].make);
        assert_int_equal(bt_http_tls_create("a.key", at, &t, err, sizeof(err)), BT_ERR_CONFIG);
        if (strncmp(err, "a.key: ", 7) != 0 || strstr(err, bad[i].why) == NULL) {
            fail_msg("no \"%s\" in \"%s\"", bad[i].why, err);
        }
    }
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, start, stop)
    const struct CMUnitTest tests[] = {
        TEST(both_versions),
        TEST(large_bodies),
        TEST(small_records),
        TEST(alpn),
        TEST(plain_http_is_told),
        TEST(garbage_ends),
        TEST(slow_handshakes_end),
        TEST(no_renegotiation),
        TEST(key_updates),
        TEST(a_client_that_leaves),
        TEST(new_files_leave_streams_alone),
        cmocka_unit_test(files_are_checked),
        TEST(clients_show_certificates),
    };
    return cmocka_run_group_tests(tests, make_files, remove_files);
}
