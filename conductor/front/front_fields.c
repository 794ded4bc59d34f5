/* The table of request fields; see front_fields.h. front_reference.c makes documents from it. Pure.
 */
#include "conductor/front/front_fields.h"

#include <stdio.h>
#include <string.h>

#include "common/base/nearest.h"
#include "conductor/front/front.h"

#define C   FRONT_COMPLETION
#define M   FRONT_CHAT
#define T   FRONT_TOKENIZE
#define D   FRONT_DETOKENIZE
#define MSG FRONT_MESSAGE
#define PRT FRONT_PART
#define SO  FRONT_STREAM_OPTIONS
#define RF  FRONT_RESPONSE_FORMAT
#define JS  FRONT_JSON_SCHEMA
#define ST  FRONT_STRUCTURED
#define R   FRONT_RESPONSES
#define RM  FRONT_RESPONSES_MESSAGE
#define RC  FRONT_RESPONSES_CALL
#define RO  FRONT_RESPONSES_OUTPUT
#define RR  FRONT_RESPONSES_REASONING
#define RP  FRONT_RESPONSES_PART
#define RT  FRONT_RESPONSES_TOOL
#define RCH FRONT_RESPONSES_CHOICE
#define RTX FRONT_RESPONSES_TEXT
#define RFM FRONT_RESPONSES_FORMAT
#define RE  FRONT_RESPONSES_EFFORT
#define A   FRONT_MESSAGES /* Anthropic's */
#define AC  FRONT_MESSAGES_COUNT
#define AM  FRONT_MESSAGES_TURN
#define AB  FRONT_MESSAGES_BLOCK
#define AT  FRONT_MESSAGES_TOOL
#define ACH FRONT_MESSAGES_CHOICE
#define ATH FRONT_MESSAGES_THINKING
#define AO  FRONT_MESSAGES_OUTPUT
#define TL  FRONT_TOOL
#define FN  FRONT_FUNCTION
#define TC  FRONT_TOOL_CALL
#define CF  FRONT_CALLED

/* What values a supported field may have, as members of a JSON Schema. */
#define USED(schema)   FRONT_USED, schema
#define HARMLESS       FRONT_HARMLESS, NULL
#define REFUSED        FRONT_REFUSED, NULL
#define TYPE(name)     "\"type\":\"" name "\""
#define BOOL           TYPE("boolean")
#define STR            TYPE("string")
#define OBJECT         TYPE("object")
#define INT(lo, hi)    TYPE("integer") ",\"minimum\":" #lo ",\"maximum\":" #hi
#define NUM(lo, hi)    TYPE("number") ",\"minimum\":" #lo ",\"maximum\":" #hi
#define ABOVE(lo, hi)  TYPE("number") ",\"exclusiveMinimum\":" #lo ",\"maximum\":" #hi
#define BYTES(lo, hi)  TYPE("string") ",\"minLength\":" #lo ",\"maxLength\":" #hi
#define WORDS(list)    TYPE("string") ",\"enum\":[" list "]"
#define LIST(of)       TYPE("array") ",\"items\":{" of "}"
#define AT_MOST(n, of) LIST(of) ",\"maxItems\":" #n
#define IDS            LIST(TYPE("integer") ",\"minimum\":0")
#define EITHER(a, b)   "\"anyOf\":[{" a "},{" b "}]"
#define REF(name)      "\"$ref\":\"#/components/schemas/" name "\""
#define PROMPT         "\"anyOf\":[{" STR "},{" IDS "},{" LIST(STR) "},{" LIST(IDS) "}]"
#define SCHEMA         "\"type\":[\"object\",\"boolean\",\"string\"]"
#define BIASES         OBJECT ",\"maxProperties\":1024,\"additionalProperties\":{" NUM(-100, 100) "}"
#define ITEM                                                                                       \
    "\"anyOf\":[{" REF("ResponsesMessage") "},{" REF("ResponsesCall") "},{" REF(                   \
        "ResponsesOutput") "},{" REF("ResponsesReasoning") "}]"
#define LABELS OBJECT ",\"maxProperties\":16,\"additionalProperties\":{" STR ",\"maxLength\":512}"

static bool is_null(const json_t *v)
{
    return json_is_null(v);
}

static bool is_one(const json_t *v)
{
    return (json_is_number(v) && json_number_value(v) == 1.0) || !bt_front_asked_for(v);
}

static bool has_text(const json_t *v, const char *a, const char *b)
{
    const char *s = json_string_value(v);
    return s != NULL && (strcmp(s, a) == 0 || strcmp(s, b) == 0);
}

static bool is_text(const json_t *v)
{
    return has_text(v, "text", "message") || !bt_front_asked_for(v);
}

static bool are_text(const json_t *v)
{
    bool all = json_is_array(v) || json_is_null(v);
    for (size_t i = 0; all && i < json_array_size(v); i++) {
        all = has_text(json_array_get(v, i), "text", "text");
    }
    return all;
}

static bool is_disabled(const json_t *v)
{
    return has_text(v, "disabled", "disabled") || !bt_front_asked_for(v);
}

