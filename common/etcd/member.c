/* Membership in etcd: this process's registration under a lease, and the cluster's settings. After
 * each grant of the lease it makes two compare-and-swaps, the settings first; at most one is in
 * flight. Loop's thread. */
#include "common/etcd/member.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/buf.h"
#include "common/etcd/process.h"
#include "common/log/log.h"
#include "common/rpc/ranges.h"
#include "common/rpc/rpc.h"

#define RETRY_MS 500
/* Between checks of a rival on this machine, whose death can be seen. */
#define DYING_MS          50
#define NAME_TAKEN_MAX_MS ((BT_MEMBER_LEASE_S + 2) * 1000ull)

typedef enum {
    PHASE_WAIT_LEASE, /* nothing to do before a grant */
    PHASE_SETTINGS,   /* the cluster's settings must be written or compared */
    PHASE_REGISTER,   /* this process's key must be written (again) */
    PHASE_DONE,       /* registered with the current data */
    PHASE_REFUSED
} phase_t;

struct bt_member {
    struct bt_etcd *e;
    struct bt_loop *loop;
    struct bt_etcd_lease *lease;
    struct bt_member_ops ops;
    void *arg;
    Baton__Member *self;
    Baton__ClusterSettings *settings;
    char *key, *settings_key;
    phase_t phase;
    bool busy; /* a compare-and-swap is in flight */
    bool joined, stopped;
    int64_t lease_id, mod_revision;             /* mod_revision: last known one of this process's
                                                   key */
    uint64_t rival_incarnation, rival_since_ns; /* the other process with this name, and since when
                                                   it is known */
    struct bt_timer timer;
    char *refusal;
    bt_status_t refusal_status;
};

static void kick(void *arg);

static void member_free(struct bt_member *m)
{
    protobuf_c_message_free_unpacked(&m->self->base, NULL);
    protobuf_c_message_free_unpacked(&m->settings->base, NULL);
    free(m->key);
    free(m->settings_key);
    free(m->refusal);
    free(m);
}

static void pack_and_swap(struct bt_member *m, const char *key, int64_t expect,
                          const ProtobufCMessage *msg, int64_t lease, bt_etcd_cas_fn done)
{
    size_t len = protobuf_c_message_get_packed_size(msg);
    uint8_t *buf = bt_malloc(len + 1);
    protobuf_c_message_pack(msg, buf);
    m->busy = true;
    bt_etcd_cas(m->e, key, expect, buf, len, lease, done, m);
    free(buf);
}

/* ---- refusal ---- */

static void tell_refused(void *arg)
{
    struct bt_member *m = arg;
    if (m->ops.on_refused != NULL) {
        /* The user may leave inside, which frees m. */
        m->ops.on_refused(m->arg, m->refusal_status, m->refusal);
    }
}

/* Takes ownership of why. Stops the lease at once: a process that may not join must not keep
 * anything. */
static void refuse(struct bt_member *m, bt_status_t st, char *why)
{
    m->phase = PHASE_REFUSED;
    m->refusal_status = st;
    m->refusal = why;
    if (m->lease != NULL) {
        bt_etcd_lease_stop(m->lease);
        m->lease = NULL;
    }
    bt_timer_start(m->loop, &m->timer, 0, 0, tell_refused, m);
}

/* ---- settings ---- */

static bool same_bytes(ProtobufCBinaryData a, ProtobufCBinaryData b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.data, b.data, a.len) == 0);
}

static void puts_hex(struct bt_buf *b, ProtobufCBinaryData d)
{
    for (size_t i = 0; i < BT_MIN(d.len, (size_t)8); i++) {
        bt_buf_printf(b, "%02x", d.data[i]);
    }
    bt_buf_puts(b, d.len == 0 ? "none" : d.len > 8 ? ".." : "");
}

