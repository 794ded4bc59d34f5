/* JSON Schema through compiled grammars: documents that must and must not pass, keyword by keyword,
 * errors with their pointers, and hostile schemas, which must end at a limit. */
#include "tests/unit/grammar_texts.h"

#define CHECK(rows) check_rows(BT_GRAMMAR_JSON_SCHEMA, rows, BT_ARRAY_LEN(rows))

static void any_json_passes_without_constraints(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"true",
         {"null", " {\"a\": [1, \"x\", {}]}\n", "-0.5E+3", "\"\\u00e9\\n\"", "[]"},
         {"", "nul", "{a: 1}", "[1,]", "01", "\"\\x\"", "1 2", "'a'"}},
        {"{}", {"12", "[[[]]]"}, {"{", "+1", ".5", "1.", "\"\t\""}},
        {"{\"title\": \"t\", \"$comment\": \"c\", \"unknown\": {\"type\": 3}}", {"1"}, {"x"}},
    };
    CHECK(rows);
}

static void types_and_constants(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"type\": \"boolean\"}", {"true", "false"}, {"1", "null", "\"true\""}},
        {"{\"type\": [\"null\", \"string\"]}", {"null", "\"\""}, {"0", "[]", "true"}},
        {"{\"type\": \"integer\"}",
         {"0", "-12", "1.0", "1.50e1", "1e3", "-0.0", "1E16", "120000000000000000000000"},
         {"1.5", "1e-1", "1.25e1", "\"1\"", "00"}},
        {"{\"enum\": [1, \"a\\u0022b\", null, [1, {\"x\": 2}], {\"p\": 1.0, \"q\": []}]}",
         {"1", "1.00", "1e0", "\"a\\\"b\"", "\"\\u0061\\u0022b\"", "null", "[1,{\"x\":2}]",
          "{\"q\": [], \"p\": 1}", "[ 1.0 , { \"\\u0078\" : 2e0 } ]"},
         {"2", "\"ab\"", "[1]", "{\"p\":1}", "{\"p\":1,\"q\":[],\"r\":0}", "[{\"x\":2},1]"}},
        {"{\"const\": \"\\u20ac\\ud83d\\ude00/\"}",
         {"\"\xE2\x82\xAC\xF0\x9F\x98\x80/\"", "\"\\u20AC\\uD83D\\ude00\\/\""},
         {"\"\"", "\"\xE2\x82\xAC\"", "\"\\u20ac\\ud83d/\""}},
        {"{\"type\": \"string\", \"enum\": [\"ab\", \"abc\", \"b\", 3]}",
         {"\"ab\"", "\"abc\"", "\"b\""},
         {"\"a\"", "\"abcd\"", "3"}},
        {"{\"const\": 18446744073709551615}", {"18446744073709551615"}, {"18446744073709551616"}},
    };
    CHECK(rows);
}

static void numbers_have_exact_bounds(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"type\": \"integer\", \"minimum\": 3, \"maximum\": 120}",
         {"3", "99", "120", "120.0", "1.2e2", "3e0", "100"},
         {"2", "121", "1000", "-5", "3.5", "1.21e2", "0"}},
        {"{\"type\": \"number\", \"exclusiveMinimum\": -1.5, \"maximum\": 0.1}",
         {"-1.49999", "0", "-0", "0.1", "0.100", "1e-1", "-1.4e0", "5e-300", "0e7"},
         {"-1.5", "-1.50", "0.1000001", "1", "-2", "1.1e-1", "-1.5e0", "0.2"}},
        {"{\"minimum\": 1, \"exclusiveMinimum\": true}", {"1.0001", "\"x\""}, {"1", "1.0", "0"}},
        {"{\"maximum\": 18446744073709551615, \"type\": \"integer\"}",
         {"18446744073709551615", "-7"},
         {"18446744073709551616", "1.9e19"}},
        {"{\"type\": \"integer\", \"multipleOf\": 7}",
         {"0", "-14", "700", "21.0", "999999999999999999999999999999"},
         {"1", "15", "7.5"}},
        {"{\"multipleOf\": 0.01}", {"1.25", "3", "0.10", "-0.01", "1e2"}, {"0.001", "1.255"}},
        {"{\"multipleOf\": 2.5, \"minimum\": 1, \"maximum\": 10}",
         {"2.5", "5", "7.50", "10.0"},
         {"0", "12.5", "2.6", "25"}},
        {"{\"type\": \"integer\", \"multipleOf\": 999999937}",
         {"0", "999999937", "1999999874"},
         {"1", "999999938"}},
        {"{\"not\": {\"type\": \"integer\"}, \"type\": \"number\"}", {"1.5", "-0.1"}, {"1", "2.0"}},
    };
    CHECK(rows);
}