#define BODY  (C | M)
#define EVERY (BODY | A | R) /* fields that mean the same in every API that generates */
static const struct bt_front_field fields[] = {
    {"model", C | M | T | D | A | AC | R, USED(STR),
     "must be the served model; left out or empty: the served model"},
    {"prompt", C | T, USED(PROMPT), "a string, token ids, or (completions) a list of either"},
    {"messages", M | T, USED(LIST(REF("Message"))),
     "text messages of the roles system, developer, user, assistant, tool"},
    {"tokens", D, USED(IDS), "token ids"},
    /* length and number of answers */
    {"max_tokens", BODY, USED(INT(0, 2147483647)),
     "the answer has at most this many tokens. Default: 16 for completions; for chat "
     "`max_new_tokens` of generation_config.json, or else the rest of the context. Prompt and "
     "`max_tokens` must fit into the context together"},
    {"max_completion_tokens", BODY, USED(INT(0, 2147483647)),
     "the newer name of `max_tokens`; it is used if both are given"},
    {"min_tokens", EVERY, USED(INT(0, 2147483647)), "the answer has at least this many tokens"},
    {"n", BODY, USED(INT(1, 16)), "number of choices for each prompt, 1 to 16"},
    {"best_of", BODY, USED(INT(1, 16)),
     "`n` to 16: this many choices are generated; the answer has the `n` choices with the highest "
     "logprob per token. Not with `stream`. With `use_beam_search`: the number of beams"},
    {"use_beam_search", BODY, USED(BOOL), "true: beam search finds the answer, see below"},
    {"length_penalty", BODY, USED(NUM(-10, 10)), "for beam search: -10 to 10, default 1"},
    {"early_stopping", BODY, USED(EITHER(BOOL, WORDS("\"never\""))),
     "for beam search: true, false or `never`"},
    {"ignore_eos", EVERY, USED(BOOL),
     "true: generation continues after the model's end-of-text token"},
    {"stop", BODY, USED(EITHER(STR, AT_MOST(16, STR))),
     "a string, or a list of up to 16: the answer ends before the first of them"},
    {"stop_token_ids", EVERY, USED(IDS),
     "token ids that end a choice, in addition to the model's own"},
    {"include_stop_str_in_output", BODY, USED(BOOL), "true: the answer includes the stop string"},
    /* sampling */
    {"temperature", EVERY, USED(NUM(0, 100)), "0 to 100; 0: always the most likely token"},
    {"top_p", EVERY, USED(ABOVE(0, 1)), "above 0, at most 1"},
    {"top_k", EVERY, USED(INT(-1, 2147483647)), "0 or -1: off"},
    {"min_p", EVERY, USED(NUM(0, 1)), "0 to 1"},
    {"typical_p", BODY, USED(ABOVE(0, 1)),
     "above 0, at most 1; 1: off. It is applied after `top_k` and `top_p`"},
    {"xtc_probability", BODY, USED(NUM(0, 1)),
     "0 to 1; 0: off. The probability that XTC removes the most likely tokens: all that are at "
     "least as likely as `xtc_threshold`, except the least likely of these"},
    {"xtc_threshold", BODY, USED(ABOVE(0, 1)), "above 0, at most 1; default 0.1"},
    {"dry_multiplier", BODY, REFUSED,
     "this server has no DRY sampling; use `repetition_penalty` or `frequency_penalty`"},
    {"repetition_penalty", EVERY, USED(ABOVE(0, 100)), "above 0, at most 100"},
    {"frequency_penalty", EVERY, USED(NUM(-2, 2)), "-2 to 2"},
    {"presence_penalty", EVERY, USED(NUM(-2, 2)), "-2 to 2"},
    {"logit_bias", EVERY, USED(BIASES),
     "an object of up to 1024 token ids, each with a value from -100 to 100"},
    {"dola_layers", BODY, USED(EITHER(WORDS("\"low\",\"high\""), AT_MOST(16, INT(0, 2147483647)))),
     "DoLa, as in transformers: `low` or `high` (every second layer of that half), or a list of up "
     "to 16 layers; 0 is the embedding. The logits of the listed layer that differs most from the "
     "last layer are subtracted from those of the last layer. May be combined with all other "
     "fields. Switches drafts off"},
    {"penalty_alpha", BODY, USED(NUM(0, 1)),
     "contrastive search, as in transformers: 0 to 1, needs `top_k` from 2 to 16. Of the `top_k` "
     "most likely tokens it takes the one with the highest (1 - alpha) * probability - alpha * "
     "similarity to the text so far. Only with one choice and temperature 0. Uses neither the "
     "prefix cache nor drafts"},
    {"speculation", EVERY, USED(WORDS("\"auto\",\"off\",\"suffix\",\"ngram\",\"draft\",\"mtp\"")),
     "auto, off, suffix, ngram, draft or mtp: the source of drafts, unless the workers' "
     "configuration switches drafts off. Changes the speed, never the answer"},
    {"prediction", M, USED(OBJECT),
     "{type: `content`, content: a string or text parts}: text that the answer will probably "
     "contain. Drafts are taken from it. Changes the speed, never the answer"},
    {"seed", EVERY, USED(INT(-9223372036854775808, 9223372036854775807)),
     "a 64-bit integer: the same request with the same seed draws the same tokens"},
    /* form of the answer */
    {"stream", EVERY, USED(BOOL), "true: the answer comes in pieces, as server-sent events"},
    {"stream_options", BODY, USED(REF("StreamOptions")), "needs `stream`: true"},
    {"echo", C, USED(BOOL), "true: the text begins with the prompt"},
    {"logprobs", C, USED(INT(0, 20)),
     "0 to 20: logprobs of the chosen tokens, and of this many most likely tokens"},
    {"logprobs", M, USED(BOOL), "true: logprobs of the chosen tokens"},
    {"top_logprobs", M, USED(INT(0, 20)),
     "0 to 20: also logprobs of this many most likely tokens; needs `logprobs`: true"},
    {"prompt_logprobs", BODY, USED(INT(0, 20)),
     "0 to 20: logprobs of the prompt's tokens, and of this many most likely tokens; not with "
     "`stream`"},
    {"return_tokens_as_token_ids", BODY, USED(BOOL), "true: logprobs name tokens as `token_id:N`"},
    {"skip_special_tokens", EVERY, USED(BOOL),
     "false: the text includes special tokens; default true"},
    /* constrained output */
    {"response_format", BODY, USED(REF("ResponseFormat")),
     "of type `text`, `json_object` or `json_schema`"},
    {"structured_outputs", BODY, USED(REF("StructuredOutputs")), "an object, see below"},
    {"guided_json", BODY, USED(SCHEMA), "a JSON schema: an object, or a string with its text"},
    {"json_schema", BODY, USED(SCHEMA), "a JSON schema: an object, or a string with its text"},
    {"guided_regex", BODY, USED(STR), "a regular expression for the whole answer"},
    {"regex", BODY, USED(STR), "a regular expression for the whole answer"},
    {"guided_choice", BODY, USED(LIST(STR)), "a list of strings: the answer is one of them"},
    {"guided_grammar", BODY, USED(STR), "a grammar in GBNF, llama.cpp's EBNF; it begins at `root`"},
    {"grammar", BODY, USED(STR), "a grammar in GBNF, llama.cpp's EBNF; it begins at `root`"},
    {"ebnf", BODY, USED(STR), "a grammar in GBNF, llama.cpp's EBNF; it begins at `root`"},
    /* prompts */
    {"add_special_tokens", C | M | T, USED(BOOL),
     "true: the tokenizer's special tokens (such as BOS) are added to the prompt"},
    {"add_generation_prompt", M | T, USED(BOOL), "passed to the chat template; default true"},
    {"continue_final_message", M | T, USED(BOOL), "true: the answer continues the last message"},
    {"chat_template_kwargs", M | T | A | AC | R, USED(OBJECT),
     "an object: variables of the chat template"},
    /* tools and reasoning */
    {"tools", M | T, USED(LIST(REF("Tool"))),
     "functions that the model may call; passed to the chat template. Streams send arguments in "
     "pieces, while they are generated"},
    {"tool_choice", M | T, USED(EITHER(WORDS("\"none\",\"auto\",\"required\""), OBJECT)),
     "`auto`; `none`: the model does not see the tools; `required` or a named function: the answer "
     "consists of calls whose arguments follow the schemas; or `allowed_tools`"},
    {"parallel_tool_calls", M | T, USED(BOOL),
     "false: the answer has at most one call; further ones are left out"},
    {"include_reasoning", M, USED(BOOL),
     "false: the answer has no reasoning. Otherwise `reasoning_content` and `reasoning`, its newer "
     "name, both contain the model's reasoning"},
    {"separate_reasoning", M, USED(BOOL),
     "false: the content includes the reasoning as the model wrote it"},
    {"thinking_token_budget", M | T, USED(INT(-1, 2147483647)),
     "the reasoning has at most this many tokens; then Baton forces its end and the answer "
     "follows"},
    {"thinking_budget", M | T, USED(INT(-1, 2147483647)),
     "the same as `thinking_token_budget`; also allowed in `chat_template_kwargs`, where templates "
     "can read it"},
    {"thinking", M | T, USED(REF("Thinking")),
     "an object, see below: whether the model thinks, and its budget"},
    {"reasoning", M | T, USED(REF("Reasoning")),
     "an object, see below: how hard the model thinks, and its budget"},
    {"reasoning_effort", M | T, USED(STR),
     "a word that is passed to the chat template; `none` has the effect of `enable_thinking`: "
     "false"},
    {"enable_thinking", M | T, USED(BOOL), "true or false: passed to the chat template"},
    {"return_token_strs", T, USED(BOOL),
     "true: the answer also has the tokens as tokenizer.json spells them"},
    /* scheduling */
    {"priority", EVERY, USED(INT(-2147483648, 2147483647)),
     "an integer: requests with a smaller one go first"},
    {"cache_salt", EVERY, USED(BYTES(1, 256)),
     "only requests with the same salt share cached prefixes"},

    {"user", C | M | T | D | R, HARMLESS, "a label for the provider's records"},
    {"safety_identifier", BODY | R, HARMLESS, "a label for the provider's records"},
    {"metadata", BODY | A, HARMLESS, "a label for the provider's records"},
    {"store", BODY | R, HARMLESS, "this server does not store answers"},
    {"prompt_cache_key", BODY | R, HARMLESS, "the cache finds prompts by their content"},
    {"prompt_cache_retention", BODY | R, HARMLESS, "prompts stay cached as long as there is room"},
    {"service_tier", EVERY, HARMLESS, "there is one tier; `priority` orders requests"},
    {"verbosity", M, HARMLESS, "a hint"},
    {"stream_reasoning", M, HARMLESS, "streams always send the reasoning while it is generated"},
    {"request_id", BODY, HARMLESS, "the header `x-request-id` names a request"},
    {"rid", BODY, HARMLESS, "the header `x-request-id` names a request"},
    {"spaces_between_special_tokens", BODY, HARMLESS, "it concerns tokenizers of another kind"},
    {"detokenize", BODY, HARMLESS, "the answer is always text"},
    {"guided_decoding_backend", BODY, HARMLESS, "there is only one backend"},

    {"suffix", C, REFUSED, "this server cannot insert text before a given end"},
    {"echo", M, REFUSED, "only /v1/completions has it"},
    {"num_beams", BODY, REFUSED, "use `use_beam_search` and `best_of`"},
    {"prompt_embeds", BODY, REFUSED, "a prompt must be text or token ids"},
    {"input_embeds", BODY, REFUSED, "a prompt must be text or token ids"},
    {"truncate_prompt_tokens", C | M | T, REFUSED, "prompts are never cut"},
    {"truncation_side", C | M | T, REFUSED, "prompts are never cut"},
    {"allowed_token_ids", BODY, REFUSED, "use `logit_bias`"},
    {"bad_words", BODY, REFUSED, "use `logit_bias`"},
    {"logits_processors", BODY, REFUSED, "clients cannot run code in this server"},
    {"custom_logit_processor", BODY, REFUSED, "clients cannot run code in this server"},
    {"custom_params", BODY, REFUSED, "clients cannot run code in this server"},
    {"repetition_detection", BODY, REFUSED, "this server has no such function"},
    {"thinking_token_budget", C, REFUSED, "only chat has it"},
    {"return_token_ids", BODY, REFUSED, "this server has no such function"},
    {"return_hidden_states", BODY, REFUSED, "this server has no such function"},
    {"no_stop_trim", BODY, REFUSED, "use `include_stop_str_in_output`"},
    {"stop_regex", BODY, REFUSED, "this server has no such function"},
    {"max_new_tokens", BODY, REFUSED, "use `max_tokens`"},
    {"max_output_tokens", BODY, REFUSED, "use `max_tokens`"},
    {"n_predict", BODY, REFUSED, "use `max_tokens`"},
    {"repeat_penalty", BODY, REFUSED, "use `repetition_penalty`"},
    {"stop_sequences", BODY, REFUSED, "use `stop`"},
    {"do_sample", BODY, REFUSED, "use `temperature`"},
    {"extra_body", BODY, REFUSED, "put its fields directly into the body"},
    {"vllm_xargs", BODY, REFUSED, "this server has no such function"},
    {"lora_path", BODY, REFUSED, "this server has no adapters"},
    {"session_params", BODY, REFUSED, "it refers to the state of another kind of server"},
    {"kv_transfer_params", BODY, REFUSED, "it refers to the state of another kind of server"},
    {"resume", BODY, REFUSED, "it refers to the state of another kind of server"},
    {"tools", C, REFUSED, "only chat has it"},
    {"tool_choice", C, REFUSED, "only chat has it"},
    {"functions", BODY, REFUSED, "use `tools`"},
    {"function_call", C | M | T, REFUSED, "use `tool_choice`"},
    {"tool_prompt", BODY, REFUSED, "use `tools`"},
    {"audio", BODY, REFUSED, "only text is supported"},
    {"modalities", BODY, REFUSED, "only text is supported"},
    {"documents", C | M | T, REFUSED, "only text is supported"},
    {"web_search_options", BODY, REFUSED, "this server does not search the web"},
    {"mm_processor_kwargs", C | M | T, REFUSED, "only text is supported"},
    {"media_io_kwargs", C | M | T, REFUSED, "only text is supported"},
    {"structural_tag", BODY | ST, REFUSED, "use `tools`"},
    {"guided_whitespace_pattern", BODY, USED(STR),
     "a regular expression for the white space between the tokens of JSON. Default: a space, or a "
     "line end followed by spaces or tabs"},
    {"chat_template", C | M | T, REFUSED, "the server always uses the model's own template"},

    {"role", MSG, USED(WORDS("\"system\",\"developer\",\"user\",\"assistant\",\"tool\"")),
     "system, developer, user, assistant or tool"},
    {"content", MSG, USED(EITHER(STR, LIST(REF("Part")))),
     "a string, or a list of text parts; null in an assistant's message"},
    {"tool_calls", MSG, USED(LIST(REF("ToolCall"))),
     "the calls of an assistant's message. The chat template gets their arguments as an object, "
     "and their ids as the model's family writes them"},
    {"tool_call_id", MSG, USED(STR),
     "in a message of role tool: the id of the call that it answers"},
    {"name", MSG, USED(STR), "passed to the chat template"},
    {"reasoning_content", MSG, USED(STR), "a string, passed to the chat template"},
    {"reasoning", MSG, USED(STR), "the same as `reasoning_content`"},
    {"refusal", MSG, HARMLESS, "part of an earlier answer"},
    {"parsed", MSG, HARMLESS, "a client's own record"},
    {"annotations", MSG | PRT, HARMLESS, "part of an earlier answer"},
    {"cache_control", MSG | PRT, HARMLESS, "the cache finds prompts by their content"},
    {"id", MSG | PRT, HARMLESS, "a client's own record"},
    {"message_id", MSG, HARMLESS, "a client's own record"},
    {"messageId", MSG, HARMLESS, "a client's own record"},
    {"traceId", MSG, HARMLESS, "a client's own record"},
    {"timestamp", MSG, HARMLESS, "a client's own record"},
    {"metadata", MSG, HARMLESS, "a client's own record"},
    {"model", MSG, HARMLESS, "a client's own record"},
    {"agent", MSG, HARMLESS, "a client's own record"},
    {"usage", MSG, HARMLESS, "a client's own record"},
    {"opts", MSG, HARMLESS, "a client's own record"},
    {"type", MSG, REFUSED, "only text messages are supported"},
    {"function_call", MSG, REFUSED, "use `tool_calls`"},
    {"audio", MSG, REFUSED, "only text is supported"},
    {"prefix", MSG, REFUSED, "use `continue_final_message`"},
    {"partial", MSG, REFUSED, "use `continue_final_message`"},

    {"type", PRT, USED(WORDS("\"text\"")), "`text`"},
    {"text", PRT, USED(STR), "a string"},

    {"include_usage", SO, USED(BOOL), "true: a last event contains the number of tokens"},
    {"continuous_usage_stats", SO, USED(BOOL),
     "true: every event contains the number of tokens; needs `include_usage`"},
    {"include_obfuscation", SO, HARMLESS, "events never have padding"},

    {"type", RF, USED(WORDS("\"text\",\"json_object\",\"json_schema\"")),
     "`text`, `json_object` (any object) or `json_schema`"},
    {"json_schema", RF, USED(REF("JsonSchema")), "an object, see below"},
    {"schema", RF, USED(SCHEMA),
     "a JSON schema, for type `json_object`, or for type `json_schema` without a field "
     "`json_schema`"},
    {"name", RF | JS, HARMLESS, "a label"},
    {"description", RF | JS, HARMLESS, "a label"},
    {"strict", RF | JS, USED(BOOL), "true or false: the schema is enforced either way"},
    {"schema", JS, USED(SCHEMA), "the JSON schema: an object, or a string with its text"},

    {"json", ST, USED(SCHEMA), "a JSON schema: an object, or a string with its text"},
    {"json_object", ST, USED(BOOL), "true: any JSON object"},
    {"regex", ST, USED(STR), "a regular expression for the whole answer"},
    {"choice", ST, USED(LIST(STR)), "a list of strings: the answer is one of them"},
    {"grammar", ST, USED(STR), "a grammar in GBNF, llama.cpp's EBNF; it begins at `root`"},
    {"disable_fallback", ST, HARMLESS, "there is only one backend, and it never falls back"},
    {"whitespace_pattern", ST, USED(STR), "as `guided_whitespace_pattern`"},
    {"disable_any_whitespace", ST, USED(BOOL), "true: at most one space between tokens of JSON"},
    {"disable_additional_properties", ST, REFUSED,
     "write `additionalProperties`: false into the schema"},

    /* /v1/responses */
    {"input", R, USED(EITHER(STR, LIST(ITEM))),
     "a string, or items: message, function_call, function_call_output, reasoning"},
    {"instructions", R, USED(STR),
     "the system message. The answer repeats it if it has at most 64 KiB of JSON"},
    {"max_output_tokens", R, USED(INT(1, 2147483647)),
     "the answer has at most this many tokens. Default: the rest of the context. Prompt and "
     "`max_output_tokens` must fit into the context together"},
    {"top_logprobs", R, USED(INT(0, 20)), "0 to 20"},
    {"include", R, USED(LIST(STR)),
     "`message.output_text.logprobs`: the answer has logprobs. Other strings have no effect"},
    {"text", R, USED(REF("ResponsesText")), "an object with a `format`"},
    {"tools", R, USED(LIST(REF("ResponsesTool"))), "tools of the type `function`"},
    {"tool_choice", R,
     USED(EITHER(WORDS("\"none\",\"auto\",\"required\""), REF("ResponsesChoice"))),
     "none, auto, required, or an object of the type `function`"},
    {"parallel_tool_calls", R, USED(BOOL), "false: the answer has at most one call"},
    {"reasoning", R, USED(REF("Reasoning")), "an object, see below"},
    {"metadata", R, USED(LABELS), "an object of up to 16 strings, which the answer repeats"},
    {"max_tool_calls", R, HARMLESS,
     "it concerns tools that a server runs itself; this server runs none"},
    {"stream_options", R, HARMLESS, "events never have padding"},
    {"background", R, REFUSED, "this server does not store answers"},
    {"previous_response_id", R, REFUSED,
     "this server does not store answers; send the whole conversation as `input`"},
    {"conversation", R, REFUSED,
     "this server does not store answers; send the whole conversation as `input`"},
    {"prompt", R, REFUSED, "this server does not store prompts; send `instructions` and `input`"},
    {"truncation", R, REFUSED, "prompts are never cut"},
    {"context_management", R, REFUSED, "prompts are never cut"},
    {"stop", R, REFUSED, "only chat and completions have it"},

    {"type", RM | RC | RO | RR, USED(STR), "names the kind of the item; left out: `message`"},
    {"role", RM, USED(WORDS("\"user\",\"assistant\",\"system\",\"developer\"")),
     "user, assistant, system or developer"},
    {"content", RM, USED(EITHER(STR, LIST(REF("ResponsesPart")))),
     "a string or parts: `input_text`, `output_text`"},
    {"phase", RM, HARMLESS, "part of an earlier answer"},
    {"call_id", RC | RO, USED(STR), "connects a call and its output"},
    {"name", RC, USED(STR), "the name of the function"},
    {"arguments", RC, USED(STR), "a string of JSON"},
    {"namespace", RC, HARMLESS, "part of an earlier answer"},
    {"output", RO, USED(EITHER(STR, LIST(REF("ResponsesPart")))), "a string or parts of text"},
    {"content", RR, USED(LIST(REF("ResponsesPart"))),
     "parts of the type `reasoning_text`: given to the chat template"},
    {"summary", RR, USED(LIST(REF("ResponsesPart"))),
     "parts of the type `summary_text`, used if there is no `content`"},
    {"encrypted_content", RR, HARMLESS, "this server does not make encrypted reasoning"},
    {"id", RM | RC | RO | RR, HARMLESS, "part of an earlier answer"},
    {"status", RM | RC | RO | RR, HARMLESS, "part of an earlier answer"},
    {"created_by", RC | RO, HARMLESS, "part of an earlier answer"},

    {"type", RP, USED(STR), "names the kind of the part"},
    {"text", RP, USED(STR), "a string"},
    {"annotations", RP, HARMLESS, "part of an earlier answer"},
    {"logprobs", RP, HARMLESS, "part of an earlier answer"},

    {"type", RT | RCH, USED(WORDS("\"function\"")), "`function`"},
    {"name", RT | RCH, USED(STR), "the name of the function"},
    {"description", RT, USED(STR), "passed to the chat template"},
    {"parameters", RT, USED(OBJECT), "the JSON schema of the arguments"},
    {"strict", RT, USED(BOOL), "true or false"},
    {"defer_loading", RT, REFUSED, "this server cannot search for tools"},

    {"format", RTX, USED(OBJECT), "`text`, `json_object` or `json_schema`"},
    {"verbosity", RTX, HARMLESS, "a hint"},
    {"type", RFM, USED(WORDS("\"json_schema\"")), "`json_schema`"},
    {"name", RFM, USED(STR), "a label"},
    {"description", RFM, USED(STR), "a label"},
    {"schema", RFM, USED(OBJECT), "the JSON schema of the answer"},
    {"strict", RFM, USED(BOOL), "true or false"},

    {"effort", RE, USED(STR), "the same as `reasoning_effort` of chat"},
    {"max_tokens", RE, USED(INT(-1, 2147483647)), "the same as `thinking_token_budget` of chat"},
    {"enabled", RE, USED(BOOL), "the same as `enable_thinking` of chat"},
    {"exclude", RE, USED(BOOL), "true: the answer contains no reasoning"},
    {"summary", RE, HARMLESS, "the answer contains the whole reasoning"},
    {"generate_summary", RE, HARMLESS, "the answer contains the whole reasoning"},

    /* /v1/messages */
    {"max_tokens", A, USED(INT(1, 2147483647)),
     "required. Prompt and `max_tokens` must fit into the context together"},
    {"messages", A | AC, USED(LIST(REF("Turn"))),
     "turns of the roles user, assistant and system. If the last turn is the assistant's, the "
     "answer continues it"},
    {"system", A | AC, USED(EITHER(STR, LIST(REF("Block")))),
     "a string or text blocks: the system message"},
    {"stop_sequences", A, USED(AT_MOST(16, STR)), "up to 16"},
    {"tools", A | AC, USED(LIST(REF("MessagesTool"))),
     "tools with an `input_schema`; tools that a server runs itself are not supported"},
    {"tool_choice", A | AC, USED(REF("MessagesChoice")), "auto, any, tool or none"},
    {"thinking", A | AC, USED(REF("Thinking")), "enabled, disabled or adaptive"},
    {"output_config", A | AC, USED(REF("OutputConfig")), "an object"},
    {"output_format", A | AC, USED(OBJECT), "the same as `output_config.format`"},
    {"cache_control", A | AC, HARMLESS, "the cache finds prompts by their content"},
    {"inference_geo", A, HARMLESS, "there is only one region"},
    {"speed", A | AC, HARMLESS, "a hint"},
    {"betas", A | AC, HARMLESS, "the header `anthropic-beta` has no effect either"},
    {"mcp_servers", A | AC, REFUSED, "this server does not call other servers"},
    {"container", A, REFUSED, "this server does not run code"},
    {"context_management", A | AC, REFUSED, "prompts are never cut"},

    {"role", AM, USED(WORDS("\"user\",\"assistant\",\"system\"")), "user, assistant or system"},
    {"content", AM, USED(EITHER(STR, LIST(REF("Block")))), "a string, or a list of blocks"},

    {"type", AB, USED(STR),
     "`text`; in a user's message also `tool_result`; in an assistant's also `tool_use`, "
     "`thinking`, and `redacted_thinking`, which is ignored"},
    {"text", AB, USED(STR), "a string"},
    {"id", AB, USED(STR), "part of a `tool_use`"},
    {"name", AB, USED(STR), "part of a `tool_use`"},
    {"input", AB, USED(OBJECT), "the arguments of a `tool_use`: an object"},
    {"tool_use_id", AB, USED(STR), "the call that a `tool_result` answers"},
    {"content", AB, USED(EITHER(STR, LIST(REF("Block")))),
     "the content of a `tool_result`: a string or text blocks"},
    {"is_error", AB, USED(BOOL), "in a `tool_result`: true puts `Error: ` before its text"},
    {"thinking", AB, USED(STR), "the text of a `thinking` block: passed to the chat template"},
    {"signature", AB, HARMLESS, "this server does not check the origin of reasoning"},
    {"data", AB, HARMLESS, "`redacted_thinking` blocks are ignored"},
    {"citations", AB, HARMLESS, "part of an earlier answer"},
    {"caller", AB, HARMLESS, "part of an earlier answer"},
    {"cache_control", AB | AT, HARMLESS, "the cache finds prompts by their content"},

    {"type", AT, USED(WORDS("\"custom\"")), "`custom`"},
    {"name", AT | ACH, USED(STR), "the name of the tool"},
    {"description", AT, USED(STR), "passed to the chat template"},
    {"input_schema", AT, USED(OBJECT), "an object: the JSON schema of the tool's input"},
    {"strict", AT, USED(BOOL), "true or false"},
    {"eager_input_streaming", AT, HARMLESS,
     "arguments are always streamed while they are generated"},
    {"defer_loading", AT, REFUSED, "this server cannot search for tools"},
    {"allowed_callers", AT, HARMLESS, "only the client runs tools"},
    {"input_examples", AT, HARMLESS, "a hint"},

    {"type", ACH, USED(WORDS("\"auto\",\"any\",\"tool\",\"none\"")),
     "`auto`, `any`, `tool` or `none`"},
    {"disable_parallel_tool_use", ACH, USED(BOOL), "true: the answer has at most one call"},

    {"type", ATH, USED(WORDS("\"enabled\",\"disabled\",\"adaptive\",\"auto\"")),
     "`enabled` or `disabled`; `adaptive` or `auto`: the model's own default"},
    {"budget_tokens", ATH, USED(INT(-1, 2147483647)),
     "the same as `thinking_token_budget` of chat"},
    {"display", ATH, HARMLESS, "the answer always contains the whole reasoning"},

    {"format", AO, USED(OBJECT), "of the type `json_schema`, with a `schema`"},
    {"effort", AO, USED(STR), "the same as `reasoning_effort` of chat"},
    {"task_budget", AO, HARMLESS, "a hint"},

    {"type", TL | TC, USED(WORDS("\"function\"")), "`function`"},
    {"function", TL, USED(REF("Function")), "the function"},
    {"function", TC, USED(REF("Called")), "the function and its arguments"},
    {"cache_control", TL, HARMLESS, "the cache finds prompts by their content"},
    {"name", FN | CF, USED(BYTES(1, 128)), "1 to 128 letters, digits or characters of `_-.:/`"},
    {"description", FN, USED(STR), "a string"},
    {"parameters", FN, USED(OBJECT), "a JSON schema of the arguments"},
    {"strict", FN, USED(BOOL),
     "true: the arguments always follow the schema, even if `tool_choice` is `auto`"},
    {"id", TC, USED(STR), "a string"},
    {"index", TC, HARMLESS, "calls are numbered by their order in the list"},
    {"arguments", CF, USED(EITHER(STR, OBJECT)), "a string with a JSON object; or the object"},
    {"parsed_arguments", CF, HARMLESS, "a client's own record"},
};
#undef EVERY
#undef BODY

