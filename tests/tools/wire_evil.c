/* A UCX peer that breaks the rules, for tests: sends active messages with whatever header a test
 * asks for. The gRPC side is played by the test (tests/cluster/test_wire_strangers.py).
 * Commands: connect HEX NONCE | seg KEY=VALUE... | raw HEXHEADER | quit. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "kvstore/wire/msg.h"

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h ep;
static uint64_t nonce;
static uint8_t payload[4 << 20];

static void say(const char *text)
{
    puts(text);
    fflush(stdout);
}

static void on_error(void *arg, ucp_ep_h e, ucs_status_t st)
{
    (void)arg;
    (void)e;
    printf("ep_error %s\n", ucs_status_string(st));
    fflush(stdout);
    ep = NULL; /* leaked on purpose: this process ends soon */
}

/* Without any handler UCX 1.13.1 crashes when a message comes. */
static ucs_status_t on_am(void *arg, const void *header, size_t header_len, void *data, size_t len,
                          const ucp_am_recv_param_t *param)
{
    (void)arg;
    (void)header;
    (void)header_len;
    (void)data;
    (void)len;
    (void)param;
    return UCS_OK;
}

static void wait_for(ucs_status_ptr_t r)
{
    if (UCS_PTR_IS_PTR(r)) {
        uint64_t end = bt_mono_ns() + 2000000000ull;
        while (ucp_request_check_status(r) == UCS_INPROGRESS && bt_mono_ns() < end) {
            ucp_worker_progress(worker);
        }
        ucp_request_free(r);
    }
}

static void send_am(unsigned id, const void *header, size_t len, size_t bytes, bool rndv)
{
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                             .flags = UCP_AM_SEND_FLAG_REPLY |
                                      (rndv ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER)};
    if (ep != NULL) {
        wait_for(ucp_am_send_nbx(ep, id, header, len, payload, bytes, &p));
    }
}

static void cmd_connect(const char *hex, uint64_t n)
{
    uint8_t addr[4096];
    size_t len = strlen(hex) / 2;
    for (size_t i = 0; i < len && i < sizeof(addr); i++) {
        sscanf(hex + 2 * i, "%2hhx", &addr[i]);
    }
    ucp_ep_params_t p = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                       UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                       UCP_EP_PARAM_FIELD_ERR_HANDLER,
                         .address = (const ucp_address_t *)addr,
                         .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                         .err_handler.cb = on_error};
    nonce = n;
    if (ucp_ep_create(worker, &p, &ep) == UCS_OK) {
        struct bt_wire_proof proof = {BT_WIRE_PROOF_MAGIC, BT_WIRE_VERSION, n};
        send_am(BT_WIRE_AM_PROOF, &proof, sizeof(proof), 0, false);
        say("connected");
    }
}

static uint64_t field(const char *line, const char *key, uint64_t def)
{
    char pat[32];
    snprintf(pat, sizeof(pat), " %s=", key);
    const char *at = strstr(line, pat);
    return at == NULL ? def : strtoull(at + strlen(pat), NULL, 0);
}

static void cmd_seg(const char *line)
{
    union {
        struct bt_wire_seg_hdr h;
        uint8_t raw[sizeof(struct bt_wire_seg_hdr) + 4 * 1024];
    } m;
    memset(&m, 0, sizeof(m));
    m.h.n_segs = (uint16_t)field(line, "n", 1);
    m.h.nonce = field(line, "nonce", nonce);
    m.h.request = field(line, "request", 0);
    m.h.epoch = (uint32_t)field(line, "epoch", 1);
    m.h.stream = (uint32_t)field(line, "stream", 1);
    m.h.item = (uint32_t)field(line, "item", 0);
    m.h.first_block = (uint32_t)field(line, "first", 0);
    m.h.seg_bytes = (uint32_t)field(line, "seg", 8192);
    size_t len = bt_wire_seg_finish(&m.h);
    m.h.crc ^= (uint32_t)field(line, "flip", 0);
    send_am((unsigned)field(line, "id", BT_WIRE_AM_SEGMENTS), &m, len - field(line, "cut", 0),
            field(line, "bytes", (uint64_t)m.h.n_segs * m.h.seg_bytes),
            field(line, "rndv", 0) != 0);
    say("sent");
}

static void start(void)
{
    ucp_config_t *c;
    ucp_params_t p = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_AM};
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_address_t *a;
    size_t len;
    BT_ASSERT(ucp_config_read(NULL, NULL, &c) == UCS_OK);
    BT_ASSERT(ucp_config_modify(c, "TLS", "tcp") == UCS_OK);
    BT_ASSERT(ucp_config_modify(c, "NET_DEVICES", "lo") == UCS_OK);
    BT_ASSERT(ucp_init(&p, c, &context) == UCS_OK);
    ucp_config_release(c);
    BT_ASSERT(ucp_worker_create(context, &wp, &worker) == UCS_OK);
    BT_ASSERT(ucp_worker_get_address(worker, &a, &len) == UCS_OK);
    ucp_am_handler_param_t h = {.field_mask =
                                    UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB,
                                .id = BT_WIRE_AM_PROOF,
                                .cb = on_am};
    BT_ASSERT(ucp_worker_set_am_recv_handler(worker, &h) == UCS_OK);
    printf("address ");
    for (size_t i = 0; i < len; i++) {
        printf("%02x", ((const uint8_t *)a)[i]);
    }
    say("");
    ucp_worker_release_address(worker, a);
}

int main(void)
{
    char line[16384], hex[8192];
    unsigned long long n;
    start();
    for (;;) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        while (ucp_worker_progress(worker) != 0) {
        }
        if (poll(&p, 1, 1) > 0) {
            if (fgets(line, sizeof(line), stdin) == NULL || strncmp(line, "quit", 4) == 0) {
                _exit(0); /* as rude as it came */
            }
            if (sscanf(line, "connect %8191s %llu", hex, &n) == 2) {
                cmd_connect(hex, n);
            } else if (strncmp(line, "seg", 3) == 0) {
                cmd_seg(line);
            }
        }
    }
}