static void differ_bytes(struct bt_buf *b, const char *what, ProtobufCBinaryData ours,
                         ProtobufCBinaryData theirs)
{
    if (!same_bytes(ours, theirs)) {
        bt_buf_printf(b, "%s%s (here ", b->len == 0 ? "" : "; ", what);
        puts_hex(b, ours);
        bt_buf_puts(b, ", cluster ");
        puts_hex(b, theirs);
        bt_buf_puts(b, ")");
    }
}

static void differ_u64(struct bt_buf *b, const char *what, uint64_t ours, uint64_t theirs, bool hex)
{
    if (ours != theirs) {
        bt_buf_printf(b,
                      hex ? "%s%s (here %" PRIx64 ", cluster %" PRIx64 ")"
                          : "%s%s (here %" PRIu64 ", cluster %" PRIu64 ")",
                      b->len == 0 ? "" : "; ", what, ours, theirs);
    }
}

/* Why this process cannot join a cluster with these settings; NULL: it can. The caller frees it. */
static char *differences(const Baton__ClusterSettings *ours, const Baton__ClusterSettings *theirs)
{
    struct bt_buf b;
    bt_buf_init(&b);
    differ_bytes(&b,
                 "root_key: model weights or settings (model.*, kv.block_tokens, "
                 "engine.deterministic) differ",
                 ours->root_key, theirs->root_key);
    differ_u64(&b, "layout_id differs", ours->layout_id, theirs->layout_id, true);
    differ_u64(&b, "block_tokens differs", ours->block_tokens, theirs->block_tokens, false);
    differ_u64(&b, "flow_chunk_tokens differs", ours->flow_chunk_tokens, theirs->flow_chunk_tokens,
               false);
    differ_bytes(&b, "salt_id differs: another cluster secret, or none", ours->salt_id,
                 theirs->salt_id);
    char *text = bt_buf_take(&b);
    bt_buf_cleanup(&b);
    return text;
}

static void on_settings(void *arg, bt_status_t st, bool succeeded, const struct bt_etcd_kv *cur)
{
    struct bt_member *m = arg;
    m->busy = false;
    if (m->stopped) {
        member_free(m);
        return;
    }
    if (m->phase != PHASE_SETTINGS) {
        kick(m);
        return;
    }
    if (st != BT_OK) {
        bt_timer_start(m->loop, &m->timer, RETRY_MS, 0, kick, m);
        return;
    }
    if (!succeeded) {
        char why[256];
        Baton__ClusterSettings *theirs =
            bt_cluster_settings_unpack(cur->value, cur->value_len, why, sizeof(why));
        if (theirs == NULL) {
            refuse(m, BT_ERR_MISMATCH,
                   bt_sprintf("%s in etcd is not readable (%s): it was written by another version "
                              "or damaged; delete it when no daemon of the cluster runs",
                              m->settings_key, why));
            return;
        }
        char *diff = differences(m->settings, theirs);
        baton__cluster_settings__free_unpacked(theirs, NULL);
        if (diff != NULL) {
            refuse(m, BT_ERR_MISMATCH,
                   bt_sprintf("this daemon's settings differ from those of its cluster: %s", diff));
            free(diff);
            return;
        }
    }
    m->phase = PHASE_REGISTER;
    kick(m);
}

/* ---- registration ---- */

/* There is another process's key under this name. It is a predecessor that has crashed (its lease
 * will expire soon), or a running process with the same name. For a process of this machine this is
 * known at once; otherwise only time shows it. */
