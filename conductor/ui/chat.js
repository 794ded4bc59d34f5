/* A chat: streams an answer, shows when each token came and how likely it was. */
import { get, stream } from "./api.js";
import { h, s } from "./dom.js";
import { count, ms, percent } from "./format.js";

const turns = []; /* {role, text, reasoning, tokens, sent, error, usage, plan, id, done} */
let abort = null, chosen = null, shown = "tokens", refused = false; /* refused: the model has no chat template */
let model = null;

export async function load() {
  if (model !== null) return;
  try {
    model = (await get("/v1/models")).data[0].id;
  } catch {
    model = null; /* the key may lack the scope; sending says so */
  }
}

const field = (name) => document.querySelector(`#chat-${name}`);

function body(prompt, withTemplate) {
  const common = { max_tokens: Number(field("max").value) || 256, temperature: Number(field("temperature").value), stream: true,
    stream_options: { include_usage: true } };
  if (!withTemplate) return { ...common, prompt, logprobs: 5 };
  const messages = turns.filter((t) => t.text && !t.error).map(({ role, text }) => ({ role, content: text }));
  const system = field("system").value.trim();
  return { ...common, messages: system ? [{ role: "system", content: system }, ...messages] : messages, logprobs: true, top_logprobs: 5 };
}

/* The tokens of one event of either API: {text, p, top: [[text, p]]}. */
function tokensOf(choice) {
  const l = choice.logprobs;
  if (!l) return [];
  if (l.content) {
    return l.content.map((t) => ({ text: t.token, p: Math.exp(t.logprob), top: (t.top_logprobs ?? []).map((o) => [o.token, Math.exp(o.logprob)]) }));
  }
  return (l.tokens ?? []).map((text, i) => ({ text, p: Math.exp(l.token_logprobs[i]),
    top: Object.entries(l.top_logprobs?.[i] ?? {}).map(([t, v]) => [t, Math.exp(v)]) }));
}

async function send(state) {
  const text = field("text").value.trim();
  if (!text || abort) return;
  field("text").value = "";
  turns.push({ role: "user", text });
  await answer(state, text);
}

async function answer(state, prompt) {
  const turn = { role: "assistant", text: "", reasoning: "", tokens: [], sent: performance.now() };
  const request = body(prompt, !refused);
  turns.push(turn);
  abort = new AbortController();
  state.refresh();
  let again = false;
  try {
    for await (const event of stream(refused ? "/v1/completions" : "/v1/chat/completions", request, abort.signal)) {
      const now = performance.now() - turn.sent, choice = event.choices?.[0];
      turn.id ??= event.id;
      if (event.error) throw new Error(event.error.message);
      if (choice) {
        turn.text += choice.delta?.content ?? choice.text ?? "";
        turn.reasoning += choice.delta?.reasoning_content ?? "";
        turn.tokens.push(...tokensOf(choice).map((t) => ({ ...t, at: now })));
        turn.end ??= choice.finish_reason;
      }
      if (event.usage) turn.usage = event.usage;
      if (event.plan) turn.plan = event.plan;
      draw(state);
    }
  } catch (e) {
    if (e.name === "AbortError") turn.end = "stopped";
    else if (!refused && e.status === 400 && /chat template/.test(e.message)) again = true;
    else turn.error = e.message;
  }
  turn.done = performance.now() - turn.sent;
  abort = null;
  if (again) {
    turns.pop();
    refused = true;
    await answer(state, prompt);
    return;
  }
  state.refresh();
  field("text")?.focus();
}

/* At most one drawing a frame, however fast tokens come. */
let drawing = false;
function draw(state) {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (state.view !== "chat") return;
    const log = document.querySelector(".log"), low = log && log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    state.refresh();
    if (low) document.querySelector(".log").scrollTop = 1e9;
  });
}

/* ---- what is shown ---- */

const visible = (t) => t.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
const level = (p) => (p > 0.9 ? 5 : p > 0.6 ? 4 : p > 0.3 ? 3 : p > 0.1 ? 2 : 1);

function gaps(tokens) {
  return tokens.slice(1).map((t, i) => t.at - tokens[i].at);
}

const quantile = (sorted, q) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : -1);

function timing(turn) {
  const all = [turn.tokens[0]?.at ?? 0, ...gaps(turn.tokens)], sorted = gaps(turn.tokens).sort((a, b) => a - b);
  const top = Math.max(1, quantile(sorted, 0.98) * 1.2), w = Math.max(1000 / Math.max(all.length, 60), 0.5);
  return h("figure", { class: "gaps" }, s("svg", { viewBox: "0 0 1000 40", preserveAspectRatio: "none", role: "img",
    "aria-label": `time between tokens: median ${ms(quantile(sorted, 0.5))}, 99 % below ${ms(quantile(sorted, 0.99))}` },
  all.map((v, i) => {
    const height = Math.max(1, 40 * Math.min(v / top, 1));
    return s("rect", { class: i === 0 ? "prefill" : "decode", x: i * w, y: 40 - height, width: Math.max(w * 0.85, 0.4), height },
      s("title", {}, i === 0 ? `first token after ${ms(v)}` : `gap ${i}: ${ms(v)}`));
  })));
}

