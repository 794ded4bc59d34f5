/* A private etcd for tests: on two free ports of loopback, in a folder of its own, ended by pid.
 * Static helpers; include after cmocka.h. Blocking calls to it need no loop. */
#ifndef BT_TESTS_ETCD_FIXTURE_H
#define BT_TESTS_ETCD_FIXTURE_H

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/base.h"
#include "common/rpc/rpc.h"
#include "etcd.pb-c.h"
#include "tests/unit/hold_port.h"

#define ETCD_START_MS 60000 /* only a hang takes so long */

struct etcd_fixture {
    char dir[64];
    int port, peer_port, holders[2]; /* holders: keep the ports while it is dead */
    char endpoint[64];               /* 127.0.0.1:port */
    pid_t pid;                       /* 0: not running */
};

/* One blocking call; the reply is unpacked with `d` (free with protobuf_c_message_free_unpacked),
 * or NULL if etcd did not answer OK. */
static inline void *etcd_ask(const struct etcd_fixture *x, const char *method,
                             const ProtobufCMessage *req, const ProtobufCMessageDescriptor *d)
{
    size_t len = protobuf_c_message_get_packed_size(req), reply_len = 0;
    uint8_t *buf = malloc(len + 1);
    void *reply = NULL, *msg = NULL;
    protobuf_c_message_pack(req, buf);
    struct bt_rpc_question q = {
        .target = x->endpoint, .method = method, .data = buf, .len = len, .deadline_ms = 3000};
    int code = bt_rpc_unary_blocking(&q, &reply, &reply_len, NULL, 0);
    if (code == BT_GRPC_OK) {
        msg = protobuf_c_message_unpack(d, NULL, reply_len, reply);
    }
    free(reply);
    free(buf);
    return msg;
}

static inline ProtobufCBinaryData etcd_text(const char *s)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)s, .len = strlen(s)};
}

/* Puts and returns the revision. */
static inline int64_t etcd_put(const struct etcd_fixture *x, const char *key, const char *value,
                               int64_t lease)
{
    Etcdserverpb__PutRequest req = ETCDSERVERPB__PUT_REQUEST__INIT;
    req.key = etcd_text(key);
    req.value = etcd_text(value);
    req.lease = lease;
    Etcdserverpb__PutResponse *r =
        etcd_ask(x, "/etcdserverpb.KV/Put", &req.base, &etcdserverpb__put_response__descriptor);
    assert_non_null(r);
    int64_t revision = r->header->revision;
    protobuf_c_message_free_unpacked(&r->base, NULL);
    return revision;
}

static inline void etcd_del(const struct etcd_fixture *x, const char *key)
{
    Etcdserverpb__DeleteRangeRequest req = ETCDSERVERPB__DELETE_RANGE_REQUEST__INIT;
    req.key = etcd_text(key);
    Etcdserverpb__DeleteRangeResponse *r =
        etcd_ask(x, "/etcdserverpb.KV/DeleteRange", &req.base,
                 &etcdserverpb__delete_range_response__descriptor);
    assert_non_null(r);
    protobuf_c_message_free_unpacked(&r->base, NULL);
}

/* The reply to a range of one key (NULL: etcd does not answer); free with
 * etcdserverpb__range_response__free_unpacked. */
static inline Etcdserverpb__RangeResponse *etcd_get(const struct etcd_fixture *x, const char *key)
{
    Etcdserverpb__RangeRequest req = ETCDSERVERPB__RANGE_REQUEST__INIT;
    req.key = etcd_text(key);
    return etcd_ask(x, "/etcdserverpb.KV/Range", &req.base,
                    &etcdserverpb__range_response__descriptor);
}

static inline bool etcd_has(const struct etcd_fixture *x, const char *key)
{
    Etcdserverpb__RangeResponse *r = etcd_get(x, key);
    assert_non_null(r);
    bool has = r->n_kvs > 0;
    etcdserverpb__range_response__free_unpacked(r, NULL);
    return has;
}

/* The lease that key hangs on; 0: none. */
static inline int64_t etcd_lease_of(const struct etcd_fixture *x, const char *key)
{
    Etcdserverpb__RangeResponse *r = etcd_get(x, key);
    assert_non_null(r);
    int64_t lease = r->n_kvs > 0 ? r->kvs[0]->lease : 0;
    etcdserverpb__range_response__free_unpacked(r, NULL);
    return lease;
}

static inline int64_t etcd_grant(const struct etcd_fixture *x, int64_t ttl_s)
{
    Etcdserverpb__LeaseGrantRequest req = ETCDSERVERPB__LEASE_GRANT_REQUEST__INIT;
    req.ttl = ttl_s;
    Etcdserverpb__LeaseGrantResponse *r = etcd_ask(x, "/etcdserverpb.Lease/LeaseGrant", &req.base,
                                                   &etcdserverpb__lease_grant_response__descriptor);
    assert_non_null(r);
    int64_t id = r->id;
    protobuf_c_message_free_unpacked(&r->base, NULL);
    return id;
}

