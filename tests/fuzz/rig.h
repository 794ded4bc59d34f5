/* What the fuzz targets share. The Makefile links every target with rig.c, which puts itself in the
 * place of the clock, of the kernel's random numbers and of the log (-Wl,--wrap): a run depends on
 * its input alone, and every log line is made and checked, but not written. */
#ifndef TESTS_FUZZ_RIG_H
#define TESTS_FUZZ_RIG_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size); /* libFuzzer's own */

/* Sets clock and random numbers to their beginning. Each target calls it first for each input. */
void rig_reset(void);
/* Both clocks go on by so much. Each look at a clock takes 1 us besides. */
void rig_pass_ms(uint64_t ms);
uint64_t rig_log_lines(void); /* since rig_reset */

/* A folder in memory for this process: BATON_FUZZ_DIR, or a new one in /dev/shm. */
const char *rig_dir(void);
/* Gives the file `name` in rig_dir() this content and mode 0600; returns its path, valid for the
 * rest of the process. At most 16 names. */
const char *rig_file(const char *name, const void *data, size_t len);
void rig_no_file(const char *name); /* there is none of this name */

#endif
