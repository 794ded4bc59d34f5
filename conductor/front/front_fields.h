/* Within front/: every field that a request body may have, and what the server does with it. A
 * field that no table names is refused, so that a spelling mistake never changes a result silently.
 * Pure. */
#ifndef BT_CONDUCTOR_FRONT_FIELDS_H
#define BT_CONDUCTOR_FRONT_FIELDS_H

#include "conductor/front/front_json.h"

/* Kinds of JSON objects in requests; bits, because many fields belong to several. */
enum bt_front_object {
    FRONT_COMPLETION = 1,
    FRONT_CHAT = 2,
    FRONT_TOKENIZE = 4,
    FRONT_DETOKENIZE = 8,
    FRONT_MESSAGE = 16,          /* messages[i] */
    FRONT_PART = 32,             /* messages[i].content[k] */
    FRONT_STREAM_OPTIONS = 64,   /* stream_options */
    FRONT_RESPONSE_FORMAT = 128, /* response_format */
    FRONT_TOOL = 1 << 8,         /* tools[i] */
    FRONT_FUNCTION = 1 << 9,     /* tools[i].function */
    FRONT_TOOL_CALL = 1 << 29,   /* messages[i].tool_calls[k] */
    FRONT_CALLED = 1 << 30,      /* messages[i].tool_calls[k].function */
    FRONT_JSON_SCHEMA = 1ull << 32, /* response_format.json_schema */
    FRONT_STRUCTURED = 1ull << 33,  /* structured_outputs */
    /* OpenAI's Responses */
    FRONT_RESPONSES = 1 << 10,
    FRONT_RESPONSES_MESSAGE = 1 << 11,   /* input[i] */
    FRONT_RESPONSES_CALL = 1 << 12,      /* input[i], function_call */
    FRONT_RESPONSES_OUTPUT = 1 << 13,    /* input[i], function_call_output */
    FRONT_RESPONSES_REASONING = 1 << 14, /* input[i], reasoning */
    FRONT_RESPONSES_PART = 1 << 15,      /* input[i].content[k] */
    FRONT_RESPONSES_TOOL = 1 << 16,      /* tools[i] */
    FRONT_RESPONSES_CHOICE = 1 << 17,    /* tool_choice */
    FRONT_RESPONSES_TEXT = 1 << 18,      /* text */
    FRONT_RESPONSES_FORMAT = 1 << 19,    /* text.format, json_schema */
    FRONT_RESPONSES_EFFORT = 1 << 28,    /* reasoning */
    /* Anthropic's API */
    FRONT_MESSAGES = 1 << 20,
    FRONT_MESSAGES_COUNT = 1 << 21,  /* count_tokens */
    FRONT_MESSAGES_TURN = 1 << 22,   /* messages[i] */
    FRONT_MESSAGES_BLOCK = 1 << 23,  /* messages[i].content[k], system[k] */
    FRONT_MESSAGES_TOOL = 1 << 24,   /* tools[i] */
    FRONT_MESSAGES_CHOICE = 1 << 25, /* tool_choice */
    FRONT_MESSAGES_THINKING = 1 << 26,
    FRONT_MESSAGES_OUTPUT = 1 << 27 /* output_config */
};

/* True if the object has only known fields and sets no unsupported one. kinds: bits of enum
 * bt_front_object, mostly one. prefix: what stands before a field's name in errors, e.g.
 * "messages[2]."; "" for the body itself. */
bool bt_front_fields_check(const json_t *object, unsigned kinds, const char *prefix,
                           struct bt_front_error *e);

#endif
