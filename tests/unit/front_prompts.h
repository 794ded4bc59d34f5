/* What the tests of /v1/messages and /v1/responses share: prompts that are the same as those of a
 * chat body, and streams of events with names. */
#ifndef BT_TESTS_FRONT_PROMPTS_H
#define BT_TESTS_FRONT_PROMPTS_H

#include "tests/unit/front_fixture.h"

/* The prompt's text of the generation that a body begins. The caller frees it. */
static inline char *prompt_of(const char *path, const char *body)
{
    struct bt_buf text = {0};
    int fd = begin(path, body);
    assert_int_equal(
        bt_tokenizer_decode(tok, now->spec.prompt.ids, now->spec.prompt.n, false, &text), BT_OK);
    fail_now(500, "enough", 0);
    receive(fd);
    return bt_buf_take(&text);
}

/* A body of path and a body of /v1/chat/completions make the same prompt. */
static inline void same_prompt_as_chat(const char *path, const char *body, const char *chat)
{
    char *own = prompt_of(path, body), *others = prompt_of("/v1/chat/completions", chat);
    assert_string_equal(own, others);
    free(own);
    free(others);
}

/* The i-th event of ans.body; its name must be the data's type. */
static inline json_t *event(int i)
{
    char *p = ans.body, name[64] = "";
    for (int k = 0; k < i; k++) {
        p = strstr(p, "\n\n");
        assert_non_null(p);
        p += 2;
    }
    assert_int_equal(sscanf(p, "event: %63s\n", name), 1);
    char *data = strstr(p, "\ndata: "), *end = strstr(p, "\n\n");
    assert_non_null(end);
    assert_true(data < end);
    char *text = bt_sprintf("%.*s", (int)(end - data - 7), data + 7);
    json_t *j = parse(text);
    free(text);
    assert_string_equal(str_at(j, "type"), name);
    return j;
}

/* path NULL: only the type is compared. */
static inline void is_event(int i, const char *type, const char *path, const char *expected)
{
    json_t *j = event(i);
    assert_string_equal(str_at(j, "type"), type);
    if (path != NULL) {
        assert_string_equal(str_at(j, path), expected);
    }
    json_decref(j);
}

#endif
