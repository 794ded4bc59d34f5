/* libFuzzer: the HTTP request parser. The outcome must not depend on how the bytes are cut; nothing
 * is read beyond a piece (each is an exact heap copy). Build and run: tests/fuzz/run http_parse 60
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "common/http/http_parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct outcome {
    int status;
    size_t used;
    uint64_t hash;
};

static uint64_t mix(uint64_t h, const char *s)
{
    for (; *s != '\0'; s++) {
        h = (h ^ (unsigned char)*s) * 0x100000001b3ull;
    }
    return h * 31 + 7;
}

/* stop: behind the header, as the server does. */
static struct outcome run(const uint8_t *data, size_t size, size_t piece, bool stop)
{
    struct bt_http_parser p;
    struct outcome o = {0};
    bt_http_parser_init(&p, 4096);
    while (o.used < size && (p.phase == BT_HTTP_HEAD || p.phase == BT_HTTP_BODY)) {
        size_t n = BT_MIN(piece, size - o.used);
        char *copy = bt_malloc(n);
        memcpy(copy, data + o.used, n);
        size_t took = 0;
        if (stop && p.phase == BT_HTTP_HEAD) {
            took = bt_http_parse_head(&p, copy, n);
        }
        if (p.phase == BT_HTTP_HEAD || p.phase == BT_HTTP_BODY) {
            took += bt_http_parse(&p, copy + took, n - took);
        }
        free(copy);
        BT_ASSERT(took <= n && (took == n || p.phase == BT_HTTP_DONE || p.phase == BT_HTTP_REFUSE));
        o.used += took;
    }
    o.status = p.phase == BT_HTTP_REFUSE ? p.status : (int)p.phase;
    if (p.phase == BT_HTTP_DONE) {
        o.hash = mix(mix(0, p.head.data + p.path), p.head.data + p.query);
        for (uint32_t i = 0; i < p.n_fields; i++) {
            o.hash = mix(o.hash, p.head.data + p.fields[i].name);
            o.hash = mix(o.hash, p.head.data + p.fields[i].value);
        }
        BT_ASSERT(p.body.len <= 4096);
        for (size_t i = 0; i < p.body.len; i++) {
            o.hash = (o.hash ^ (unsigned char)p.body.data[i]) * 0x100000001b3ull;
        }
    }
    bt_http_parser_cleanup(&p);
    return o;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct outcome whole = run(data, size, SIZE_MAX, false);
    for (size_t piece = 1; piece <= 3; piece += 2) {
        struct outcome cut = run(data, size, piece, piece == 1);
        BT_ASSERT(cut.status == whole.status && cut.used == whole.used && cut.hash == whole.hash);
    }
    return 0;
}
