/* Programs that batonctl runs. */
#include "conductor/ctl/child.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/base/buf.h"
#include "common/base/clock.h"

#define OUTPUT_MAX ((size_t)4 << 20)

extern char **environ;

/* Reads until the end of the output or of the time. False: the time was over. */
static bool read_all(int fd, uint64_t end_ns, struct bt_buf *b)
{
    for (;;) {
        uint64_t now = bt_mono_ns();
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int n = now < end_ns ? poll(&p, 1, (int)((end_ns - now) / 1000000) + 1) : 0;
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return false;
        }
        if (n > 0) {
            char part[16384];
            ssize_t got = read(fd, part, sizeof(part));
            if (got <= 0) {
                return got == 0;
            }
            bt_buf_append(b, part, BT_MIN((size_t)got, OUTPUT_MAX - b->len));
        }
    }
}

int bt_ctl_child(const char *const *argv, int seconds_max, char **out_p)
{
    return bt_ctl_child_with(argv, (const char *const *)environ, seconds_max, out_p);
}

int bt_ctl_child_with(const char *const *argv, const char *const *environment, int seconds_max,
                      char **out_p)
{
    int pipe_fd[2], status = -1;
    struct bt_buf b;
    posix_spawn_file_actions_t files;
    pid_t pid;
    bt_buf_init(&b);
    *out_p = NULL;
    if (pipe2(pipe_fd, O_CLOEXEC) != 0) {
        *out_p = bt_strdup("");
        return -1;
    }
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, pipe_fd[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, pipe_fd[1], STDERR_FILENO);
    int rc =
        posix_spawnp(&pid, argv[0], &files, NULL, (char *const *)argv, (char *const *)environment);
    posix_spawn_file_actions_destroy(&files);
    close(pipe_fd[1]);
    if (rc == 0) {
        if (!read_all(pipe_fd[0], bt_mono_ns() + (uint64_t)seconds_max * 1000000000u, &b)) {
            (void)kill(pid, SIGKILL);
        }
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
        }
        status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    close(pipe_fd[0]);
    *out_p = bt_buf_take(&b);
    *out_p = *out_p != NULL ? *out_p : bt_strdup("");
    return rc == 0 ? status : -1;
}

char *bt_ctl_beside(const char *program)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[BT_MAX(n, 0)] = '\0';
    char *slash = strrchr(self, '/');
    return bt_sprintf("%.*s%s", slash != NULL ? (int)(slash - self) + 1 : 0, self, program);
}
