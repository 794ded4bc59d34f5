/* Traces: the header traceparent, the environment, the sampler, the bounded queue. What a collector
 * gets is in tests/cluster/test_traces.py. */
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/log/log.h"
#include "common/trace/trace.h"

#define USER   "me:hush@" /* of an address, with a password */
#define ID     "4bf92f3577b34da6a3ce929d0e0e4736"
#define PARENT "00f067aa0ba902b7"

static const char *const variables[] = {
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_HEADERS",  "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TIMEOUT",  "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_TRACES_EXPORTER",        "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",     "OTEL_SDK_DISABLED"};

static struct bt_metrics *metrics;

static int clean(void **state)
{
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(variables); i++) {
        unsetenv(variables[i]);
    }
    metrics = bt_metrics_create();
    return 0;
}

static int end(void **state)
{
    (void)state;
    bt_metrics_destroy(metrics);
    return 0;
}

static void test_traceparent(void **state)
{
    static const struct {
        const char *text;
        int sampled; /* -1: not valid */
    } cases[] = {
        {"00-" ID "-" PARENT "-01", 1},
        {"00-" ID "-" PARENT "-00", 0},
        {"00-" ID "-" PARENT "-ff", 1},
        {"01-" ID "-" PARENT "-01-what comes later", 1},
        {"01-" ID "-" PARENT "-01", 1},
        {"00-" ID "-" PARENT "-01-more", -1},
        {"01-" ID "-" PARENT "-01more", -1},
        {"ff-" ID "-" PARENT "-01", -1},
        {"00-4BF92F3577B34DA6A3CE929D0E0E4736-" PARENT "-01", -1},
        {"00-00000000000000000000000000000000-" PARENT "-01", -1},
        {"00-" ID "-0000000000000000-01", -1},
        {"00-" ID "-" PARENT "-0", -1},
        {"00-" ID "-" PARENT "-", -1},
        {"00-" ID "-" PARENT, -1},
        {"00-" ID, -1},
        {"00_" ID "-" PARENT "-01", -1},
        {"0", -1},
        {"", -1},
        {" 00-" ID "-" PARENT "-01", -1},
        {"00-" ID "-" PARENT "-0g", -1},
    };
    (void)state;
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        struct bt_trace_context c = {0};
        bool ok = bt_traceparent_read(cases[i].text, &c);
        if (ok != (cases[i].sampled >= 0) || (ok && c.sampled != (cases[i].sampled == 1))) {
            fail_msg("%s", cases[i].text);
        }
        if (ok) {
            assert_true(c.has_parent && c.trace_id[0] == 0x4b && c.trace_id[15] == 0x36 &&
                        c.parent_id[1] == 0xf0 && c.parent_id[7] == 0xb7);
        }
    }
}

static struct bt_trace *create(bt_status_t want, char *err, size_t cap)
{
    struct bt_trace *t = NULL;
    assert_int_equal(bt_trace_create("c", "n", metrics, &t, err, cap), want);
    return t;
}

