/* Formats as patterns that match the whole string. */
#include "common/grammar/schema_priv.h"

#include <string.h>

/* RFC 3339; the year 0000 is a leap year. */
#define YEAR_LEAP "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
#define DATE                                                                                       \
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]"    \
    "[0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|" YEAR_LEAP "-02-29)"
#define CLOCK "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
/* A leap second is 23:59:60 in UTC; of other offsets only those of whole hours are known here. */
#define LEAP                                                                                       \
    "(?:23:59:60(?:\\.[0-9]+)?(?:[Zz]|[+-]00:00)|00:59:60(?:\\.[0-9]+)?\\+01:00|01:59:60(?:\\.[0-" \
    "9"                                                                                            \
    "]+)?\\+02:00|07:59:60(?:\\.[0-9]+)?\\+08:00|08:59:60(?:\\.[0-9]+)?\\+09:00|18:59:60(?:\\.[0-" \
    "9]+)?-05:00|17:59:60(?:\\.[0-9]+)?-06:00|16:59:60(?:\\.[0-9]+)?-07:00|15:59:60(?:\\.[0-9]+)"  \
    "?-08:00)"
#define TIME "(?:" CLOCK ":[0-5][0-9](?:\\.[0-9]+)?(?:[Zz]|[+-]" CLOCK ")|" LEAP ")"

/* ISO 8601 as in RFC 3339, appendix A */
#define DUR_TIME "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
#define DUR_DATE "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:" DUR_TIME ")?"

/* RFC 1123; the whole name has at most 253 characters (max_length below) */
#define LABEL "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define HOST  LABEL "(?:\\." LABEL ")*"

#define OCTET "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define IPV4  OCTET "(?:\\." OCTET "){3}"
#define H16   "[0-9A-Fa-f]{1,4}"
#define LS32  "(?:" H16 ":" H16 "|" IPV4 ")"
/* RFC 3986, section 3.2.2, IPv6address */
#define IPV6                                                                                       \
    "(?:(?:" H16 ":){6}" LS32 "|::(?:" H16 ":){5}" LS32 "|(?:" H16 ")?::(?:" H16 ":){4}" LS32      \
    "|(?:" H16 "(?::" H16 "){0,1})?::(?:" H16 ":){3}" LS32 "|(?:" H16 "(?::" H16                   \
    "){0,2})?::(?:" H16 ":){2}" LS32 "|(?:" H16 "(?::" H16 "){0,3})?::" H16 ":" LS32 "|(?:" H16    \
    "(?::" H16 "){0,4})?::" LS32 "|(?:" H16 "(?::" H16 "){0,5})?::" H16 "|(?:" H16 "(?::" H16      \
    "){0,6})?::)"

/* RFC 5321, section 4.1.2: dot-string or quoted-string, then a domain or an address literal */
#define ATOM  "[A-Za-z0-9!#$%&'*+\\/=?^_`{|}~-]+"
#define LOCAL "(?:" ATOM "(?:\\." ATOM ")*|\"(?:[ !#-\\[\\]-~]|\\\\[ -~])*\")"
#define EMAIL LOCAL "@(?:" HOST "|\\[(?:" IPV4 "|IPv6:" IPV6 ")\\])"

/* RFC 3986, appendix A; X adds the characters of RFC 3987 */
#define UNRES(X)    "A-Za-z0-9._~\\-" X
#define PCT         "%[0-9A-Fa-f]{2}"
#define SUB         "!$&'()*+,;="
#define PCHAR(X)    "(?:[" UNRES(X) SUB ":@]|" PCT ")"
#define USER(X)     "(?:(?:[" UNRES(X) SUB ":]|" PCT ")*@)?"
#define REG(X)      "(?:[" UNRES(X) SUB "]|" PCT ")*"
#define LITERAL     "\\[(?:" IPV6 "|[vV][0-9A-Fa-f]+\\.[A-Za-z0-9._~" SUB ":-]+)\\]"
#define AUTH(X)     USER(X) "(?:" LITERAL "|" REG(X) ")(?::[0-9]*)?"
#define ABEMPTY(X)  "(?:\\/" PCHAR(X) "*)*"
#define ROOTLESS(X) PCHAR(X) "+(?:\\/" PCHAR(X) "*)*"
#define HIER(X)     "(?:\\/\\/" AUTH(X) ABEMPTY(X) "|\\/(?:" ROOTLESS(X) ")?|" ROOTLESS(X) "|)"
#define NOSCHEME(X) "(?:[" UNRES(X) SUB "@]|" PCT ")+(?:\\/" PCHAR(X) "*)*"
#define RELATIVE(X) "(?:\\/\\/" AUTH(X) ABEMPTY(X) "|\\/(?:" ROOTLESS(X) ")?|" NOSCHEME(X) "|)"
#define TAIL(X, P)  "(?:\\?(?:" PCHAR(X) "|[\\/?" P "])*)?(?:#(?:" PCHAR(X) "|[\\/?])*)?"
#define SCHEME      "[A-Za-z][A-Za-z0-9+.-]*:"
#define URI(X, P)   SCHEME HIER(X) TAIL(X, P)
#define UCS                                                                                        \
    "\\u{A0}-\\u{D7FF}\\u{F900}-\\u{FDCF}\\u{FDF0}-\\u{FFEF}\\u{10000}-\\u{1FFFD}\\u{20000}-\\u{"  \
    "2FFFD}\\u{30000}-\\u{3FFFD}\\u{40000}-\\u{DFFFD}\\u{E1000}-\\u{EFFFD}"
