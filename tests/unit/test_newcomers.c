/* Connections to a guarded port: the newest stay, the known stay, others are shut down. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/loop/newcomers.h"

#define MAX 32 /* an eighth of what setup allows */

struct rig {
    int listener;
    uint16_t port;
};

struct pair { /* of one connection */
    int client, server;
    char peer[64]; /* the client, as gRPC writes it */
};

static int setup(void **state)
{
    struct rig *r = bt_calloc(1, sizeof(*r));
    struct rlimit few = {.rlim_cur = MAX * 8, .rlim_max = MAX * 8};
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    r->listener = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(r->listener, (struct sockaddr *)&at, len), 0);
    assert_int_equal(listen(r->listener, 128), 0);
    assert_int_equal(getsockname(r->listener, (struct sockaddr *)&at, &len), 0);
    r->port = ntohs(at.sin_port);
    *state = r;
    return 0;
}

static int teardown(void **state)
{
    struct rig *r = *state;
    close(r->listener);
    free(r);
    return 0;
}

static struct pair meet(const struct rig *r)
{
    struct pair p;
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                             .sin_port = htons(r->port)};
    socklen_t len = sizeof(at);
    p.client = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(p.client, (struct sockaddr *)&at, len), 0);
    p.server = bt_loop_accept(r->listener, (struct sockaddr *)&at, &len, 0);
    assert_true(p.server >= 0);
    snprintf(p.peer, sizeof(p.peer), "ipv4:127.0.0.1:%u", ntohs(at.sin_port));
    return p;
}

static struct pair come(const struct rig *r)
{
    struct pair p = meet(r);
    assert_true(bt_newcomers_came(p.server));
    return p;
}

static void leave(struct pair *p)
{
    close(p->client);
    close(p->server);
}

static bool ended(const struct pair *p)
{
    char c;
    return recv(p->client, &c, 1, MSG_DONTWAIT) == 0;
}

static void test_the_oldest_is_ended(void **state)
{
    const struct rig *r = *state;
    struct pair p[MAX + 10];
    bt_newcomers_guard(r->port);
    assert_int_equal(bt_newcomers_max(), MAX);
    for (int i = 0; i < MAX + 10; i++) {
        p[i] = come(r);
    }
    for (int i = 0; i < MAX + 10; i++) {
        assert_int_equal(ended(&p[i]), i < 10);
        leave(&p[i]);
    }
    bt_newcomers_unguard(r->port);
}

static void test_who_is_known_stays(void **state)
{
    const struct rig *r = *state;
    bt_newcomers_guard(r->port);
    struct pair friend = come(r), friend6 = come(r), stranger = come(r);
    char mapped[96];
    bt_newcomers_known(friend.peer);
    snprintf(mapped, sizeof(mapped), "ipv6:%%5B::ffff:%s%%5D:%s", "127.0.0.1",
             friend6.peer + sizeof("ipv4:127.0.0.1:") - 1);
    bt_newcomers_known(mapped);
    for (int i = 0; i < MAX; i++) {
        struct pair p = come(r);
        leave(&p);
    }
    assert_false(ended(&friend));
    assert_false(ended(&friend6));
    assert_true(ended(&stranger));
    leave(&friend);
    leave(&friend6);
    leave(&stranger);
    bt_newcomers_unguard(r->port);
}

static void test_a_descriptor_of_somebody_else_is_left_alone(void **state)
{
    const struct rig *r = *state;
    bt_newcomers_guard(r->port);
    struct pair gone = come(r);
    leave(&gone);
    bt_newcomers_unguard(r->port);
    struct pair other = meet(r); /* it has the descriptor of the one that left */
    assert_int_equal(other.server, gone.server);
    bt_newcomers_guard(r->port);
    for (int i = 0; i < MAX; i++) {
        struct pair p = come(r);
        leave(&p);
    }
    assert_false(ended(&other));
    leave(&other);
    bt_newcomers_unguard(r->port);
}

/* gRPC accepts all that wait before it reads what was shut down. */
static void test_no_more_than_twice_as_many_are_open(void **state)
{
    const struct rig *r = *state;
    struct pair p[2 * MAX];
    bt_newcomers_guard(r->port);
    for (int i = 0; i < 2 * MAX; i++) {
        p[i] = come(r);
    }
    struct pair more = meet(r);
    assert_false(bt_newcomers_came(more.server));
    leave(&p[0]);
    assert_true(bt_newcomers_came(more.server));
    leave(&more);
    for (int i = 1; i < 2 * MAX; i++) {
        leave(&p[i]);
    }
    bt_newcomers_unguard(r->port);
}

static void test_other_ports_are_not_counted(void **state)
{
    const struct rig *r = *state;
    struct pair p[MAX + 1];
    for (int i = 0; i < MAX + 1; i++) {
        p[i] = come(r);
    }
    for (int i = 0; i < MAX + 1; i++) {
        assert_false(ended(&p[i]));
        leave(&p[i]);
    }
}

static void test_addresses_that_are_none(void **state)
{
    static const char *const wrong[] = {"",          "unix:/x",  "ipv4:",          "ipv4:1.2.3.4",
                                        "ipv4::7",   "ipv6:%5B", "ipv6:%5B%5D:1",  "ipv6:[::1]:0",
                                        "ipv6:[]:1", "ipv4:1:2", "ipv4:1.2.3.4:x", "ipv6:%5D:9"};
    const struct rig *r = *state;
    bt_newcomers_guard(r->port);
    struct pair stranger = come(r);
    for (size_t i = 0; i < BT_ARRAY_LEN(wrong); i++) {
        bt_newcomers_known(wrong[i]); /* none of them is anybody's; the sanitizers look on */
    }
    for (int i = 0; i < MAX; i++) {
        struct pair p = come(r);
        leave(&p);
    }
    assert_true(ended(&stranger)); /* nobody has become known by them */
    leave(&stranger);
    bt_newcomers_unguard(r->port);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_the_oldest_is_ended, setup, teardown),
        cmocka_unit_test_setup_teardown(test_who_is_known_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_descriptor_of_somebody_else_is_left_alone, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_no_more_than_twice_as_many_are_open, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_ports_are_not_counted, setup, teardown),
        cmocka_unit_test_setup_teardown(test_addresses_that_are_none, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