static void strings_combine_patterns_lengths_and_formats(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"type\": \"string\", \"pattern\": \"[0-9]{2}\", \"maxLength\": 4}",
         {"\"12\"", "\"a12\"", "\"\\u00312b\"",
          "\"\xC3\xA9"
          "12x\""},
         {"\"1\"", "\"abc12\"", "\"1a2\""}},
        {"{\"type\": \"string\", \"minLength\": 2, \"maxLength\": 3}",
         {"\"\xF0\x9F\x98\x80\xF0\x9F\x98\x80\"", "\"\\ud83d\\ude00b\"", "\"\\n\\\"c\""},
         {"\"\"", "\"a\"", "\"abcd\"", "\"\\ud83d\\ude00\""}},
        {"{\"type\": \"string\", \"pattern\": \"^a\", \"allOf\": [{\"pattern\": \"b$\"}]}",
         {"\"ab\"", "\"axxb\""},
         {"\"a\"", "\"ba\"", "\"b\""}},
        {"{\"type\": \"string\", \"format\": \"date\"}",
         {"\"2024-02-29\"", "\"1999-12-31\""},
         {"\"2023-02-29\"", "\"2024-13-01\"", "\"2024-1-01\"", "\"1900-02-29\""}},
        {"{\"type\": \"string\", \"format\": \"date-time\"}",
         {"\"2024-02-29T12:00:00Z\"", "\"1998-12-31T23:59:60Z\"",
          "\"2024-01-01t00:00:00.5+01:30\""},
         {"\"2024-01-01 00:00:00Z\"", "\"2024-01-01T24:00:00Z\"", "\"2024-01-01T00:00:00\"",
          "\"1998-12-31T22:59:60Z\""}},
        {"{\"type\": \"string\", \"format\": \"ipv6\"}",
         {"\"::\"", "\"::1\"", "\"fe80::1:2\"", "\"::ffff:192.168.0.1\"", "\"1:2:3:4:5:6:7:8\""},
         {"\":\"", "\"1::2::3\"", "\"12345::\"", "\"1:2:3:4:5:6:7\"", "\"::1%eth0\""}},
        {"{\"type\": \"string\", \"format\": \"ipv4\"}",
         {"\"0.0.0.0\"", "\"255.1.20.3\""},
         {"\"256.1.1.1\"", "\"01.1.1.1\"", "\"1.1.1\""}},
        {"{\"type\": \"string\", \"format\": \"email\"}",
         {"\"a.b+c@example.com\"", "\"\\\"a b\\\"@x.org\"", "\"a@[127.0.0.1]\""},
         {"\"a\"", "\"a@\"", "\".a@b.c\"", "\"a..b@c.d\"", "\"a@-b.c\""}},
        {"{\"type\": \"string\", \"format\": \"uri\"}",
         {"\"http://a.b:80/c?d=e#f\"", "\"urn:a:b\"", "\"http:\\/\\/[::1]/%20\""},
         {"\"//a\"", "\"http://a b\"", "\"a\"", "\"http://a/%2\"", "\"http://[::1\""}},
        {"{\"type\": \"string\", \"format\": \"uuid\"}",
         {"\"2eb8aa08-aa98-11ea-b4aa-73b441d16380\""},
         {"\"2eb8aa08aa9811eab4aa73b441d16380\"", "\"2eb8aa08-aa98-11ea-b4aa-73b441d1638\""}},
        {"{\"type\": \"string\", \"format\": \"duration\"}",
         {"\"P1Y2M3DT4H5M6S\"", "\"P4W\"", "\"PT1M\""},
         {"\"P\"", "\"P1YT\"", "\"P1D2H\"", "\"1D\"", "\"P1W1D\""}},
        {"{\"type\": \"string\", \"format\": \"no-such-format\"}", {"\"x\""}, {"1"}},
        {"{\"type\": \"string\", \"not\": {\"pattern\": \"^x\"}}", {"\"ax\"", "\"\""}, {"\"xa\""}},
    };
    CHECK(rows);
}