static inline void etcd_revoke(const struct etcd_fixture *x, int64_t lease)
{
    Etcdserverpb__LeaseRevokeRequest req = ETCDSERVERPB__LEASE_REVOKE_REQUEST__INIT;
    req.id = lease;
    Etcdserverpb__LeaseRevokeResponse *r =
        etcd_ask(x, "/etcdserverpb.Lease/LeaseRevoke", &req.base,
                 &etcdserverpb__lease_revoke_response__descriptor);
    assert_non_null(r);
    protobuf_c_message_free_unpacked(&r->base, NULL);
}

static inline void etcd_compact(const struct etcd_fixture *x, int64_t revision)
{
    Etcdserverpb__CompactionRequest req = ETCDSERVERPB__COMPACTION_REQUEST__INIT;
    req.revision = revision;
    req.physical = true;
    Etcdserverpb__CompactionResponse *r = etcd_ask(x, "/etcdserverpb.KV/Compact", &req.base,
                                                   &etcdserverpb__compaction_response__descriptor);
    assert_non_null(r);
    protobuf_c_message_free_unpacked(&r->base, NULL);
}

/* ---- the process ---- */

static inline const char *etcd_binary(void)
{
    static const char unpacked[] = "build/third/etcd/usr/bin/etcd"; /* by deploy/local/setup.sh */
    return access(unpacked, X_OK) == 0 ? unpacked : "etcd";
}

/* Starts etcd on the fixture's ports with its data and waits until it answers. */
static inline void etcd_start(struct etcd_fixture *x)
{
    extern char **environ;
    char data[96], log[96], client[64], peer[64], initial[80];
    snprintf(data, sizeof(data), "%s/data", x->dir);
    snprintf(log, sizeof(log), "%s/log", x->dir);
    snprintf(client, sizeof(client), "http://127.0.0.1:%d", x->port);
    snprintf(peer, sizeof(peer), "http://127.0.0.1:%d", x->peer_port);
    snprintf(initial, sizeof(initial), "t=%s", peer);
    char *argv[] = {"setpriv",
                    "--pdeathsig",
                    "KILL",
                    (char *)etcd_binary(),
                    "--name",
                    "t",
                    "--data-dir",
                    data,
                    "--listen-client-urls",
                    client,
                    "--advertise-client-urls",
                    client,
                    "--listen-peer-urls",
                    peer,
                    "--initial-advertise-peer-urls",
                    peer,
                    "--initial-cluster",
                    initial,
                    "--log-level",
                    "warn",
                    NULL};
    posix_spawn_file_actions_t fa;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, STDOUT_FILENO, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&fa, STDOUT_FILENO, STDERR_FILENO);
    /* setpriv (util-linux): etcd ends with the test, even if the test dies. */
    assert_int_equal(posix_spawnp(&x->pid, argv[0], &fa, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&fa);
    for (uint64_t end = bt_mono_ns() + ETCD_START_MS * 1000000ull; bt_mono_ns() < end;) {
        if (waitpid(x->pid, NULL, WNOHANG) == x->pid) {
            x->pid = 0;
            fail_msg("etcd ends (is etcd-server installed?); its log is %s", log);
        }
        Etcdserverpb__RangeResponse *r = etcd_get(x, "ready?");
        if (r != NULL) {
            etcdserverpb__range_response__free_unpacked(r, NULL);
            return;
        }
        usleep(50000);
    }
    fail_msg("etcd does not answer; its log is %s", log);
}

static inline void etcd_kill(struct etcd_fixture *x)
{
    if (x->pid > 0) {
        kill(x->pid, SIGKILL);
        waitpid(x->pid, NULL, 0);
        x->pid = 0;
    }
}

/* Removes the data: the next start is an etcd that knows nothing. */
static inline void etcd_wipe(struct etcd_fixture *x)
{
    extern char **environ;
    char data[96];
    pid_t pid;
    assert_int_equal(x->pid, 0);
    snprintf(data, sizeof(data), "%s/data", x->dir);
    char *argv[] = {"rm", "-rf", data, NULL};
    assert_int_equal(posix_spawnp(&pid, "rm", NULL, NULL, argv, environ), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static inline void etcd_init(struct etcd_fixture *x)
{
    memset(x, 0, sizeof(*x));
    strcpy(x->dir, "/tmp/baton-etcd-XXXXXX");
    assert_non_null(mkdtemp(x->dir));
    x->holders[0] = hold_port(&x->port);
    x->holders[1] = hold_port(&x->peer_port);
    snprintf(x->endpoint, sizeof(x->endpoint), "127.0.0.1:%d", x->port);
    etcd_start(x);
}

static inline void etcd_cleanup(struct etcd_fixture *x)
{
    char log[96];
    etcd_kill(x);
    etcd_wipe(x);
    close(x->holders[0]);
    close(x->holders[1]);
    snprintf(log, sizeof(log), "%s/log", x->dir);
    unlink(log);
    rmdir(x->dir);
}

#endif
