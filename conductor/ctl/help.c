/* The tables of batonctl's commands and options, and the help texts made of them. */
#include "conductor/ctl/help.h"

#include <string.h>

#define WIDTH  80
#define INDENT 24 /* where the texts of commands and options begin */

const struct bt_ctl_command bt_ctl_commands[] = {
#define BT_CTL_COMMAND(name, run, arg, arg2, summary, details)                                     \
    {name, run, arg, arg2, summary, details},
#include "conductor/ctl/commands.def"
#undef BT_CTL_COMMAND
};
const size_t bt_ctl_n_commands = BT_ARRAY_LEN(bt_ctl_commands);

const struct bt_ctl_option bt_ctl_options[] = {
#define BT_CTL_OPTION(id, name, value, commands, text) {name, value, commands, text},
#include "conductor/ctl/options.def"
#undef BT_CTL_OPTION
};
const size_t bt_ctl_n_options = BT_ARRAY_LEN(bt_ctl_options);

const struct bt_ctl_command *bt_ctl_find_command(const char *name)
{
    for (size_t i = 0; i < bt_ctl_n_commands; i++) {
        if (strcmp(bt_ctl_commands[i].name, name) == 0) {
            return &bt_ctl_commands[i];
        }
    }
    return NULL;
}

bool bt_ctl_takes(const struct bt_ctl_command *k, const struct bt_ctl_option *o)
{
    char word[40];
    snprintf(word, sizeof(word), " %s ", k->name);
    return o->commands == NULL || strstr(o->commands, word) != NULL;
}

/* Prints text from the column `at` on, in lines that begin there. */
static void wrapped(FILE *f, const char *text, size_t at)
{
    size_t column = at;
    while (*text != '\0') {
        size_t n = strcspn(text, " ");
        if (column > at && column + 1 + n > WIDTH) {
            fprintf(f, "\n%*s", (int)at, "");
            column = at;
        } else if (column > at) {
            (void)fputc(' ', f);
            column++;
        }
        fprintf(f, "%.*s", (int)n, text);
        column += n;
        text += n + (text[n] == ' ');
    }
    (void)fputc('\n', f);
}

/* A term and its text, the text in its column. */
static void entry(FILE *f, const char *term, const char *text)
{
    size_t n = strlen(term);
    fprintf(f, "  %s", term);
    if (n + 4 > INDENT) {
        fprintf(f, "\n%*s", INDENT, "");
    } else {
        fprintf(f, "%*s", (int)(INDENT - 2 - n), "");
    }
    wrapped(f, text, INDENT);
}

static void option_entry(FILE *f, const struct bt_ctl_option *o)
{
    char term[80];
    snprintf(term, sizeof(term), "%s%s%s", o->name,
             o->value[0] != '\0' && o->value[0] != '[' ? " " : "", o->value);
    entry(f, term, o->text);
}

static void command_term(const struct bt_ctl_command *k, char *out, size_t cap)
{
    snprintf(out, cap, "%s%s%s%s%s", k->name, k->arg != NULL ? " " : "",
             k->arg != NULL ? k->arg : "", k->arg2 != NULL ? " " : "",
             k->arg2 != NULL ? k->arg2 : "");
}

void bt_ctl_help(const struct bt_ctl_command *k, FILE *f)
{
    char term[80];
    bool own = false;
    if (k == NULL) {
        fprintf(f, "usage: batonctl COMMAND [ARGUMENTS] [OPTIONS]\n\nCommands:\n");
        for (size_t i = 0; i < bt_ctl_n_commands; i++) {
            command_term(&bt_ctl_commands[i], term, sizeof(term));
            entry(f, term, bt_ctl_commands[i].summary);
        }
        entry(f, "help [COMMAND]", "what a command does, and its options");
    } else {
        command_term(k, term, sizeof(term));
        fprintf(f, "usage: batonctl %s [OPTIONS]\n\n", term);
        wrapped(f, k->summary, 0);
        if (k->details != NULL) {
            (void)fputc('\n', f);
            wrapped(f, k->details, 0);
        }
    }
    for (size_t i = 0; k != NULL && i < bt_ctl_n_options; i++) {
        const struct bt_ctl_option *o = &bt_ctl_options[i];
        if (o->commands != NULL && bt_ctl_takes(k, o)) {
            fputs(own ? "" : "\nOptions of this command:\n", f);
            option_entry(f, o);
            own = true;
        }
    }
    fprintf(f, "\nOptions of every command:\n");
    for (size_t i = 0; i < bt_ctl_n_options; i++) {
        if (bt_ctl_options[i].commands == NULL) {
            option_entry(f, &bt_ctl_options[i]);
        }
    }
    entry(f, "-h, --help; --version", "of batonctl, or of a command");
    fprintf(f, "\nExit status: 0 ok, 1 failed, 2 usage.\n");
}
