/* batonctl: asks a conductor's Admin service and prints tables or JSON. Each command makes one
 * blocking call. Exit status: 0 ok, 1 failed (the message says what failed and what helps), 2
 * usage.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "conductor/ctl/ctl.h"
#include "conductor/ctl/help.h"
#include "conductor/ctl/watch.h"
#include "conductor/ctl/where.h"

#define LIMIT_DEFAULT 50

int bt_ctl_usage(const char *what, const char *arg)
{
    fprintf(stderr, "batonctl: %s%s%s\nTry 'batonctl --help'.\n", what, arg != NULL ? ": " : "",
            arg != NULL ? arg : "");
    return 2;
}

int bt_ctl_print_json(json_t *j)
{
    int rc = json_dumpf(j, stdout, JSON_INDENT(1) | JSON_PRESERVE_ORDER);
    putchar('\n');
    json_decref(j);
    return rc == 0 ? 0 : 1;
}

int bt_ctl_print_table(const struct bt_ctl *c, struct bt_ctl_table *t)
{
    const char *sort = c->opt[BT_CTL_SORT];
    int rc = 0;
    if (sort == NULL || bt_ctl_table_sort(t, sort)) {
        bt_ctl_table_print(t, stdout);
    } else {
        rc = bt_ctl_usage("--sort needs a column's title, as the table shows it", sort);
    }
    bt_ctl_table_cleanup(t);
    return rc;
}

/* ---- options ---- */

/* The option that arg names, as "--opt" or "--opt=value". NULL: there is no such option. *value_p:
 * the text behind the '=', or NULL. */
static const struct bt_ctl_option *find_option(const char *arg, const char **value_p)
{
    *value_p = NULL;
    if (strcmp(arg, "-o") == 0) {
        arg = "--output";
    }
    for (size_t i = 0; i < bt_ctl_n_options; i++) {
        size_t n = strlen(bt_ctl_options[i].name);
        if (strncmp(arg, bt_ctl_options[i].name, n) == 0 && (arg[n] == '\0' || arg[n] == '=')) {
            *value_p = arg[n] == '=' ? arg + n + 1 : NULL;
            return &bt_ctl_options[i];
        }
    }
    return NULL;
}

/* Takes the option at argv[*i]. 0, or the exit status. */
static int take_option(struct bt_ctl *c, int argc, char **argv, int *i)
{
    const char *value;
    const struct bt_ctl_option *o = find_option(argv[*i], &value);
    if (o == NULL) {
        return bt_ctl_usage("unknown option", argv[*i]);
    }
    if (o->value[0] == '\0') {
        if (value != NULL) {
            return bt_ctl_usage("this option takes no value", argv[*i]);
        }
        value = "";
    } else if (o->value[0] != '[' && value == NULL) {
        value = *i + 1 < argc ? argv[++*i] : NULL;
    } else if (o->value[0] == '[' && value == NULL) {
        value = "";
    }
    if (value == NULL || (value[0] == '\0' && o->value[0] != '\0' && o->value[0] != '[')) {
        char text[120];
        snprintf(text, sizeof(text), "%s needs %s", o->name, o->value);
        return bt_ctl_usage(text, NULL);
    }
    c->opt[o - bt_ctl_options] = value;
    return 0;
}

/* Reads the values that are not plain text. 0, or the exit status. */
static int check_options(struct bt_ctl *c)
{
    const char *v = c->opt[BT_CTL_ADDR];
    if (v != NULL) {
        if (strchr(v, ':') == NULL || strlen(v) >= sizeof(c->addr)) {
            return bt_ctl_usage("--addr needs HOST:PORT", v);
        }
        snprintf(c->addr, sizeof(c->addr), "%s", v);
    }
    v = c->opt[BT_CTL_OUTPUT];
    if (v != NULL && strcmp(v, "json") != 0 && strcmp(v, "table") != 0) {
        return bt_ctl_usage("-o needs json or table", v);
    }
    c->json = v != NULL && strcmp(v, "json") == 0;
    c->limit = LIMIT_DEFAULT;
    v = c->opt[BT_CTL_LIMIT];
    if (v != NULL) {
        char *end = NULL;
        unsigned long n = strtoul(v, &end, 10);
        if (v[0] < '0' || v[0] > '9' || *end != '\0' || n > 10000) {
            return bt_ctl_usage("--limit needs a number from 0 to 10000", v);
        }
        c->limit = (uint32_t)n;
    }
    v = c->opt[BT_CTL_WATCH];
    if (v != NULL && v[0] != '\0') {
        char *end = NULL;
        c->watch_s = strtod(v, &end);
        if (v[0] < '0' || v[0] > '9' || *end != '\0' ||
            !(c->watch_s >= 0.1 && c->watch_s <= 3600)) {
            return bt_ctl_usage("--watch needs seconds from 0.1 to 3600, as --watch=5", v);
        }
    } else if (v != NULL) {
        c->watch_s = 2;
    }
    return 0;
}

