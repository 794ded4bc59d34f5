/* A small server and client on common/rpc for tests/cluster/test_rpc_interop.py, whose other side
 * is grpcio. The messages are plain bytes.
 *   rpc_echo serve HOST:PORT|unix:PATH   prints the port, serves until SIGTERM
 *       /t.Echo/Unary   answers the same bytes; "fail:CODE:TEXT" answers that status
 *       /t.Echo/Stream  answers each message; "burst:N:BYTES" N messages; "close:CODE:TEXT"
 *   rpc_echo unary TARGET METHOD TEXT    prints "CODE DETAIL" and the reply, hex
 *   rpc_echo stream TARGET METHOD N      sends N messages, half-closes after their echoes
 *   rpc_echo flood TARGET METHOD         sends until the queue is full, waits, goes on: 64 MiB */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "common/rpc/rpc.h"

#define FLOOD_BYTES   (64u << 20)
#define FLOOD_MESSAGE (64u << 10)

static struct bt_loop *loop;

static void on_term(void *arg, int signo)
{
    (void)arg;
    (void)signo;
    bt_loop_stop(loop);
}

/* ---- server ---- */

static char *text_of(const void *data, size_t len)
{
    char *s = bt_malloc(len + 1);
    memcpy(s, data, len);
    s[len] = '\0';
    return s;
}

static void on_unary(void *arg, struct bt_rpc_call *call, const void *data, size_t len)
{
    char *s = text_of(data, len), detail[128];
    int code;
    (void)arg;
    if (sscanf(s, "fail:%d:%127[^\n]", &code, detail) == 2) {
        bt_rpc_call_reply(call, code, detail, NULL, 0);
    } else {
        bt_rpc_call_reply(call, BT_GRPC_OK, NULL, data, len);
    }
    free(s);
}

static void send_or_drop(struct bt_rpc_stream *s, const void *data, size_t len)
{
    bt_status_t st = bt_rpc_stream_send(s, data, len);
    if (st != BT_OK) {
        BT_WARN("echo_dropped", "status=%s", bt_status_name(st));
    }
}

static void on_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    char *text = text_of(data, len), detail[128];
    unsigned n, size;
    int code;
    (void)arg;
    if (sscanf(text, "burst:%u:%u", &n, &size) == 2) {
        char *buf = bt_calloc(1, size + 1);
        for (unsigned i = 0; i < n; i++) {
            memset(buf, 'a' + (int)(i % 26), size);
            send_or_drop(s, buf, size);
        }
        free(buf);
    } else if (sscanf(text, "close:%d:%127[^\n]", &code, detail) == 2) {
        bt_rpc_stream_close(s, code, detail, true);
    } else {
        send_or_drop(s, data, len);
    }
    free(text);
}

static void on_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    (void)arg;
    (void)s;
    (void)detail;
    printf("closed %d\n", code);
    fflush(stdout);
}

static void on_accept(void *arg, struct bt_rpc_stream *s)
{
    static const struct bt_rpc_stream_ops ops = {.on_message = on_message, .on_close = on_close};
    bt_rpc_stream_set_arg(s, &ops, arg);
    bt_rpc_stream_set_queue_max(s, 256u << 20);
}

static int serve(struct bt_rpc *rpc, const char *listen)
{
    struct bt_rpc_server *srv;
    int port;
    if (bt_rpc_server_create(rpc, listen, &srv, &port) != BT_OK) {
        return 1;
    }
    bt_rpc_server_unary(srv, "/t.Echo/Unary", NULL, on_unary, NULL);
    bt_rpc_server_stream(srv, "/t.Echo/Stream", NULL, on_accept, NULL);
    bt_rpc_server_start(srv);
    printf("%d\n", port);
    fflush(stdout);
    bt_loop_run(loop);
    bt_rpc_server_destroy(srv);
    return 0;
}

/* ---- client ---- */

struct client {
    uint64_t n, sent, got, bytes;
    bool flood, done;
    struct bt_rpc_stream *s;
    unsigned paused;
};