/* Values with which a refused field is harmless, in addition to those of bt_front_asked_for. */
static const struct neutral {
    const char *name;
    bool (*is)(const json_t *v);
    const char *doc;
} neutrals[] = {
    {"num_beams", is_one, "1"},
    {"truncate_prompt_tokens", is_null, "null"},
    {"truncation", is_disabled, "`disabled`"},
    {"stop", is_null, "null"},
    {"max_new_tokens", is_null, "null"},
    {"max_output_tokens", is_null, "null"},
    {"n_predict", is_null, "null"},
    {"do_sample", is_null, "null"},
    {"repeat_penalty", is_one, "1"},
    {"modalities", are_text, "[`text`]"},
    {"web_search_options", is_null, "null"},
    {"type", is_text, "`text`, `message`"},
};

static const struct neutral *neutral_of(const char *name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(neutrals); i++) {
        if (strcmp(neutrals[i].name, name) == 0) {
            return &neutrals[i];
        }
    }
    return NULL;
}

static const struct bt_front_object_doc objects[] = {
    {C, "Completion", "prompt", "/v1/completions", NULL},
    {M, "Chat", "messages", "/v1/chat/completions", NULL},
    {T, "Tokenize", "", "/tokenize", NULL},
    {D, "Detokenize", "tokens", "/detokenize", NULL},
    {MSG, "Message", "role", "a message", "A message: `messages[i]`"},
    {PRT, "Part", "type", "a part of a message", "A part of a message: `messages[i].content[k]`"},
    {SO, "StreamOptions", "", "stream_options", "`stream_options`"},
    {RF, "ResponseFormat", "", "response_format", "`response_format`"},
    {TL, "Tool", "type function", "a tool", "A tool: `tools[i]`"},
    {FN, "Function", "name", "a function", "Its function: `tools[i].function`"},
    {TC, "ToolCall", "function", "a tool call", "A call: `messages[i].tool_calls[k]`"},
    {CF, "Called", "name", "a tool call's function",
     "What it calls: `messages[i].tool_calls[k].function`"},
    {JS, "JsonSchema", "", "response_format.json_schema", "`response_format.json_schema`"},
    {ST, "StructuredOutputs", "", "structured_outputs", "`structured_outputs`"},
    {R, "Responses", "input", "/v1/responses",
     "`POST /v1/responses` and `/v1/responses/input_tokens`"},
    {RM, "ResponsesMessage", "role", "a message", "`/v1/responses`: `input[i]`, a message"},
    {RC, "ResponsesCall", "call_id name arguments", "a function_call",
     "`/v1/responses`: `input[i]`, a `function_call`"},
    {RO, "ResponsesOutput", "call_id output", "a function_call_output",
     "`/v1/responses`: `input[i]`, a `function_call_output`"},
    {RR, "ResponsesReasoning", "", "a reasoning item", "`/v1/responses`: `input[i]`, `reasoning`"},
    {RP, "ResponsesPart", "type", "a part", "`/v1/responses`: a part of an item"},
    {RT, "ResponsesTool", "", "a tool", "`/v1/responses`: `tools[i]`"},
    {RCH, "ResponsesChoice", "", "tool_choice", "`/v1/responses`: `tool_choice`"},
    {RTX, "ResponsesText", "", "text", "`/v1/responses`: `text`"},
    {RFM, "ResponsesFormat", "", "text.format",
     "`/v1/responses`: `text.format` of the type `json_schema`"},
    {RE, "Reasoning", "", "reasoning", "`reasoning` of chat and `/v1/responses`"},
    {A, "Messages", "max_tokens messages", "/v1/messages", "`POST /v1/messages`"},
    {AC, "MessagesCount", "messages", "/v1/messages/count_tokens",
     "`POST /v1/messages/count_tokens`"},
    {AM, "Turn", "role content", "a message", "`/v1/messages`: `messages[i]`"},
    {AB, "Block", "", "a block", "`/v1/messages`: a block of `messages[i].content` or `system`"},
    {AT, "MessagesTool", "name input_schema", "a tool", "`/v1/messages`: `tools[i]`"},
    {ACH, "MessagesChoice", "type", "tool_choice", "`/v1/messages`: `tool_choice`"},
    {ATH, "Thinking", "", "thinking", "`thinking` of chat and `/v1/messages`"},
    {AO, "OutputConfig", "", "output_config", "`/v1/messages`: `output_config`"}};

