/* Requests as waterfalls: those that run, the last plans, and why each was placed where it is. */
import { get } from "./api.js";
import { h, s } from "./dom.js";
import { bytes, clock, count, ms, percent, shortId } from "./format.js";

const SHOWN = 60;
let data = null, explained = null, why = "", filter = "", scale = "life", held = false;

export async function load(state) {
  if (!held || !data) data = await get("/admin/v1/requests");
  if (!state.detail) {
    explained = null;
    why = "";
    return;
  }
  try {
    explained = await get(`/admin/v1/explain/${encodeURIComponent(state.detail)}`);
    why = "";
  } catch (e) {
    if (e.status !== 404) throw e;
    explained = null;
    why = "This conductor does not know the request (any more). It remembers the last 128.";
  }
}

/* The parts of a request's time in ms since it came: [class, from, to, what it is]. Unknown parts
 * are left out. */
function parts(r) {
  const o = r.outcome, list = [];
  const add = (cls, from, to, name) => {
    if (from >= 0 && to > from) list.push([cls, from, to, name]);
  };
  if (!o) return list;
  const started = o.queue_ms, computed = o.queue_ms + o.prefill_ms;
  add("queue", 0, o.planned_ms >= 0 ? o.planned_ms : started, "queue: waits for a place and a plan");
  add("load", o.planned_ms, started, "load: slots, the cached prefix, prompts before it");
  if (o.prefill_ms >= 0) add("prefill", started, computed, "prefill: computes the prompt");
  if (o.ttft_ms >= 0) {
    add("handoff", o.prefill_ms >= 0 && started >= 0 ? computed : 0, o.ttft_ms, "hand-off: until the first token");
    add("decode", o.ttft_ms, o.ttft_ms + Math.max(o.decode_ms, 0), "decode: generates the answer");
  }
  return list;
}

const length = (r) => {
  const o = r.outcome;
  if (!o) return 0;
  const first = Math.max(o.ttft_ms, o.queue_ms, o.flow_to_ms, r.ttft_ms, 0);
  return scale === "life" ? Math.max(first, o.ttft_ms + Math.max(o.decode_ms, 0)) : first;
};

function waterfall(r, end) {
  const x = (t) => (1000 * Math.min(Math.max(t, 0), end)) / end;
  const rect = (cls, from, to, y, height, name) =>
    s("rect", { class: cls, x: x(from), y, width: Math.max(x(to) - x(from), 1.5), height }, s("title", {}, name));
  const o = r.outcome, shapes = [];
  for (const [cls, from, to, name] of parts(r)) {
    if (from < end) shapes.push(rect(cls, from, to, 1, 11, `${name}\n${ms(to - from)}`));
  }
  if (o?.flow_to_ms >= 0) {
    shapes.push(rect("transfer", o.flow_from_ms, o.flow_to_ms, 13, 4,
      `transfer of KV to the decode side: ${bytes(o.kv_bytes)}\n${ms(o.flow_to_ms - o.flow_from_ms)}`));
  }
  if (r.planned && r.ttft_ms >= 0 && r.epoch === 1) {
    shapes.push(rect("predicted queue", 0, r.queue_ms, 19, 4, `predicted queue: ${ms(r.queue_ms)}`),
      rect("predicted prefill", r.queue_ms, r.queue_ms + r.prefill_ms, 19, 4, `predicted prefill: ${ms(r.prefill_ms)}`),
      rect("predicted handoff", r.queue_ms + r.prefill_ms, r.ttft_ms, 19, 4, `predicted first token: ${ms(r.ttft_ms)}`));
  }
  const text = parts(r).map(([, from, to, name]) => `${name.split(":")[0]} ${ms(to - from)}`).join(", ");
  return s("svg", { class: "waterfall", viewBox: "0 0 1000 24", preserveAspectRatio: "none", role: "img", "aria-label": text }, shapes);
}

const where = (r) => (!r.planned ? "not placed" : r.both ? r.decode : `${r.prefill} → ${r.decode}`);

function verdict(r) {
  const o = r.outcome;
  if (!o) return ["live", r.planned ? "runs" : "waits"];
  if (o.error) return ["bad", "failed"];
  return o.in_time ? ["good", "in time"] : ["warn", "late"];
}

