/* Messages between a kvstore and its wire process; see wx_ipc.h. Called by one thread of each. */
#include "kvstore/wire/wx_ipc.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define READ_BYTES     (256u << 10)
#define READ_BYTES_MAX (1u << 20)

struct head {
    uint32_t bytes; /* including this header */
    uint32_t type, handle, zero;
};

struct has_head {
    uint32_t stream, item;
    uint64_t n; /* bytes of bits that follow */
};

uint32_t bt_wx_counters(struct bt_wx_config *conf, struct bt_metric **list_p[BT_WX_COUNTERS])
{
    struct bt_wx_metrics *m = &conf->m;
    struct bt_metric **const own[] = {
        &m->sent_bytes,     &m->recv_bytes,   &m->sent_segs,  &m->recv_segs,
        &m->crc_errors,     &m->drop_unknown, &m->drop_stale, &m->drop_garbled,
        &m->drop_duplicate, &m->resent_segs,  &m->unordered,
    };
    uint32_t n = 0;
    _Static_assert(BT_ARRAY_LEN(own) + 4 * BT_NICS_MAX <= BT_WX_COUNTERS, "all counters fit");
    _Static_assert(sizeof(own) == sizeof(*m), "every counter is shared");
    for (size_t i = 0; i < BT_ARRAY_LEN(own); i++) {
        list_p[n++] = own[i];
    }
    for (uint32_t i = 0; i < conf->n_cards; i++) {
        struct bt_wx_card *c = &conf->cards[i];
        list_p[n++] = &c->sent_bytes;
        list_p[n++] = &c->recv_bytes;
        list_p[n++] = &c->sent_segs;
        list_p[n++] = &c->recv_segs;
    }
    return n;
}

/* ---- the pipe ---- */

void bt_wx_pipe_init(struct bt_wx_pipe *p, int fd)
{
    memset(p, 0, sizeof(*p));
    p->fd = fd;
    bt_buf_init(&p->out);
    bt_buf_init(&p->in);
}

void bt_wx_pipe_cleanup(struct bt_wx_pipe *p)
{
    bt_buf_cleanup(&p->out);
    bt_buf_cleanup(&p->in);
}

void bt_wx_pipe_put(struct bt_wx_pipe *p, bt_wx_ipc_type_t type, uint32_t handle,
                    const struct iovec *parts, size_t n_parts)
{
    size_t n = sizeof(struct head);
    for (size_t i = 0; i < n_parts; i++) {
        n += parts[i].iov_len;
    }
    BT_ASSERT(n <= BT_WX_IPC_BYTES_MAX);
    struct head h = {.bytes = (uint32_t)n, .type = type, .handle = handle};
    bt_buf_append(&p->out, &h, sizeof(h));
    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].iov_len > 0) {
            bt_buf_append(&p->out, parts[i].iov_base, parts[i].iov_len);
        }
    }
}

size_t bt_wx_pipe_unsent(const struct bt_wx_pipe *p)
{
    return p->out.len - p->out_at;
}

bt_status_t bt_wx_pipe_flush(struct bt_wx_pipe *p)
{
    while (p->out_at < p->out.len) {
        ssize_t n = send(p->fd, p->out.data + p->out_at, p->out.len - p->out_at,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM ? BT_AGAIN
                                                                          : BT_ERR_PEER_LOST;
        }
        p->out_at += (size_t)n;
    }
    p->out_at = 0;
    bt_buf_clear(&p->out);
    return BT_OK;
}

bt_status_t bt_wx_pipe_read(struct bt_wx_pipe *p)
{
    bt_buf_consume(&p->in, p->in_at);
    p->in_at = 0;
    for (size_t got = 0; got < READ_BYTES_MAX;) {
        char *to = bt_buf_reserve(&p->in, READ_BYTES);
        ssize_t n = recv(p->fd, to, READ_BYTES, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            return got > 0 ? BT_OK : BT_AGAIN;
        }
        if (n <= 0) {
            return got > 0 ? BT_OK : BT_ERR_PEER_LOST; /* the next call reports the end */
        }
        p->in.len += (size_t)n;
        got += (size_t)n;
        if ((size_t)n < READ_BYTES) { /* the socket is empty, or becomes readable again */
            return BT_OK;
        }
    }
    return BT_OK;
}

bt_status_t bt_wx_pipe_next(struct bt_wx_pipe *p, struct bt_wx_ipc_msg *m_p)
{
    struct head h;
    size_t have = p->in.len - p->in_at;
    if (p->broken) {
        return BT_ERR_PEER_PROTOCOL;
    }
    if (have < sizeof(h)) {
        return BT_AGAIN;
    }
    memcpy(&h, p->in.data + p->in_at, sizeof(h));
    if (h.bytes < sizeof(h) || h.bytes > BT_WX_IPC_BYTES_MAX || h.zero != 0) {
        p->broken = true; /* the beginning of the next message is unknown */
        return BT_ERR_PEER_PROTOCOL;
    }
    if (have < h.bytes) {
        return BT_AGAIN;
    }
    m_p->type = h.type;
    m_p->handle = h.handle;
    m_p->body = (const uint8_t *)p->in.data + p->in_at + sizeof(h);
    m_p->n = h.bytes - sizeof(h);
    p->in_at += h.bytes;
    return BT_OK;
}

bool bt_wx_ipc_take(struct bt_wx_ipc_msg *m, void *to, size_t n)
{
    if (m->n < n) {
        return false;
    }
    bt_copy(to, m->body, n);
    m->body += n;
    m->n -= n;
    return true;
}

void bt_wx_ipc_text(const struct bt_wx_ipc_msg *m, char *to, size_t cap)
{
    size_t n = BT_MIN(m->n, cap - 1);
    for (size_t i = 0; i < n; i++) {
        to[i] = iscntrl(m->body[i]) ? ' ' : (char)m->body[i];
    }
    to[n] = '\0';
}

/* ---- what a receiver has ---- */

void bt_wx_has_pack(const struct bt_wx_has *list, struct bt_buf *out)
{
    for (const struct bt_wx_has *h = list; h != NULL; h = h->next) {
        struct has_head head = {.stream = h->stream, .item = h->item, .n = h->n};
        bt_buf_append(out, &head, sizeof(head));
        if (h->n > 0) {
            bt_buf_append(out, h->bits, h->n);
        }
    }
}

bool bt_wx_has_unpack(const uint8_t *p, size_t n, struct bt_wx_has **list_p)
{
    struct bt_wx_ipc_msg m = {.body = p, .n = n};
    struct bt_wx_has *list = NULL;
    struct has_head head;
    while (m.n > 0) {
        if (!bt_wx_ipc_take(&m, &head, sizeof(head)) || head.n > m.n) {
            bt_wx_has_free(list);
            return false;
        }
        struct bt_wx_has *h = bt_malloc(sizeof(*h) + head.n);
        *h =
            (struct bt_wx_has){.next = list, .stream = head.stream, .item = head.item, .n = head.n};
        BT_ASSERT(bt_wx_ipc_take(&m, h->bits, head.n));
        list = h;
    }
    *list_p = list;
    return true;
}

void bt_wx_has_free(struct bt_wx_has *list)
{
    while (list != NULL) {
        struct bt_wx_has *h = list;
        list = h->next;
        free(h);
    }
}
