/* Numbers as short texts. */
const known = (v) => typeof v === "number" && Number.isFinite(v) && v >= 0;

export function ms(v) {
  if (!known(v)) return "–";
  if (v === 0) return "0 ms";
  if (v < 10) return `${v.toFixed(1)} ms`;
  if (v < 1000) return `${Math.round(v)} ms`;
  if (v < 100000) return `${(v / 1000).toFixed(v < 10000 ? 2 : 1)} s`;
  return `${Math.round(v / 60000)} min`;
}

function scaled(v, step, units) {
  let i = 0;
  while (v >= step && i < units.length - 1) {
    v /= step;
    i++;
  }
  const digits = i === 0 && Number.isInteger(v) ? 0 : v < 10 ? 1 : 0;
  return v.toFixed(digits) + units[i];
}

export const count = (v) => (known(v) ? scaled(v, 1000, ["", "k", "M", "G"]) : "–");
export const bytes = (v) => (known(v) ? scaled(v, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]) : "–");
export const percent = (v) => (known(v) ? `${(100 * v).toFixed(v > 0 && v < 0.1 ? 1 : 0)} %` : "–");
export const clock = (ns) => new Date(ns / 1e6).toLocaleTimeString([], { hour12: false });
export const shortId = (id) => (id.length > 18 ? `${id.slice(0, id.indexOf("-") + 1)}…${id.slice(-6)}` : id);
