/* Two Bloom filters with ten bits a key and seven probes. */
#include "common/policy/evict/recent.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"

#define BITS   10u
#define PROBES 7u

struct bt_recent {
    uint64_t *bits[2]; /* [0]: the younger one */
    uint64_t mask;     /* for bit numbers */
    uint32_t n, count;
};

struct bt_recent *bt_recent_create(uint32_t n)
{
    struct bt_recent *s = bt_calloc(1, sizeof(*s));
    uint64_t m = 64;
    while (m < (uint64_t)n * BITS) {
        m *= 2;
    }
    s->n = BT_MAX(n, 1u);
    s->mask = m - 1;
    s->bits[0] = bt_calloc(m / 64, sizeof(uint64_t));
    s->bits[1] = bt_calloc(m / 64, sizeof(uint64_t));
    return s;
}

void bt_recent_destroy(struct bt_recent *s)
{
    if (s == NULL) {
        return;
    }
    free(s->bits[0]);
    free(s->bits[1]);
    free(s);
}

bool bt_recent_again(struct bt_recent *s, const struct bt_kv_key *key)
{
    uint64_t a = bt_hash64(key->b, sizeof(key->b), 1), b = bt_hash64(key->b, sizeof(key->b), 2);
    bool in[2] = {true, true};
    for (uint32_t i = 0; i < PROBES; i++) {
        uint64_t bit = (a + i * (b | 1)) & s->mask;
        for (int g = 0; g < 2; g++) {
            in[g] = in[g] && (s->bits[g][bit / 64] >> (bit % 64) & 1) != 0;
        }
        s->bits[0][bit / 64] |= 1ull << (bit % 64);
    }
    if (!in[0] && ++s->count >= s->n) {
        uint64_t *old = s->bits[1];
        s->bits[1] = s->bits[0];
        s->bits[0] = old;
        memset(old, 0, (s->mask + 1) / 8);
        s->count = 0;
    }
    return in[0] || in[1];
}
