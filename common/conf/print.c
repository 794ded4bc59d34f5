/* Help, example file and docs/CONFIG.md, all printed from the table. */
#include <stdio.h>
#include <string.h>

#include "common/conf/conf_priv.h"

static const char *type_text(const struct bt_conf_row *r)
{
    switch (r->type) {
    case BT_CONF_STR: return "text";
    case BT_CONF_INT: return "whole number";
    case BT_CONF_SIZE: return "size";
    case BT_CONF_MS: return "time";
    case BT_CONF_FLOAT: return "number";
    case BT_CONF_BOOL: return "true or false";
    case BT_CONF_ADDR: return "host:port";
    case BT_CONF_LIST: return r->one_is_list ? "list, or one value" : "list";
    }
    return "?";
}

static const char *default_text(const struct bt_conf_row *r)
{
    return r->required ? "required" : r->def == NULL ? "none" : r->def;
}

static void help_row(void *arg, const struct bt_conf_row *r)
{
    (void)arg;
    printf("  %-32s %s (%s)\n", r->key, r->doc, default_text(r));
}

void bt_conf_print_help(const struct bt_conf_schema *s)
{
    printf("baton-%s: %s\n\n"
           "usage: baton-%s [--config FILE] [--check] [--set KEY=VALUE]...\n\n"
           "  --config FILE      read FILE instead of /etc/baton/%s.yaml\n"
           "  --set KEY=VALUE    set one key; wins over the file and the environment\n"
           "  --check            check the configuration and exit (0 good, 2 not)\n"
           "  --print-example    print a commented configuration file and exit\n"
           "  --version, --help\n\n"
           "Every key can also be set by the environment: kv.block_tokens is "
           "BATON_KV_BLOCK_TOKENS.\n\nKeys (default):\n",
           s->daemon, s->summary, s->daemon, s->daemon);
    bt_conf_each(s, help_row, NULL);
}

struct section {
    char path[128];
};

/* Opens the YAML maps that lead to key, given the path that is open. */
static void example_row(void *arg, const struct bt_conf_row *r)
{
    struct section *open = arg;
    const char *leaf = strrchr(r->key, '.');
    size_t n = leaf == NULL ? 0 : (size_t)(leaf - r->key);
    if (strlen(open->path) != n || strncmp(open->path, r->key, n) != 0) {
        size_t from = 0;
        int indent = 0;
        while (from < n) {
            size_t to = from + strcspn(r->key + from, ".");
            if (to > n) {
                to = n;
            }
            bool shared = strncmp(open->path, r->key, to) == 0 &&
                          (open->path[to] == '.' || open->path[to] == '\0');
            if (!shared) {
                printf("%*s%.*s:\n", indent, "", (int)(to - from), r->key + from);
            }
            indent += 2;
            from = to + 1;
        }
        snprintf(open->path, sizeof(open->path), "%.*s", (int)n, r->key);
    }
    int indent = 0;
    for (const char *p = r->key; *p != '\0'; p++) {
        indent += *p == '.' ? 2 : 0;
    }
    printf("%*s# %s\n", indent, "", r->doc);
    const char *name = leaf == NULL ? r->key : leaf + 1;
    if (r->type == BT_CONF_LIST) {
        printf("%*s%s%s: [%s]\n", indent, "", r->required ? "" : "# ", name,
               r->def == NULL ? "" : r->def);
    } else {
        printf("%*s%s%s: %s\n", indent, "", r->required ? "" : "# ", name,
               r->def == NULL ? "" : r->def);
    }
}

void bt_conf_print_example(const struct bt_conf_schema *s)
{
    struct section open = {""};
    printf("# /etc/baton/%s.yaml: defaults are commented out.\n", s->daemon);
    bt_conf_each(s, example_row, &open);
}

static void docs_row(void *arg, const struct bt_conf_row *r)
{
    (void)arg;
    printf("| `%s` | %s", r->key, type_text(r));
    if (r->min != 0 || r->max != 0) {
        char min[40], max[40];
        bt_conf_bound_text(r, r->min, min, sizeof(min));
        bt_conf_bound_text(r, r->max, max, sizeof(max));
        printf(", %s to %s", min, max);
    }
    printf(" | %s%s%s | %s%s |\n", r->required || r->def == NULL ? "" : "`", default_text(r),
           r->required || r->def == NULL ? "" : "`", r->doc, r->reload ? " *(reload)*" : "");
}

void bt_conf_print_docs(const struct bt_conf_schema *s)
{
    printf("## baton-%s\n\n%s File: `/etc/baton/%s.yaml`.\n\n"
           "| key | type | default | meaning |\n|---|---|---|---|\n",
           s->daemon, s->summary, s->daemon);
    bt_conf_each(s, docs_row, NULL);
    printf("\n");
}
