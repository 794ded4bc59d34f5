/* Goodput and objectives over the last half hour, from the counters that the conductor keeps. */
import { get } from "./api.js";
import { h, s } from "./dom.js";
import { clock, count, ms, percent } from "./format.js";

const W = 600, H = 120;
let history = null, asked = 0, at = -1; /* at: step under the pointer */

export async function load() {
  if (history && performance.now() - asked < 4000) return;
  asked = performance.now();
  history = await get("/admin/v1/history");
}

/* What was counted between two samples, as rates and means. */
function steps(list) {
  const out = [];
  for (let i = 1; i < list.length; i++) {
    const a = list[i - 1], b = list[i], seconds = (b.at_ns - a.at_ns) / 1e9;
    if (seconds < 1 && list.length > 2) continue; /* the sample of now, right behind a step */
    const d = (name) => b[name] - a[name];
    const done = d("finished"), all = done + d("failed") + d("refused");
    out.push({
      at_ns: b.at_ns, running: b.running, waiting: b.waiting,
      good: d("in_time") / seconds, late: (done - d("in_time")) / seconds, failed: d("failed") / seconds, refused: d("refused") / seconds,
      share: all > 0 ? d("in_time") / all : null,
      tokens: d("tokens") / seconds, prompt: Math.max(d("prompt_tokens") - d("cached_tokens"), 0) / seconds, cached: d("cached_tokens") / seconds,
      ttft: done > 0 ? d("ttft_ms") / done : null, tbt: done > 0 ? d("tbt_ms") / done : null,
    });
  }
  return out;
}

/* Rounds up to 1, 2 or 5 times a power of ten. */
function nice(v) {
  if (!(v > 0)) return 1;
  const p = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 5, 10].find((m) => m * p >= v) * p;
}

function chart(title, data, series, { stacked, unit, top, line } = {}) {
  const sums = data.map((d) => series.reduce((sum, [name]) => (stacked ? sum + (d[name] ?? 0) : Math.max(sum, d[name] ?? 0)), 0));
  const max = top ?? nice(Math.max(...sums, line ?? 0));
  const x = (i) => (data.length > 1 ? (W * i) / (data.length - 1) : W), y = (v) => H - ((H - 2) * Math.min(v, max)) / max;
  const shapes = [];
  const base = data.map(() => 0);
  for (const [name, cls] of series) {
    if (stacked) {
      const low = data.map((d, i) => `${x(i).toFixed(1)},${y(base[i]).toFixed(1)}`).reverse();
      data.forEach((d, i) => (base[i] += d[name] ?? 0));
      const high = data.map((d, i) => `${x(i).toFixed(1)},${y(base[i]).toFixed(1)}`);
      shapes.push(s("polygon", { class: `area ${cls}`, points: [...high, ...low].join(" ") }));
    } else {
      const runs = [[]]; /* a step without a value is a gap */
      data.forEach((d, i) => (d[name] === null ? runs.push([]) : runs.at(-1).push(`${x(i).toFixed(1)},${y(d[name]).toFixed(1)}`)));
      for (const run of runs.filter((r) => r.length > 0)) {
        if (run.length === 1) run.push(run[0].replace(/^[\d.]+/, (v) => (Number(v) < W ? Number(v) + 2 : W - 2).toFixed(1)));
        shapes.push(s("polyline", { class: `line ${cls}`, points: run.join(" ") }));
      }
    }
  }
  if (line > 0) shapes.push(s("line", { class: "objective", x1: 0, x2: W, y1: y(line), y2: y(line) }, s("title", {}, `objective: ${unit(line)}`)));
  const i = at >= 0 && at < data.length ? at : data.length - 1;
  if (at >= 0 && at < data.length) shapes.push(s("line", { class: "cursor", x1: x(i), x2: x(i), y1: 0, y2: H }));
  const shown = data[i];
  return h("figure", { class: "card chart", "data-key": title },
    h("figcaption", {}, h("b", {}, title), h("span", { class: "values" }, series.map(([name, cls, text]) =>
      h("span", {}, s("svg", { class: "key", viewBox: "0 0 10 10" }, s("rect", { class: cls, width: 10, height: 10 })),
        text && `${text} `, h("b", {}, shown && shown[name] !== null ? unit(shown[name]) : "–"))))),
    h("div", { class: "plot" },
      h("span", { class: "max" }, unit(max)),
      s("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "data-action": "point",
        "aria-label": `${title}: ${series.map(([name, , text]) => `${text ?? ""} ${shown && shown[name] !== null ? unit(shown[name]) : "none"}`).join(", ")}` },
      [0.25, 0.5, 0.75].map((f) => s("line", { class: "grid", x1: 0, x2: W, y1: H * f, y2: H * f })), shapes)),
    h("div", { class: "ends" }, h("span", {}, data.length ? clock(data[0].at_ns) : ""),
      h("span", {}, at >= 0 && shown ? clock(shown.at_ns) : ""), h("span", {}, data.length ? clock(data.at(-1).at_ns) : "")));
}

export function render() {
  if (!history) return [h("p", { class: "empty" }, "Waiting for the server …")];
  const data = steps(history.list);
  const first = history.list[0], last = history.list.at(-1);
  const total = (name) => last[name] - first[name];
  const ended = total("finished") + total("failed") + total("refused");
  const rate = (v) => `${count(v)}/s`;
  const figure = (name, value, note) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value, note && h("small", {}, ` ${note}`)));
  const objective = (v) => (v > 0 ? ms(v) : "none");
  return [
    h("dl", { class: "figures" },
      figure("Goodput", ended > 0 ? percent(total("in_time") / ended) : "–"),
      figure("In time", count(total("in_time"))), figure("Late", count(total("finished") - total("in_time"))),
      figure("Failed", count(total("failed"))), figure("Refused", count(total("refused"))),
      figure("Objectives", objective(history.ttft_objective_ms), `gaps ${objective(history.tbt_objective_ms)}`),
      figure("From the cache", total("prompt_tokens") > 0 ? percent(total("cached_tokens") / total("prompt_tokens")) : "–")),
    h("div", { class: "charts" },
      chart("Requests", data, [["good", "good", "in time"], ["late", "warn", "late"], ["failed", "bad", "failed"], ["refused", "refused", "refused"]],
        { stacked: true, unit: rate }),
      chart("Share in time", data, [["share", "good"]], { unit: percent, top: 1 }),
      chart("Time to the first token, mean", data, [["ttft", "prefill"]], { unit: ms, line: history.ttft_objective_ms }),
      chart("Longest tenth of the gaps, mean", data, [["tbt", "decode"]], { unit: ms, line: history.tbt_objective_ms }),
      chart("Tokens", data, [["tokens", "decode", "generated"], ["prompt", "prefill", "computed"], ["cached", "sealed", "cached"]], { unit: rate }),
      chart("Open requests", data, [["running", "decode", "running"], ["waiting", "queue", "waiting"]], { stacked: true, unit: count }))];
}

document.addEventListener("pointermove", (e) => {
  const plot = e.target instanceof Element ? e.target.closest(".plot svg") : null;
  const next = plot && history ? Math.round(((e.offsetX || 0) / plot.clientWidth) * (steps(history.list).length - 1)) : -1;
  if (next === at) return;
  at = next;
  moved?.();
});
let moved = null;
export const actions = {
  point(state) {
    moved = state.refresh;
  },
};