static void objects(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"b\": "
         "{\"type\": "
         "\"string\"}}, \"required\": [\"a\"], \"additionalProperties\": false}",
         {"{\"a\":1}", "{\"b\":\"\",\"a\":2}", "{ \"\\u0061\" : 1 , \"b\" : \"x\" }"},
         {"{}", "{\"b\":\"\"}", "{\"a\":\"x\"}", "{\"a\":1,\"c\":2}", "{\"a\":1,\"a\":2}",
          "{\"a\":1,}"}},
        {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"null\"}}}",
         {"{}", "{\"x\":[1]}", "{\"x\":1,\"a\":null}", "{\"aa\":1}", "{\"\\u0061b\":1}"},
         {"{\"a\":1}", "{\"\\u0061\":1}", "[]"}},
        {"{\"type\": \"object\", \"patternProperties\": {\"^x\": {\"type\": \"integer\"}, \"y$\": "
         "{\"minimum\": 5}}, \"additionalProperties\": {\"type\": \"boolean\"}}",
         {"{\"xa\":1}", "{\"xy\":7}", "{\"ay\":5}", "{\"ay\":\"s\"}", "{\"b\":true}"},
         {"{\"xa\":\"s\"}", "{\"xy\":3}", "{\"xy\":5.5}", "{\"ay\":1}", "{\"b\":1}"}},
        {"{\"type\": \"object\", \"propertyNames\": {\"pattern\": \"^[a-c]+$\"}, "
         "\"minProperties\": 1, \"maxProperties\": 2}",
         {"{\"a\":1}", "{\"ab\":1,\"c\":2}"},
         {"{}", "{\"d\":1}", "{\"a\":1,\"b\":2,\"c\":3}"}},
        {"{\"type\": \"object\", \"dependentRequired\": {\"a\": [\"b\"]}, \"properties\": {\"a\": "
         "{}, "
         "\"b\": {}}, \"additionalProperties\": false}",
         {"{}", "{\"b\":1}", "{\"b\":1,\"a\":2}", "{\"a\":1,\"b\":2}"},
         {"{\"a\":1}"}},
        {"{\"type\": \"object\", \"dependencies\": {\"a\": {\"properties\": {\"b\": {\"type\": "
         "\"integer\"}}}}}",
         {"{\"b\":\"x\"}", "{\"a\":1,\"b\":2}"},
         {"{\"a\":1,\"b\":\"x\"}", "{\"b\":\"x\",\"a\":1}"}},
        {"{\"allOf\": [{\"properties\": {\"a\": {\"type\": \"integer\"}}}, {\"properties\": "
         "{\"b\": "
         "true}}], \"unevaluatedProperties\": false, \"type\": \"object\"}",
         {"{\"a\":1}", "{\"b\":1}", "{}"},
         {"{\"c\":1}", "{\"a\":\"x\"}"}},
        {"{\"type\": \"object\", \"allOf\": [{\"properties\": {\"a\": {\"minimum\": 3}}, "
         "\"additionalProperties\": false}, {\"properties\": {\"a\": {\"maximum\": 5}, \"b\": "
         "{}}}]}",
         {"{\"a\":4}", "{}"},
         {"{\"a\":6}", "{\"a\":2}", "{\"b\":1}"}},
        /* Keys of few names count as properties: no second "a" can make two of them. */
        {"{\"type\": \"object\", \"minProperties\": 2, \"patternProperties\": {\"^(a|b)$\": true}, "
         "\"additionalProperties\": false}",
         {"{\"a\":1,\"b\":2}", "{\"\\u0062\":1,\"a\":2}"},
         {"{\"a\":1}", "{\"a\":1,\"a\":2}", "{\"a\":1,\"c\":2}"}},
        {"{\"type\": \"object\", \"patternProperties\": {\"a\": {\"type\": \"integer\"}, \"b\": "
         "{\"minimum\": 2}, \"c\": true, \"d\": true}, \"additionalProperties\": false}",
         {"{\"xa\":1}", "{\"ab\":2}", "{\"c\":\"\"}", "{}"},
         {"{\"x\":1}", "{\"ab\":1}", "{\"ba\":2.5}", "{\"a\":\"\"}"}},
        /* Before draft-06 there is no const, and a $ref hides what stands beside it. */
        {"{\"$schema\": \"http://json-schema.org/draft-04/schema#\", \"type\": \"object\", "
         "\"properties\": {\"a\": {\"const\": 1}}, \"minProperties\": 1}",
         {"{\"a\":2}"},
         {"{}"}},
    };
    CHECK(rows);
}

