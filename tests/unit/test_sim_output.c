/* conductor/sim/output: files that baton-sim writes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "conductor/sim/output.h"

#define LONG (1u << 20) /* stdio writes so much at once, and has nothing left for the end */

static void test_full_disk(void **state)
{
    (void)state;
    struct bt_sim_output o;
    char err[256] = "", *text = bt_calloc(1, LONG);
    assert_int_equal(bt_sim_output_open(&o, NULL, "/dev/full", err, sizeof(err)), BT_OK);
    assert_int_equal(fwrite(text, 1, LONG, o.f), LONG);
    assert_int_equal(bt_sim_output_close(&o, err, sizeof(err)), BT_ERR_INVALID);
    assert_non_null(strstr(err, "/dev/full: No space left on device"));
    assert_non_null(strstr(err, "free some space"));
    free(text);
}

static void test_whole_file(void **state)
{
    (void)state;
    struct bt_sim_output o;
    char err[256] = "", folder[] = "/tmp/baton-sim-output-XXXXXX", path[64], got[16] = "";
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/a.csv", folder);
    assert_int_equal(bt_sim_output_open(&o, folder, "a.csv", err, sizeof(err)), BT_OK);
    fprintf(o.f, "1,%d\n", 2);
    assert_int_equal(bt_sim_output_close(&o, err, sizeof(err)), BT_OK);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_int_equal(fread(got, 1, sizeof(got), f), 4);
    assert_string_equal(got, "1,2\n");
    fclose(f);
    unlink(path);
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_whole_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
