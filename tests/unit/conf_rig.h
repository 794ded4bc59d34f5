/* A configuration file in a folder of its own, and what the code that reads it writes to stderr.
 * Include after cmocka.h. */
#ifndef BT_TESTS_CONF_RIG_H
#define BT_TESTS_CONF_RIG_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char dir[] = "/tmp/baton-test-conf-XXXXXX", path[64], err_path[64];
static char err[8192]; /* what was written between the last rig_listen and rig_heard */
static int rig_stdout = -1, rig_stderr = -1;

/* setup and teardown of the group */
static int rig_setup(void **state)
{
    (void)state;
    if (mkdtemp(dir) == NULL) {
        return -1;
    }
    snprintf(path, sizeof(path), "%s/c.yaml", dir);
    snprintf(err_path, sizeof(err_path), "%s/err", dir);
    return 0;
}

static int rig_teardown(void **state)
{
    (void)state;
    unlink(path);
    unlink(err_path);
    return rmdir(dir);
}

static void write_file(const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

/* From here on stderr comes into err, and stdout goes nowhere: it is no line of the test's
 * protocol. */
static void rig_listen(void)
{
    fflush(stdout);
    fflush(stderr);
    rig_stdout = dup(STDOUT_FILENO);
    rig_stderr = dup(STDERR_FILENO);
    assert_non_null(freopen(err_path, "w", stderr));
    int nowhere = open("/dev/null", O_WRONLY);
    assert_int_equal(dup2(nowhere, STDOUT_FILENO), STDOUT_FILENO);
    close(nowhere);
}

static void rig_heard(void)
{
    fflush(stdout);
    fflush(stderr);
    dup2(rig_stdout, STDOUT_FILENO);
    dup2(rig_stderr, STDERR_FILENO);
    close(rig_stdout);
    close(rig_stderr);
    FILE *f = fopen(err_path, "r");
    assert_non_null(f);
    size_t n = fread(err, 1, sizeof(err) - 1, f);
    err[n] = '\0';
    fclose(f);
}

#endif
