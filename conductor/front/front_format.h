/* Within front/: OpenAI's formats of completions and chat. front_write.h writes the parts that may
 * be long: whole responses and echoed prompts. */
#ifndef BT_CONDUCTOR_FRONT_FORMAT_H
#define BT_CONDUCTOR_FRONT_FORMAT_H

#include "conductor/front/front_answer.h"

extern const struct bt_front_format bt_front_format_completions, bt_front_format_chat;
extern const struct bt_front_format bt_front_format_messages;  /* front_messages.c */
extern const struct bt_front_format bt_front_format_responses; /* front_responses.c */

/* An error of Anthropic's API. request_id NULL: left out. */
void bt_front_messages_error(const struct bt_front_error *e, const char *request_id,
                             struct bt_buf *out);

/* The id of a call, as a JSON string: unique among all answers. */
void bt_front_put_call_id(const char *prefix, const struct bt_front_answer *a,
                          const struct bt_front_item *item, struct bt_buf *out);

/* data: {...,"choices":[{"index":...,"text":" */
void bt_front_put_event_head(struct bt_front_answer *a, uint32_t choice, struct bt_buf *out);
/* ,"finish_reason":...,"stop_reason":... */
void bt_front_put_finish(const struct bt_front_choice *c, struct bt_buf *out);
/* "usage":{...} */
void bt_front_put_usage(const struct bt_front_answer *a, const struct bt_gen_usage *u,
                        struct bt_buf *out);
/* "id":"call_...","type":"function","function":{"name":...,"arguments":" */
void bt_front_put_call_head(const struct bt_front_answer *a, uint32_t choice, uint32_t call,
                            const char *name, size_t len, struct bt_buf *out);
/* The additional objects of any format, if the request has asked for them:
 * ,"timings":{...},"plan":{...} */
void bt_front_put_extras(const struct bt_front_answer *a, const struct bt_gen_usage *u,
                         struct bt_buf *out);

#endif