static void test_the_environment(void **state)
{
    static const struct {
        const char *name, *value, *said; /* said NULL: good */
    } cases[] = {
        {"OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://a", "http://"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT", "http://a b", "http://"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "127.0.0.1:4318", "http://"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT", "http://hush@a", "OTEL_EXPORTER_OTLP_HEADERS"},
        {"OTEL_EXPORTER_OTLP_HEADERS", "a=b, c-d=e%20f", NULL},
        {"OTEL_EXPORTER_OTLP_HEADERS", "a", "name=value"},
        {"OTEL_EXPORTER_OTLP_HEADERS", "a b=c", "name=value"},
        {"OTEL_EXPORTER_OTLP_HEADERS", "a=b%0ac", "name=value"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", NULL},
        {"OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf"},
        {"OTEL_EXPORTER_OTLP_TIMEOUT", "0", "milliseconds"},
        {"OTEL_BSP_SCHEDULE_DELAY", "soon", "milliseconds"},
        {"OTEL_BSP_SCHEDULE_DELAY", "99999999999999999999", "milliseconds"},
        {"OTEL_TRACES_EXPORTER", "zipkin", "otlp or none"},
        {"OTEL_TRACES_SAMPLER", "sometimes", "always_on"},
        {"OTEL_TRACES_SAMPLER_ARG", "2", NULL}, /* this sampler has none */
    };
    (void)state;
    char err[512];
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1", 1);
        setenv(cases[i].name, cases[i].value, 1);
        struct bt_trace *t =
            create(cases[i].said != NULL ? BT_ERR_CONFIG : BT_OK, err, sizeof(err));
        if (cases[i].said != NULL &&
            (strstr(err, cases[i].name) == NULL || strstr(err, cases[i].said) == NULL)) {
            fail_msg("%s: %s", cases[i].name, err);
        }
        assert_null(strstr(err, "hush"));
        bt_trace_destroy(t);
        unsetenv(cases[i].name);
        bt_metrics_destroy(metrics);
        metrics = bt_metrics_create();
    }
    setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1", 1);
    setenv("OTEL_TRACES_SAMPLER", "traceidratio", 1);
    setenv("OTEL_TRACES_SAMPLER_ARG", "1.5", 1);
    bt_trace_destroy(create(BT_ERR_CONFIG, err, sizeof(err)));
    assert_non_null(strstr(err, "0 to 1"));
    /* The value of a header is a secret. */
    bt_metrics_destroy(metrics);
    metrics = bt_metrics_create();
    unsetenv("OTEL_TRACES_SAMPLER");
    setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hush%0a", 1);
    bt_trace_destroy(create(BT_ERR_CONFIG, err, sizeof(err)));
    assert_null(strstr(err, "hush"));
}

/* An address may have a password: neither the log nor an error repeats it. */
static void test_secrets_of_an_address(void **state)
{
    char err[512], said[4096] = "";
    FILE *log = tmpfile();
    int was = dup(STDERR_FILENO);
    struct bt_log_settings quiet;
    (void)state;
    bt_log_settings_get(&quiet);
    bt_log_init("test", "n", BT_LOG_INFO, false);
    assert_true(log != NULL && was >= 0 && dup2(fileno(log), STDERR_FILENO) >= 0);
    setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1/in?token=hush", 1);
    bt_trace_destroy(create(BT_OK, err, sizeof(err)));
    assert_true(dup2(was, STDERR_FILENO) >= 0);
    bt_log_settings_set(&quiet);
    rewind(log);
    assert_true(fread(said, 1, sizeof(said) - 1, log) > 0);
    (void)fclose(log);
    close(was);
    assert_non_null(strstr(said, "endpoint=http://127.0.0.1:1/in "));
    assert_null(strstr(said, "hush"));
    static const char *const bad[] = {"http://" USER "127.0.0.1:1", "ftp://" USER "127.0.0.1",
                                      "ftp://127.0.0.1?token=hush"};
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        bt_metrics_destroy(metrics);
        metrics = bt_metrics_create();
        setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", bad[i], 1);
        bt_trace_destroy(create(BT_ERR_CONFIG, err, sizeof(err)));
        assert_null(strstr(err, "hush"));
        assert_non_null(strstr(err, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"));
    }
}

/* Of 1000 new traces, and of one whose client has decided. */
static void sampled(const char *sampler, const char *arg, uint32_t least, uint32_t most, bool yes,
                    bool no)
{
    char err[512];
    bt_metrics_destroy(metrics);
    metrics = bt_metrics_create();
    setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1", 1);
    setenv("OTEL_TRACES_SAMPLER", sampler, 1);
    setenv("OTEL_TRACES_SAMPLER_ARG", arg, 1);
    struct bt_trace *t = create(BT_OK, err, sizeof(err));
    struct bt_trace_context c;
    uint32_t n = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        bt_trace_begin(t, i % 2 != 0 ? NULL : "no traceparent", &c);
        assert_false(c.has_parent);
        n += c.sampled;
    }
    assert_true(n >= least && n <= most);
    bt_trace_begin(t, "00-" ID "-" PARENT "-01", &c);
    assert_true(c.sampled == yes && c.has_parent);
    bt_trace_begin(t, "00-" ID "-" PARENT "-00", &c);
    assert_true(c.sampled == no);
    bt_trace_destroy(t);
}

static void test_samplers(void **state)
{
    (void)state;
    sampled("parentbased_always_on", "", 1000, 1000, true, false);
    sampled("parentbased_always_off", "", 0, 0, true, false);
    sampled("always_on", "", 1000, 1000, true, true);
    sampled("always_off", "", 0, 0, false, false);
    sampled("parentbased_traceidratio", "0.5", 400, 600, true, false);
    sampled("traceidratio", "0", 0, 0, false, false);
    sampled("traceidratio", "1", 1000, 1000, true, true);
}

static void test_off(void **state)
{
    char err[512];
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        bt_metrics_destroy(metrics);
        clean(NULL);
        if (i > 0) {
            setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1", 1);
            setenv(i == 1 ? "OTEL_SDK_DISABLED" : "OTEL_TRACES_EXPORTER", i == 1 ? "true" : "none",
                   1);
        }
        struct bt_trace *t = create(BT_OK, err, sizeof(err));
        struct bt_trace_context c;
        bt_trace_begin(t, "00-" ID "-" PARENT "-01", &c);
        assert_false(c.sampled);
        bt_trace_destroy(t);
    }
}

