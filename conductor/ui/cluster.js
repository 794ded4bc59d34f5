/* The cluster: nodes, what runs on them, how full it is. */
import { h, s } from "./dom.js";
import { bytes, count, ms, percent } from "./format.js";

const SHOWN = 40; /* nodes: a page with thousands of elements would be slow to draw every second */
let filter = "";
let rate = null; /* requests a second, from the last two looks */
let before = null;

export async function load() {}

/* A bar of parts, each [class, amount, what it is]. */
function bar(parts, total, label) {
  let x = 0;
  const rects = parts.map(([cls, amount, name]) => {
    const width = total > 0 ? (1000 * Math.min(amount, total)) / total : 0;
    const rect = s("rect", { class: cls, x, y: 0, width, height: 10 }, s("title", {}, `${name}: ${count(amount)}`));
    x += width;
    return rect;
  });
  return s("svg", { class: "bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("rect", { class: "track", x: 0, y: 0, width: 1000, height: 10 }), rects);
}

const figure = (name, value, note) =>
  h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value, note && h("small", {}, ` ${note}`)));

function summary(st) {
  const objective = (v) => (v > 0 ? ms(v) : "none");
  return h("dl", { class: "figures" },
    figure("Running", count(st.requests_running)),
    figure("Waiting", count(st.requests_waiting)),
    figure("Requests", count(st.requests_total), rate !== null ? `${rate.toFixed(1)}/s` : ""),
    figure("Planned again", count(st.replanned_total)),
    figure("First token", objective(st.ttft_objective_ms), "objective"),
    figure("Between tokens", objective(st.tbt_objective_ms), "objective"),
    figure("Scheduling", st.policy, st.admission));
}

const roles = (mask) => [mask & 1 && "prefill", mask & 2 && "decode"].filter(Boolean).join(" + ");

/* What a member is doing, in a word and a colour. */
function health(n) {
  if (n.draining) return ["warn", "draining"];
  if (n.member.state !== "READY") return ["warn", n.member.state.toLowerCase()];
  if (n.member.kind !== "conductor" && !n.session_up) return ["bad", "no session"];
  return ["good", "ready"];
}