static const char *object_name(uint64_t kinds)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(objects); i++) {
        if (kinds & objects[i].kind) {
            return objects[i].name;
        }
    }
    return "";
}

/* ---- checking ---- */

static const struct bt_front_field *find(const char *name, uint64_t kinds)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(fields); i++) {
        if ((fields[i].objects & kinds) && strcmp(fields[i].name, name) == 0) {
            return &fields[i];
        }
    }
    return NULL;
}

/* Writes the full name of a field. Cuts a long name, but not its prefix. */
static void put_name(char out[64], const char *prefix, const char *name)
{
    int n = (int)strnlen(prefix, 44);
    snprintf(out, 64, "%.*s%.*s", n, prefix, 63 - n, name);
}

/* Finds the field that the client probably meant. At most a third of its letters may differ. */
static const char *nearest(const char *name, uint64_t kind)
{
    const char *best = NULL;
    unsigned best_d = BT_MIN((unsigned)strnlen(name, 16) / 3, 3u) + 1;
    for (size_t i = 0; i < BT_ARRAY_LEN(fields); i++) {
        bool of = (fields[i].objects & kind) && fields[i].answer == FRONT_USED;
        unsigned d = of ? bt_edit_distance(name, fields[i].name) : best_d;
        if (d < best_d) {
            best_d = d;
            best = fields[i].name;
        }
    }
    return best;
}