static double counted(const char *result)
{
    struct bt_buf b;
    char line[100];
    bt_buf_init(&b);
    bt_metrics_render(metrics, &b);
    bt_buf_append(&b, "", 1);
    snprintf(line, sizeof(line), "baton_trace_spans_total{result=\"%s\"} ", result);
    const char *at = strstr((const char *)b.data, line);
    double v = at != NULL ? strtod(at + strlen(line), NULL) : -1;
    bt_buf_cleanup(&b);
    return v;
}

/* A collector that takes connections and answers nothing: spans beyond the queue are lost at once,
 * and the end does not wait for it. */
static void test_a_silent_collector(void **state)
{
    char err[512], url[64];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);
    (void)state;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&at, len) == 0 && listen(fd, 8) == 0 &&
                getsockname(fd, (struct sockaddr *)&at, &len) == 0);
    snprintf(url, sizeof(url), "http://127.0.0.1:%u", ntohs(at.sin_port));
    setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url, 1);
    setenv("OTEL_BSP_SCHEDULE_DELAY", "1", 1);
    struct bt_trace *t = create(BT_OK, err, sizeof(err));
    uint64_t begin = bt_mono_ns();
    for (uint32_t i = 0; i < 5000; i++) {
        struct bt_spans *s = bt_spans_create(2);
        for (uint32_t k = 0; k < 2; k++) {
            struct bt_span *p = bt_spans_add(s, "a", BT_SPAN_INTERNAL);
            for (uint32_t j = 0; j < BT_SPAN_ATTRS_MAX + 3; j++) {
                bt_span_text(p, "k", "v\xff\n");
            }
            assert_int_equal(p->n_lost_attrs, 3);
            assert_string_equal(p->attrs[0].text, "v??");
        }
        bt_trace_offer(t, s);
    }
    assert_true(bt_mono_ns() - begin < 5000000000ull);
    assert_true(counted("queue_full") == 10000 - 4096);
    assert_true(counted("sent") == 0);
    begin = bt_mono_ns();
    bt_trace_destroy(t);
    assert_true(bt_mono_ns() - begin < 5000000000ull);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_traceparent),
        cmocka_unit_test_setup_teardown(test_the_environment, clean, end),
        cmocka_unit_test_setup_teardown(test_secrets_of_an_address, clean, end),
        cmocka_unit_test_setup_teardown(test_samplers, clean, end),
        cmocka_unit_test_setup_teardown(test_off, clean, end),
        cmocka_unit_test_setup_teardown(test_a_silent_collector, clean, end),
    };
    bt_log_init("test", "trace", BT_LOG_ERROR, false);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
