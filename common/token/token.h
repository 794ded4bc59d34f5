/* Tokenizer of Hugging Face's tokenizer.json, incremental detokenizer, chat templates. No I/O but
 * reading the files at load. A loaded tokenizer is immutable; use it from one thread at a time, or
 * share it. A compiled template may be rendered by several threads. */
#ifndef BT_TOKEN_TOKEN_H
#define BT_TOKEN_TOKEN_H

#include "common/base/base.h"
#include "common/base/buf.h"

struct bt_tokenizer;
struct bt_detok;
struct bt_template;

/* Reads DIR/tokenizer.json and, of tokenizer_config.json, whether BOS and EOS are put around a text
 * (add_bos_token, add_eos_token of the classes that transformers lets decide it: DeepSeek's
 * tokenizer.json has no BOS, its LlamaTokenizerFast adds it). What it does not know (a model type,
 * pre-tokenizer, normalizer, decoder, post-processor) is ERR_UNSUPPORTED, broken files ERR_INVALID;
 * err names file, field and remedy. */
bt_status_t bt_tokenizer_load(const char *dir, struct bt_tokenizer **t_p, char *err,
                              size_t err_cap) BT_MUST_CHECK;
void bt_tokenizer_destroy(struct bt_tokenizer *t);
/* The same tokenizer for another thread: it encodes with scratch memory of its own, the tables are
 * t's. To be destroyed before t. */
struct bt_tokenizer *bt_tokenizer_share(const struct bt_tokenizer *t);
uint32_t bt_tokenizer_vocab(const struct bt_tokenizer *t); /* highest id + 1 */

struct bt_token_watch;
/* From now on long encodings of this handle ask w whether to stop. NULL: they never stop. */
void bt_tokenizer_watch(struct bt_tokenizer *t, const struct bt_token_watch *w);

struct bt_tokens {
    uint32_t *ids; /* heap, bt_tokens_cleanup */
    size_t n, cap;
};
void bt_tokens_cleanup(struct bt_tokens *t);

/* Appends the ids of UTF-8 text[0..len), those of the reference implementation (tokenizers 0.23)
 * but where a pattern meets a character that is newer than PCRE2's Unicode (14 in Debian 12).
 * add_special: run the post-processor (BOS...). Special tokens written in the text are recognised.
 * ERR_INVALID: not UTF-8; ERR_EXHAUSTED: a regex limit; ERR_CANCELLED: its watch stopped it.
 */
bt_status_t bt_tokenizer_encode(const struct bt_tokenizer *t, const char *text, size_t len,
                                bool add_special, struct bt_tokens *out) BT_MUST_CHECK;
/* Appends the text of ids[0..n); special tokens are left out if skip_special. Bytes that are not
 * UTF-8 become U+FFFD (one for a maximal subpart, so that text is final as it streams).
 * ERR_INVALID: an id >= vocab. */
bt_status_t bt_tokenizer_decode(const struct bt_tokenizer *t, const uint32_t *ids, size_t n,
                                bool skip_special, struct bt_buf *out) BT_MUST_CHECK;
/* A token as tokenizer.json spells it (byte-level tokens in GPT-2's alphabet), for /tokenize.
 * ERR_INVALID: the id has no token. */
bt_status_t bt_tokenizer_string(const struct bt_tokenizer *t, uint32_t id,
                                struct bt_buf *out) BT_MUST_CHECK;
/* Raw bytes of one token (no U+FFFD), for logprobs' "bytes" and stop strings. */
bt_status_t bt_tokenizer_piece(const struct bt_tokenizer *t, uint32_t id,
                               struct bt_buf *out) BT_MUST_CHECK;
bool bt_tokenizer_is_special(const struct bt_tokenizer *t, uint32_t id);
/* Returns whether the id is one of added_tokens, special or not: where a text spells it, the text
 * becomes this token alone. */
