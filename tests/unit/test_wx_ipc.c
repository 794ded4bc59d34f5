/* Messages between a kvstore and its wire process: whole, in pieces, large, and none at all. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "kvstore/wire/wx_ipc.h"

static struct bt_wx_pipe a, b;

static int setup(void **state)
{
    int ends[2];
    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    bt_wx_pipe_init(&a, ends[0]);
    bt_wx_pipe_init(&b, ends[1]);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    close(a.fd);
    close(b.fd);
    bt_wx_pipe_cleanup(&a);
    bt_wx_pipe_cleanup(&b);
    return 0;
}

static void whole_messages(void **state)
{
    struct bt_wx_ipc_msg m;
    uint64_t body = 77, got;
    char text[8];
    (void)state;
    bt_wx_pipe_put(&a, BT_WX_M_STOP, 5, NULL, 0);
    bt_wx_pipe_put(&a, BT_WX_M_LOST, 6, (struct iovec[]){{&body, 8}, {"a\nlong text", 11}}, 2);
    assert_int_equal(bt_wx_pipe_next(&b, &m), BT_AGAIN);
    assert_int_equal(bt_wx_pipe_read(&b), BT_AGAIN);
    assert_int_equal(bt_wx_pipe_flush(&a), BT_OK);
    assert_int_equal(bt_wx_pipe_unsent(&a), 0);
    assert_int_equal(bt_wx_pipe_read(&b), BT_OK);
    assert_int_equal(bt_wx_pipe_next(&b, &m), BT_OK);
    assert_true(m.type == BT_WX_M_STOP && m.handle == 5 && m.n == 0);
    assert_false(bt_wx_ipc_take(&m, &got, 1));
    assert_int_equal(bt_wx_pipe_next(&b, &m), BT_OK);
    assert_true(m.type == BT_WX_M_LOST && m.handle == 6 && m.n == 19);
    assert_true(bt_wx_ipc_take(&m, &got, 8));
    assert_int_equal(got, 77);
    bt_wx_ipc_text(&m, text, sizeof(text));
    assert_string_equal(text, "a long "); /* cut, and without what would begin a line */
    assert_int_equal(bt_wx_pipe_next(&b, &m), BT_AGAIN);
}

/* More than the socket holds: what is not read yet waits, and nothing is lost or mixed. */
static void large_and_many(void **state)
{
    struct bt_wx_ipc_msg m;
    size_t big = 3u << 20;
    uint8_t *bytes = malloc(big);
    uint32_t seen = 0;
    bool waited = false;
    (void)state;
    for (size_t i = 0; i < big; i++) {
        bytes[i] = (uint8_t)(i * 7 + i / 251);
    }
    for (uint32_t i = 0; i < 200; i++) {
        bt_wx_pipe_put(&a, BT_WX_M_ADD_RECV, i, &(struct iovec){bytes, i % 50 == 0 ? big : i}, 1);
    }
    while (seen < 200) {
        waited |= bt_wx_pipe_flush(&a) == BT_AGAIN;
        assert_int_equal(bt_wx_pipe_read(&b), BT_OK);
        while (bt_wx_pipe_next(&b, &m) == BT_OK) {
            assert_int_equal(m.handle, seen);
            assert_int_equal(m.n, seen % 50 == 0 ? big : seen);
            assert_memory_equal(m.body, bytes, m.n);
            seen++;
        }
    }
    assert_true(waited);
    free(bytes);
}

static void the_other_end_goes(void **state)
{
    struct bt_wx_ipc_msg m;
    (void)state;
    bt_wx_pipe_put(&a, BT_WX_M_SENT, 9, NULL, 0);
    assert_int_equal(bt_wx_pipe_flush(&a), BT_OK);
    shutdown(a.fd, SHUT_RDWR);
    assert_int_equal(bt_wx_pipe_read(&b), BT_OK); /* its last words first */
    assert_int_equal(bt_wx_pipe_next(&b, &m), BT_OK);
    assert_int_equal(m.handle, 9);
    assert_int_equal(bt_wx_pipe_read(&b), BT_ERR_PEER_LOST);
    bt_wx_pipe_put(&b, BT_WX_M_STOP, 1, NULL, 0);
    assert_int_equal(bt_wx_pipe_flush(&b), BT_ERR_PEER_LOST); /* and no SIGPIPE */
}

