// Elements, and numbers as text. Text only ever becomes a text node: what a model writes is never markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") styled(node, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function styled(node, values) {
  for (const [name, value] of Object.entries(values)) {
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.style[name] = value;
  }
}

/** An HTML element: el("p", {class: "note"}, "text", child …). `on…` attributes are listeners. */
export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

/** The same of SVG. */
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** A number in few characters: 0.0123, 1,234, 2.1e-7. */
export function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-4 || size >= 1e15) return value.toExponential(digits - 1).replace("-", "−");
  if (Number.isInteger(value) || size >= 10000) return Math.round(value).toLocaleString("en").replace("-", "−");
  const places = size >= 100 ? 1 : size >= 10 ? 2 : digits;
  return value.toFixed(places).replace("-", "−");
}

export const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(1)} %` : p >= 0.0001 ? `${(100 * p).toFixed(2)} %` : `${num(100 * p, 2)} %`);

/** Bytes in the unit that fits. */
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return `${i && n < 100 ? n.toFixed(n < 10 ? 2 : 1) : Math.round(n)} ${units[i]}`;
}

/** 134,515,008 → 134.5 M. */
export function count(n) {
  for (const [size, unit] of [[1e15, "Q"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(n) >= size) return `${(n / size).toPrecision(4).replace(/\.?0+$/, "")} ${unit}`;
  }
  return num(n);
}

/** Behind the next frame, when what is most wanted is painted; of several calls before it only the last one happens. */
export function afterFrame(action) {
  let waiting = false;
  let latest = [];
  return (...given) => {
    latest = given;
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => setTimeout(() => { waiting = false; action(...latest); }));
  };
}