static void wait_for_rival(struct bt_member *m, uint64_t incarnation, bt_process_state_t rival)
{
    uint64_t now = bt_mono_ns();
    m->mod_revision = 0; /* the key must be created by this process */
    if (m->rival_since_ns == 0 || m->rival_incarnation != incarnation) {
        m->rival_incarnation = incarnation;
        m->rival_since_ns = now;
        BT_INFO("member_name_taken", "key=%s incarnation=%" PRIx64 " wait_ms=%llu", m->key,
                incarnation, NAME_TAKEN_MAX_MS);
    } else if (now - m->rival_since_ns > NAME_TAKEN_MAX_MS * 1000000ull) {
        refuse(m, BT_ERR_EXISTS,
               bt_sprintf("another live %s is called %s (incarnation %" PRIx64
                          "): give each its own name",
                          m->self->kind, m->self->name, incarnation));
        return;
    }
    bt_timer_start(m->loop, &m->timer, rival == BT_PROCESS_ALIVE ? DYING_MS : RETRY_MS, 0, kick, m);
}

/* Replaces the dead process's key if it is unchanged. Then the expiry of the old lease does no
 * harm. */
static void take_over(struct bt_member *m, uint64_t incarnation, const struct bt_etcd_kv *cur)
{
    BT_INFO("member_name_taken_over", "key=%s incarnation=%" PRIx64 " why=%s", m->key, incarnation,
            "its process on this machine is dead");
    m->mod_revision = cur->mod_revision;
    kick(m);
}

static void on_conflict(struct bt_member *m, const struct bt_etcd_kv *cur)
{
    if (cur->mod_revision == 0) { /* the key is gone: write it again */
        m->mod_revision = 0;
        m->rival_since_ns = 0;
        kick(m);
        return;
    }
    char why[256];
    Baton__Member *other = bt_member_unpack(cur->value, cur->value_len, why, sizeof(why));
    uint64_t incarnation = other == NULL ? 0 : other->incarnation;
    bt_process_state_t rival = BT_PROCESS_UNKNOWN;
    if (other != NULL) {
        rival = strcmp(other->node, m->self->node) == 0 ? bt_process_state(other) : rival;
        baton__member__free_unpacked(other, NULL);
    }
    /* It is this process's key: an earlier answer was lost. */
    if (incarnation == m->self->incarnation) {
        m->mod_revision = cur->mod_revision;
        kick(m);
    } else if (rival == BT_PROCESS_DEAD) {
        take_over(m, incarnation, cur);
    } else {
        wait_for_rival(m, incarnation, rival);
    }
}

static void on_registered(void *arg, bt_status_t st, bool succeeded, const struct bt_etcd_kv *cur)
{
    struct bt_member *m = arg;
    m->busy = false;
    if (m->stopped) {
        member_free(m);
        return;
    }
    if (st == BT_OK && succeeded) {
        m->mod_revision = cur->mod_revision;
    }
    if (st != BT_OK || succeeded) {
        m->rival_since_ns = 0; /* while etcd is away, leases do not expire either */
    }
    if (m->phase == PHASE_DONE) {
        m->phase = PHASE_REGISTER; /* kick() has set PHASE_DONE before the answer */
        if (st == BT_OK && succeeded) {
            m->phase = PHASE_DONE;
            if (!m->joined) {
                m->joined = true;
                if (m->ops.on_joined != NULL) {
                    m->ops.on_joined(m->arg); /* the user may leave inside */
                }
            }
        } else if (st == BT_OK) {
            on_conflict(m, cur);
        } else {
            bt_timer_start(m->loop, &m->timer, RETRY_MS, 0, kick, m);
        }
        return;
    }
    kick(m); /* something has changed meanwhile: a new lease, a new state */
}

/* Starts the request that the phase needs, unless an answer is pending. */
static void kick(void *arg)
{
    struct bt_member *m = arg;
    if (m->busy) {
        return;
    }
    bt_timer_stop(m->loop, &m->timer);
    switch (m->phase) {
    case PHASE_SETTINGS:
        pack_and_swap(m, m->settings_key, 0, &m->settings->base, 0, on_settings);
        break;
    case PHASE_REGISTER:
        /* Done, unless a change resets the phase before the answer comes. */
        m->phase = PHASE_DONE;
        pack_and_swap(m, m->key, m->mod_revision, &m->self->base, m->lease_id, on_registered);
        break;
    case PHASE_WAIT_LEASE:
    case PHASE_DONE:
    case PHASE_REFUSED: break;
    }
}