function row(r, end, chosen) {
  const o = r.outcome, [cls, word] = verdict(r);
  return h("a", { class: "row", role: "listitem", href: `#requests/${encodeURIComponent(r.id || r.wire_id)}`, "data-key": r.wire_id,
    "aria-current": r.id === chosen || r.wire_id === chosen ? "true" : null },
    h("span", { class: "time" }, clock(r.received_ns)),
    h("span", { class: "id", title: r.id }, shortId(r.id || r.wire_id)),
    h("span", { class: "tokens", title: "prompt (of it cached) → generated tokens" }, count(r.tokens),
      h("i", {}, ` (${count(o ? o.cached_tokens : r.cached_tokens)})`), " → ", o ? count(o.tokens) : "…"),
    h("span", { class: "where", title: where(r) }, where(r)),
    h("span", { class: "fall" }, waterfall(r, end)),
    h("span", { class: "first", title: "first token: actual, and predicted" }, ms(o ? o.ttft_ms : -1),
      h("i", {}, r.epoch === 1 ? ` / ${ms(r.ttft_ms)}` : " / again")),
    h("span", { class: `state ${cls}` }, word));
}

function openRow(r) {
  return h("a", { class: "row open", role: "listitem", href: `#requests/${encodeURIComponent(r.id)}`, "data-key": `open-${r.wire_id}` },
    h("span", { class: "time" }, ms(r.age_ms)), h("span", { class: "id", title: r.id }, shortId(r.id)),
    h("span", { class: "tokens" }, count(r.prompt_tokens), " → ", count(r.tokens)),
    h("span", { class: "where" }, [r.prefill, r.decode].filter((n, i, all) => n && all.indexOf(n) === i).join(" → ") || "–"),
    h("span", { class: "fall dim" }, r.replans > 0 ? `planned again ${r.replans} times` : ""),
    h("span", { class: "first" }, ""), h("span", { class: "state live" }, r.state));
}

function axis(end) {
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((f) => h("span", {}, ms(f * end)));
  return h("div", { class: "row head", "aria-hidden": "true" },
    h("span", { class: "time" }, "Time"), h("span", { class: "id" }, "Request"), h("span", { class: "tokens" }, "Tokens"),
    h("span", { class: "where" }, "Workers"), h("span", { class: "fall axis" }, ticks), h("span", { class: "first" }, "First token"),
    h("span", { class: "state" }, ""));
}

const LEGEND = [["queue", "queue"], ["load", "load"], ["prefill", "prefill"], ["handoff", "hand-off"], ["decode", "decode"],
  ["transfer", "transfer"], ["predicted prefill", "predicted"]];

function controls() {
  const choice = (value, text) => h("button", { type: "button", "data-action": "scale", "data-value": value, "aria-pressed": String(scale === value) }, text);
  return h("div", { class: "controls" },
    h("input", { type: "search", placeholder: "Filter by id, worker, state", "aria-label": "Filter", "data-action": "filter" }),
    h("span", { class: "group" }, choice("life", "Whole life"), choice("first", "Until the first token")),
    h("button", { type: "button", "data-action": "hold", "aria-pressed": String(held) }, held ? "Held" : "Hold"),
    h("span", { class: "legend" }, LEGEND.map(([cls, name]) => h("span", {},
      s("svg", { class: "key", viewBox: "0 0 10 10" }, s("rect", { class: cls, x: 0, y: 0, width: 10, height: 10 })), name))));
}

/* ---- one request ---- */

