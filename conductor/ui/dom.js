/* Elements and their update. Text only ever becomes text nodes and attributes, never markup, so that
 * no prompt, model name or error can run as a script. */
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
  return node;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/* What the user has set stays: whether <details> is open, and what a field holds. */
const KEPT = new Set(["open", "value"]);

function same(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName &&
    (a.nodeType !== Node.ELEMENT_NODE || a.getAttribute("data-key") === b.getAttribute("data-key"));
}

function update(old, next) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) !== value && !KEPT.has(name)) old.setAttribute(name, value);
  }
  morph(old, [...next.childNodes]);
}

/* Makes the children of a node equal to these, and changes only what differs: focus, scroll
 * positions and selections survive. Children with a data-key keep their element when they move. */
export function morph(parent, next) {
  const keyed = new Map();
  for (const child of parent.children) {
    const key = child.getAttribute("data-key");
    if (key !== null) keyed.set(key, child);
  }
  let at = parent.firstChild;
  for (const node of next.flat(Infinity).filter((n) => n)) {
    const key = node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
    const old = key !== null ? keyed.get(key) ?? null : at;
    if (old && same(old, node)) {
      if (old === at) at = at.nextSibling;
      else parent.insertBefore(old, at);
      update(old, node);
    } else {
      parent.insertBefore(node, at);
    }
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}
