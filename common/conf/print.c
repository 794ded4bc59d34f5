/* Help, example file and docs/CONFIG.md, all printed from the table. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "common/base/buf.h"
#include "common/conf/conf_priv.h"

static const char *default_text(const struct bt_conf_row *r)
{
    return r->required ? "required" : r->def == NULL ? "none" : r->def;
}

/* Prints text in lines of at most `columns`. The first line begins with `first`, the others with
 * `rest`. */
static void print_lines(size_t columns, const char *first, const char *rest, const char *text)
{
    const char *lead = first;
    while (*text != '\0') {
        size_t room = columns - strlen(lead), n = strlen(text);
        if (n > room) {
            for (n = room; n > 0 && text[n] != ' '; n--) {
            }
            n = n == 0 ? strcspn(text, " ") : n; /* a word longer than a line is not split */
        }
        printf("%s%.*s\n", lead, (int)n, text);
        text += n;
        text += strspn(text, " ");
        lead = rest;
    }
}

static void print_wrapped(const char *first, const char *rest, const char *text)
{
    print_lines(80, first, rest, text);
}

static void help_row(void *arg, const struct bt_conf_row *r)
{
    (void)arg;
    if (r->hidden) {
        return;
    }
    printf("  %s (%s)\n", r->key, default_text(r));
    print_wrapped("      ", "      ", r->doc);
    if (r->when != NULL) {
        print_wrapped("      Change it: ", "      ", r->when);
    }
}

/* Prints the names of the keys that most operators set, with `between` between them. */
static void print_main_keys(const struct bt_conf_schema *s, const char *between)
{
    for (size_t i = 0; s->main_keys != NULL && s->main_keys[i] != NULL; i++) {
        printf("%s%s", i == 0 ? "" : between, s->main_keys[i]);
    }
}

void bt_conf_print_help(const struct bt_conf_schema *s)
{
    char name[64];
    snprintf(name, sizeof(name), "baton-%s: ", s->daemon);
    print_wrapped(name, "  ", s->summary);
    printf("\nusage: baton-%s [--config FILE] [--check] [--set KEY=VALUE]...\n\n"
           "  --config FILE      read FILE instead of /etc/baton/%s.yaml\n"
           "  --set KEY=VALUE    set one key; wins over the file and the environment\n"
           "  --check            check the configuration, and the addresses, directories and\n"
           "                     model that it names on this host, and exit (0 good, 2 not)\n"
           "  --check=values     check the values only\n"
           "  --print-values     print every key with its value, as the file, the\n"
           "                     environment and --set make it, and exit\n"
           "  --print-example    print a commented configuration file and exit\n"
           "  --version, --help\n\n"
           "Every key can also be set by the environment: kv.block_tokens is\n"
           "BATON_KV_BLOCK_TOKENS.\n\n",
           s->daemon, s->daemon);
    if (s->main_keys != NULL) {
        printf("Most operators set these keys first:\n  ");
        print_main_keys(s, "\n  ");
        printf("\n\n");
    }
    printf("Keys (default):\n");
    bt_conf_each(s, help_row, NULL);
}

/* ---- the example: one YAML map, each section once, in the order of its first key ---- */

#define ROWS_MAX 256

struct rows {
    const struct bt_conf_row *row[ROWS_MAX];
    size_t n;
};

static void collect_row(void *arg, const struct bt_conf_row *r)
{
    struct rows *all = arg;
    if (!r->hidden) {
        BT_ASSERT(all->n < ROWS_MAX);
        all->row[all->n++] = r;
    }
}

static void example_row(const struct bt_conf_row *r, const char *name, int indent)
{
    char lead[32];
    const char *def = r->def == NULL ? "" : r->def;
    snprintf(lead, sizeof(lead), "%*s# ", indent, "");
    print_wrapped(lead, lead, r->doc);
    printf(r->type == BT_CONF_LIST ? "%*s%s%s: [%s]\n" : "%*s%s%s: %s\n", indent, "",
           r->required ? "" : "# ", name, def);
}