static void arrays(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"type\": \"array\", \"items\": {\"type\": \"integer\"}, \"minItems\": 1, \"maxItems\": "
         "3}",
         {"[1]", "[ 1 , 2,3 ]"},
         {"[]", "[1,2,3,4]", "[\"a\"]", "[1,]", "[1 2]"}},
        {"{\"type\": \"array\", \"prefixItems\": [{\"type\": \"string\"}, {\"type\": \"null\"}], "
         "\"items\": {\"type\": \"boolean\"}}",
         {"[]", "[\"a\"]", "[\"a\",null]", "[\"a\",null,true,false]"},
         {"[null]", "[\"a\",true]", "[\"a\",null,1]"}},
        {"{\"type\": \"array\", \"items\": [{\"type\": \"string\"}], \"additionalItems\": false}",
         {"[]", "[\"a\"]"},
         {"[1]", "[\"a\",\"b\"]"}},
        {"{\"type\": \"array\", \"items\": {\"type\": \"integer\"}, \"contains\": {\"minimum\": "
         "5}}",
         {"[5]", "[1,7,2]", "[1,2,9]"},
         {"[]", "[1,2]", "[\"a\",7]"}},
        {"{\"type\": \"array\", \"contains\": {\"const\": 1}, \"maxItems\": 2}",
         {"[1]", "[2,1]", "[1,2]"},
         {"[]", "[2,3]", "[2,3,1]"}},
        {"{\"type\": \"array\", \"items\": {\"type\": [\"string\", \"number\"]}, \"uniqueItems\": "
         "true}",
         {"[]", "[1,2,\"1\"]", "[\"a\",\"b\"]"},
         {"[1,1]", "[1,1.0]", "[1,10e-1]", "[\"a\",\"\\u0061\"]", "[\"a\",2,\"a\"]", "[100,1e2]"}},
        {"{\"type\": \"array\", \"items\": {\"enum\": [\"a\", \"b\"]}, \"uniqueItems\": true, "
         "\"minItems\": 2}",
         {"[\"a\",\"b\"]", "[\"b\",\"a\"]"},
         {"[\"a\"]", "[\"a\",\"a\"]", "[\"a\",\"b\",\"a\"]"}},
        /* Values are equal whatever their spelling and the order of their members are. */
        {"{\"type\": \"array\", \"uniqueItems\": true}",
         {"[{},[],\"\",0,null]", "[{\"a\":1,\"b\":2},{\"a\":2,\"b\":1},{\"a\":1}]",
          "[[1,2],[2,1],[1]]"},
         {"[{},{ }]", "[{\"a\":1,\"b\":[2]},{\"b\":[2.0],\"\\u0061\":1e0}]", "[[[1]],[],[[10e-1]]]",
          "[\"\\ud83d\\ude00\",\"\xf0\x9f\x98\x80\"]", "[0,-0.0]"}},
        /* Where both are 0 already, the last member of a third item can only be 1. */
        {"{\"type\": \"array\", \"uniqueItems\": true, \"items\": {\"type\": \"object\", "
         "\"properties\": "
         "{\"a\": {\"enum\": [0, 1]}, \"b\": {\"enum\": [0, 1]}}, \"required\": [\"a\", \"b\"], "
         "\"additionalProperties\": false}}",
         {"[{\"a\":0,\"b\":0},{\"b\":0,\"a\":1},{\"a\":0,\"b\":1},{\"a\":1,\"b\":1}]"},
         {"[{\"a\":0,\"b\":0},{\"b\":0,\"a\":0}]"}},
        {"{\"type\": \"array\", \"uniqueItems\": true, \"prefixItems\": [{\"enum\": [[], {}]}], "
         "\"items\": {\"const\": []}, \"minItems\": 2}",
         {"[{},[]]"},
         {"[[],[]]", "[[]]", "[{},[],[]]"}},
    };
    CHECK(rows);
}

