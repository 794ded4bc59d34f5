/* Real worker processes (tests/tools/kv_worker) beside a test's kvstore: what they are told to do
 * and what they say. */
#ifndef TESTS_UNIT_KV_CHILD_H
#define TESTS_UNIT_KV_CHILD_H

#include "kv_node.h"

#include <fcntl.h>
#include <libgen.h>
#include <signal.h>
#include <sys/wait.h>

struct child {
    pid_t pid;
    int in, out;
    char text[1 << 16];
    size_t len, mark; /* what was seen so far */
};

static inline void child_start(struct child *c, const char *name, uint64_t inc, const char *extra)
{
    char self[512], tool[600], a_dir[96], a_name[64], a_inc[64];
    int to[2], from[2];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    assert_true(n > 0);
    self[n] = '\0';
    snprintf(tool, sizeof(tool), "%s/../tools/kv_worker", dirname(self));
    if (access(tool, X_OK) != 0) {
        fail_msg("%s is missing: build it first (make tests)", tool);
    }
    snprintf(a_dir, sizeof(a_dir), "run_dir=%s", node_current->dir);
    snprintf(a_name, sizeof(a_name), "name=%s", name);
    snprintf(a_inc, sizeof(a_inc), "inc=%llu", (unsigned long long)inc);
    memset(c, 0, sizeof(*c));
    assert_int_equal(pipe2(to, O_CLOEXEC), 0);
    assert_int_equal(pipe2(from, O_CLOEXEC), 0);
    c->pid = fork();
    if (c->pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        execl(tool, tool, a_dir, a_name, a_inc, extra, (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    c->in = to[1];
    c->out = from[0];
    fcntl(c->out, F_SETFL, O_NONBLOCK);
}

static inline void child_say(struct child *c, const char *fmt, ...)
{
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof(line) - 1, fmt, ap);
    va_end(ap);
    line[n++] = '\n';
    assert_int_equal(write(c->in, line, (size_t)n), n);
}

static inline void child_read(struct child *c)
{
    ssize_t n;
    while ((n = read(c->out, c->text + c->len, sizeof(c->text) - 1 - c->len)) > 0) {
        c->len += (size_t)n;
    }
    c->text[c->len] = '\0';
}

/* Waits for a line that begins with want, after the last one found; returns it. */
static inline const char *child_wait(struct child *c, const char *want)
{
    for (uint64_t end = node_machine_ns() + 60000000000ull; node_machine_ns() < end;) {
        child_read(c);
        for (char *l = c->text + c->mark, *nl; (nl = strchr(l, '\n')) != NULL; l = nl + 1) {
            if (strncmp(l, want, strlen(want)) == 0) {
                c->mark = (size_t)(nl + 1 - c->text);
                return l;
            }
        }
        bt_loop_poll(node_current->loop, 10);
    }
    fail_msg("no \"%s\" from the worker; it said:\n%s", want, c->text);
    return NULL;
}

static inline bool child_said(struct child *c, const char *what)
{
    child_read(c);
    return strstr(c->text, what) != NULL;
}

static inline void child_reap(struct child *c, int want_signal)
{
    int st;
    assert_int_equal(waitpid(c->pid, &st, 0), c->pid);
    if (want_signal != 0) {
        assert_true(WIFSIGNALED(st));
        assert_int_equal(WTERMSIG(st), want_signal);
    } else {
        assert_true(WIFEXITED(st));
        assert_int_equal(WEXITSTATUS(st), 0);
    }
    close(c->in);
    close(c->out);
}

static inline void child_quit(struct child *c)
{
    child_say(c, "quit");
    child_reap(c, 0);
}

#endif
