/* sd_notify without libsystemd: one datagram a message. Owned by the loop's thread. */
#include "common/loop/notify.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/log/log.h"

#define MESSAGE_MAX       512
#define STATUS_MAX        256
#define WATCHDOG_MAX_USEC (86400ull * 1000000)
#define AGAIN_MS          50

enum { STATUS, READY, STOPPING, KINDS }; /* in the order of sending */

static struct {
    struct bt_loop *loop;
    int fd; /* connected; meaningful while loop is set */
    struct bt_timer watchdog, again;
    bool ready;
    char due[KINDS][MESSAGE_MAX]; /* not sent yet; empty: none */
} n;

/* False: could not be sent now, but maybe later. */
static bool send_now(const char *message)
{
    if (send(n.fd, message, strlen(message), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
        return true;
    }
    int why = errno;
    if (why != EAGAIN) {
        BT_WARN("notify_failed", "what=%.32s why=%s", message, strerror(why));
    }
    return why != EAGAIN;
}

static void on_again(void *arg)
{
    (void)arg;
    for (int i = 0; i < KINDS; i++) {
        if (n.due[i][0] != '\0') {
            if (!send_now(n.due[i])) {
                return;
            }
            n.due[i][0] = '\0';
        }
    }
    bt_timer_stop(n.loop, &n.again);
}

/* A full socket means that the manager is slow and a few datagrams wait (the kernel's limit may be
 * ten). The daemon does not wait. It sends the message again later, because otherwise the manager
 * might wait for a start that has already happened. */
static void tell(int kind, const char *message)
{
    if (n.loop == NULL) {
        return;
    }
    snprintf(n.due[kind], MESSAGE_MAX, "%s", message);
    bt_timer_stop(n.loop, &n.again);
    bt_timer_start(n.loop, &n.again, AGAIN_MS, AGAIN_MS, on_again, NULL);
    on_again(NULL);
}

static void on_watchdog(void *arg)
{
    (void)arg;
    (void)send_now("WATCHDOG=1"); /* the next one comes soon */
}

/* NOTIFY_SOCKET is a path, or '@' and a name in the abstract namespace. -1: cannot be used. */
static int dial(const char *socket_name)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    size_t len = strlen(socket_name);
    if ((socket_name[0] != '/' && socket_name[0] != '@') || len < 2 || len >= sizeof(to.sun_path)) {
        errno = EINVAL;
        return -1;
    }
    memcpy(to.sun_path, socket_name, len);
    if (to.sun_path[0] == '@') {
        to.sun_path[0] = '\0';
    }
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&to, size) != 0) {
        int why = errno;
        close(fd);
        errno = why;
        return -1;
    }
    return fd;
}

/* The watchdog's interval in microseconds if it is for this process, else 0. */
static uint64_t watchdog_of(const char *usec, const char *pid)
{
    if (usec == NULL || (pid != NULL && strtoll(pid, NULL, 10) != (long long)getpid())) {
        return 0;
    }
    char *end;
    errno = 0;
    unsigned long long v = strtoull(usec, &end, 10);
    bool good = errno == 0 && end != usec && *end == '\0' && v > 0 && v <= WATCHDOG_MAX_USEC;
    return good ? v : 0;
}

void bt_notify_start(struct bt_loop *loop, const char *socket_name, const char *watchdog_usec,
                     const char *watchdog_pid)
{
    if (socket_name == NULL) {
        return;
    }
    n.fd = dial(socket_name);
    if (n.fd < 0) {
        BT_WARN("notify_failed", "what=NOTIFY_SOCKET value=%s why=%s", socket_name,
                strerror(errno));
        return;
    }
    n.loop = loop;
    n.ready = false;
    memset(n.due, 0, sizeof(n.due));
    uint64_t period_ms = watchdog_of(watchdog_usec, watchdog_pid) / 2000;
    if (period_ms > 0) {
        bt_timer_start(loop, &n.watchdog, 0, period_ms, on_watchdog, NULL);
    }
}

void bt_notify_status(const char *fmt, ...)
{
    char text[STATUS_MAX], message[MESSAGE_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    for (char *c = text; *c != '\0'; c++) {
        if (*c == '\n') {
            *c = ' '; /* a line break would begin another assignment */
        }
    }
    snprintf(message, sizeof(message), "STATUS=%s", text);
    tell(STATUS, message);
}

void bt_notify_ready(void)
{
    if (!n.ready) {
        n.ready = true;
        tell(READY, "READY=1");
    }
}

void bt_notify_stopping(void)
{
    tell(STOPPING, "STOPPING=1");
}

void bt_notify_end(void)
{
    if (n.loop != NULL) {
        on_again(NULL);
        bt_timer_stop(n.loop, &n.watchdog);
        bt_timer_stop(n.loop, &n.again);
        close(n.fd);
        n.loop = NULL;
    }
}
