/* libFuzzer: configuration files. The first byte chooses the daemon, the rest is its file, and
 * behind a line of "---8<---" the file as it is when the daemon reads it again. A file that is
 * accepted gives values within the bounds of the daemon's table; one that is refused has a text. */
#include <stdlib.h>
#include <string.h>

#include "common/conf/conf.h"
#include "common/worker/conf.h"
#include "conductor/conf.h"
#include "kvstore/conf.h"
#include "tests/fuzz/rig.h"

static union {
    struct bt_conductor_conf conductor;
    struct bt_kvstore_conf kvstore;
    struct bt_worker_conf worker;
} conf;

static void check_row(const struct bt_conf_row *r, const char *base)
{
    const void *at = base + r->offset;
    double v;
    switch (r->type) {
    case BT_CONF_INT: v = (double)*(const int64_t *)at; break;
    case BT_CONF_SIZE:
    case BT_CONF_MS: v = (double)*(const uint64_t *)at; break;
    case BT_CONF_FLOAT: v = *(const double *)at; break;
    default: BT_ASSERT(!r->required || *(void *const *)at != NULL); return;
    }
    BT_ASSERT(v == v);
    /* What is beyond the bounds may only be the default. */
    BT_ASSERT((r->min == 0 && r->max == 0) || (v >= r->min && v <= r->max) || r->def != NULL);
}

static void check_all(const struct bt_conf_schema *s)
{
    for (size_t t = 0; s->tables[t] != NULL; t++) {
        for (size_t i = 0; i < s->table_lens[t]; i++) {
            check_row(&s->tables[t][i], (const char *)&conf);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char cut[] = "---8<---\n";
    if (size == 0) {
        return 0;
    }
    rig_reset();
    const struct bt_conf_schema *schemas[] = {bt_conductor_schema(), &bt_kvstore_schema,
                                              bt_worker_schema(false), bt_worker_schema(true)};
    const struct bt_conf_schema *s = schemas[data[0] % 4];
    const uint8_t *again = memmem(data + 1, size - 1, cut, sizeof(cut) - 1);
    size_t n = again != NULL ? (size_t)(again - data) - 1 : size - 1;
    const char *path = rig_file("conf.yaml", data + 1, n);
    char *argv[] = {"baton", "--config", (char *)(uintptr_t)path, NULL};
    int code = -1;
    if (!bt_conf_main(s, 3, argv, &conf, &code)) {
        BT_ASSERT(code == 2);
        return 0;
    }
    check_all(s);
    char text[2048] = "";
    if (s->describe != NULL) {
        s->describe(&conf, text, sizeof(text));
    }
    if (again != NULL) {
        again += sizeof(cut) - 1;
        (void)rig_file("conf.yaml", again, (size_t)(data + size - again));
        bt_status_t st = bt_conf_reload(s, &conf);
        BT_ASSERT(st == BT_OK || st == BT_ERR_CONFIG);
        check_all(s);
    }
    bt_conf_cleanup(s, &conf);
    return 0;
}
