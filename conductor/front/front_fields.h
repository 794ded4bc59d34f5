/* Within front/: every field that a request body may have, and what the server does with it. A
 * field that is in no table is refused, so that a spelling mistake never changes a result silently.
 * Pure. */
#ifndef BT_CONDUCTOR_FRONT_FIELDS_H
#define BT_CONDUCTOR_FRONT_FIELDS_H

#include "conductor/front/front_json.h"

/* Kinds of JSON objects in requests; bits of a uint64_t, because many fields belong to several. */
enum bt_front_object {
    FRONT_COMPLETION = 1ull << 0,
    FRONT_CHAT = 1ull << 1,
    FRONT_TOKENIZE = 1ull << 2,
    FRONT_DETOKENIZE = 1ull << 3,
    FRONT_MESSAGE = 1ull << 4,         /* messages[i] */
    FRONT_PART = 1ull << 5,            /* messages[i].content[k] */
    FRONT_STREAM_OPTIONS = 1ull << 6,  /* stream_options */
    FRONT_RESPONSE_FORMAT = 1ull << 7, /* response_format */
    FRONT_TOOL = 1ull << 8,            /* tools[i] */
    FRONT_FUNCTION = 1ull << 9,        /* tools[i].function */
    FRONT_TOOL_CALL = 1ull << 10,      /* messages[i].tool_calls[k] */
    FRONT_CALLED = 1ull << 11,         /* messages[i].tool_calls[k].function */
    FRONT_JSON_SCHEMA = 1ull << 12,    /* response_format.json_schema */
    FRONT_STRUCTURED = 1ull << 13,     /* structured_outputs */
    /* OpenAI's Responses */
    FRONT_RESPONSES = 1ull << 14,
    FRONT_RESPONSES_MESSAGE = 1ull << 15,   /* input[i] */
    FRONT_RESPONSES_CALL = 1ull << 16,      /* input[i], function_call */
    FRONT_RESPONSES_OUTPUT = 1ull << 17,    /* input[i], function_call_output */
    FRONT_RESPONSES_REASONING = 1ull << 18, /* input[i], reasoning */
    FRONT_RESPONSES_PART = 1ull << 19,      /* input[i].content[k] */
    FRONT_RESPONSES_TOOL = 1ull << 20,      /* tools[i] */
    FRONT_RESPONSES_CHOICE = 1ull << 21,    /* tool_choice */
    FRONT_RESPONSES_TEXT = 1ull << 22,      /* text */
    FRONT_RESPONSES_FORMAT = 1ull << 23,    /* text.format, json_schema */
    FRONT_RESPONSES_EFFORT = 1ull << 24,    /* reasoning */
    /* Anthropic's API */
    FRONT_MESSAGES = 1ull << 25,
    FRONT_MESSAGES_COUNT = 1ull << 26,  /* count_tokens */
    FRONT_MESSAGES_TURN = 1ull << 27,   /* messages[i] */
    FRONT_MESSAGES_BLOCK = 1ull << 28,  /* messages[i].content[k], system[k] */
    FRONT_MESSAGES_TOOL = 1ull << 29,   /* tools[i] */
    FRONT_MESSAGES_CHOICE = 1ull << 30, /* tool_choice */
    FRONT_MESSAGES_THINKING = 1ull << 31,
    FRONT_MESSAGES_OUTPUT = 1ull << 32 /* output_config */
};

/* Returns whether the object has only known fields and sets no unsupported one. kinds: bits of enum
 * bt_front_object, usually one. prefix: precedes a field's name in errors, e.g. "messages[2]."; ""
 * for the body itself. */
bool bt_front_fields_check(const json_t *object, uint64_t kinds, const char *prefix,
                           struct bt_front_error *e);

enum bt_front_use {
    FRONT_USED,     /* read and checked by the parsers */
    FRONT_HARMLESS, /* accepted with any value: it cannot change the generated text */
    /* would change the answer, and is not supported: only neutral values are accepted */
    FRONT_REFUSED
};

struct bt_front_field {
    const char *name;
    uint64_t objects; /* bits of enum bt_front_object */
    enum bt_front_use answer;
    /* USED: its allowed values, as members of a JSON Schema, without the braces */
    const char *schema;
    const char *why; /* what the server does with the field */
};

struct bt_front_object_doc {
    uint64_t kind;
    const char *component;    /* its name among the schemas of /openapi.json */
    const char *required;     /* names of required fields, separated by spaces */
    const char *name, *title; /* title: heading of its section in docs/API.md; NULL: it has none */
};

/* Field or object number i of the tables, in the order of docs/API.md; NULL: there is none. */
const struct bt_front_field *bt_front_field_at(size_t i);
const struct bt_front_object_doc *bt_front_object_at(size_t i);
/* Values that a refused field may have, besides null and other empty values. NULL: none. */
const char *bt_front_field_neutral(const struct bt_front_field *f);

#endif
