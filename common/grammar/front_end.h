/* The front ends: each builds a program from the text of a spec. grammar.c calls them.
 * On success each returns OK and the start node in *start. ERR_INVALID: the text is not of its
 * kind. ERR_UNSUPPORTED: the text asks for something that cannot be enforced. ERR_EXHAUSTED: the
 * text is too large. err gets the place and the remedy. */
#ifndef BT_GRAMMAR_FRONT_END_H
#define BT_GRAMMAR_FRONT_END_H

#include "common/grammar/program.h"

/* schema.c: JSON Schema, draft 2020-12 and draft-07. */
bt_status_t bt_grammar_build_schema(struct bt_program *p, const char *text, size_t len,
                                    bt_node_t *start, char *err, size_t err_cap) BT_MUST_CHECK;
/* pattern.c: the whole text matches a regular expression. */
bt_status_t bt_grammar_build_regex(struct bt_program *p, const char *text, size_t len,
                                   bt_node_t *start, char *err, size_t err_cap) BT_MUST_CHECK;
/* pattern.c: one of the strings of a JSON array. */
bt_status_t bt_grammar_build_choice(struct bt_program *p, const char *text, size_t len,
                                    bt_node_t *start, char *err, size_t err_cap) BT_MUST_CHECK;
/* gbnf.c: llama.cpp's EBNF. */
bt_status_t bt_grammar_build_gbnf(struct bt_program *p, const char *text, size_t len,
                                  bt_node_t *start, char *err, size_t err_cap) BT_MUST_CHECK;
/* tags.c: free text with constrained parts. */
bt_status_t bt_grammar_build_tags(struct bt_program *p, const char *text, size_t len,
                                  bt_node_t *start, char *err, size_t err_cap) BT_MUST_CHECK;

#endif
