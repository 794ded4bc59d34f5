/* common/loop/notify: what arrives at the service manager's socket. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/loop/notify.h"

static struct bt_loop *loop;
static int manager;
static char name[64];

/* A manager on an abstract socket, as systemd's. */
static int setup(void **state)
{
    (void)state;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(name, sizeof(name), "@baton-notify-%d", (int)getpid());
    memcpy(a.sun_path + 1, name + 1, strlen(name) - 1);
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name));
    return bind(manager, (struct sockaddr *)&a, len) != 0 || bt_loop_create(&loop) != BT_OK;
}

static int teardown(void **state)
{
    (void)state;
    bt_notify_end();
    bt_loop_destroy(loop);
    close(manager);
    return 0;
}

static const char *next(void)
{
    static char got[1024];
    ssize_t n = recv(manager, got, sizeof(got) - 1, 0);
    got[n < 0 ? 0 : n] = '\0';
    return got;
}

static void messages_arrive_one_a_datagram(void **state)
{
    (void)state;
    bt_notify_start(loop, name, NULL, NULL);
    bt_notify_status("%d%% of\nREADY=1", 40);
    bt_notify_ready();
    bt_notify_ready();
    bt_notify_stopping();
    assert_string_equal(next(), "STATUS=40% of READY=1");
    assert_string_equal(next(), "READY=1");
    assert_string_equal(next(), "STOPPING=1");
    assert_string_equal(next(), "");
}

static void long_status_is_cut(void **state)
{
    (void)state;
    char text[2000];
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    bt_notify_start(loop, name, NULL, NULL);
    bt_notify_status("%s", text);
    assert_int_equal(strlen(next()), strlen("STATUS=") + 255);
}

static void without_a_manager_nothing_is_sent(void **state)
{
    (void)state;
    char long_name[300];
    memset(long_name, 'a', sizeof(long_name) - 1);
    long_name[0] = '/';
    long_name[sizeof(long_name) - 1] = '\0';
    const char *const unusable[] = {NULL, "", "@", "relative", "/nonexistent/socket", long_name};
    for (size_t i = 0; i < BT_ARRAY_LEN(unusable); i++) {
        bt_notify_start(loop, unusable[i], "1000", NULL);
        bt_notify_ready();
        bt_notify_status("x");
        bt_notify_end();
    }
    assert_string_equal(next(), "");
}

/* The kernel keeps a few datagrams: with all of them taken nothing that counts is lost, and of the
 * status the newest arrives. */
static void a_slow_manager_misses_nothing(void **state)
{
    (void)state;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path + 1, name + 1, strlen(name) - 1);
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name));
    int other = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    while (sendto(other, "x", 1, 0, (struct sockaddr *)&a, len) == 1) {
    }
    bt_notify_start(loop, name, NULL, NULL);
    bt_notify_status("starting");
    bt_notify_status("serving");
    bt_notify_ready();
    bt_loop_poll(loop, 0);
    while (strcmp(next(), "x") == 0) {
    }
    const char *const want[] = {"STATUS=serving", "READY=1"};
    for (size_t i = 0; i < BT_ARRAY_LEN(want); i++) {
        uint64_t end = bt_mono_ns() + 60000000000ull;
        const char *got;
        while (*(got = next()) == '\0' && bt_mono_ns() < end) {
            bt_loop_poll(loop, 10);
        }
        assert_string_equal(got, want[i]);
    }
    close(other);
}

static void the_loop_feeds_its_own_watchdog(void **state)
{
    (void)state;
    char me[32];
    snprintf(me, sizeof(me), "%d", (int)getpid());
    bt_notify_start(loop, name, "40000", me);
    for (int i = 0; i < 200 && strcmp(next(), "WATCHDOG=1") != 0; i++) {
        bt_loop_poll(loop, 10);
    }
    /* Twice per period: one at once, the next after 20 ms. */
    uint64_t end = bt_mono_ns() + 60000000000ull;
    bool again = false;
    while (!again && bt_mono_ns() < end) {
        bt_loop_poll(loop, 50);
        again = strcmp(next(), "WATCHDOG=1") == 0;
    }
    assert_true(again);
}

static void somebody_elses_watchdog_is_not_fed(void **state)
{
    (void)state;
    static const char *const periods[] = {"40000", "0", "-1", "", "soon", "99999999999999999999"};
    for (size_t i = 0; i < BT_ARRAY_LEN(periods); i++) {
        bt_notify_start(loop, name, periods[i], i == 0 ? "1" : NULL);
        for (int k = 0; k < 3; k++) {
            bt_loop_poll(loop, 10);
        }
        assert_string_equal(next(), "");
        bt_notify_end();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(messages_arrive_one_a_datagram, setup, teardown),
        cmocka_unit_test_setup_teardown(long_status_is_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(a_slow_manager_misses_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(without_a_manager_nothing_is_sent, setup, teardown),
        cmocka_unit_test_setup_teardown(the_loop_feeds_its_own_watchdog, setup, teardown),
        cmocka_unit_test_setup_teardown(somebody_elses_watchdog_is_not_fed, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
