/* The clusters of fakes in which the tests of the request machine plan: a pair, where every plan is
 * known beforehand, and a trio, where there is somebody left when one is lost. */
#ifndef BT_TESTS_REQUEST_FIXTURE_H
#define BT_TESTS_REQUEST_FIXTURE_H

#include "tests/unit/conductor_fixture.h"

/* One prefill on n1, one decode on n2, their kvstores. */
struct pair {
    struct fixture f;
    struct fake *p, *d, *ka, *kb;
};

static inline void all_up(struct fixture *f)
{
    for (int i = 0; i < f->n_fakes; i++) {
        until(f, fake_up(&f->fakes[i]));
    }
}

static inline void pair_start(struct pair *x)
{
    fixture_start(&x->f);
    x->ka = fake_add(&x->f, "kvstore", "kvstore-n1", "n1");
    x->kb = fake_add(&x->f, "kvstore", "kvstore-n2", "n2");
    x->p = fake_add(&x->f, "prefill", "prefill-n1-0", "n1");
    x->d = fake_add(&x->f, "decode", "decode-n2-0", "n2");
    all_up(&x->f);
}

static inline void pair_init(struct pair *x)
{
    fixture_init(&x->f);
    pair_start(x);
}

/* Prefill on n1 and n2, decode on n1, n2 and n3, a kvstore on each. */
struct trio {
    struct fixture f;
    struct fake *p[2], *d[3], *k[3];
};

static inline void trio_start(struct trio *x)
{
    static const char *const nodes[] = {"n1", "n2", "n3"};
    static const char *const kn[] = {"kv-n1", "kv-n2", "kv-n3"};
    static const char *const pn[] = {"p-n1", "p-n2"};
    static const char *const dn[] = {"d-n1", "d-n2", "d-n3"};
    fixture_start(&x->f);
    for (int i = 0; i < 3; i++) {
        x->k[i] = fake_add(&x->f, "kvstore", kn[i], nodes[i]);
        x->d[i] = fake_add(&x->f, "decode", dn[i], nodes[i]);
        if (i < 2) {
            x->p[i] = fake_add(&x->f, "prefill", pn[i], nodes[i]);
        }
    }
    all_up(&x->f);
}

static inline void trio_init(struct trio *x)
{
    fixture_init(&x->f);
    trio_start(x);
}

/* One submission as it arrived: at which worker, on which node. */
struct placed {
    struct fake *w, *kv;
    struct seen_submit s;
};

/* The newest submission of a phase for (first) choice, with an epoch of min..max. */
static inline bool find_submit(struct trio *x, uint32_t phases, uint32_t choice, uint32_t min,
                               uint32_t max, struct placed *out)
{
    for (int i = 0; i < x->f.n_fakes; i++) {
        struct fake *w = &x->f.fakes[i];
        for (int n = w->submits - 1; n >= 0; n--) {
            const struct seen_submit *s = &w->submit[n];
            if (s->phases != phases || s->choice != choice || s->epoch < min || s->epoch > max) {
                continue;
            }
            out->w = w;
            out->s = *s;
            for (int k = 0; k < 3; k++) {
                out->kv = strcmp(x->k[k]->node, w->node) == 0 ? x->k[k] : out->kv;
            }
            return true;
        }
    }
    return false;
}

static inline bool released(const struct fake *k, uint64_t id, uint32_t epoch)
{
    for (int i = 0; i < k->releases; i++) {
        if (k->release[i].request == id && k->release[i].epoch == epoch) {
            return true;
        }
    }
    return false;
}

static inline bool cancelled(const struct fake *w, uint64_t id, uint32_t epoch)
{
    for (int i = 0; i < w->cancels; i++) {
        if (w->cancel[i].request == id && w->cancel[i].epoch == epoch) {
            return true;
        }
    }
    return false;
}

#endif
