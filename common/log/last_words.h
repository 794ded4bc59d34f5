/* Logs the end of a process that a library ends without a message: gRPC, for one, calls abort()
 * when an allocation fails. */
#ifndef BT_LOG_LAST_WORDS_H
#define BT_LOG_LAST_WORDS_H

/* From now on SIGABRT, SIGSEGV, SIGILL and SIGFPE write one line, which says whether memory was
 * short, and then end the process as they would have ended it: with a core dump, or with what a
 * sanitizer or UCX has to say. Early, before threads; again after bt_log_init, so that the line has
 * what all lines have. */
void bt_log_last_words(void);

#endif