/* Bytes that are no messages: an error, for good, and nothing is read beyond them. */
static void garbage(void **state)
{
    static const uint32_t heads[][4] = {
        {0, 1, 1, 0},          {15, 1, 1, 0}, {BT_WX_IPC_BYTES_MAX + 1, 1, 1, 0},
        {UINT32_MAX, 1, 1, 0}, {16, 1, 1, 1},
    };
    teardown(state);
    for (size_t i = 0; i < BT_ARRAY_LEN(heads); i++) {
        struct bt_wx_ipc_msg m;
        setup(NULL);
        assert_int_equal(write(a.fd, heads[i], sizeof(heads[i])), sizeof(heads[i]));
        assert_int_equal(bt_wx_pipe_read(&b), BT_OK);
        assert_int_equal(bt_wx_pipe_next(&b, &m), BT_ERR_PEER_PROTOCOL);
        assert_int_equal(bt_wx_pipe_next(&b, &m), BT_ERR_PEER_PROTOCOL);
        teardown(NULL);
    }
    setup(NULL);
}

static void lists_of_what_is_there(void **state)
{
    struct bt_buf buf;
    struct bt_wx_has *list = NULL, *got = NULL;
    (void)state;
    bt_buf_init(&buf);
    bt_wx_has_pack(NULL, &buf);
    assert_true(bt_wx_has_unpack((const uint8_t *)buf.data, buf.len, &got) && got == NULL);
    for (uint32_t i = 0; i < 5; i++) {
        struct bt_wx_has *h = calloc(1, sizeof(*h) + i * 3);
        *h = (struct bt_wx_has){.next = list, .stream = i, .item = i * 10, .n = i * 3};
        memset(h->bits, (int)(0x10 + i), h->n);
        list = h;
    }
    bt_wx_has_pack(list, &buf);
    assert_true(bt_wx_has_unpack((const uint8_t *)buf.data, buf.len, &got));
    uint32_t n = 0;
    for (const struct bt_wx_has *h = got; h != NULL; h = h->next, n++) { /* in the other order */
        assert_true(h->stream == n && h->item == n * 10 && h->n == n * 3);
        assert_true(h->n == 0 || h->bits[h->n - 1] == 0x10 + n);
    }
    assert_int_equal(n, 5);
    bt_wx_has_free(got);
    for (size_t cut = 1; cut < buf.len; cut++) { /* cut anywhere: a shorter list or an error */
        bool good = bt_wx_has_unpack((const uint8_t *)buf.data, cut, &got);
        if (good) {
            bt_wx_has_free(got);
        }
    }
    uint64_t seed = 1;
    for (int i = 0; i < 20000; i++) {
        uint8_t bytes[96];
        for (size_t k = 0; k < sizeof(bytes); k++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            bytes[k] = (uint8_t)(seed >> 60); /* small numbers: lengths that fit */
        }
        if (bt_wx_has_unpack(bytes, (size_t)(i % 97), &got)) {
            bt_wx_has_free(got);
        }
    }
    bt_wx_has_free(list);
    bt_buf_cleanup(&buf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(whole_messages, setup, teardown),
        cmocka_unit_test_setup_teardown(large_and_many, setup, teardown),
        cmocka_unit_test_setup_teardown(the_other_end_goes, setup, teardown),
        cmocka_unit_test_setup_teardown(garbage, setup, teardown),
        cmocka_unit_test_setup_teardown(lists_of_what_is_there, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