static void combinations(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"anyOf\": [{\"type\": \"integer\"}, {\"minimum\": 2}]}",
         {"1", "2.5", "\"x\""},
         {"1.5"}},
        {"{\"oneOf\": [{\"type\": \"integer\"}, {\"minimum\": 2}]}",
         {"1", "2.5", "\"x\""},
         {"3", "1.5"}},
        {"{\"oneOf\": [{\"type\": \"object\", \"required\": [\"k\"], \"properties\": {\"k\": "
         "{\"const\": "
         "\"a\"}, \"v\": {\"type\": \"integer\"}}}, {\"type\": \"object\", \"required\": [\"k\"], "
         "\"properties\": {\"k\": {\"const\": \"b\"}, \"v\": {\"type\": \"string\"}}}]}",
         {"{\"k\":\"a\",\"v\":1}", "{\"v\":\"s\",\"k\":\"b\"}"},
         {"{\"k\":\"a\",\"v\":\"s\"}", "{\"v\":1,\"k\":\"b\"}", "{\"k\":\"c\"}", "{}"}},
        {"{\"oneOf\": [{\"type\": \"object\", \"required\": [\"m\"], \"properties\": {\"m\": "
         "{\"type\": "
         "\"object\", \"required\": [\"k\"], \"properties\": {\"k\": {\"const\": \"a\"}}}}}, "
         "{\"type\": \"object\", \"required\": [\"m\"], \"properties\": {\"m\": {\"type\": "
         "\"object\", \"properties\": {\"k\": {\"enum\": [\"b\", \"c\"]}}}}}]}",
         {"{\"m\":{\"k\":\"a\"}}", "{\"m\":{\"k\":\"b\"}}", "{\"m\":{}}"},
         {"{\"m\":{\"k\":\"d\"}}", "{\"m\":1}", "{}"}},
        {"{\"type\": \"object\", \"required\": [\"v\"], \"oneOf\": [{\"properties\": {\"v\": "
         "{\"const\": 1}}}, {\"properties\": {\"v\": {\"enum\": [1.0, 2]}}}, {\"properties\": "
         "{\"v\": {\"enum\": [3, \"s\"]}}}, {\"properties\": {\"v\": {\"const\": \"s\"}}}]}",
         {"{\"v\":2}", "{\"v\":3}"},
         {"{\"v\":1}", "{\"v\":\"s\"}", "{\"v\":4}"}},
        {"{\"type\": \"object\", \"oneOf\": [{\"required\": [\"a\"]}, {\"required\": [\"b\"]}]}",
         {"{\"a\":1}", "{\"b\":1,\"c\":2}"},
         {"{}", "{\"a\":1,\"b\":2}", "{\"b\":1,\"a\":2}"}},
        {"{\"oneOf\": [{\"type\": \"object\", \"properties\": {\"a\": {}}, "
         "\"additionalProperties\": "
         "false}, {\"type\": \"object\", \"properties\": {\"a\": {}, \"b\": {}}, "
         "\"additionalProperties\": false}]}",
         {"{\"b\":1}", "{\"a\":1,\"b\":1}"},
         {"{}", "{\"a\":1}", "{\"c\":1}"}},
        {"{\"if\": {\"properties\": {\"k\": {\"const\": \"x\"}}, \"required\": [\"k\"]}, \"then\": "
         "{\"required\": [\"v\"]}, \"else\": {\"properties\": {\"v\": false}}, \"type\": "
         "\"object\"}",
         {"{\"k\":\"x\",\"v\":1}", "{}", "{\"k\":\"y\"}"},
         {"{\"k\":\"x\"}", "{\"v\":1}", "{\"v\":1,\"k\":\"z\"}"}},
        {"{\"not\": {\"required\": [\"a\"]}, \"type\": \"object\"}",
         {"{}", "{\"b\":1}"},
         {"{\"a\":1}"}},
        {"{\"not\": {\"enum\": [1, \"a\"]}}", {"2", "\"b\"", "[1]"}, {"1", "1.0", "\"\\u0061\""}},
        {"{\"type\": [\"string\", \"array\"], \"not\": {\"type\": \"array\", \"items\": {\"type\": "
         "\"integer\"}}}",
         {"\"x\"", "[\"a\"]", "[1,null]"},
         {"[]", "[1,2]", "3"}},
        {"{\"allOf\": [{\"anyOf\": [{\"const\": 1}, {\"const\": 2}]}, {\"anyOf\": [{\"const\": 2}, "
         "{\"const\": 3}]}]}",
         {"2"},
         {"1", "3"}},
    };
    CHECK(rows);
}

