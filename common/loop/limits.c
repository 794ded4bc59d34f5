/* Sets limits of the whole process at its start, before there are threads. */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>

#include "common/base/base.h"
#include "common/log/last_words.h"
#include "common/log/log.h"
#include "common/loop/loop.h"

/* The same as LimitNOFILE of the units; the hard limit of a container may be a thousand million. */
#define FILES_WANTED 1048576u
#define FILES_FEW    1024u

uint64_t bt_loop_process_limits(void)
{
    struct rlimit r;
    bt_log_last_words();
    bt_loop_accept_ready();
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGXFSZ, SIG_IGN);
    if (getrlimit(RLIMIT_NOFILE, &r) != 0) {
        return FILES_FEW;
    }
    rlim_t want = BT_MIN(r.rlim_max, (rlim_t)FILES_WANTED);
    if (r.rlim_cur < want) {
        struct rlimit more = {.rlim_cur = want, .rlim_max = r.rlim_max};
        if (setrlimit(RLIMIT_NOFILE, &more) == 0) {
            r = more;
        } else {
            BT_WARN("open_files", "limit=%llu why=%s", (unsigned long long)r.rlim_cur,
                    strerror(errno));
        }
    }
    if (r.rlim_cur < FILES_FEW) {
        BT_WARN("open_files", "limit=%llu remedy=%s", (unsigned long long)r.rlim_cur,
                "connections, clients and the SSD's index may be refused a file: raise "
                "LimitNOFILE, ulimit -Hn or --ulimit nofile to 1024 at least");
    }
    return r.rlim_cur;
}
