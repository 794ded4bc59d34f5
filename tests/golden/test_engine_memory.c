/* An allocation that fails in oneDNN while the engine runs: the process ends and says that memory
 * was missing, as it does for an allocation of its own. Only products in f32 allocate there, so the
 * run limited to AVX2 is the one that tests it. */
#include "tests/golden/drive.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/log/last_words.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OTHER_ALLOCATOR /* a sanitizer's, which does not free what this one gives */
#endif

void *__libc_memalign(size_t align, size_t size);

static bool fails;
static int failed;

#ifndef OTHER_ALLOCATOR
/* In place of the C library's, also for oneDNN, which reports its failure. */
int posix_memalign(void **p, size_t align, size_t size)
{
    if (fails) {
        failed++;
        errno = ENOMEM;
        return ENOMEM;
    }
    *p = __libc_memalign(align, size);
    return *p == NULL ? ENOMEM : 0;
}
#endif

/* Exit status: 0: nothing was allocated, 3: something was, and the engine went on. */
static void run_without_memory(void)
{
    static struct drive d;
    uint32_t tokens[97];
    for (uint32_t i = 0; i < BT_ARRAY_LEN(tokens); i++) {
        tokens[i] = 5 + 13 * i;
    }
    drive_open(&d, "cpu", "deploy/models/shakespeare-draft-1m", 16);
    const struct bt_engine_params p = drive_greedy(0);
    drive_slot(&d, 0, &p, tokens, 97, 1);
    drive_prefill(&d, 0, tokens, 0, 97, 2048);
    drive_slot_close(&d, 0);
    drive_slot(&d, 1, &p, tokens, 97, 1);
    const struct bt_engine_row row = {.slot = 1, .n = 97, .tokens = tokens, .flags = BT_ROW_SAMPLE};
    const struct bt_engine_batch b = {.n_rows = 1, .rows = &row};
    bt_engine_ticket_t fwd;
    fails = true;
    bt_status_t st = d.vt->forward(d.e, &b, &fwd);
    fails = false;
    fprintf(stderr, "forward: %s, %d failed\n", bt_status_name(st), failed);
    _exit(failed ? 3 : 0);
}

static void test_a_library_without_memory(void **state)
{
#ifdef OTHER_ALLOCATOR
    skip();
#endif
    (void)state;
    int fds[2], st;
    char said[4096];
    size_t n = 0;
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rlimit none = {0, 0};
        (void)setrlimit(RLIMIT_CORE, &none);
        (void)signal(SIGABRT, SIG_DFL); /* not cmocka's */
        (void)dup2(fds[1], STDERR_FILENO);
        close(fds[0]);
        close(fds[1]);
        bt_log_last_words();
        run_without_memory();
    }
    close(fds[1]);
    for (ssize_t got; n < sizeof(said) - 1; n += (size_t)got) {
        got = read(fds[0], said + n, sizeof(said) - 1 - n);
        if (got <= 0) {
            break;
        }
    }
    said[n] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(pid, &st, 0), pid);
    const char *isa = getenv("ONEDNN_MAX_CPU_ISA");
    bool f32 = isa != NULL && strcmp(isa, "AVX2") == 0;
    if (!f32 && WIFEXITED(st) && WEXITSTATUS(st) == 0) {
        return; /* bf16: no product allocates */
    }
    if (!WIFSIGNALED(st) || WTERMSIG(st) != SIGABRT || !strstr(said, "ev=out_of_memory")) {
        fail_msg("status %x: %s", (unsigned)st, said);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_library_without_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