static void on_granted(void *arg, int64_t lease)
{
    struct bt_member *m = arg;
    m->lease_id = lease;
    m->phase = PHASE_SETTINGS; /* also after the first time: an etcd that has lost its data has no
                                  settings */
    kick(m);
}

static void on_lost(void *arg)
{
    struct bt_member *m = arg;
    m->joined = false;
    m->mod_revision = 0; /* the key was deleted with the lease */
    m->rival_since_ns = 0;
    m->phase = PHASE_WAIT_LEASE;
    if (!m->busy) {
        bt_timer_stop(m->loop, &m->timer);
    }
    if (m->ops.on_lost != NULL) {
        m->ops.on_lost(m->arg);
    }
}

/* ---- start and end ---- */

static bool name_ok(const char *s)
{
    return s != NULL && s[0] != '\0' && strchr(s, '/') == NULL;
}

/* The identity of this process, so that a successor can check whether it is dead. */
static void say_who(Baton__Member *self)
{
    struct bt_process_id id;
    if (self->boot_id[0] != '\0' || self->pid != (uint32_t)getpid() ||
        !bt_process_id(self->pid, &id)) {
        return;
    }
    self->boot_id = bt_strdup(id.boot_id);
    self->pid_ns = id.pid_ns;
    self->start_ticks = id.start_ticks;
}

struct bt_member *bt_member_join(struct bt_etcd *e, const char *cluster, const Baton__Member *self,
                                 const Baton__ClusterSettings *settings,
                                 const struct bt_member_ops *ops, void *arg)
{
    static const struct bt_etcd_lease_ops lease_ops = {.on_granted = on_granted,
                                                       .on_lost = on_lost};
    struct bt_member *m = bt_calloc(1, sizeof(*m));
    m->e = e;
    m->loop = bt_etcd_loop(e);
    m->ops = *ops;
    m->arg = arg;
    m->self = bt_message_copy(&self->base);
    m->settings = bt_message_copy(&settings->base);
    say_who(m->self);
    m->key = bt_sprintf("/baton/%s/members/%s/%s", cluster, self->kind, self->name);
    m->settings_key = bt_sprintf("/baton/%s/settings", cluster);
    BT_ASSERT(self->incarnation != 0);
    if (!name_ok(cluster) || !name_ok(self->kind) || !name_ok(self->name)) {
        refuse(m, BT_ERR_INVALID,
               bt_sprintf("cluster, kind and name of %s must not be empty or contain '/'", m->key));
        return m;
    }
    m->lease = bt_etcd_lease_start(e, BT_MEMBER_LEASE_S, &lease_ops, m);
    return m;
}

static void register_again(struct bt_member *m)
{
    if (m->phase == PHASE_DONE) {
        m->phase = PHASE_REGISTER;
        kick(m);
    }
}

void bt_member_set_state(struct bt_member *m, Baton__MemberState state)
{
    if (m->self->state != state) {
        m->self->state = state;
        register_again(m);
    }
}

void bt_member_set_role(struct bt_member *m, uint32_t role, uint32_t next_role, uint64_t role_epoch)
{
    Baton__Member *s = m->self;
    if (s->role != role || s->next_role != next_role || s->role_epoch != role_epoch) {
        s->role = role;
        s->next_role = next_role;
        s->role_epoch = role_epoch;
        register_again(m);
    }
}

void bt_member_leave(struct bt_member *m)
{
    if (m == NULL) {
        return;
    }
    bt_timer_stop(m->loop, &m->timer);
    /* Revoking deletes only this process's key: a key that another process wrote meanwhile
     * stays. */
    bt_etcd_lease_stop(m->lease);
    m->lease = NULL;
    m->stopped = true;
    if (!m->busy) {
        member_free(m);
    }
}
