/* Messages of segments as active messages of UCX. Over TCP all bytes come through a buffer of UCX,
 * and this file copies them from there, so UCX never gets the address of a slot. With RDMA the
 * network card writes into the slots. Transfer thread. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/wire/ucx_priv.h"

#define OUT_MAGIC  0x4d534758u
#define PULL_MAGIC 0x4c4e4458u

/* Lists of memory pieces are passed to UCX unchanged. */
_Static_assert(sizeof(ucp_dt_iov_t) == sizeof(struct iovec) &&
                   offsetof(ucp_dt_iov_t, buffer) == offsetof(struct iovec, iov_base) &&
                   offsetof(ucp_dt_iov_t, length) == offsetof(struct iovec, iov_len),
               "UCX's iov is the system's");

struct pull { /* one receive by rendezvous */
    uint32_t magic;
    struct bt_wx_land land;
    uint8_t crcs[4 * BT_WIRE_SEGS_MAX];
    struct iovec iov[]; /* used with RDMA */
};

/* ---- out ---- */

static void on_sent(void *request, ucs_status_t status, void *user)
{
    struct bt_wx_out *o = user;
    BT_ASSERT(o->magic == OUT_MAGIC);
    ucp_request_free(request);
    bt_wx_out_done(o, status == UCS_OK ? NULL : ucs_status_string(status));
}

void bt_ucx_post(struct bt_wx_out *o, size_t header_len)
{
    struct bt_wx_path *l = o->path;
    bool one = o->hdr.n_segs == 1;
    ucp_request_param_t p = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_DATATYPE,
        .flags = UCP_AM_SEND_FLAG_REPLY |
                 (o->bytes <= l->conn->x->ucx->eager_max ? UCP_AM_SEND_FLAG_EAGER
                                                         : UCP_AM_SEND_FLAG_RNDV),
        .datatype = one ? ucp_dt_make_contig(1) : UCP_DATATYPE_IOV,
        .cb.send = on_sent,
        .user_data = o,
    };
    o->magic = OUT_MAGIC;
    ucs_status_ptr_t r = ucp_am_send_nbx(l->ucx->ep, BT_WIRE_AM_SEGMENTS, &o->hdr, header_len,
                                         one ? o->iov[0].iov_base : (void *)o->iov,
                                         one ? o->bytes : o->hdr.n_segs, &p);
    if (r == NULL) {
        bt_wx_out_done(o, NULL);
    } else if (UCS_PTR_IS_ERR(r)) {
        bt_wx_out_done(o, ucs_status_string(UCS_PTR_STATUS(r)));
    }
}

/* ---- in ---- */

static void pull_done(struct pull *p, ucs_status_t status, size_t len)
{
    struct bt_wx_recv *r = p->land.recv;
    struct bt_wx_path *l = p->land.path;
    r->outstanding--;
    l->ucx->n_recvs--;
    if (status != UCS_OK) {
        bt_wx_land_undo(&p->land);
        bt_wx_path_kill(l, BT_ERR_PEER_LOST, "UCX receive: %s", ucs_status_string(status));
    } else if (len != (size_t)p->land.hdr.n_segs * p->land.hdr.seg_bytes) {
        bt_wx_conn_kill(r->conn, BT_ERR_PEER_PROTOCOL, "short message");
    } else {
        bt_wx_land_end(&p->land);
    }
    bt_wx_conn_hot(r->conn);
    free(p);
}

static void on_received(void *request, ucs_status_t status, size_t length, void *user)
{
    struct pull *p = user;
    BT_ASSERT(p->magic == PULL_MAGIC);
    ucp_request_free(request);
    pull_done(p, status, length);
}

/* ---- the functions of this project's UCX datatype ---- */

static void *unpack_start(void *context, void *buffer, size_t count)
{
    (void)context;
    (void)count;
    return buffer; /* it points to the struct pull */
}