static void flood_more(struct client *c)
{
    static char buf[FLOOD_MESSAGE];
    while (c->bytes < FLOOD_BYTES) {
        bt_status_t st = bt_rpc_stream_send(c->s, buf, sizeof(buf));
        if (st != BT_OK) {
            c->paused += st == BT_AGAIN;
            return;
        }
        c->bytes += sizeof(buf);
        c->sent++;
    }
}

static void client_message(void *arg, struct bt_rpc_stream *s, const void *data, size_t len)
{
    struct client *c = arg;
    (void)data;
    (void)len;
    c->got++;
    if (!c->flood && c->got < c->n) {
        char text[32];
        snprintf(text, sizeof(text), "%llu", (unsigned long long)++c->sent);
        send_or_drop(s, text, strlen(text));
    } else if (c->flood ? c->got == FLOOD_BYTES / FLOOD_MESSAGE : c->got == c->n) {
        printf("got %llu paused %d\n", (unsigned long long)c->got, c->paused > 0);
        c->done = true;
        bt_rpc_stream_close(s, BT_GRPC_OK, NULL, true);
        bt_loop_stop(loop);
    }
}

static void client_close(void *arg, struct bt_rpc_stream *s, int code, const char *detail)
{
    struct client *c = arg;
    (void)s;
    printf("closed %d %s after %llu\n", code, detail, (unsigned long long)c->got);
    c->done = true;
    bt_loop_stop(loop);
}

static void client_writable(void *arg, struct bt_rpc_stream *s)
{
    (void)s;
    flood_more(arg);
}

static int client(struct bt_rpc *rpc, const char *target, const char *method, uint64_t n)
{
    static const struct bt_rpc_stream_ops ops = {
        .on_message = client_message, .on_close = client_close, .on_writable = client_writable};
    struct client c = {.n = n, .flood = n == 0};
    struct bt_rpc_channel *ch;
    if (bt_rpc_channel_create(rpc, target, NULL, &ch) != BT_OK ||
        bt_rpc_stream_open(ch, method, true, &ops, &c, &c.s) != BT_OK) {
        return 1;
    }
    if (c.flood) {
        flood_more(&c);
    } else {
        send_or_drop(c.s, "0", 1);
    }
    while (!c.done) {
        bt_loop_poll(loop, -1);
    }
    for (int i = 0; i < 20; i++) { /* lets the half-close out */
        bt_loop_poll(loop, 10);
    }
    bt_rpc_channel_destroy(ch);
    return 0;
}

static int unary(const char *target, const char *method, const char *text)
{
    void *reply = NULL;
    size_t len = 0;
    char detail[256];
    struct bt_rpc_question q = {.target = target,
                                .method = method,
                                .data = text,
                                .len = strlen(text),
                                .deadline_ms = 10000};
    int code = bt_rpc_unary_blocking(&q, &reply, &len, detail, sizeof(detail));
    printf("%d %s\n", code, detail);
    for (size_t i = 0; i < len; i++) {
        printf("%02x", ((uint8_t *)reply)[i]);
    }
    printf("\n");
    free(reply);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "unary") == 0) {
        return unary(argv[2], argv[3], argv[4]);
    }
    bool is_serve = argc == 3 && strcmp(argv[1], "serve") == 0;
    bool is_stream = argc == 5 && strcmp(argv[1], "stream") == 0 && atoi(argv[4]) > 0;
    bool is_flood = argc == 4 && strcmp(argv[1], "flood") == 0;
    struct bt_rpc *rpc;
    if (!is_serve && !is_stream && !is_flood) {
        fprintf(stderr, "usage: rpc_echo serve ADDR | unary TARGET METHOD TEXT | "
                        "stream TARGET METHOD N | flood TARGET METHOD\n");
        return 2;
    }
    if (bt_loop_create(&loop) != BT_OK) {
        return 1;
    }
    bt_loop_on_signal(loop, SIGTERM, on_term, NULL);
    if (bt_rpc_create(loop, &rpc) != BT_OK) {
        return 1;
    }
    int rc = is_serve ? serve(rpc, argv[2])
                      : client(rpc, argv[2], argv[3], is_stream ? (uint64_t)atoi(argv[4]) : 0);
    bt_rpc_destroy(rpc);
    bt_loop_destroy(loop);
    return rc;
}