static void references(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"$ref\": \"#/$defs/n\", \"$defs\": {\"n\": {\"type\": \"object\", \"properties\": "
         "{\"v\": "
         "{\"type\": \"integer\"}, \"l\": {\"$ref\": \"#/$defs/n\"}, \"r\": {\"$ref\": \"#\"}}, "
         "\"required\": [\"v\"], \"additionalProperties\": false}}}",
         {"{\"v\":1}", "{\"l\":{\"l\":{\"v\":3},\"v\":2},\"v\":1,\"r\":{\"v\":0}}"},
         {"{}", "{\"v\":1,\"l\":{}}", "{\"v\":1,\"r\":1}"}},
        /* Two recursive schemas meet in every level. */
        {"{\"allOf\": [{\"$ref\": \"#/$defs/a\"}, {\"$ref\": \"#/$defs/b\"}], \"$defs\": {\"a\": "
         "{\"properties\": {\"v\": {\"minimum\": 1}, \"n\": {\"$ref\": \"#/$defs/a\"}}}, \"b\": "
         "{\"properties\": {\"v\": {\"maximum\": 3}, \"n\": {\"$ref\": \"#/$defs/b\"}}}}, "
         "\"type\": "
         "\"object\"}",
         {"{\"v\":2,\"n\":{\"n\":{\"v\":3}}}"},
         {"{\"n\":{\"n\":{\"v\":4}}}", "{\"n\":{\"v\":0}}"}},
        {"{\"$id\": \"http://x/root.json\", \"$ref\": \"other.json#p\", \"$defs\": {\"o\": "
         "{\"$id\": "
         "\"other.json\", \"$defs\": {\"q\": {\"$anchor\": \"p\", \"const\": 5}}}}}",
         {"5"},
         {"4"}},
        {"{\"$schema\": \"http://json-schema.org/draft-07/schema#\", \"definitions\": {\"a/b~c%\": "
         "{\"const\": 1}}, \"$ref\": \"#/definitions/a~1b~0c%25\", \"const\": 2}",
         {"1"},
         {"2"}},
        {"{\"$defs\": {\"a\": {\"minimum\": 1}}, \"$ref\": \"#/$defs/a\", \"maximum\": 2}",
         {"1", "2"},
         {"0", "3"}},
    };
    CHECK(rows);
}

static void white_space_is_limited(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"type\": [\"object\", \"array\"]}",
         {"{\"a\":1,\"b\":[1,2]}", "{\"a\": 1, \"b\": [1, 2]}",
          "{\n  \"a\": 1,\n  \"b\": [\n    1,\n    2\n  ]\n}\n", "{\r\n\t\"a\" : 1\r\n}"},
         {"{  \"a\":1}", "{\"a\":\n1}", "{\"a\"\n:1}", "{\"a\":1\n,\"b\":2}", "[\n\n1]", "[1  ]",
          "[\n \t1]"}},
        {"{\"x-guidance\": {\"whitespace_flexible\": true}, \"type\": \"array\"}",
         {"[  1\n\n,\t2 ]\n\n", "[]"},
         {"{}"}},
        {"{\"x-guidance\": {\"whitespace_flexible\": false}}",
         {"[1,2]", "{\"a\": [ ] }"},
         {"[\n1]", "[  1]"}},
        {"{\"x-guidance\": {\"whitespace_pattern\": \"[ \\n]{2}\"}, \"type\": \"array\"}",
         {"[  1  ,\n 2  ]", "  [    ]"},
         {"[1]", "[ 1 ]", " []"}},
    };
    CHECK(rows);
}

