/* Lines on a stderr that somebody reads, does not read, reads again, and has closed. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/base.h"
#include "common/log/last_words.h"
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
    BT_WARN("first", "a=%s n=%u", "b \"c\"", 3u);
    assert_int_equal(drain(text, sizeof(text)), 1);
    assert_non_null(strstr(text, "level=warn"));
    assert_non_null(strstr(text, "ev=first a=\"b \\\"c\\\"\" n=3\n"));
    assert_int_equal(strncmp(text, "ts=", 3), 0); /* stderr is no journal: no <4> */
    static char longest[9000];
    memset(longest, 'x', sizeof(longest) - 1);
    BT_INFO("long", "a=%s", longest);
    assert_int_equal(drain(text, sizeof(text)), 1);
    assert_non_null(strstr(text, "xxx...\n"));
}

/* Text from outside in a value: it stays one value of one line, in both formats. */
static void test_hostile_values(void **state)
{
    static const struct {
        const char *value, *logfmt, *json;
    } cases[] = {
        {"a\n<3>ts=2026 level=error ev=forged", "\"a\\u000a<3>ts=2026 level=error ev=forged\"",
         "\"a\\u000a<3>ts=2026 level=error ev=forged\""},
        {"b\" ev=forged x=\"", "\"b\\\" ev=forged x=\\\"\"", "\"b\\\" ev=forged x=\\\"\""},
        {"\",\"level\":\"error", "\"\\\",\\\"level\\\":\\\"error\"",
         "\"\\\",\\\"level\\\":\\\"error\""},
        {"back\\slash", "\"back\\\\slash\"", "\"back\\\\slash\""},
        {"\x1b[2J\x7f\xc2\x9b", "\"\\u001b[2J\\u007f\\u009b\"", "\"\\u001b[2J\\u007f\\u009b\""},
        {"\xff\xc0\xaf\xed\xa0\x80|",
         "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd|\"",
         "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd|\""},
        {"k=v", "\"k=v\"", "\"k=v\""},
        {"%s%n", "%s%n", "\"%s%n\""},
        {"", "\"\"", "\"\""},
        {NULL, "-", "\"-\""},
        {"10", "10", "\"10\""},
        {"gr\xc3\xbc\xc3\x9f", "\"gr\xc3\xbc\xc3\x9f\"", "\"gr\xc3\xbc\xc3\x9f\""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (int json = 0; json < 2; json++) {
            char text[4200], want[400];
            bt_log_init("test", "n\n0", BT_LOG_INFO, json);
            BT_WARN("hostile", "name=%s end=%d", cases[i].value, 1);
            assert_int_equal(drain(text, sizeof(text)), 1);
            snprintf(want, sizeof(want),
                     json ? "\"node\":\"n\\u000a0\",\"ev\":\"hostile\",\"name\":%s,\"end\":1}\n"
                          : "node=\"n\\u000a0\" ev=hostile name=%s end=1\n",
                     json ? cases[i].json : cases[i].logfmt);
            assert_non_null(strstr(text, want));
        }
    }
    bt_log_init("test", "n0", BT_LOG_INFO, false);
}

/* Numbers are numbers in JSON; hexadecimal digits and texts are strings. */
static void test_json_numbers(void **state)
{
    char text[4200];
    (void)state;
    bt_log_init("test", "n0", BT_LOG_INFO, true);
    BT_INFO("numbers",
            "u=%u d=%d llu=%llu zu=%zu f=%.2f g=%g x=%016llx pct=%d%% both=%u/%u lit=7 q=\"two "
            "words\" star=%5u nan=%f",
            7u, -3, 18446744073709551615ull, (size_t)9, 1.5, 1e-9, 255ull, 40, 1u, 2u, 8u,
            0.0 / 0.0);
    assert_int_equal(drain(text, sizeof(text)), 1);
    assert_non_null(
        strstr(text, "\"u\":7,\"d\":-3,\"llu\":18446744073709551615,\"zu\":9,"
                     "\"f\":1.50,\"g\":1e-09,\"x\":\"00000000000000ff\",\"pct\":\"40%\","
                     "\"both\":\"1/2\",\"lit\":7,\"q\":\"two words\",\"star\":\"    8\",\"nan\":"));
    assert_non_null(strstr(text, "nan\"}\n"));
    bt_log_init("test", "n0", BT_LOG_INFO, false);
}

/* A line that would be too long loses whole fields, says so, and still ends as a line should. */
static void test_long_lines_stay_whole(void **state)
{
    static char big[900];
    (void)state;
    memset(big, '\n', sizeof(big) - 1);
    for (int json = 0; json < 2; json++) {
        char text[4200];
        bt_log_init("test", "n0", BT_LOG_INFO, json);
        BT_INFO("long", "a=%s b=%s c=%s d=%s e=%s f=%s", big, big, big, big, big, big);
        assert_int_equal(drain(text, sizeof(text)), 1);
        assert_true(strlen(text) < 4096);
        assert_non_null(strstr(text, json ? ",\"cut\":true}\n" : " cut=true\n"));
        assert_null(strstr(text, json ? "\"f\":" : " f="));
    }
    bt_log_init("test", "n0", BT_LOG_INFO, false);
}

/* Only the stream that JOURNAL_STREAM names gets priorities. */
static void test_journal(void **state)
{
    char text[4200], mine[64];
    struct stat st;
    (void)state;
    assert_int_equal(fstat(STDERR_FILENO, &st), 0);
    snprintf(mine, sizeof(mine), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    assert_true(bt_log_set_journal(mine));
    BT_WARN("in_journal", "a=1");
    assert_int_equal(drain(text, sizeof(text)), 1);
    assert_int_equal(strncmp(text, "<4>ts=", 6), 0);
    assert_false(bt_log_set_journal("1:2"));
    assert_false(bt_log_set_journal(NULL));
    BT_WARN("elsewhere", "a=1");
    assert_int_equal(drain(text, sizeof(text)), 1);
    assert_int_equal(strncmp(text, "ts=", 3), 0);
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

static unsigned n_waited;

__attribute__((visibility("hidden"))) int poll(struct pollfd *fds, nfds_t n, int ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000l};
    int rc = ppoll(fds, n, ms < 0 ? NULL : &t, NULL);
    n_waited += rc == 0 && ms > 0;
    return rc;
}

/* A reader that takes a little now and then: lines get lost, but not each with a wait. */
static void test_slow_reader(void **state)
{
    (void)state;
    char text[4096];
    log_many("a"); /* the pipe is full */
    double from = seconds();
    n_waited = 0;
    for (int i = 0; i < 500; i++) {
        assert_true(read(reader, text, sizeof(text)) > 0);
        for (int j = 0; j < 100; j++) {
            BT_INFO("more", "a=%100d", j);
        }
    }
    assert_true(n_waited < 10 + 2 * (seconds() - from)); /* one a second, not one a piece */
}

/* Lines go nowhere, without a wait for each, until stderr has a reader again. */
static void test_reader_gone(void **state)
{
    (void)state;
    char text[4200];
    int ends[2];
    signal(SIGPIPE, SIG_IGN); /* as the daemons do */
    close(reader);
    double from = seconds();
    log_many("a");
    assert_true(seconds() - from < 20); /* a write that waits would wait for ever */
    assert_int_equal(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    reader = ends[0];
    fcntl(reader, F_SETFL, O_NONBLOCK);
    BT_INFO("again", "a=1");
    assert_in_range(drain(text, sizeof(text)), 1, 2); /* perhaps with how many were lost */
    assert_non_null(strstr(text, "ev=again a=1\n"));
}

/* stderr is a file whose disk is full, as a limit of its size plays it: lost lines are counted, and
 * the count and the next line stand whole when there is room again. */
static void test_full_disk(void **state)
{
    char path[] = "/tmp/baton-test-log.XXXXXX", text[4200];
    struct rlimit was, now;
    (void)state;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    unlink(path);
    dup2(fd, STDERR_FILENO);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    now = was;
    now.rlim_cur = 100; /* the first line's beginning */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &now), 0);
    for (unsigned i = 0; i < 20; i++) {
        BT_INFO("no_room", "i=%u a=%s", i, "a text that makes the line longer than a hundred");
    }
    assert_int_equal(lseek(fd, 0, SEEK_END), 100);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    BT_INFO("again", "a=1");
    BT_INFO("once_more", "a=1");
    ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    close(fd);
    assert_true(n > 101);
    text[n] = '\0';
    assert_int_equal(strncmp(text + 100, "\nts=", 4), 0); /* behind the torn line */
    assert_non_null(strstr(text,
                           " ev=log_lost lines=20 why=\"stderr could not be written: File too "
                           "large\"\nts="));
    assert_non_null(strstr(text, " ev=again a=1\nts="));
    assert_non_null(strstr(text, " ev=once_more a=1\n"));
}

static void give_up(void)
{
    errno = ENOMEM;
    abort();
}

static void abort_for_another_reason(void)
{
    errno = ENOENT;
    abort();
}

static void touch_nothing(void)
{
    errno = 0;
    *(volatile int *)NULL = 1;
}

static void assert_without_memory(void)
{
    errno = ENOMEM;
    BT_ASSERT(reader == -2);
}

/* Ends a child by fn: the signal that it ended by, and its output in last. */
static int last_words_of(void (*fn)(void), char *last, size_t cap)
{
    static const int own[] = {SIGABRT, SIGSEGV, SIGILL, SIGFPE};
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rlimit none = {0, 0};
        (void)setrlimit(RLIMIT_CORE, &none);
        for (size_t i = 0; i < BT_ARRAY_LEN(own); i++) {
            (void)signal(own[i], SIG_DFL); /* neither cmocka's nor a sanitizer's */
        }
        bt_log_last_words();
        fn();
        _exit(0);
    }
    int st;
    assert_int_equal(waitpid(pid, &st, 0), pid);
    assert_int_equal(drain(last, cap), 1);
    return WIFSIGNALED(st) ? WTERMSIG(st) : 0;
}

