/* Spans as OTLP's protobuf messages (proto/otlp.proto). Everything that is built here lies in one
 * block of memory that is as large as the spans need. Any thread. */
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "common/trace/trace_priv.h"
#include "otlp.pb-c.h"

/* What one span becomes. */
struct parts {
    Otlp__Span span;
    Otlp__SpanStatus status;
    Otlp__KeyValue attr[BT_SPAN_ATTRS_MAX], *attrs[BT_SPAN_ATTRS_MAX];
    Otlp__Value value[BT_SPAN_ATTRS_MAX], item[BT_SPAN_ATTRS_MAX], *items[BT_SPAN_ATTRS_MAX];
    Otlp__Values list[BT_SPAN_ATTRS_MAX];
};

static void set_text(Otlp__Value *v, const char *text)
{
    otlp__value__init(v);
    v->v_case = OTLP__VALUE__V_STRING_VALUE;
    v->string_value = (char *)text;
}

static void set_attr(struct parts *p, uint32_t i, const struct bt_span_attr *a)
{
    Otlp__Value *v = &p->value[i];
    otlp__value__init(v);
    switch (a->kind) {
    case BT_ATTR_INT:
        v->v_case = OTLP__VALUE__V_INT_VALUE;
        v->int_value = a->number;
        break;
    case BT_ATTR_DOUBLE:
        v->v_case = OTLP__VALUE__V_DOUBLE_VALUE;
        v->double_value = a->real;
        break;
    case BT_ATTR_TEXT: set_text(v, a->text); break;
    case BT_ATTR_TEXTS:
        set_text(&p->item[i], a->text);
        p->items[i] = &p->item[i];
        otlp__values__init(&p->list[i]);
        p->list[i].n_values = 1;
        p->list[i].values = &p->items[i];
        v->v_case = OTLP__VALUE__V_ARRAY_VALUE;
        v->array_value = &p->list[i];
        break;
    }
    otlp__key_value__init(&p->attr[i]);
    p->attr[i].key = (char *)a->key;
    p->attr[i].value = v;
    p->attrs[i] = &p->attr[i];
}

static Otlp__Span *set_span(struct parts *p, const struct bt_span *s)
{
    Otlp__Span *o = &p->span;
    otlp__span__init(o);
    o->trace_id = (ProtobufCBinaryData){sizeof(s->trace_id), (uint8_t *)s->trace_id};
    o->span_id = (ProtobufCBinaryData){sizeof(s->span_id), (uint8_t *)s->span_id};
    if (s->has_parent) {
        o->parent_span_id = (ProtobufCBinaryData){sizeof(s->parent_id), (uint8_t *)s->parent_id};
    }
    o->name = (char *)s->name;
    o->kind = (int32_t)s->kind;
    o->start_time_unix_nano = s->start_ns;
    o->end_time_unix_nano = s->end_ns;
    for (uint32_t i = 0; i < s->n_attrs; i++) {
        set_attr(p, i, &s->attrs[i]);
    }
    o->n_attributes = s->n_attrs;
    o->attributes = p->attrs;
    o->dropped_attributes_count = s->n_lost_attrs;
    if (s->failed) {
        otlp__span_status__init(&p->status);
        p->status.code = 2;
        p->status.message = (char *)s->error;
        o->status = &p->status;
    }
    return o;
}

void bt_otlp_encode(const struct bt_spans *list, const char *service, const char *instance,
                    const char *node, struct bt_buf *out)
{
    const char *const facts[][2] = {{"service.name", service},
                                    {"service.instance.id", instance},
                                    {"service.version", bt_version()},
                                    {"host.name", node}};
    Otlp__KeyValue attr[BT_ARRAY_LEN(facts)], *attrs[BT_ARRAY_LEN(facts)];
    Otlp__Value value[BT_ARRAY_LEN(facts)];
    for (size_t i = 0; i < BT_ARRAY_LEN(facts); i++) {
        set_text(&value[i], facts[i][1]);
        otlp__key_value__init(&attr[i]);
        attr[i].key = (char *)facts[i][0];
        attr[i].value = &value[i];
        attrs[i] = &attr[i];
    }
    size_t n = 0;
    for (const struct bt_spans *s = list; s != NULL; s = s->next) {
        n += s->n;
    }
    struct parts *parts = bt_calloc(n + 1, sizeof(*parts));
    Otlp__Span **spans = bt_calloc(n + 1, sizeof(Otlp__Span *));
    size_t at = 0;
    for (const struct bt_spans *s = list; s != NULL; s = s->next) {
        for (uint32_t i = 0; i < s->n; i++, at++) {
            spans[at] = set_span(&parts[at], &s->at[i]);
        }
    }
    Otlp__Resource resource = OTLP__RESOURCE__INIT;
    resource.n_attributes = BT_ARRAY_LEN(facts);
    resource.attributes = attrs;
    Otlp__Scope scope = OTLP__SCOPE__INIT;
    scope.name = "baton";
    scope.version = (char *)bt_version();
    Otlp__ScopeSpans scoped = OTLP__SCOPE_SPANS__INIT, *scopes = &scoped;
    scoped.scope = &scope;
    scoped.n_spans = n;
    scoped.spans = spans;
    Otlp__ResourceSpans of = OTLP__RESOURCE_SPANS__INIT, *all = &of;
    of.resource = &resource;
    of.n_scope_spans = 1;
    of.scope_spans = &scopes;
    Otlp__ExportTrace request = OTLP__EXPORT_TRACE__INIT;
    request.n_resource_spans = 1;
    request.resource_spans = &all;
    size_t len = otlp__export_trace__get_packed_size(&request);
    uint8_t *packed = bt_malloc(len);
    otlp__export_trace__pack(&request, packed);
    bt_buf_append(out, packed, len);
    free(packed);
    free(spans);
    free(parts);
}