/* Prints the keys and sections below prefix ("", or "kvstore.ssd."). */
static void example_section(const struct rows *all, const char *prefix, int indent)
{
    size_t len = strlen(prefix);
    for (size_t i = 0; i < all->n; i++) {
        const char *key = all->row[i]->key;
        if (strncmp(key, prefix, len) != 0) {
            continue;
        }
        size_t to = strcspn(key + len, ".");
        if (key[len + to] == '\0') {
            example_row(all->row[i], key + len, indent);
            continue;
        }
        bool first = true; /* the first key of its section */
        for (size_t k = 0; k < i; k++) {
            first = first && strncmp(all->row[k]->key, key, len + to + 1) != 0;
        }
        if (first) {
            char below[128];
            snprintf(below, sizeof(below), "%.*s", (int)(len + to + 1), key);
            printf("%*s%.*s:\n", indent, "", (int)to, key + len);
            example_section(all, below, indent + 2);
        }
    }
}

void bt_conf_print_example(const struct bt_conf_schema *s)
{
    struct rows all = {.n = 0};
    printf("# /etc/baton/%s.yaml: defaults are commented out.\n", s->daemon);
    bt_conf_each(s, collect_row, &all);
    example_section(&all, "", 0);
}

/* ---- --print-values ---- */

struct values {
    const char *conf;
};

static void value_row(void *arg, const struct bt_conf_row *r)
{
    const struct values *v = arg;
    const void *at = v->conf + r->offset;
    char number[40] = "";
    if (r->hidden) {
        return;
    }
    printf("%s: ", r->key);
    switch (r->type) {
    case BT_CONF_STR:
    case BT_CONF_ADDR: printf("%s", *(char *const *)at != NULL ? *(char *const *)at : ""); break;
    case BT_CONF_BOOL: printf("%s", *(const bool *)at ? "true" : "false"); break;
    case BT_CONF_INT:
        bt_conf_bound_text(r, (double)*(const int64_t *)at, number, sizeof(number));
        break;
    case BT_CONF_SIZE:
    case BT_CONF_MS:
        bt_conf_bound_text(r, (double)*(const uint64_t *)at, number, sizeof(number));
        break;
    case BT_CONF_FLOAT: bt_conf_bound_text(r, *(const double *)at, number, sizeof(number)); break;
    case BT_CONF_LIST:
        for (char *const *i = *(char **const *)at; i != NULL && *i != NULL; i++) {
            printf("%s%s", i == *(char **const *)at ? "" : ",", *i);
        }
        break;
    default: break;
    }
    printf("%s\n", number);
}

void bt_conf_print_values(const struct bt_conf_schema *s, const void *conf)
{
    struct values v = {.conf = conf};
    bt_conf_each(s, value_row, &v);
}

/* One entry of docs/CONFIG.md: key, default, limits, meaning, and when to change it. */
static void docs_row(const struct bt_conf_row *r)
{
    struct bt_buf b;
    bt_buf_init(&b);
    const char *quote = r->required || r->def == NULL ? "" : "`";
    bt_buf_printf(&b, "**`%s`** (%s%s%s", r->key, quote, default_text(r), quote);
    if (r->min != 0 || r->max != 0) {
        char min[40], max[40];
        bt_conf_bound_text(r, r->min, min, sizeof(min));
        bt_conf_bound_text(r, r->max, max, sizeof(max));
        bt_buf_printf(&b, "; %s to %s", min, max);
    } else if (r->type == BT_CONF_LIST) {
        bt_buf_printf(&b, "; a list");
    }
    bt_buf_printf(&b, "%s): %s", r->reload ? "; reload" : "", r->doc);
    if (r->when != NULL && strchr("wto", r->when[0]) != NULL) { /* when, together, to, only */
        bt_buf_printf(&b, " _Change it %s_", r->when);
    } else if (r->when != NULL) { /* set, raise, lower, always */
        bt_buf_printf(&b, " _%c%s_", toupper(r->when[0]), r->when + 1);
    }
    print_lines(120, "- ", "  ", b.data);
    bt_buf_cleanup(&b);
}

void bt_conf_print_docs(const struct bt_conf_schema *s, bool common)
{
    if (common) {
        printf("## All daemons\n\nEvery daemon has these keys. Most of them must be the same in "
               "the whole cluster.\n\n");
    } else {
        printf("## baton-%s\n\n%s File: `/etc/baton/%s.yaml`.\n\nMost operators set these "
               "first:\n`",
               s->daemon, s->summary, s->daemon);
        print_main_keys(s, "`, `");
        printf("`.\n\n");
    }
    for (size_t t = 0; s->tables[t] != NULL; t++) {
        for (size_t i = 0; i < s->table_lens[t]; i++) {
            bool of_all = s->tables[t] == bt_conf_common_rows;
            if (of_all == common && !s->tables[t][i].hidden) {
                docs_row(&s->tables[t][i]);
            }
        }
    }
    printf("\n");
}