static void errors_name_the_place(void **state)
{
    (void)state;
    static const struct error rows[] = {
        {"{\"type\": \"object\"", BT_ERR_INVALID, "#: the schema is not JSON"},
        {"{\"a\": 1, \"a\": 2}", BT_ERR_INVALID, "#/a: the name occurs twice"},
        {"[]", BT_ERR_INVALID, "#: a schema is an object"},
        {"{\"properties\": {\"a\": {\"type\": \"any\"}}, \"required\": [\"a\"]}", BT_ERR_INVALID,
         "#/properties/a/type: a type is"},
        {"{\"x-guidance\": {\"whitespace_pattern\": \" |a\"}}", BT_ERR_INVALID,
         "#/x-guidance/whitespace_pattern: the pattern must"},
        {"{\"x-guidance\": {\"whitespace_pattern\": \"(\"}}", BT_ERR_INVALID,
         "#/x-guidance/whitespace_pattern: "},
        {"{\"x-guidance\": {\"lazy\": true}}", BT_ERR_UNSUPPORTED, "#/x-guidance/lazy: "},
        {"{\"type\": \"string\", \"minLength\": -1}", BT_ERR_INVALID, "#/minLength: "},
        {"{\"type\": \"object\", \"required\": true}", BT_ERR_INVALID, "#/required: "},
        {"{\"$ref\": \"#/$defs/x\"}", BT_ERR_INVALID, "#/$ref: the document has no schema"},
        {"{\"$ref\": \"http://example.com/x\"}", BT_ERR_UNSUPPORTED, "#/$ref: "},
        {"{\"$ref\": \"#\"}", BT_ERR_INVALID, "refers to itself"},
        {"{\"allOf\": [{\"$ref\": \"#/$defs/a\"}], \"$defs\": {\"a\": {\"anyOf\": [{\"$ref\": "
         "\"#\"}]}}}",
         BT_ERR_INVALID, "refers to itself"},
        {"false", BT_ERR_INVALID, "#: nothing satisfies"},
        {"{\"type\": \"string\", \"enum\": [1]}", BT_ERR_INVALID, "#: nothing satisfies"},
        {"{\"allOf\": [{\"type\": \"string\"}, {\"type\": \"null\"}]}", BT_ERR_INVALID,
         "#: nothing satisfies"},
        {"{\"type\": \"integer\", \"minimum\": 1.2, \"maximum\": 1.8}", BT_ERR_INVALID,
         "#: nothing satisfies"},
        {"{\"type\": \"array\", \"items\": {\"enum\": [1, 2]}, \"uniqueItems\": true, "
         "\"minItems\": "
         "3}",
         BT_ERR_INVALID, "no text can satisfy"},
        {"{\"type\": \"object\", \"minProperties\": 3, \"patternProperties\": {\"^(a|b)$\": true}, "
         "\"additionalProperties\": false}",
         BT_ERR_INVALID, "no text can satisfy"},
        {"{\"type\": \"array\", \"not\": {\"uniqueItems\": true}}", BT_ERR_UNSUPPORTED,
         "#/not/uniqueItems: "},
        {"{\"type\": \"array\", \"items\": {\"type\": \"object\", \"properties\": {\"a\": "
         "{\"enum\": "
         "[1, 1.0]}}, \"additionalProperties\": false}, \"uniqueItems\": true, \"minItems\": 3}",
         BT_ERR_UNSUPPORTED, "#/uniqueItems: there are not 3 different items"},
        {"{\"properties\": {\"a/b\": {\"type\": \"array\", \"contains\": {}, \"minContains\": 2}}}",
         BT_ERR_UNSUPPORTED, "#/properties/a~1b/contains: "},
        {"{\"type\": \"object\", \"not\": {\"additionalProperties\": false}}", BT_ERR_UNSUPPORTED,
         "#/not: "},
        {"{\"properties\": {\"a\": {\"multipleOf\": 0.123456789}}}", BT_ERR_UNSUPPORTED,
         "#/properties/a/multipleOf: "},
        {"{\"type\": \"string\", \"pattern\": \"(\"}", BT_ERR_INVALID, "#/pattern: "},
        {"{\"type\": \"string\", \"pattern\": \"(a)\\\\1\"}", BT_ERR_UNSUPPORTED, "#/pattern: "},
    };
    check_errors(BT_GRAMMAR_JSON_SCHEMA, rows, BT_ARRAY_LEN(rows));
}

/* A text of n times the part, between a head and a tail; '%' in it is the number, '@' the next one.
 */
static void ends(const char *head, const char *part, size_t n, const char *tail, bt_status_t status)
{
    struct bt_buf b;
    bt_buf_init(&b);
    bt_buf_puts(&b, head);
    for (size_t i = 0; i < n; i++) {
        for (const char *p = part; *p; p++) {
            if (*p == '%') {
                bt_buf_printf(&b, "%zu", i);
            } else if (*p == '@') {
                bt_buf_printf(&b, "%zu", i + 1);
            } else {
                bt_buf_append(&b, p, 1);
            }
        }
    }
    bt_buf_puts(&b, tail);
    char err[512] = "";
    struct bt_grammar *g = NULL;
    bt_status_t st = compile(BT_GRAMMAR_JSON_SCHEMA, b.data, &g, err, sizeof(err));
    if (st != status) {
        fail_msg("%.60s...: %s: '%s'", head, bt_status_name(st), err);
    }
    if (g) {
        bt_grammar_unref(g);
    }
    bt_buf_cleanup(&b);
}