/* ---- commands ---- */

/* Checks that the arguments and options fit the command. Returns 0, or the exit status. */
static int check_command(const struct bt_ctl *c, const struct bt_ctl_command *k)
{
    bool last = c->opt[BT_CTL_LAST] != NULL;
    for (size_t i = 0; i < bt_ctl_n_options; i++) {
        if (c->opt[i] != NULL && !bt_ctl_takes(k, &bt_ctl_options[i])) {
            char text[120];
            snprintf(text, sizeof(text), "%s is not an option of this command",
                     bt_ctl_options[i].name);
            return bt_ctl_usage(text, k->name);
        }
    }
    if (c->arg != NULL && (k->arg == NULL || last)) {
        return bt_ctl_usage("this command takes no such argument", c->arg);
    }
    if (c->arg2 != NULL && k->arg2 == NULL) {
        return bt_ctl_usage("this command takes no such argument", c->arg2);
    }
    bool empty = c->arg == NULL || c->arg[0] == '\0'; /* "$ID" in a script that has no id */
    if (empty && k->arg != NULL && !last) {
        return bt_ctl_usage("this command needs an argument", k->arg);
    }
    if (c->arg2 == NULL && k->arg2 != NULL && k->arg2[0] != '[') {
        return bt_ctl_usage("this command needs a second argument", k->arg2);
    }
    return 0;
}

static int run(struct bt_ctl *c, const struct bt_ctl_command *k)
{
    if (k->run == bt_ctl_doctor || k->run == bt_ctl_debug || /* also without a conductor */
        k->run == bt_ctl_key) {
        return k->run(c);
    }
    if (!bt_ctl_find_conductor(c)) {
        return 1;
    }
    int rc = bt_ctl_watch(c, k);
    bt_tls_release(c->tls);
    free(c->tls_dir);
    if (c->authorization != NULL) {
        explicit_bzero(c->authorization, strlen(c->authorization));
        free(c->authorization);
    }
    return rc;
}

static int command(int argc, char **argv)
{
    struct bt_ctl c = {.watch_s = 0};
    bool help = false;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (strcmp(arg, "--version") == 0) {
            printf("batonctl %s\n", bt_version());
            return 0;
        }
        if (strcmp(arg, "-h") == 0 || strcmp(arg, "--help") == 0) {
            help = true;
        } else if (arg[0] == '-' && arg[1] != '\0') {
            int rc = take_option(&c, argc, argv, &i);
            if (rc != 0) {
                return rc;
            }
        } else if (c.command != NULL && c.arg2 != NULL) {
            return bt_ctl_usage("unexpected argument after the command and its arguments", arg);
        } else if (c.command != NULL && c.arg != NULL) {
            c.arg2 = arg;
        } else if (c.command != NULL) {
            c.arg = arg;
        } else {
            c.command = arg;
        }
    }
    if (c.command != NULL && strcmp(c.command, "help") == 0) {
        help = true;
        c.command = c.arg;
    }
    if (c.command == NULL) {
        bt_ctl_help(NULL, help ? stdout : stderr);
        return help ? 0 : 2;
    }
    const struct bt_ctl_command *k = bt_ctl_find_command(c.command);
    if (k == NULL) {
        return bt_ctl_usage("unknown command", c.command);
    }
    if (help) {
        bt_ctl_help(k, stdout);
        return 0;
    }
    int rc = check_options(&c);
    rc = rc == 0 ? check_command(&c, k) : rc;
    return rc == 0 ? run(&c, k) : rc;
}

int main(int argc, char **argv)
{
    return bt_end_of_output("batonctl", command(argc, argv));
}
