/* Matching of network cards and the choice between paths. Pure; any thread. */
#include "kvstore/wire/nics.h"

#include <string.h>

/* Averaging window of a rate: after this many bytes an old value counts for about a third. */
#define RATE_BYTES   (16.0 * 1048576)
#define FAR_FACTOR   (4.0 / 3) /* memory of another NUMA node */
#define RATE_DEFAULT 1e9

static bool loopback(const struct bt_nic *a)
{
    static const uint8_t one[16] = {[15] = 1};
    return a->family == 4 ? a->addr[0] == 127 : memcmp(a->addr, one, sizeof(one)) == 0;
}

bool bt_nics_same_net(const struct bt_nic *a, const struct bt_nic *b)
{
    uint32_t bits = BT_MIN(BT_MAX(a->prefix, b->prefix), a->family == 4 ? 32u : 128u);
    if (a->family != b->family || memcmp(a->addr, b->addr, bits / 8) != 0) {
        return false;
    }
    uint8_t mask = (uint8_t)(0xff00u >> bits % 8);
    return bits % 8 == 0 || ((a->addr[bits / 8] ^ b->addr[bits / 8]) & mask) == 0;
}

/* The rules for pairs, the best first. Without same_net there may be a router between the cards. */
static const struct {
    bool same_net, same_place, both_up;
} passes[] = {{true, true, true},   {true, false, true},  {true, true, false},
              {true, false, false}, {false, false, true}, {false, false, false}};

static bool fits(const struct bt_nic *a, uint32_t i, const struct bt_nic *b, uint32_t j,
                 size_t pass)
{
    if ((passes[pass].same_place && i != j) || (passes[pass].both_up && !(a->up && b->up))) {
        return false;
    }
    return passes[pass].same_net ? bt_nics_same_net(a, b)
                                 : a->family == b->family && !loopback(a) && !loopback(b);
}

uint32_t bt_nics_match(const struct bt_nic *local, uint32_t n_local, const struct bt_nic *remote,
                       uint32_t n_remote, struct bt_nic_pair *pairs_p)
{
    uint32_t mate[BT_NICS_MAX], n = 0;
    bool taken[BT_NICS_MAX] = {false};
    BT_ASSERT(n_local <= BT_NICS_MAX && n_remote <= BT_NICS_MAX);
    for (uint32_t i = 0; i < n_local; i++) {
        mate[i] = BT_NICS_MAX;
    }
    for (size_t pass = 0; pass < BT_ARRAY_LEN(passes); pass++) {
        for (uint32_t i = 0; i < n_local; i++) {
            for (uint32_t j = 0; j < n_remote && mate[i] == BT_NICS_MAX; j++) {
                if (!taken[j] && fits(&local[i], i, &remote[j], j, pass)) {
                    taken[j] = true;
                    mate[i] = j;
                }
            }
        }
    }
    for (uint32_t i = 0; i < n_local; i++) {
        if (mate[i] != BT_NICS_MAX) {
            pairs_p[n++] = (struct bt_nic_pair){.local = i, .remote = mate[i]};
        }
    }
    return n;
}

void bt_nic_rate_add(struct bt_nic_rate *r, uint64_t bytes, uint64_t posted_ns, uint64_t now_ns)
{
    uint64_t from = BT_MAX(posted_ns, r->done_ns);
    double keep = 1 / (1 + (double)bytes / RATE_BYTES);
    r->bytes = r->bytes * keep + (double)bytes;
    r->seconds = r->seconds * keep + (now_ns > from ? (double)(now_ns - from) * 1e-9 : 0);
    r->done_ns = now_ns;
}

double bt_nic_rate_get(const struct bt_nic_rate *r, uint64_t now_ns)
{
    if (r->bytes <= 0) {
        return 0;
    }
    double idle = now_ns > r->done_ns ? (double)(now_ns - r->done_ns) * 1e-9 : 0;
    return r->bytes / BT_MAX(r->seconds, 1e-9) * (1 + idle);
}

uint32_t bt_nics_pick(const struct bt_nic_load *paths, uint32_t n, uint64_t bytes, int32_t node)
{
    double best = 0, fastest = 0;
    uint32_t at = 0;
    BT_ASSERT(n > 0);
    for (uint32_t i = 0; i < n; i++) {
        fastest = BT_MAX(fastest, paths[i].rate);
    }
    fastest = fastest > 0 ? fastest : RATE_DEFAULT;
    for (uint32_t i = 0; i < n; i++) {
        double rate = paths[i].rate > 0 ? paths[i].rate : fastest;
        double cost = (double)(paths[i].in_flight + bytes) / rate;
        if (node >= 0 && paths[i].node >= 0 && paths[i].node != node) {
            cost *= FAR_FACTOR;
        }
        if (i == 0 || cost < best) {
            best = cost;
            at = i;
        }
    }
    return at;
}