/* Whatever ends a process by a signal, it says one line, and says whether memory was short. */
static void test_last_words(void **state)
{
    (void)state;
    char last[4096];
    assert_int_equal(last_words_of(give_up, last, sizeof(last)), SIGABRT);
    assert_non_null(strstr(last, "ev=out_of_memory signal=SIGABRT"));
    assert_int_equal(last_words_of(abort_for_another_reason, last, sizeof(last)), SIGABRT);
    assert_non_null(strstr(last, "ev=ended_by_signal signal=SIGABRT"));
    assert_int_equal(last_words_of(touch_nothing, last, sizeof(last)), SIGSEGV);
    assert_non_null(strstr(last, "ev=ended_by_signal signal=SIGSEGV"));
    assert_int_equal(last_words_of(assert_without_memory, last, sizeof(last)), SIGABRT);
    assert_non_null(strstr(last, "ev=out_of_memory why="));
}

/* The first event has a line at once; later ones wait, and the next line counts them. */
static void test_pace(void **state)
{
    struct bt_log_pace p = {0};
    (void)state;
    assert_int_equal(bt_log_due(&p, 1000, 100), 1);
    assert_int_equal(bt_log_due(&p, 1000, 100), 0);
    assert_int_equal(bt_log_due(&p, 1099, 100), 0);
    assert_int_equal(bt_log_due(&p, 1100, 100), 3);
    assert_int_equal(bt_log_due(&p, 1199, 100), 0);
    assert_int_equal(bt_log_due(&p, 5000, 100), 2);
    assert_int_equal(bt_log_due(&p, 9000, 100), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pace),
        cmocka_unit_test_setup_teardown(test_lines, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_hostile_values, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_json_numbers, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_long_lines_stay_whole, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_journal, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_nobody_reads, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_slow_reader, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_reader_gone, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_full_disk, open_log, close_log),
        cmocka_unit_test_setup_teardown(test_last_words, open_log, close_log),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