function compare(name, cls, predicted, actual) {
  const end = Math.max(predicted, actual, 0.001);
  const width = (v) => (v >= 0 ? (1000 * v) / end : 0);
  return h("div", { class: "compare" }, h("span", { class: "name" }, name),
    s("svg", { class: "bar two", viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" },
      s("rect", { class: cls, x: 0, y: 0, width: width(actual), height: 7 }),
      s("rect", { class: "predicted prefill", x: 0, y: 9, width: width(predicted), height: 4 })),
    h("span", { class: "value" }, ms(actual), h("i", {}, ` / ${ms(predicted)}`)));
}

/* The parts in words: name, how long, what it is. */
function partList(e) {
  const o = e.outcome, list = parts(e);
  if (o.flow_to_ms > o.flow_from_ms) list.push(["transfer", o.flow_from_ms, o.flow_to_ms, "transfer: KV goes to the decode side"]);
  return list.map(([cls, from, to, text]) => {
    const [name, what] = text.split(": ");
    return [h("span", {}, s("svg", { class: "key", viewBox: "0 0 10 10" }, s("rect", { class: cls, width: 10, height: 10 })), name),
      h("span", { class: "value" }, ms(to - from)), h("i", {}, what)];
  });
}

function candidates(e) {
  const predicted = (c) => (c.for_prefill ? `first token ${ms(c.ttft_ms)}${c.queue_ms > 0 ? `, queue ${ms(c.queue_ms)}` : ""}`
    : `gaps ${ms(c.tbt_ms)}, ${percent(c.load)} in use`);
  return h("table", {}, h("thead", {}, h("tr", {}, ["Worker", "For", "Cached", "Predicted", "Verdict"].map((t) => h("th", {}, t)))),
    h("tbody", {}, e.candidates.map((c) => h("tr", { class: c.chosen ? "chosen" : "" },
      h("td", {}, c.worker), h("td", {}, c.for_prefill ? "prefill" : "decode"), h("td", {}, count(c.cached_tokens)),
      h("td", {}, predicted(c)), h("td", {}, c.verdict)))));
}

function detail(state) {
  const close = h("a", { class: "close", href: "#requests", "aria-label": "Close" }, "×");
  if (!explained) return h("aside", { class: "card detail" }, close, h("p", { class: "empty" }, why || "Asking …"));
  const e = explained, o = e.outcome, [cls, word] = verdict(e), end = length(e);
  return h("aside", { class: "card detail", "data-key": e.wire_id, "aria-label": "One request" }, close,
    h("h2", {}, h("span", { class: `state ${cls}` }, word), " ", h("code", {}, e.id)),
    h("p", { class: "why" }, h("b", {}, where(e)), ". ", e.meaning ? `Why: ${e.meaning}.` : "",
      e.again && ` The plan before this one was given up: ${e.again}.`, e.draining && " On a node that is being drained: nobody else could take it.",
      o?.error && h("span", { class: "bad" }, ` ${o.error}`)),
    o && end > 0 ? [waterfall(e, end), h("div", { class: "parts" }, partList(e))] : "",
    h("h3", {}, "What happened, and what was predicted"),
    compare("Queue", "queue", e.queue_ms, o ? o.queue_ms : -1), compare("Prefill", "prefill", e.prefill_ms, o ? o.prefill_ms : -1),
    compare(e.epoch > 1 ? "Next token" : "First token", "handoff", e.ttft_ms, o ? o.ttft_ms : -1), compare("Between tokens", "decode", e.tbt_ms, o ? o.tbt_ms : -1),
    h("dl", { class: "facts" }, [
      ["prompt", `${count(e.tokens)} tokens, ${count(o ? o.cached_tokens : e.cached_tokens)} from the cache`],
      o && ["answer", `${count(o.tokens)} tokens in ${ms(o.decode_ms)}`],
      o && o.kv_bytes > 0 && ["KV moved", `${bytes(o.kv_bytes)}, ${percent(o.hidden_fraction)} hidden behind the prefill`],
      e.fetch_tokens > 0 && ["fetched", `${count(e.fetch_tokens)} tokens from ${e.sources.map((x) => `${x.kvstore} (${x.blocks} blocks)`).join(", ")}`],
      ["plan", `number ${e.epoch}, ${e.choices} choice${e.choices === 1 ? "" : "s"}${o && o.replans > 0 ? `, planned again ${o.replans} times` : ""}`],
      ["in logs", `req=${e.wire_id}`],
    ].filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("h3", {}, "Who could have taken it"), h("div", { class: "scroll" }, candidates(e)),
    e.candidates.length < e.candidates_total ? h("p", { class: "dim" }, `${e.candidates.length} of ${e.candidates_total}`) : "");
}

export function render(state) {
  if (!data) return [h("p", { class: "empty" }, "Waiting for the server …")];
  const wanted = (r) => !filter || [r.id, r.wire_id, r.prefill, r.decode, r.state ?? verdict(r)[1], r.outcome?.error]
    .some((t) => t?.toLowerCase().includes(filter));
  const open = data.open.list.filter(wanted).slice(-20);
  const running = new Set(open.map((r) => r.wire_id));
  const recent = data.recent.list.filter((r) => wanted(r) && !running.has(r.wire_id)).slice(0, SHOWN);
  const end = Math.max(1, ...recent.map(length));
  return [controls(), h("div", { class: state.detail ? "split with" : "split" },
    h("div", { class: "list", role: "list", "aria-label": "Requests" }, axis(end), open.map(openRow),
      recent.map((r) => row(r, end, state.detail)),
      open.length + recent.length === 0 ? h("p", { class: "empty" }, filter ? "No request matches." : "No request yet. The chat makes one.") : ""),
    state.detail ? detail(state) : "")];
}

export const actions = {
  filter(state, e, from) {
    if (e.type !== "input") return;
    filter = from.value.trim().toLowerCase();
    state.refresh();
  },
  scale(state, e, from) {
    if (e.type !== "click") return;
    scale = from.getAttribute("data-value");
    state.refresh();
  },
  hold(state, e) {
    if (e.type !== "click") return;
    held = !held;
    state.refresh();
  },
};
