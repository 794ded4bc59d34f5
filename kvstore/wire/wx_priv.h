/* Shared by the files of the kvstore's side (wx_process.c: the process; wx_proxy.c: the objects;
 * wx_events.c: events of the process) and by both sides of the wire process, in addition to its
 * messages (wx_ipc.h). */
#ifndef BT_KVSTORE_WIRE_WX_PRIV_H
#define BT_KVSTORE_WIRE_WX_PRIV_H

#include <sys/types.h>

#include "kvstore/wire/wx_ipc.h"
#include "kvstore/wire/xfer_priv.h"

#define BT_WX_CHILD_ARG "--wire-process"

/* Descriptors that the wire process inherits; it has no others but stdin (empty), stdout, stderr.
 */
struct bt_wx_child_fds {
    int sock, slab, wake, board, crcs; /* crcs -1: none */
};

/* Reads the arguments that bt_wx_process_start gives, and closes all other descriptors. */
bool bt_wx_child_args(int argc, char **argv, long *parent_p, struct bt_wx_child_fds *fds_p);

/* ---- wx_process.c: the kvstore's control thread ---- */

struct bt_wx_process {
    pid_t pid; /* 0: there is none */
    int pidfd;
    struct bt_loop_fd *pidfd_w, *sock_w;
    bool sock_out; /* watched for room as well */
    bool told;     /* the reason for killing it is in `why` */
    char why[160];
    struct bt_wx_pipe pipe;
    uint64_t start_ns, ping_ns, tick_ns; /* ping_ns: of one that is not answered; 0: none */
    uint32_t backoff_ms;
    struct bt_timer again, ping;
};

/* Starts it, with the first message and those for cards. ERR_IO: err says why it cannot be. */
bt_status_t bt_wx_process_start(struct bt_wx_proxy *p, char *err, size_t err_cap) BT_MUST_CHECK;
/* Kills it, for a reason that is logged; the rest follows when it is dead. */
void bt_wx_process_kill(struct bt_wx_proxy *p, const char *why);
/* Messages were put into the pipe. */
void bt_wx_process_post(struct bt_wx_proxy *p);
/* Reads and delivers all messages that arrive within ms. Returns false if the process has ended; it
 * is reaped. */
bool bt_wx_process_wait(struct bt_wx_proxy *p, int ms);
/* At the end of the kvstore: tells it to go, delivers its last events, and sees that it goes. */
void bt_wx_process_finish(struct bt_wx_proxy *p);

/* ---- wx_proxy.c ---- */

struct bt_wx_proxy_card {
    bool started, asked; /* by the process that there is; asked: no answer yet */
    bool failed;         /* the last answer */
    bool kept;           /* it has been started once: every new process starts it as well */
    uint64_t asked_ns;
    char why[256];
};

struct bt_wx_proxy {
    struct bt_wx *x;
    struct bt_wx_process process;
    struct bt_map *objs; /* u32 handle -> bt_wx_obj: the objects of the wire process */
    uint32_t next_handle;
    struct bt_wx_board *board;
    int board_fd;
    struct bt_wx_proxy_card cards[BT_NICS_MAX];
    bool heard_taken[BT_WX_HEARD];
    bool finishing;
};

/* The wire process has the object no more. */
void bt_wx_proxy_unname(struct bt_wx_proxy *p, struct bt_wx_obj *o);
/* The messages of c's session are counted in c again. */
void bt_wx_proxy_unhear(struct bt_wx_proxy *p, struct bt_wx_conn *c);
/* The process is dead and reaped, so nothing writes to the slab any more. */
void bt_wx_proxy_lost(struct bt_wx_proxy *p, const char *why);
/* The pipe is new: all that a new process has to know first. */
void bt_wx_proxy_greet(struct bt_wx_proxy *p);
void bt_wx_proxy_tick(struct bt_wx_proxy *p, uint64_t now_ns); /* cards that are tried again */
bool bt_wx_proxy_cards_asked(const struct bt_wx_proxy *p);

/* ---- wx_events.c ---- */
/* A message that came. False: it is none that the wire process may send now. */
bool bt_wx_proxy_message(struct bt_wx_proxy *p, struct bt_wx_ipc_msg *m);

#endif
