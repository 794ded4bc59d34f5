/* The front before browsers: pages of other origins, and those that are not allowed. */
#include "tests/unit/front_fixture.h"

static int setup_listed(void **state)
{
    allowed_origins = "http://localhost:3000, https://a.example";
    int rc = setup(state);
    allowed_origins = "*";
    return rc;
}

static void test_other_origins(void **state)
{
    (void)state;
    static const char pre[] = "Origin: https://chat.example\r\n"
                              "Access-Control-Request-Method: POST\r\n"
                              "Access-Control-Request-Headers: authorization, content-type\r\n";
    receive(send_raw("OPTIONS", "/v1/chat/completions", pre, "", 0));
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "Access-Control-Allow-Origin: *"));
    assert_non_null(strstr(ans.head, "Access-Control-Allow-Methods: POST"));
    assert_non_null(strstr(ans.head, "Access-Control-Allow-Headers: authorization, content-type"));
    receive(send_raw("GET", "/v1/models", "Origin: https://chat.example\r\n", "", 0));
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "Access-Control-Allow-Origin: *"));
    receive(send_raw("GET", "/nowhere", "Origin: https://chat.example\r\n", "", 0));
    assert_int_equal(ans.status, 404); /* the page can read what is wrong */
    assert_non_null(strstr(ans.head, "Access-Control-Allow-Origin: *"));
    receive(send_raw("GET", "/v1/models", "", "", 0));
    assert_null(strstr(ans.head, "Access-Control"));
    receive(send_raw("OPTIONS", "/v1/models", "", "", 0)); /* no question of a browser's */
    assert_int_equal(ans.status, 405);
}

static void test_listed_origins(void **state)
{
    (void)state;
    receive(send_raw("GET", "/v1/models", "Origin: https://a.example\r\n", "", 0));
    assert_int_equal(ans.status, 200);
    assert_non_null(strstr(ans.head, "Access-Control-Allow-Origin: https://a.example"));
    assert_non_null(strstr(ans.head, "Vary: Origin"));
    static const char *const others[] = {"https://b.example", "https://a.example:81", "null",
                                         "https://a.exampl", "https://a.example.org"};
    for (size_t i = 0; i < BT_ARRAY_LEN(others); i++) {
        char headers[200];
        snprintf(headers, sizeof(headers), "Origin: %s\r\nAccess-Control-Request-Method: GET\r\n",
                 others[i]);
        receive(send_raw("OPTIONS", "/v1/models", headers, "", 0));
        assert_int_equal(ans.status, 405);
        assert_null(strstr(ans.head, "Access-Control-Allow"));
        assert_non_null(strstr(ans.head, "Vary: Origin"));
    }
}

static void test_bad_origins(void **state)
{
    (void)state;
    static const char *const bad[] = {"chat.example",       "https://",
                                      "https://a.example/", "https://a.example, b",
                                      "https://*.example",  "://a"};
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        char err[512] = "";
        struct bt_front *other = NULL;
        struct bt_front_config conf = {
            .model_path = MODEL, .model = &model, .allowed_origins = bad[i]};
        bt_http_options_default(&conf.http);
        conf.http.listen = "127.0.0.1:0";
        struct bt_metrics *m = bt_metrics_create();
        struct bt_front_parts parts = {.loop = loop, .tok = tok, .metrics = m};
        assert_int_equal(bt_front_create(&parts, &conf, &other, NULL, err, sizeof(err)),
                         BT_ERR_CONFIG);
        bt_metrics_destroy(m);
        assert_non_null(strstr(err, "allowed_origins"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_other_origins, setup, teardown),
        cmocka_unit_test_setup_teardown(test_listed_origins, setup_listed, teardown),
        cmocka_unit_test_setup_teardown(test_bad_origins, setup, teardown),
    };
    return cmocka_run_group_tests(tests, load_model, unload_model);
}