const facts = (rows) =>
  h("dl", { class: "facts" }, rows.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

function gauge(name, used, total, parts, label) {
  return h("div", { class: "gauge" }, h("span", { class: "name" }, name), bar(parts, total, label),
    h("span", { class: "value" }, `${count(used)} / ${count(total)}`));
}

function worker(n) {
  const l = n.load;
  if (!l) return [];
  const slots = l.slots_total - l.slots_free, pages = l.pages_total - l.pages_free;
  return [
    gauge("rows", slots, l.slots_total, [["decode", slots, "in use"]], `${slots} of ${l.slots_total} rows in use`),
    gauge("pages", pages, l.pages_total, [["prefill", pages, "in use"]], `${pages} of ${l.pages_total} pages in use`),
    h("p", { class: "line" }, `${l.running} running, ${l.waiting} waiting`,
      l.landing > 0 ? `, ${l.landing} landing` : "",
      l.queued_prefill_tokens > 0 ? ` · ${count(l.queued_prefill_tokens)} tokens queued (${ms(l.queue_ms)})` : "",
      l.step_ms > 0 ? ` · step ${ms(l.step_ms)}` : "",
      l.prefill_tokens_per_s > 0 ? ` · prefill ${count(l.prefill_tokens_per_s)} tokens/s` : ""),
  ];
}

function store(n, names) {
  const p = n.pool;
  if (!p) return [];
  const used = p.slots_total - p.slots_free;
  const parts = [["sealed", p.slots_sealed, "cached blocks"], ["writing", p.slots_writing, "being written"],
    ["quarantine", p.slots_quarantine, "in quarantine"]];
  const speed = (l) => (l.slab_bytes_per_s > 0 ? `${bytes(l.slab_bytes_per_s)}/s` : "–");
  return [
    gauge("slab", used, p.slots_total, parts, `${used} of ${p.slots_total} slots of the slab in use`),
    p.ssd_slots > 0 ? gauge("SSD", p.ssd_blocks, p.ssd_slots, [["load", p.ssd_blocks, "blocks"]], `${p.ssd_blocks} of ${p.ssd_slots} blocks on the SSD`) : "",
    h("p", { class: "line" }, `${count(p.slots_sealed)} blocks cached (${percent(p.slots_sealed / p.slots_total)}), `,
      `${p.leases} leases`,
      p.ssd_bytes_per_s > 0 ? ` · SSD ${bytes(p.ssd_bytes_per_s)}/s` : "",
      p.links.map((l) => ` · from ${names.get(l.incarnation) ?? "a peer"} ${speed(l)}`)),
  ];
}

function member(n, names) {
  const m = n.member, [cls, word] = health(n);
  const role = m.kind === "prefill" || m.kind === "decode" ? roles(n.role) || m.kind : m.kind;
  return h("section", { class: "member", "data-key": `${m.kind}/${m.name}` },
    h("h3", {},
      h("span", { class: `chip ${role.includes("+") ? "both" : role}` }, role),
      h("span", { class: "name" }, m.name),
      m.next_role ? h("span", { class: "dim" }, `→ ${roles(m.next_role)}`) : "",
      h("span", { class: "health" }, h("span", { class: `dot ${cls}` }), word)),
    worker(n), store(n, names),
    h("details", {}, h("summary", {}, "Details"), facts([
      m.device && ["device", m.device], ["HTTP", m.http], ["gRPC", m.rpc], ["pid", m.pid], ["version", m.version],
      ["incarnation", m.incarnation], n.session_up && ["last heard", `${ms(n.silence_ms)} ago`],
      n.load && ["longest context", `${count(n.load.max_model_len)} tokens`],
    ])));
}

/* A member that loads its model and is not there yet. */
function starting(b) {
  return h("section", { class: "member", "data-key": `starting/${b.kind}/${b.name}` },
    h("h3", {}, h("span", { class: `chip ${b.kind}` }, b.kind), h("span", { class: "name" }, b.name),
      h("span", { class: "health" }, h("span", { class: "dot warn" }), "starting")),
    h("div", { class: "gauge" }, h("span", { class: "name" }, b.what), bar([["load", b.percent, "%"]], 100, `${b.what}: ${b.percent} %`),
      h("span", { class: "value" }, `${b.percent} %`)));
}

const ORDER = { conductor: 0, prefill: 1, decode: 2, kvstore: 3 };

export function render({ status: st }) {
  if (!st) return [h("p", { class: "empty" }, "Waiting for the server …")];
  const now = performance.now();
  if (before && now - before.at > 900) {
    rate = (1000 * (st.requests_total - before.total)) / (now - before.at);
  }
  if (!before || now - before.at > 900) before = { at: now, total: st.requests_total };

  const nodes = new Map(), names = new Map(st.nodes.map((n) => [n.member.incarnation, n.member.node]));
  for (const n of st.nodes) nodes.set(n.member.node, [...(nodes.get(n.member.node) ?? []), n]);
  const loading = new Map();
  for (const b of st.starting ?? []) {
    loading.set(b.node, [...(loading.get(b.node) ?? []), b]);
    if (!nodes.has(b.node)) nodes.set(b.node, []);
  }
  const ill = (members) => members.some((n) => health(n)[0] !== "good");
  const wanted = ([name, members]) => !filter || name.toLowerCase().includes(filter) ||
    members.some((n) => [n.member.name, n.member.kind, health(n)[1]].some((t) => t.toLowerCase().includes(filter)));
  const found = [...nodes].filter(wanted).sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }));
  if (found.length > SHOWN) found.sort(([, a], [, b]) => ill(b) - ill(a)); /* what needs attention comes first */
  const cards = found.slice(0, SHOWN).map(([name, members]) => {
    members.sort((a, b) => ORDER[a.member.kind] - ORDER[b.member.kind] || a.member.name.localeCompare(b.member.name));
    return h("article", { class: "card node", "data-key": name },
      h("h2", {}, name, members.some((n) => n.draining) ? h("span", { class: "badge warn" }, "draining") : ""),
      members.map((n) => member(n, names)), (loading.get(name) ?? []).map(starting));
  });
  const search = nodes.size > 6 && h("div", { class: "controls" },
    h("input", { type: "search", placeholder: "Filter by node, name, role, state", "aria-label": "Filter", "data-action": "filter" }),
    h("span", { class: "dim" }, `${cards.length} of ${nodes.size} nodes`));
  return [summary(st), search, h("div", { class: "nodes" }, cards)].filter(Boolean);
}

export const actions = {
  filter(state, e, from) {
    if (e.type !== "input") return;
    filter = from.value.trim().toLowerCase();
    state.refresh();
  },
};
