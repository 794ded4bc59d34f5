/* libFuzzer: the chat-template interpreter. The input is a template, rendered over one
 * conversation: any answer but a crash, a leak, a hang or an error without words is right, and the
 * same twice. Build and run in the repository root: tests/fuzz/run template 60 */
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

static bt_status_t render(const struct bt_template *t, struct bt_buf *out)
{
    char err[512] = "";
    bt_buf_init(out);
    bt_status_t st = bt_template_render(t, context, out, err, sizeof(err));
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
        bt_status_t first = render(t, &a), again = render(t, &b);
        bool clock = strstr(source, "strftime_now") != NULL;
        BT_ASSERT(clock || (first == again && a.len == b.len &&
                            (a.len == 0 || memcmp(a.data, b.data, a.len) == 0)));
        bt_buf_cleanup(&a);
        bt_buf_cleanup(&b);
        bt_template_destroy(t);
    } else {
        BT_ASSERT(err[0] != '\0' && t == NULL);
    }
    free(source);
    return 0;
}
