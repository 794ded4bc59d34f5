/* Steps that a test holds up through a file. */
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* after the four above, as cmocka wants it */
#include <cmocka.h>

#include "common/engine/pace.h"

static void say(int fd, const char *us)
{
    assert_int_equal(pwrite(fd, us, strlen(us), 0), (ssize_t)strlen(us));
}

static int file(char *path)
{
    strcpy(path, "/tmp/baton-pace-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    setenv("BATON_ENGINE_PACE", path, 1);
    return fd;
}

struct step {
    struct bt_pace *pace;
    _Atomic bool done;
};

static void *wait_for_it(void *arg)
{
    struct step *s = arg;
    bt_pace_wait(s->pace);
    s->done = true;
    return NULL;
}

/* A step that would take 1,000 s waits, and ends as soon as the file says so. */
static void test_the_file_holds_and_lets_go(void **state)
{
    (void)state;
    char path[64], err[256];
    int fd = file(path);
    struct bt_pace p = {0};
    assert_int_equal(bt_pace_open(&p, err, sizeof(err)), BT_OK);
    bt_pace_wait(&p); /* empty: no wait */
    say(fd, "1000000000");
    struct step s = {.pace = &p};
    pthread_t t;
    assert_int_equal(pthread_create(&t, NULL, wait_for_it, &s), 0);
    usleep(50000);
    assert_false(s.done);
    say(fd, "0000000000");
    pthread_join(t, NULL);
    assert_true(s.done);
    say(fd, "no number!");
    bt_pace_wait(&p);
    bt_pace_close(&p);
    close(fd);
    unlink(path);
}

static void test_without_a_file(void **state)
{
    (void)state;
    char err[256] = "";
    struct bt_pace p = {0};
    setenv("BATON_ENGINE_PACE", "/nowhere/at/all", 1);
    assert_int_equal(bt_pace_open(&p, err, sizeof(err)), BT_ERR_CONFIG);
    assert_non_null(strstr(err, "BATON_ENGINE_PACE: /nowhere/at/all: No such file"));
    unsetenv("BATON_ENGINE_PACE");
    assert_int_equal(bt_pace_open(&p, err, sizeof(err)), BT_OK);
    bt_pace_wait(&p);
    bt_pace_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_file_holds_and_lets_go),
                                       cmocka_unit_test(test_without_a_file)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