#define PRIVATE "\\u{E000}-\\u{F8FF}\\u{F0000}-\\u{FFFFD}\\u{100000}-\\u{10FFFD}"

#define POINTER "(?:\\/(?:[^~\\/]|~[01])*)*"

/* RFC 6570, section 2 */
#define VARCHAR "(?:[A-Za-z0-9_]|" PCT ")"
#define VARSPEC VARCHAR "(?:\\.?" VARCHAR ")*(?::[1-9][0-9]{0,3}|\\*)?"
#define TEMPLATE                                                                                   \
    "(?:[^\\u{0}- \"'%<>\\\\^`{|}\\u{7F}-\\u{9F}]|" PCT "|\\{[+#.\\/;?&=,!@|]?" VARSPEC            \
    "(?:," VARSPEC ")*\\})*"

static const struct {
    const char *name, *pattern;
    uint32_t max_length;
} formats[] = {
    {"date", DATE, 0},
    {"time", TIME, 0},
    {"date-time", DATE "[Tt]" TIME, 0},
    {"duration", "P(?:" DUR_DATE "|" DUR_TIME "|[0-9]+W)", 0},
    {"email", EMAIL, 0},
    {"hostname", HOST, 253},
    {"host-name", HOST, 253},
    {"ipv4", IPV4, 0},
    {"ip-address", IPV4, 0},
    {"ipv6", IPV6, 0},
    {"uuid", "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}", 0},
    {"uri", URI("", ""), 0},
    {"uri-reference", "(?:" URI("", "") "|" RELATIVE("") TAIL("", "") ")", 0},
    {"iri", URI(UCS, PRIVATE), 0},
    {"iri-reference", "(?:" URI(UCS, PRIVATE) "|" RELATIVE(UCS) TAIL(UCS, PRIVATE) ")", 0},
    {"uri-template", TEMPLATE, 0},
    {"json-pointer", POINTER, 0},
    {"relative-json-pointer", "(?:0|[1-9][0-9]*)(?:#|" POINTER ")", 0},
};

static bt_rx_t make(struct bt_schema *c, const struct bt_sj *format, size_t i)
{
    char err[128] = "";
    bt_rx_t rx;
    bt_status_t st = bt_rx_parse(c->rx, formats[i].pattern, strlen(formats[i].pattern), false,
                                 BT_RX_JSON_STRING, &rx, err, sizeof(err));
    if (st != BT_OK)
        bt_schema_fail(c, st, format, "the pattern of this format: %s", err);
    if (formats[i].max_length)
        rx = bt_rx_and(c->rx, rx, bt_str_length(c, 0, formats[i].max_length));
    return bt_schema_rx(c, rx);
}

bool bt_str_format(struct bt_schema *c, const struct bt_sj *format, bt_rx_t *out)
{
    _Static_assert(BT_ARRAY_LEN(formats) <= BT_SCHEMA_FORMATS, "room for all formats");
    for (size_t i = 0; i < BT_ARRAY_LEN(formats); i++) {
        if (!bt_sj_is(format, formats[i].name))
            continue;
        if (c->kept.formats[i] == BT_RX_NONE)
            c->kept.formats[i] = make(c, format, i);
        *out = c->kept.formats[i];
        return true;
    }
    return false;
}