static bool unknown(const char *name, uint64_t kind, const char *prefix, struct bt_front_error *e)
{
    static const unsigned bodies = C | M | T | D | R | A | AC;
    char param[64];
    const char *meant = nearest(name, kind);
    const struct bt_front_field *elsewhere = (kind & bodies) ? find(name, bodies) : NULL;
    put_name(param, prefix, name);
    if (meant != NULL) {
        return bt_front_fail(e, 400, param, "unknown_parameter",
                             "'%s' is not a field of %s; did you mean '%s%s'?", param,
                             object_name(kind), prefix, meant);
    }
    if (elsewhere != NULL) {
        return bt_front_fail(e, 400, param, "unknown_parameter",
                             "'%s' is not a field of %s, but of %s; leave it out", param,
                             object_name(kind), object_name(elsewhere->objects));
    }
    return bt_front_fail(e, 400, param, "unknown_parameter",
                         "'%s' is not a field of %s; /docs lists them. Leave it out", param,
                         object_name(kind));
}

static bool refuse(const struct bt_front_field *f, const json_t *v, const char *prefix,
                   struct bt_front_error *e)
{
    char param[64];
    const struct neutral *n = neutral_of(f->name);
    if (n != NULL ? n->is(v) : !bt_front_asked_for(v)) {
        return false;
    }
    put_name(param, prefix, f->name);
    if (n != NULL) {
        bt_front_fail(e, 400, param, "unsupported_parameter",
                      "'%s' is not supported (%s); leave it out, or set it to %s", param, f->why,
                      n->doc);
    } else {
        bt_front_fail(e, 400, param, "unsupported_parameter",
                      "'%s' is not supported (%s); leave it out", param, f->why);
    }
    return true;
}

bool bt_front_fields_check(const json_t *object, uint64_t kinds, const char *prefix,
                           struct bt_front_error *e)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)object, name, v)
    {
        const struct bt_front_field *f = find(name, kinds);
        if (f == NULL) {
            return unknown(name, kinds, prefix, e);
        }
        if (f->answer == FRONT_REFUSED && refuse(f, v, prefix, e)) {
            return false;
        }
    }
    return true;
}

/* ---- for documents ---- */

const struct bt_front_field *bt_front_field_at(size_t i)
{
    return i < BT_ARRAY_LEN(fields) ? &fields[i] : NULL;
}

const struct bt_front_object_doc *bt_front_object_at(size_t i)
{
    return i < BT_ARRAY_LEN(objects) ? &objects[i] : NULL;
}

const char *bt_front_field_neutral(const struct bt_front_field *f)
{
    const struct neutral *n = f->answer == FRONT_REFUSED ? neutral_of(f->name) : NULL;
    return n != NULL ? n->doc : NULL;
}
