/* The HTTP request parser: a table of framings, each fed whole, byte by byte and in random pieces;
 * the outcomes must be equal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/base.h"
#include "common/http/http_parse.h"

#define BODY_MAX 4096

struct framing {
    const char *name;
    const char *bytes;
    size_t len; /* 0: strlen */
    int status; /* 0: accepted, -1: must wait for more */
    const char *body;
    const char *path;
};

#define H "Host: a\r\n"
static const struct framing table[] = {
    {"plain get", "GET /x?q=1 HTTP/1.1\r\n" H "\r\n", 0, 0, "", "/x"},
    {"percent-decoded", "GET /a%20b%2Fc HTTP/1.1\r\n" H "\r\n", 0, 0, "", "/a b/c"},
    {"absolute form", "GET http://h:80/x HTTP/1.1\r\n" H "\r\n", 0, 0, "", "/x"},
    {"one blank line before", "\r\nGET / HTTP/1.1\r\n" H "\r\n", 0, 0, "", "/"},
    {"two blank lines before", "\r\n\r\nGET / HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"length", "POST / HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nhello", 0, 0, "hello", "/"},
    {"length zero", "POST / HTTP/1.1\r\n" H "Content-Length: 0\r\n\r\n", 0, 0, "", "/"},
    {"chunked",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n"
     "3\r\nabc\r\nA;x=\"y\"\r\n0123456789\r\n0\r\n\r\n",
     0, 0, "abc0123456789", "/"},
    {"chunked with trailers",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: Chunked\r\n\r\n1\r\nz\r\n0\r\nX-T: 1\r\n\r\n", 0,
     0, "z", "/"},
    {"1.0 without host", "GET / HTTP/1.0\r\n\r\n", 0, 0, "", "/"},
    {"tabs around a value", "GET / HTTP/1.1\r\nHost:\t a \t\r\n\r\n", 0, 0, "", "/"},
    {"incomplete head", "GET / HTTP/1.1\r\n" H, 0, -1, NULL, NULL},
    {"incomplete body", "POST / HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nhell", 0, -1, NULL, NULL},
    /* ambiguous framing, which a proxy in front may read in another way (RFC 9112) */
    {"CL+TE",
     "POST / HTTP/1.1\r\n" H "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0,
     400, NULL, NULL},
    {"TE+CL",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 0,
     400, NULL, NULL},
    {"two CL equal", "POST / HTTP/1.1\r\n" H "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
     0, 400, NULL, NULL},
    {"two CL different",
     "POST / HTTP/1.1\r\n" H "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 0, 400, NULL,
     NULL},
    {"CL list", "POST / HTTP/1.1\r\n" H "Content-Length: 5, 5\r\n\r\nhello", 0, 400, NULL, NULL},
    {"CL +5", "POST / HTTP/1.1\r\n" H "Content-Length: +5\r\n\r\nhello", 0, 400, NULL, NULL},
    {"CL 0x5", "POST / HTTP/1.1\r\n" H "Content-Length: 0x5\r\n\r\nhello", 0, 400, NULL, NULL},
    {"CL -1", "POST / HTTP/1.1\r\n" H "Content-Length: -1\r\n\r\n", 0, 400, NULL, NULL},
    {"CL empty", "POST / HTTP/1.1\r\n" H "Content-Length:\r\n\r\n", 0, 400, NULL, NULL},
    {"CL 2^63", "POST / HTTP/1.1\r\n" H "Content-Length: 9223372036854775808\r\n\r\n", 0, 400, NULL,
     NULL},
    {"CL 2^64+5", "POST / HTTP/1.1\r\n" H "Content-Length: 18446744073709551621\r\n\r\nhello", 0,
     400, NULL, NULL},
    {"TE chunked, identity",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 0, 400, NULL,
     NULL},
    {"TE gzip, chunked",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 0, 400, NULL,
     NULL},
    {"two TE",
     "POST / HTTP/1.1\r\n" H
     "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     0, 400, NULL, NULL},
    {"TE in 1.0", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, 400, NULL,
     NULL},
    {"chunk size of 17 digits",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n", 0,
     400, NULL, NULL},
    {"chunk size 2^64-1",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\nhello\r\n", 0,
     400, NULL, NULL},
    {"chunk size 0x5", "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n",
     0, 400, NULL, NULL},
    {"chunk size empty", "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n\r\nhello\r\n",
     0, 400, NULL, NULL},
    {"chunk size with blank",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n", 0, 400, NULL,
     NULL},
    {"chunk size bare LF",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", 0, 400,
     NULL, NULL},
    {"chunk extension bare LF",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n5;a\nhello\r\n0\r\n\r\n", 0, 400,
     NULL, NULL},
    {"chunk extensions of every kind",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n"
     "1;a;b=c;d=\"e \\\" ;\xc3\xa9\"\r\nz\r\n0;x\r\n\r\n",
     0, 0, "z", "/"},
    {"chunk extension not a token",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n1;\xff\r\nz\r\n0\r\n\r\n", 0, 400,
     NULL, NULL},
    {"chunk extension without a name",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n1;\r\nz\r\n0\r\n\r\n", 0, 400, NULL,
     NULL},
    {"chunk extension quote left open",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n1;a=\"b\r\nz\r\n0\r\n\r\n", 0, 400,
     NULL, NULL},
    {"chunk data too long",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n", 0, 400,
     NULL, NULL},
    {"chunk data ends with bare LF",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n", 0, 400,
     NULL, NULL},
    {"framing field in trailers",
     "POST / HTTP/1.1\r\n" H
     "Transfer-Encoding: chunked\r\n\r\n1\r\nz\r\n0\r\nContent-Length: 1\r\n\r\n",
     0, 400, NULL, NULL},
    {"bare LF", "GET / HTTP/1.1\nHost: a\n\n", 0, 400, NULL, NULL},
    {"bare LF in fields", "GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 0, 400, NULL, NULL},
    {"bare CR", "GET / HTTP/1.1\r\nX-A: b\rContent-Length: 5\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"bare CR behind the colon", "GET / HTTP/1.1\r\nX-A:\rContent-Length: 5\r\n" H "\r\n", 0, 400,
     NULL, NULL},
    {"bare CR as line end", "GET / HTTP/1.1\rHost: a\r\r", 0, 400, NULL, NULL},
    {"obs-fold", "GET / HTTP/1.1\r\n" H "X-A: b\r\n c\r\n\r\n", 0, 400, NULL, NULL},
    {"obs-fold at first", "GET / HTTP/1.1\r\n X: b\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"space before colon", "GET / HTTP/1.1\r\n" H "Content-Length : 5\r\n\r\nhello", 0, 400, NULL,
     NULL},
    {"no colon", "GET / HTTP/1.1\r\n" H "nonsense\r\n\r\n", 0, 400, NULL, NULL},
    {"empty name", "GET / HTTP/1.1\r\n" H ": x\r\n\r\n", 0, 400, NULL, NULL},
    {"missing Host", "GET / HTTP/1.1\r\nX: y\r\n\r\n", 0, 400, NULL, NULL},
    {"two Host", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 0, 400, NULL, NULL},
    {"bad Host", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 0, 400, NULL, NULL},
    {"NUL in path", "GET /a\0b HTTP/1.1\r\n" H "\r\n",
     sizeof("GET /a\0b HTTP/1.1\r\n" H "\r\n") - 1, 400, NULL, NULL},
    {"NUL in path, escaped", "GET /a%00b HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"NUL in a value", "GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n",
     sizeof("GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n") - 1, 400, NULL, NULL},
    {"control character in a value", "GET / HTTP/1.1\r\n" H "X: \x01\r\n\r\n", 0, 400, NULL, NULL},
    {"bad escape", "GET /a%g0 HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"escape cut off", "GET /a%4 HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"fragment", "GET /a#b HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"two blanks", "GET  / HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"blank at the end", "GET / HTTP/1.1 \r\n" H "\r\n", 0, 400, NULL, NULL},
    {"no version", "GET /\r\n\r\n", 0, 400, NULL, NULL},
    {"lower-case version", "GET / http/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 0, 505, NULL, NULL},
    {"a TLS handshake", "\x16\x03\x01\x02", 0, 400, NULL, NULL},
    {"HTTP/1.2", "GET / HTTP/1.2\r\n" H "\r\n", 0, 505, NULL, NULL},
    {"TLS hello", "\x16\x03\x01\x02\0\x01", 6, 400, NULL, NULL},
    {"relative target", "GET x HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"method with a bracket", "G(T / HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"unknown method", "ET / HTTP/1.1\r\n" H "\r\n", 0, 501, NULL, NULL},
    {"lower-case method", "get / HTTP/1.1\r\n" H "\r\n", 0, 501, NULL, NULL},
    {"CONNECT", "CONNECT a:1 HTTP/1.1\r\n" H "\r\n", 0, 400, NULL, NULL},
    {"expectation", "POST / HTTP/1.1\r\n" H "Expect: magic\r\n\r\n", 0, 417, NULL, NULL},
    {"length above the limit", "POST / HTTP/1.1\r\n" H "Content-Length: 4097\r\n\r\n", 0, 413, NULL,
     NULL},
    {"chunk above the limit",
     "POST / HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n1000\r\n", 0, 413, NULL,
     NULL},
};
#undef H

/* piece: 0 all at once, n: n bytes at a time, -1: random. Returns the bytes taken. */
static size_t feed(struct bt_http_parser *p, const char *bytes, size_t len, int piece)
{
    size_t used = 0;
    while (used < len && (p->phase == BT_HTTP_HEAD || p->phase == BT_HTTP_BODY)) {
        size_t n = piece == 0 ? len : piece > 0 ? (size_t)piece : 1 + (size_t)rand() % 7;
        n = BT_MIN(n, len - used);
        /* An exact heap copy: reading beyond the piece is seen by the address sanitizer. */
        char *copy = bt_malloc(n);
        memcpy(copy, bytes + used, n);
        size_t took = bt_http_parse(p, copy, n);
        free(copy);
        assert_true(took <= n);
        used += took;
        if (took < n) {
            assert_true(p->phase == BT_HTTP_DONE || p->phase == BT_HTTP_REFUSE);
        }
    }
    return used;
}

static void check_outcome(const struct framing *f, const struct bt_http_parser *p, const char *how)
{
    int got = p->phase == BT_HTTP_REFUSE ? p->status : p->phase == BT_HTTP_DONE ? 0 : -1;
    int want = f->status;
    if (got != want) {
        fail_msg("%s (%s): got %d (%s), want %d", f->name, how, got, p->why != NULL ? p->why : "-",
                 want);
    }
    if (want == 0) {
        assert_string_equal(p->body.data != NULL ? p->body.data : "", f->body);
        assert_string_equal(p->head.data + p->path, f->path);
    }
}

static void test_table(void **state)
{
    (void)state;
    static const int pieces[] = {0, 1, 2, 3, -1, -1, -1};
    srand(7);
    for (size_t i = 0; i < BT_ARRAY_LEN(table); i++) {
        size_t len = table[i].len > 0 ? table[i].len : strlen(table[i].bytes);
        size_t used0 = 0;
        for (size_t k = 0; k < BT_ARRAY_LEN(pieces); k++) {
            struct bt_http_parser p;
            bt_http_parser_init(&p, BODY_MAX);
            size_t used = feed(&p, table[i].bytes, len, pieces[k]);
            check_outcome(&table[i], &p, k == 0 ? "whole" : "in pieces");
            if (k == 0) {
                used0 = used;
            }
            assert_int_equal(used, used0);
            bt_http_parser_cleanup(&p);
        }
    }
}

/* Two requests in one buffer: the parser stops exactly between them. */
static void test_stops_at_the_end(void **state)
{
    (void)state;
    static const char two[] = "POST /1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
                              "GET /2 HTTP/1.1\r\nHost: a\r\nConnection: foo , Close\r\n\r\n";
    struct bt_http_parser p;
    bt_http_parser_init(&p, BODY_MAX);
    size_t n = bt_http_parse(&p, two, sizeof(two) - 1);
    assert_int_equal(p.phase, BT_HTTP_DONE);
    assert_true(p.keep_alive);
    assert_string_equal(p.body.data, "abc");
    bt_http_parser_reset(&p);
    assert_false(bt_http_parser_started(&p));
    n += bt_http_parse(&p, two + n, sizeof(two) - 1 - n);
    assert_int_equal(n, sizeof(two) - 1);
    assert_int_equal(p.phase, BT_HTTP_DONE);
    assert_string_equal(p.head.data + p.path, "/2");
    assert_string_equal(bt_http_parser_field(&p, "CONNECTION"), "foo , Close");
    assert_null(bt_http_parser_field(&p, "content-length"));
    assert_false(p.keep_alive);
    bt_http_parser_cleanup(&p);
}

static int outcome_of(struct bt_buf *b, int piece)
{
    struct bt_http_parser p;
    bt_http_parser_init(&p, BODY_MAX);
    feed(&p, b->data, b->len, piece);
    int got = p.phase == BT_HTTP_REFUSE ? p.status : p.phase == BT_HTTP_DONE ? 0 : -1;
    bt_http_parser_cleanup(&p);
    return got;
}

static void test_limits(void **state)
{
    (void)state;
    struct bt_buf b;
    for (int piece = 0; piece <= 1; piece++) {
        /* exactly 16 KiB passes, one byte more does not */
        for (size_t extra = 0; extra <= 1; extra++) {
            static const char head[] = "GET / HTTP/1.1\r\nHost: a\r\nX: ";
            bt_buf_init(&b);
            bt_buf_puts(&b, head);
            for (size_t i = 0; i < BT_HTTP_HEAD_MAX - (sizeof(head) - 1) - 4 + extra; i++) {
                bt_buf_append(&b, "y", 1);
            }
            bt_buf_puts(&b, "\r\n\r\n");
            assert_int_equal(outcome_of(&b, piece), extra == 0 ? 0 : 431);
            bt_buf_cleanup(&b);
        }
        for (int fields = 63; fields <= 64; fields++) { /* and Host */
            bt_buf_init(&b);
            bt_buf_puts(&b, "GET / HTTP/1.1\r\nHost: a\r\n");
            for (int i = 0; i < fields; i++) {
                bt_buf_printf(&b, "X%d: y\r\n", i);
            }
            bt_buf_puts(&b, "\r\n");
            assert_int_equal(outcome_of(&b, piece), fields == 63 ? 0 : 431);
            bt_buf_cleanup(&b);
        }
        /* endless trailers and endless chunk extensions */
        bt_buf_init(&b);
        bt_buf_puts(&b, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n");
        for (int i = 0; i < 40; i++) {
            bt_buf_printf(&b, "X%d: %0500d\r\n", i, 0);
        }
        assert_int_equal(outcome_of(&b, piece), 431);
        bt_buf_cleanup(&b);
        bt_buf_init(&b);
        bt_buf_puts(&b, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
        for (int i = 0; i < 80; i++) {
            bt_buf_printf(&b, "1;%0300d\r\nx\r\n", 0); /* a name of digits */
        }
        assert_int_equal(outcome_of(&b, piece), 400);
        bt_buf_cleanup(&b);
    }
}

/* Mutated requests: whatever comes out, it does not depend on the pieces. */
static void test_mutations(void **state)
{
    (void)state;
    srand(11);
    for (int round = 0; round < 20000; round++) {
        const struct framing *f = &table[(size_t)rand() % BT_ARRAY_LEN(table)];
        struct bt_buf b;
        bt_buf_init(&b);
        bt_buf_append(&b, f->bytes, f->len > 0 ? f->len : strlen(f->bytes));
        for (int m = rand() % 4; m >= 0; m--) {
            static const char bytes[] = "\r\n \t:;,0159afFx%/\0\x7f\xff";
            b.data[(size_t)rand() % b.len] = bytes[(size_t)rand() % (sizeof(bytes) - 1)];
        }
        int whole = outcome_of(&b, 0);
        assert_int_equal(outcome_of(&b, 1), whole);
        assert_int_equal(outcome_of(&b, -1), whole);
        bt_buf_cleanup(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_stops_at_the_end),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_mutations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