static size_t unpack_size(void *state)
{
    const struct pull *p = state;
    return (size_t)p->land.hdr.n_segs * p->land.hdr.seg_bytes;
}

static ucs_status_t unpack(void *state, size_t offset, const void *src, size_t length)
{
    struct pull *p = state;
    BT_ASSERT(p->magic == PULL_MAGIC);
    if (offset > unpack_size(state) || length > unpack_size(state) - offset) {
        return UCS_ERR_MESSAGE_TRUNCATED;
    }
    if (p->land.loose || offset != p->land.at) {
        if (!p->land.loose) {
            bt_metric_add(p->land.path->conn->x->conf.m.unordered, 1);
        }
        p->land.loose = true;
        bt_wx_land_loose(&p->land, offset, src, length);
    } else {
        bt_wx_land_bytes(&p->land, src, length);
    }
    return UCS_OK;
}

static void unpack_finish(void *state)
{
    (void)state; /* on_received frees it */
}

ucs_status_t bt_ucx_datatype(ucp_datatype_t *dt_p)
{
    static const ucp_generic_dt_ops_t ops = {.start_unpack = unpack_start,
                                             .packed_size = unpack_size,
                                             .unpack = unpack,
                                             .finish = unpack_finish};
    return ucp_dt_create_generic(&ops, NULL, dt_p);
}

/* Rendezvous: the sender waits until the receiver asks for the bytes. */
static ucs_status_t recv_pull(const struct bt_wx_land *land, void *desc)
{
    struct bt_wx_recv *r = land->recv;
    struct bt_wx_path *path = land->path;
    const struct bt_wx_ucx *x = path->conn->x->ucx;
    const struct bt_wire_seg_hdr *h = &land->hdr;
    bool copy = x->copies;
    uint32_t n = h->n_segs;
    struct pull *l = bt_malloc(sizeof(*l) + (copy ? 0 : n * sizeof(struct iovec)));
    l->magic = PULL_MAGIC;
    l->land = *land;
    l->land.crcs = l->crcs;
    l->land.loose = !copy;
    memcpy(l->crcs, land->crcs, 4u * n);
    for (uint32_t i = 0; i < n && !copy; i++) {
        l->iov[i].iov_base = bt_wx_land_segment(land, i);
        l->iov[i].iov_len = h->seg_bytes;
    }
    bool one = n == 1;
    ucp_request_param_t p = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .datatype = copy  ? x->unpacked
                    : one ? ucp_dt_make_contig(1)
                          : UCP_DATATYPE_IOV,
        .memory_type = UCS_MEMORY_TYPE_HOST,
        .cb.recv_am = on_received,
        .user_data = l,
    };
    r->outstanding++;
    path->ucx->n_recvs++;
    ucs_status_ptr_t q = ucp_am_recv_data_nbx(path->ucx->worker, desc,
                                              copy  ? (void *)l
                                              : one ? l->iov[0].iov_base
                                                    : (void *)l->iov,
                                              copy  ? 1
                                              : one ? h->seg_bytes
                                                    : n,
                                              &p);
    if (q == NULL || UCS_PTR_IS_ERR(q)) {
        pull_done(l, UCS_PTR_STATUS(q), (size_t)n * h->seg_bytes);
    }
    return UCS_INPROGRESS;
}

ucs_status_t bt_ucx_on_segments(void *arg, const void *header, size_t header_len, void *data,
                                size_t len, const ucp_am_recv_param_t *param)
{
    struct bt_wx_path *l = arg;
    struct bt_wx_land land;
    BT_ASSERT(l->obj.kind == BT_WX_PATH);
    /* any process can connect to UCX's port */
    bool ours =
        (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) && param->reply_ep == l->ucx->ep;
    if (!bt_wx_land_begin(l, header, header_len, len, ours, &land)) {
        return UCS_OK;
    }
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) {
        return recv_pull(&land, data);
    }
    bt_wx_land_bytes(&land, data, len);
    bt_wx_land_end(&land);
    return UCS_OK;
}
