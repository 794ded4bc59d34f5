/* TLS below the HTTP server: the files of a directory, and a connection's encryption. The directory
 * has tls.crt (certificate, then intermediate ones) and tls.key, as Kubernetes names them. If it
 * has client-ca.crt, every client must show a certificate of that CA that revoked.txt, if there is
 * one, does not list (lines as of common/base/revoked.h). TLS 1.2 or newer, only ciphers with
 * forward secrecy, ALPN http/1.1. No renegotiation, resumption or early data: connections live
 * long, and each new one is checked anew.
 *
 * The files are watched: new connections use new ones within seconds, those that stand go on. One
 * whose client's certificate has expired or was revoked gets no further request. Loop thread. */
#ifndef BT_HTTP_HTTP_TLS_H
#define BT_HTTP_HTTP_TLS_H

#include <sys/types.h>

#include "common/base/base.h"
#include "common/loop/loop.h"

struct bt_http_tls;

/* Reads and checks the files. key: the configuration's, for messages. ERR_CONFIG: err names key,
 * file, fault and remedy. */
bt_status_t bt_http_tls_create(const char *key, const char *dir, struct bt_http_tls **tls_p,
                               char *err, size_t err_cap) BT_MUST_CHECK;
/* Looks at the files every few seconds. What is wrong with new ones is logged, and the old ones
 * stay in use. So does a demand for client certificates whose file is removed. */
void bt_http_tls_watch(struct bt_http_tls *t, struct bt_loop *loop);
void bt_http_tls_destroy(struct bt_http_tls *t);               /* NULL is allowed */
uint64_t bt_http_tls_not_after_s(const struct bt_http_tls *t); /* of the certificate; since 1970 */
uint64_t bt_http_tls_refused(const struct bt_http_tls *t);     /* handshakes that failed */

/* ---- a connection; for http_conn.c and http_input.c ---- */
struct bt_http_crypt;

struct bt_http_crypt *bt_http_crypt_create(struct bt_http_tls *t, int fd);
void bt_http_crypt_destroy(
    struct bt_http_crypt *s); /* NULL is allowed; the descriptor stays open */

typedef enum {
    BT_HTTP_SHAKE_MORE, /* call again when the descriptor is ready */
    BT_HTTP_SHAKE_DONE,
    BT_HTTP_SHAKE_PLAIN, /* the client speaks HTTP without TLS; nothing of it was read */
    BT_HTTP_SHAKE_FAILED /* logged from time to time */
} bt_http_shake_t;
/* Goes on with the handshake. client: its address, for the log. */
bt_http_shake_t bt_http_crypt_shake(struct bt_http_crypt *s, const char *client);
bool bt_http_crypt_ready(const struct bt_http_crypt *s); /* the handshake is over */
/* The name in the client's certificate: its first URI, else its subject; NULL: it showed none. */
const char *bt_http_crypt_client(const struct bt_http_crypt *s);
/* Does it wait until the descriptor takes bytes, although the connection has no output? */
bool bt_http_crypt_wants_out(const struct bt_http_crypt *s);
/* As recv and send, with errno. recv reads so much at once that epoll reports what is left. */
ssize_t bt_http_crypt_recv(struct bt_http_crypt *s, void *buf, size_t cap);
/* After EAGAIN the next call must begin with the same bytes. */
ssize_t bt_http_crypt_send(struct bt_http_crypt *s, const void *buf, size_t len);
/* Tells the client that nothing more comes, if there is room for it. */
void bt_http_crypt_close(struct bt_http_crypt *s);

#endif
