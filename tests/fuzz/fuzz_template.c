/* libFuzzer: the chat-template interpreter. The input is a template, and behind a zero byte what a
 * client adds to the context (an object of JSON, or its bytes as the variable x). It is rendered
 * over one conversation: any answer but a crash, a leak, a hang or an error without words is right,
 * and the same twice. A render that is stopped says so. Build and run in the repository root:
 * tests/fuzz/run template 60 */
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/token/token.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char context[] =
    "{\"bos_token\":\"<s>\",\"eos_token\":\"</"
    "s>\",\"add_generation_prompt\":true,\"n\":7,\"f\":2.5,"
    "\"s\":\"Hello W\\u00f6rld\",\"l\":[3,1,2],\"d\":{\"b\":1,\"a\":{\"x\":[1,null]}},"
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}],"
    "\"messages\":["
    "{\"role\":\"system\",\"content\":\" be brief \"},{\"role\":\"user\",\"content\":\"a\\n\"},"
    "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"abcdefgh9\",\"function\":"
    "{\"name\":\"f\",\"arguments\":{\"k\":\"v\"}}}]},{\"role\":\"tool\",\"content\":\"{}\"},"
    "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]}]}";

#define STEPS 300000 /* of a render: enough for every operation, and ~10 ms */

static bool stop_later(void *arg)
{
    int *left = arg;
    return (*left)-- <= 0;
}

/* The conversation and what the client adds. */
static json_t *make_context(const uint8_t *more, size_t size)
{
    json_error_t je;
    json_t *c = json_loads(context, 0, &je);
    json_t *kwargs = json_loadb((const char *)more, size, JSON_ALLOW_NUL, &je);
    BT_ASSERT(c != NULL);
    if (json_is_object(kwargs)) {
        json_object_update_missing(c, kwargs);
        json_object_set(c, "x", kwargs);
    } else {
        json_t *text = json_stringn((const char *)more, size); /* NULL: no UTF-8 */
        json_object_set_new(c, "x", text != NULL ? text : json_integer((json_int_t)size));
    }
    json_decref(kwargs);
    return c;
}

static bt_status_t render(const struct bt_template *t, const json_t *c, int looks,
                          struct bt_buf *out)
{
    char err[512] = "";
    const struct bt_token_watch watch = {stop_later, &looks};
    bt_buf_init(out);
    bt_status_t st = bt_template_render_object(t, c, STEPS, &watch, out, err, sizeof(err));
    BT_ASSERT(st == BT_OK || st == BT_ERR_INVALID || st == BT_ERR_EXHAUSTED ||
              st == BT_ERR_CANCELLED);
    BT_ASSERT(st == BT_OK || (err[0] != '\0' && out->len == 0));
    return st;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *source = bt_malloc(size + 1), err[512] = "";
    memcpy(source, data, size);
    source[size] = '\0';
    struct bt_template *t = NULL;
    if (bt_template_compile(source, &t, err, sizeof(err)) == BT_OK) {
        struct bt_buf a, b;
        size_t n = strlen(source);
        json_t *c = make_context(data + BT_MIN(n + 1, size), size - BT_MIN(n + 1, size));
        bt_status_t first = render(t, c, 1 << 30, &a), again = render(t, c, 1 << 30, &b);
        bool clock = strstr(source, "strftime_now") != NULL;
        BT_ASSERT(clock || (first == again && a.len == b.len &&
                            (a.len == 0 || memcmp(a.data, b.data, a.len) == 0)));
        bt_buf_cleanup(&b);
        again = render(t, c, (int)(size % 8), &b);
        BT_ASSERT(clock || again == first || again == BT_ERR_CANCELLED);
        bt_buf_cleanup(&a);
        bt_buf_cleanup(&b);
        json_decref(c);
        bt_template_destroy(t);
    } else {
        BT_ASSERT(err[0] != '\0' && t == NULL);
    }
    free(source);
    return 0;
}