bool bt_tokenizer_is_added(const struct bt_tokenizer *t, uint32_t id);
/* Id of a token by its content ("<|eot_id|>"); false if there is none. */
bool bt_tokenizer_find(const struct bt_tokenizer *t, const char *content, uint32_t *id_p);

/* Incremental: push ids one by one; text comes out as soon as it is final (never half a UTF-8
 * character). Concatenated output + flush == bt_tokenizer_decode of all ids. */
struct bt_detok *bt_detok_create(const struct bt_tokenizer *t, bool skip_special);
/* These n special tokens stay in the text in spite of skip_special. ids outlive d. */
void bt_detok_keep(struct bt_detok *d, const uint32_t *ids, size_t n);
void bt_detok_destroy(struct bt_detok *d);
/* Seeds the context with the prompt's last ids (nothing is emitted for them). */
void bt_detok_seed(struct bt_detok *d, const uint32_t *ids, size_t n);
bt_status_t bt_detok_push(struct bt_detok *d, uint32_t id, struct bt_buf *out) BT_MUST_CHECK;
void bt_detok_flush(struct bt_detok *d,
                    struct bt_buf *out); /* at the end: an incomplete tail as U+FFFD */

/* Compiles a Jinja chat template (tokenizer_config.json's chat_template, or chat_template.jinja in
 * DIR). What the interpreter does not know is ERR_UNSUPPORTED here, naming construct and line.
 * ERR_NOT_FOUND: the model has none. A second template, for requests with tools, is compiled too:
 * the entry "tool_use" of a list, or additional_chat_templates/tool_use.jinja. */
bt_status_t bt_template_load(const char *dir, struct bt_template **t_p, char *err,
                             size_t err_cap) BT_MUST_CHECK;
/* From text, as fuzzers and tests have it; daemons load files. */
bt_status_t bt_template_compile(const char *source, struct bt_template **t_p, char *err,
                                size_t err_cap) BT_MUST_CHECK;
void bt_template_destroy(struct bt_template *t);
/* The text of the template that renders requests with tools, or without; NUL-terminated. */
const char *bt_template_text(const struct bt_template *t, bool tools);
/* Renders. context_json: an object with messages, add_generation_prompt, and anything else the
 * template reads (tools, ...: a list that is not empty is rendered by the template for tools, if
 * there is one); bos_token, eos_token... come from tokenizer_config.json when loaded
 * from DIR. ERR_INVALID with err: raise_exception() of the template or a type error, with the line.
 * For fuzzers and tests: daemons render objects (bt_template_render_object). */
bt_status_t bt_template_render(const struct bt_template *t, const char *context_json,
                               struct bt_buf *out, char *err, size_t err_cap) BT_MUST_CHECK;

/* Asked at intervals of ~0.1 ms by what may take long, on its own thread; true: give up. */
struct bt_token_watch {
    bool (*stop)(void *arg); /* NULL: it is never stopped */
    void *arg;
};
struct json_t;
/* The same from a JSON object that is parsed already, within max_steps (0: the interpreter's own
 * limit; a step is an evaluated node, or 16 bytes read). Also ERR_EXHAUSTED: more steps or memory
 * than that; ERR_CANCELLED: watch stopped it (watch may be NULL). */
bt_status_t bt_template_render_object(const struct bt_template *t, const struct json_t *context,
                                      uint64_t max_steps, const struct bt_token_watch *watch,
                                      struct bt_buf *out, char *err, size_t err_cap) BT_MUST_CHECK;

/* Names that the interpreter knows: the i-th of a kind; NULL after the last. Methods that it only
 * refuses are included. */
enum bt_template_word {
    BT_TEMPLATE_FILTERS,
    BT_TEMPLATE_TESTS,
    BT_TEMPLATE_METHODS,
    BT_TEMPLATE_FUNCTIONS,
    BT_TEMPLATE_TOKENS, /* variables that the model's files set: bos_token and its like */
};
const char *bt_template_word(enum bt_template_word kind, size_t i);

#endif
