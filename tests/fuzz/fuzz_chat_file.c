/* libFuzzer: tokenizer_config.json, and behind a zero byte chat_template.jinja. Whatever they are,
 * loading gives a template that renders a conversation or says what is wrong, or an error in words.
 */
#include <stdlib.h>
#include <string.h>

#include "common/token/token.h"
#include "tests/fuzz/rig.h"

static const char context[] = "{\"add_generation_prompt\":true,\"messages\":["
                              "{\"role\":\"user\",\"content\":\"a\"}]}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct bt_template *t = NULL;
    char err[512] = "";
    rig_reset();
    size_t n = strnlen((const char *)data, size), behind = BT_MIN(n + 1, size);
    (void)rig_file("tokenizer_config.json", data, n);
    if (behind < size) {
        (void)rig_file("chat_template.jinja", data + behind, size - behind);
    } else {
        rig_no_file("chat_template.jinja");
    }
    bt_status_t st = bt_template_load(rig_dir(), &t, err, sizeof(err));
    if (st == BT_OK) {
        struct bt_buf out;
        bt_buf_init(&out);
        st = bt_template_render(t, context, &out, err, sizeof(err));
        BT_ASSERT(st == BT_OK || err[0] != '\0');
        bt_buf_cleanup(&out);
        bt_template_destroy(t);
    } else {
        BT_ASSERT(err[0] != '\0' && t == NULL);
    }
    return 0;
}