function numbers(turn) {
  const sorted = gaps(turn.tokens).sort((a, b) => a - b), last = turn.tokens.at(-1), first = turn.tokens[0];
  const seconds = last && first ? (last.at - first.at) / 1000 : 0, cached = turn.usage?.prompt_tokens_details?.cached_tokens;
  return h("p", { class: "numbers" }, first ? `first token ${ms(first.at)}` : "waiting …",
    turn.plan ? ` (at the server ${ms(turn.plan.actual.ttft_ms)}, predicted ${ms(turn.plan.predicted.ttft_ms)})` : "",
    seconds > 0 ? ` · ${((turn.tokens.length - 1) / seconds).toFixed(1)} tokens/s · gaps ${ms(quantile(sorted, 0.5))} median, ${ms(quantile(sorted, 0.99))} p99` : "",
    turn.usage ? ` · ${count(turn.usage.prompt_tokens)} prompt tokens${cached > 0 ? `, ${count(cached)} cached` : ""} · ${count(turn.usage.completion_tokens)} generated` : "",
    turn.end ? ` · ${turn.end}` : "",
    turn.id && turn.done ? [" · ", h("a", { href: `#requests/${encodeURIComponent(turn.id)}` }, "why there?")] : "");
}

function tokenView(turn, n) {
  return h("div", { class: "strip", "aria-label": "tokens, coloured by their probability" }, turn.tokens.map((t, i) => [
    h("button", { type: "button", class: `token p${level(t.p)}${/^<\|.*\|>$/.test(t.text) ? " mark" : ""}`, "data-action": "token", "data-turn": n, "data-token": i,
      "aria-pressed": String(chosen?.[0] === n && chosen?.[1] === i), title: percent(t.p) }, visible(t.text)),
    t.text.includes("\n") ? h("br") : ""]));
}

function others(turn, i) {
  const t = turn.tokens[i];
  if (!t) return "";
  const list = t.top.some(([text]) => text === t.text) ? t.top : [[t.text, t.p], ...t.top];
  return h("div", { class: "others" }, h("p", { class: "dim" }, `token ${i + 1}, ${ms(t.at)} after the request`),
    list.map(([text, p]) => h("div", { class: `other ${text === t.text ? "chosen" : ""}` }, h("code", {}, visible(text)),
      s("svg", { class: "bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { class: "track", width: 1000, height: 10 }),
        s("rect", { class: "decode", width: 1000 * p, height: 10 })), h("span", { class: "value" }, percent(p)))));
}

function turnView(turn, n) {
  if (turn.role === "user") return h("article", { class: "turn user", "data-key": n }, turn.text);
  const tokens = shown === "tokens" && turn.tokens.length > 0;
  return h("article", { class: "turn assistant", "data-key": n },
    turn.reasoning ? h("details", { class: "thoughts" }, h("summary", {}, "Reasoning"), turn.reasoning) : "",
    tokens ? tokenView(turn, n) : h("div", { class: "text" }, turn.text),
    chosen?.[0] === n && tokens ? others(turn, chosen[1]) : "",
    turn.error ? h("p", { class: "bad" }, turn.error) : "",
    turn.tokens.length > 0 ? timing(turn) : "", turn.error ? "" : numbers(turn));
}

export function render() {
  const number = (id, text, value, attributes) => h("label", {}, text, h("input", { id: `chat-${id}`, type: "number", value, ...attributes }));
  return [h("div", { class: "chatbox" },
    h("div", { class: "log card", role: "log", "aria-label": "Conversation", tabindex: 0 },
      turns.length === 0 ? h("p", { class: "empty" }, "Ask something. The answer shows when each token came and how likely it was.") : turns.map(turnView)),
    h("form", { class: "ask", "data-action": "send" },
      h("textarea", { id: "chat-text", rows: 3, placeholder: refused ? "A text to continue" : "A message", "aria-label": "Message", "data-action": "type" }),
      h("span", { class: "buttons" },
        abort ? h("button", { type: "button", class: "main stop", "data-key": "stop", "data-action": "stop" }, "Stop")
          : h("button", { type: "submit", class: "main", "data-key": "send" }, "Send"),
        h("button", { type: "button", "data-action": "clear" }, "Clear"))),
    h("div", { class: "options" },
      number("max", "Max tokens", 256, { min: 1, max: 100000 }), number("temperature", "Temperature", 0.7, { min: 0, max: 2, step: 0.1 }),
      h("label", { class: "wide" }, "System", h("input", { id: "chat-system", type: "text", disabled: refused })),
      h("span", { class: "group" }, ["tokens", "text"].map((v) => h("button", { type: "button", "data-action": "show", "data-value": v, "aria-pressed": String(shown === v) },
        v === "tokens" ? "Tokens" : "Text")))),
    refused ? h("p", { class: "dim" }, "This model has no chat template: it continues the text.") : "")];
}

export const actions = {
  send(state, e) {
    if (e.type !== "submit") return;
    e.preventDefault();
    send(state);
  },
  type(state, e) {
    if (e.type === "keydown" && e.key === "Enter" && !e.shiftKey && !e.isComposing) {
      e.preventDefault();
      send(state);
    }
  },
  stop(state, e) {
    if (e.type === "click") abort?.abort();
  },
  clear(state, e) {
    if (e.type !== "click" || abort) return;
    turns.length = 0;
    chosen = null;
    state.refresh();
  },
  show(state, e, from) {
    if (e.type !== "click") return;
    shown = from.getAttribute("data-value");
    state.refresh();
  },
  token(state, e, from) {
    if (e.type !== "click") return;
    const next = [Number(from.getAttribute("data-turn")), Number(from.getAttribute("data-token"))];
    chosen = chosen?.[0] === next[0] && chosen?.[1] === next[1] ? null : next;
    state.refresh();
  },
};
