/* The fields of a log line: turns a format such as "peer=%s slots=%u" and its arguments into logfmt
 * or JSON. The format is our own text; every argument is treated as text from a stranger. Pure
 * functions, any thread. */
#ifndef BT_LOG_FIELDS_H
#define BT_LOG_FIELDS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

/* Bytes of one value, escaped. A longer value is cut and ends with "...". */
#define BT_LOG_VALUE_BYTES 1000u

/* Writes the fields of fmt to out as ` key=value key="a value"` or as `,"key":1,"key":"value"`.
 * The text before `=` is the key; the value reaches to the next space of fmt itself, so that
 * spaces, quotes, line ends and control characters of arguments cannot end a value or the line:
 * a value with such characters is quoted and escaped. In JSON a value that is one number (%u, %d,
 * %.1f, digits in fmt) is written as a number and everything else as a string. Bytes that are not
 * UTF-8 become U+FFFD. Conversions: c d i u x X p s e f g with l ll z h hh, width and precision.
 * Fields that do not fit are left out whole, followed by `cut=true`, for which 16 bytes of cap are
 * set aside. Returns the length; out ends with NUL. cap is at least 64. */
size_t bt_log_fields(char *out, size_t cap, bool json, const char *fmt, va_list ap);

/* Writes s as one value: bare if it needs no quotes in logfmt, else quoted and escaped. Returns the
 * length; cap is at least 16, and a longer value is cut. */
size_t bt_log_value(char *out, size_t cap, bool json, const char *s);

#endif
