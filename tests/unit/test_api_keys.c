/* API keys as a text (common/keys): what a line may have, what is refused and how it is named, who
 * is found, and when a key counts no more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/keys/keys.h"

static struct bt_keys *keys;

static bt_status_t parse(const char *text, char err[300])
{
    size_t n = strlen(text);
    char *copy = bt_malloc(n + 1);
    memcpy(copy, text, n + 1);
    bt_keys_destroy(keys);
    keys = NULL;
    bt_status_t st = bt_keys_parse(copy, n, &keys, err, 300);
    for (size_t i = 0; i < n; i++) { /* nothing of a key stays in the text */
        assert_true(copy[i] == 0);
    }
    free(copy);
    return st;
}

static void good(const char *text)
{
    char err[300] = "";
    if (parse(text, err) != BT_OK) {
        fail_msg("%s: %s", text, err);
    }
}

static void refused(const char *text, const char *says)
{
    char err[300] = "";
    assert_int_equal(parse(text, err), BT_ERR_INVALID);
    if (strstr(err, says) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err, says);
    }
}

static const struct bt_key *find(const char *secret)
{
    return bt_keys_find(keys, secret, strlen(secret));
}

#define DIGEST_OF_ABC "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

static int teardown(void **state)
{
    (void)state;
    bt_keys_destroy(keys);
    keys = NULL;
    return 0;
}

static void a_digest_stands_for_its_key(void **state)
{
    (void)state;
    good(DIGEST_OF_ABC " id=ci scopes=metrics,admin tenant=acme rps=5\n# sk\nplain\n");
    assert_int_equal(keys->n, 2);
    const struct bt_key *k = find("abc");
    assert_non_null(k);
    assert_string_equal(k->id, "ci");
    assert_string_equal(k->tenant, "acme");
    assert_int_equal(k->scopes, BT_KEYS_METRICS | BT_KEYS_ADMIN);
    assert_true(k->terms.requests_per_s == 5 && !k->plain && k->line == 1);
    /* Who has read the file cannot use it as a key. */
    assert_null(find(DIGEST_OF_ABC));
    assert_null(find(DIGEST_OF_ABC + 7));
    assert_null(find("ab"));
    assert_null(find(""));
    /* A line without words: may infer, and has names that are not the key. */
    k = find("plain");
    assert_non_null(k);
    assert_true(k->plain && k->line == 3 && k->scopes == BT_KEYS_INFERENCE);
    assert_int_equal(strlen(k->id), 12);
    assert_int_equal(strlen(k->tenant), 32);
    assert_int_equal(strncmp(k->id, k->tenant, 12), 0);
    assert_null(strstr(k->tenant, "plain"));
}

static void a_key_ends(void **state)
{
    (void)state;
    good("a expires=2027-01-31\nb expires=2027-01-31T12:30:01Z\nc revoked=2026-05-01\nd\n");
    uint64_t day = 1801353600; /* 2027-01-31 */
    assert_int_equal(bt_key_state(find("a"), day - 1), BT_KEY_VALID);
    assert_int_equal(bt_key_state(find("a"), day), BT_KEY_EXPIRED);
    assert_int_equal(bt_key_state(find("b"), day + 45000), BT_KEY_VALID);
    assert_int_equal(bt_key_state(find("b"), day + 45001), BT_KEY_EXPIRED);
    assert_int_equal(bt_key_state(find("c"), 1), BT_KEY_REVOKED);
    assert_int_equal(bt_key_state(find("d"), UINT64_MAX), BT_KEY_VALID);
    char text[32];
    bt_keys_time_put(day + 45001, text);
    assert_string_equal(text, "2027-01-31T12:30:01Z");
}

static void mistakes_are_named(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"a\nsha256:12 id=x\n", "2: sha256: is not followed by 64 hexadecimal digits"},
        {"a scopes=\n", "1: scopes=: give one or more of inference, metrics, admin"},
        {"a scopes=inference,root\n", "1: scopes=inference,root"},
        {"a scopes=admin,\n", "1: scopes=admin,"},
        {"a scopes=admin scopes=metrics\n", "scopes= occurs twice"},
        {"a id=x id=y\n", "id= occurs twice"},
        {"a id=-\n", "id=-: give a name"},
        {"a id=x\nb id=x\n", "2: two keys have the id x"},
        {"a expires=tomorrow\n", "expires=tomorrow: give a time in UTC"},
        {"a expires=2027-02-30\n", "expires=2027-02-30"},
        {"a expires=2027-01-31T25:00:00Z\n", "expires=2027-01-31T25"},
        {"a expires=2027-01-31T12:00:00+01:00\n", "expires=2027"},
        {"a expires=2027-01-31 expires=2027-01-31\n", "expires= occurs twice"},
        {"abc\n" DIGEST_OF_ABC " id=other\n", "2: this key is listed twice"},
        {"a tenant=t\nb tenant=t rps=2\n", "2: two keys of tenant t have limits"},
        {"a rps=0\n", "rps=0: give a number"},
        {"a speed=3\n", "'speed=3' is not one of tenant="},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        refused(bad[i].text, bad[i].says);
    }
    good("\xef\xbb\xbf"
         "a\r\nb"); /* an editor's mark, another editor's line ends, no last one */
    assert_non_null(find("a"));
    assert_non_null(find("b"));
    good("");
    assert_int_equal(keys->n, 0);
}

static void there_is_a_limit(void **state)
{
    (void)state;
    struct bt_buf text;
    char err[300] = "";
    bt_buf_init(&text);
    for (int i = 0; i < BT_KEYS_MAX; i++) {
        bt_buf_printf(&text, "key%d\n", i);
    }
    assert_int_equal(parse(text.data, err), BT_OK);
    bt_buf_puts(&text, "one-more\n");
    refused(text.data, "10001: there are more than 10000 keys");
    bt_buf_cleanup(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_digest_stands_for_its_key, teardown),
        cmocka_unit_test_teardown(a_key_ends, teardown),
        cmocka_unit_test_teardown(mistakes_are_named, teardown),
        cmocka_unit_test_teardown(there_is_a_limit, teardown),
    };
    return cmocka_run_group_tests_name("api_keys", tests, NULL, NULL);
}