static void hostile_schemas_end_at_a_limit(void **state)
{
    (void)state;
    ends("", "[", 100000, "", BT_ERR_EXHAUSTED);
    ends("", "{\"not\":", 5000, "", BT_ERR_EXHAUSTED);
    /* 2^40 combinations, which differ in 40 properties */
    ends("{\"type\":\"object\",\"allOf\":[",
         "{\"anyOf\":[{\"required\":[\"a%\"]},{\"required\":[\"b%\"]}]},", 40, "true]}",
         BT_ERR_EXHAUSTED);
    ends("{\"oneOf\":[", "{\"required\":[\"a%\"]},", 400, "{\"required\":[\"z\"]}]}",
         BT_ERR_EXHAUSTED);
    ends("{\"$ref\":\"#/$defs/d0\",\"$defs\":{",
         "\"d%\":{\"allOf\":[{\"$ref\":\"#/$defs/d@\"},true]},", 300, "\"d300\":true}}",
         BT_ERR_EXHAUSTED);
}

/* The alternatives never end, so nothing keeps them apart; nor does that question end. */
static void endless_discriminators(void **state)
{
    (void)state;
    static const char text[] = "{\"oneOf\":[{\"$ref\":\"#/$defs/a\"},{\"$ref\":\"#/$defs/"
                               "b\"},{\"type\":\"null\"}],\"$defs\":{"
                               "\"a\":{\"type\":\"object\",\"required\":[\"c\"],\"properties\":{"
                               "\"c\":{\"$ref\":\"#/$defs/a\"},"
                               "\"x\":{\"type\":\"integer\"}}},"
                               "\"b\":{\"type\":\"object\",\"required\":[\"c\"],\"properties\":{"
                               "\"c\":{\"$ref\":\"#/$defs/b\"},"
                               "\"y\":{\"type\":\"integer\"}}}}}";
    ends(text, "", 0, "", BT_OK); /* null is left */
}

static void large_schemas_compile(void **state)
{
    (void)state;
    ends("{\"enum\":[", "\"v%\",", 40000, "\"end\"]}", BT_OK);
    ends("{\"enum\":[", "%,", 60000, "-1]}", BT_OK);
    ends("{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{",
         "\"p%\":{\"type\":\"string\"},", 3000, "\"z\":{}}}", BT_OK);
    /* alternatives that a constant keeps apart: of all pairs none is worth a set */
    ends("{\"oneOf\":[",
         "{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"k%\"},\"p%\":{\"type\":"
         "\"integer\"}},\"required\":[\"k\",\"p%\"]},",
         500, "{\"type\":\"null\"}]}", BT_OK);
    ends("{\"oneOf\":[",
         "{\"type\":\"object\",\"properties\":{\"v\":{\"const\":%},\"p%\":{\"type\":\"integer\"}},"
         "\"required\":[\"v\"]},",
         500, "{\"type\":\"null\"}]}", BT_OK);
    ends("{\"oneOf\":[",
         "{\"type\":\"object\",\"properties\":{\"m\":{\"type\":\"object\",\"properties\":{\"k\":"
         "{\"const\":\"k%\"}},\"required\":[\"k\"]}},\"required\":[\"m\"]},",
         500, "{\"type\":\"null\"}]}", BT_OK);
    ends("{\"type\":\"array\",\"minItems\":1000000000,\"maxItems\":2000000000}", "", 0, "", BT_OK);
    ends("{\"type\":\"string\",\"minLength\":1000000,\"maxLength\":2000000}", "", 0, "", BT_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_json_passes_without_constraints),
        cmocka_unit_test(types_and_constants),
        cmocka_unit_test(numbers_have_exact_bounds),
        cmocka_unit_test(strings_combine_patterns_lengths_and_formats),
        cmocka_unit_test(objects),
        cmocka_unit_test(arrays),
        cmocka_unit_test(combinations),
        cmocka_unit_test(references),
        cmocka_unit_test(white_space_is_limited),
        cmocka_unit_test(errors_name_the_place),
        cmocka_unit_test(hostile_schemas_end_at_a_limit),
        cmocka_unit_test(endless_discriminators),
        cmocka_unit_test(large_schemas_compile),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
