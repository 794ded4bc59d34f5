/* Lines on a stderr that somebody reads, does not read, reads again, and has closed. */
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/log/log.h"

static int reader = -1, own_stderr = -1;

static int open_log(void **state)
{
    (void)state;
    int ends[2];
    if (pipe(ends) != 0) {
        return -1;
    }
    own_stderr = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    reader = ends[0];
    fcntl(reader, F_SETFL, O_NONBLOCK);
    return 0;
}

static int close_log(void **state)
{
    (void)state;
    dup2(own_stderr, STDERR_FILENO);
    close(own_stderr);
    if (reader >= 0) {
        close(reader);
    }
    reader = -1;
    return 0;
}

/* What is in the pipe: its lines; the last piece of text stays in `last`. */
static unsigned drain(char *last, size_t cap)
{
    char buf[4096];
    unsigned lines = 0;
    ssize_t n;
    last[0] = '\0';
    while ((n = read(reader, buf, sizeof(buf) - 1)) > 0) {
        buf[n] = '\0';
        snprintf(last, cap, "%s", buf);
        for (ssize_t i = 0; i < n; i++) {
            lines += buf[i] == '\n';
        }
    }
    return lines;
}

static double seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

#define MANY 5000u

static void *log_many(void *arg)
{
    for (unsigned i = 0; i < MANY; i++) {
        BT_INFO("many", "thread=%s i=%u", (const char *)arg, i);
    }
    return NULL;
}

static void test_lines(void **state)
{
    (void)state;
    char text[4200];
    BT_WARN("first", "a=%s", bt_log_q("b \"c\""));
    assert_int_equal(drain(text, sizeof(text)), 1);
    assert_non_null(strstr(text, "level=warn"));
    assert_non_null(strstr(text, "ev=first a=\"b \\\"c\\\"\"\n"));
    static char longest[9000];
    memset(longest, 'x', sizeof(longest) - 1);
    BT_INFO("long", "a=%s", longest);
    assert_int_equal(drain(text, sizeof(text)), 1);
}

/* Nobody reads: two threads go on, and what was lost is told to the one who reads later. */
static void test_nobody_reads(void **state)
{
    (void)state;
    char text[4200];
    pthread_t other;
    double from = seconds();
    assert_int_equal(pthread_create(&other, NULL, log_many, "b"), 0);
    log_many("a");
    pthread_join(other, NULL);
    assert_true(seconds() - from < 20); /* a write that waits would wait for ever */
    unsigned kept = drain(text, sizeof(text));
    assert_in_range(kept, 1, 2 * MANY - 1);
    BT_INFO("again", "a=1");
    assert_int_equal(drain(text, sizeof(text)), 2);
    char want[64];
    snprintf(want, sizeof(want), "ev=log_lost lines=%u ", 2 * MANY - kept);
    assert_non_null(strstr(text, want));
    assert_non_null(strstr(text, "ev=again a=1\n"));
    BT_INFO("once_more", "a=1");
    assert_int_equal(drain(text, sizeof(text)), 1);
}

static void test_reader_gone(void **state)
{
    (void)state;
    signal(SIGPIPE, SIG_IGN); /* as the daemons do */
    close(reader);
    reader = -1;
    log_many("a");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_lines, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_nobody_reads, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_reader_gone, open_log, close_log),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
