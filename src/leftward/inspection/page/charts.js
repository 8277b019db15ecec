// Bars, lines and maps as SVG. Colours are the style sheet's; a value is an opacity, so that both themes can show it.
import { el, num, svg } from "leftward/dom.js";

const CELLS_AS_RECTANGLES = 64;

export const picture = (width, height, label, ...children) =>
  svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, style: { maxWidth: `${width}px` } }, ...children);

export const text = (x, y, content, attributes = {}) => svg("text", { x, y, ...attributes }, content);

/** Whole steps of 1, 2 or 5 that cover a range with about `n` of them. */
export function ticks(low, high, n = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / n;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((each) => each * unit >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

/** Lines over a plane. series: [{points: [[x, y]], cls, name}]; `marks`: [{x, y, cls, label}]; `bands`: [{points}]. */
export function lines({ label, series, marks = [], bands = [], xLabel, yLabel, logX = false, logY = false, width = 460, height = 240, onMove }) {
  const left = 58, right = 14, top = 26, bottom = 38;
  const at = (log) => (value) => (log ? Math.log10(Math.max(value, 1e-30)) : value);
  const fx = at(logX), fy = at(logY);
  const every = [...series, ...bands].flatMap((each) => each.points).filter(([x, y]) => Number.isFinite(fx(x)) && Number.isFinite(fy(y)));
  const xs = every.map(([x]) => fx(x)).concat(marks.map((mark) => fx(mark.x)));
  const ys = every.map(([, y]) => fy(y)).concat(marks.filter((mark) => mark.y !== undefined).map((mark) => fy(mark.y)));
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { y0 -= 0.5; y1 += 0.5; }
  const px = (x) => left + ((fx(x) - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => height - bottom - ((fy(y) - y0) / (y1 - y0)) * (height - top - bottom);
  const back = (log) => (value) => (log ? 10 ** value : value);
  const along = (log, low, high, n) => (!log ? ticks(low, high, n) : high - low < 2 ? ticks(10 ** low, 10 ** high, n) : ticks(low, high, n).filter(Number.isInteger).map((t) => 10 ** t));
  const path = (points) => points.filter(([x, y]) => Number.isFinite(fx(x)) && Number.isFinite(fy(y))).map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)},${py(y).toFixed(1)}`).join("");
  const grid = [
    ...along(logX, x0, x1, 6).map((t) => svg("g", {}, svg("line", { class: "grid", x1: px(t), x2: px(t), y1: top, y2: height - bottom }), text(px(t), height - bottom + 15, logX ? power(t) : num(t), { class: "tick middle" }))),
    ...along(logY, y0, y1, 5).map((t) => svg("g", {}, svg("line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }), text(left - 6, py(t) + 4, logY ? power(t) : num(t), { class: "tick end" }))),
  ];
  let keyAt = left;
  const key = series.filter((each) => each.name).map((each) => {
    const entry = svg("g", {}, svg("line", { class: `line ${each.cls}`, x1: keyAt, x2: keyAt + 18, y1: 11, y2: 11 }), text(keyAt + 22, 15, each.name, { class: "tick" }));
    keyAt += 34 + each.name.length * 6.4;
    return entry;
  });
  const drawn = picture(width, height, label, grid, key,
    bands.map((band) => svg("path", { class: `band ${band.cls ?? ""}`, d: `${path(band.points)}Z` })),
    series.map((each) => svg("path", { class: `line ${each.cls}`, d: path(each.points) })),
    marks.map((mark) => svg("g", {},
      mark.y === undefined ? svg("line", { class: `mark ${mark.cls ?? ""}`, x1: px(mark.x), x2: px(mark.x), y1: top, y2: height - bottom })
        : svg("circle", { class: `dot ${mark.cls ?? ""}`, cx: px(mark.x), cy: py(mark.y), r: 4.5 }),
      mark.label ? text(px(mark.x) + (px(mark.x) > width * 0.7 ? -9 : 9), mark.y === undefined ? top + 11 : py(mark.y) - 9, mark.label, { class: `tick strong ${px(mark.x) > width * 0.7 ? "end" : ""}` }) : null)),
    text((left + width - right) / 2, height - 5, xLabel, { class: "tick middle" }),
    text(12, (top + height - bottom) / 2, yLabel, { class: "tick middle", transform: `rotate(-90 12 ${(top + height - bottom) / 2})` }));
  if (onMove) drawn.addEventListener("pointermove", (event) => {
    const x = pointer(drawn, event).x;
    onMove(back(logX)(x0 + ((x - left) / (width - left - right)) * (x1 - x0)));
  });
  return drawn;
}

/** A number on a logarithmic axis: 250, 10⁶, 2·10⁻⁵. */
function power(value) {
  if (value >= 1e-3 && value < 1e4) return num(value, 2);
  const whole = Math.floor(Math.log10(value) + 1e-9), lead = Math.round(value / 10 ** whole);
  const raised = (whole < 0 ? "⁻" : "") + [...String(Math.abs(whole))].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
  return lead === 1 ? `10${raised}` : `${lead}·10${raised}`;
}

/** Bars side by side, up and down, as one shape: hundreds of them cost as little as one. */
export function columns({ label, values, cls = "", width = 460, height = 130, low, high, chosen, onPick, caption }) {
  const left = 50, right = 8, top = 18, bottom = 8;
  const y0 = low ?? Math.min(0, ...values), y1 = high ?? Math.max(0, ...values);
  const py = (y) => top + ((y1 - Math.max(y0, Math.min(y1, y))) / (y1 - y0 || 1)) * (height - top - bottom);
  const step = (width - left - right) / values.length;
  const thick = Math.max(step * 0.8, 0.6);
  const shape = (i) => `M${(left + i * step + (step - thick) / 2).toFixed(2)},${py(0).toFixed(2)}V${py(values[i]).toFixed(2)}h${thick.toFixed(2)}V${py(0).toFixed(2)}Z`;
  const few = values.length <= 16 ? [...values].map((v, i) => text(left + (i + 0.5) * step, v < 0 ? Math.min(py(v) + 11, height - 1) : Math.max(py(v) - 3, 9), num(v, 2), { class: "tick middle small" })) : [];
  const drawn = picture(width, height, label,
    ticks(y0, y1, 4).map((t) => svg("g", {}, svg("line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }), text(left - 6, py(t) + 4, num(t, 2), { class: "tick end" }))),
    svg("path", { class: `bar ${cls}`, d: Array.from(values, (_, i) => shape(i)).join("") }),
    chosen === undefined || chosen >= values.length ? null : svg("path", { class: "bar chosen", d: shape(chosen) }),
    chosen === undefined || chosen >= values.length ? null : svg("line", { class: "mark", x1: left + (chosen + 0.5) * step, x2: left + (chosen + 0.5) * step, y1: top, y2: height - bottom }),
    few,
    caption ? text(left, 11, caption, { class: "tick strong" }) : null);
  if (onPick) listen(drawn, (event, locks) => {
    const i = Math.floor((pointer(drawn, event).x - left) / step);
    if (i >= 0 && i < values.length) onPick(i, locks);
  });
  return drawn;
}

/** Horizontal bars with names. entries: [{name, value, cls, note, on}]; values from 0 to `most`, or around 0. */
export function bars({ label, entries, most, width = 460, row = 21, show = num, names = 120, centred = false }) {
  const said = entries.map((entry) => show(entry.value) + (entry.note ? `  ${entry.note}` : ""));
  const room = width - names - 14 - (centred ? 62 : 6.1 * Math.max(...said.map((each) => each.length)));
  const size = most ?? Math.max(1e-12, ...entries.map((entry) => Math.abs(entry.value)));
  const zero = names + (centred ? room / 2 : 0);
  const unit = (centred ? room / 2 : room) / size;
  return picture(width, entries.length * row + 6, label, entries.map((entry, i) => {
    const y = 3 + i * row;
    const length = Math.min(Math.abs(entry.value), size) * unit;
    const x = entry.value < 0 ? zero - length : zero;
    const act = entry.on ? { class: "row pickable", tabindex: 0, role: "button", "aria-label": `${entry.name} ${show(entry.value)}`, onclick: entry.on, onkeydown: (event) => { if (event.key === "Enter") entry.on(event); }, onpointerenter: entry.hover, onpointerleave: entry.leave } : { class: "row" };
    return svg("g", act,
      svg("rect", { class: "hit", x: 0, y, width, height: row }),
      text(names - 8, y + row * 0.68, cut(entry.name, Math.floor(names / 7.4)), { class: `end name ${entry.strong ? "strong" : ""}` }),
      svg("rect", { class: `bar ${entry.cls ?? ""}`, x, y: y + 3, width: Math.max(length, 0.5), height: row - 6, rx: 2 }),
      text(centred ? width - 4 : zero + length + 6, y + row * 0.68, said[i], { class: `tick ${centred ? "end" : ""}` }));
  }));
}

export const cut = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

/** Where a pointer is, in the picture's own units. */
export function pointer(drawn, event) {
  const box = drawn.getBoundingClientRect();
  const { width, height } = drawn.viewBox.baseVal;
  return { x: ((event.clientX - box.left) / box.width) * width, y: ((event.clientY - box.top) / box.height) * height };
}

/** Tells a picture's moves (false) and clicks (true). */
export function listen(drawn, tell) {
  drawn.classList.add("pickable");
  drawn.addEventListener("pointermove", (event) => tell(event, false));
  drawn.addEventListener("click", (event) => tell(event, true));
}

/** Moves the ring of a map to another row, without drawing the map anew. */
export const moveRing = (drawn, row) => { const ring = drawn.querySelector(".ring"); ring?.setAttribute("y", row * ring.dataset.step); };

/**
 * A map of rows × columns. value(i, j) → −1 … 1, or null for a cell that is masked; `write` → the text of a cell where
 * cells are large. Up to 64 × 64 cells are rectangles; more are pixels of one image.
 */
export function map({ label, rows, columns: n, value, write, rowNames = [], columnNames = [], row, column, size = 420, names = 74, onPick, onLeave, fill = "heat" }) {
  const wide = size / Math.max(n, 1), high = Math.min(wide, size / Math.max(rows, 1));
  const width = names + size + (columnNames.length ? names / 2 : 4);  // slanted names lean over the edge
  const height = names + rows * high + 4;
  const inside = svg("g", { transform: `translate(${names} ${names})` });
  if (rows <= CELLS_AS_RECTANGLES && n <= CELLS_AS_RECTANGLES) {
    const crosses = [], shades = new Map();  // one shape for all ✕, and one for all cells of a shade
    const box = `h${wide + 0.05}v${high + 0.05}h${-wide - 0.05}Z`, texts = [];
    for (let i = 0; i < rows; i += 1) for (let j = 0; j < n; j += 1) {
      const v = value(i, j);
      if (v === null) {
        const [x, y, arm] = [(j + 0.5) * wide, (i + 0.5) * high, Math.min(wide, high) * 0.26];
        crosses.push(`M${(x - arm).toFixed(1)},${(y - arm).toFixed(1)}l${2 * arm},${2 * arm}m0,${-2 * arm}l${-2 * arm},${2 * arm}`);
        continue;
      }
      const shade = `${v < 0 ? "cell negative" : `cell ${fill}`}/${Math.abs(v).toFixed(2)}`;
      shades.set(shade, `${shades.get(shade) ?? ""}M${(j * wide).toFixed(2)},${(i * high).toFixed(2)}${box}`);
      if (write && wide >= 34) texts.push(text((j + 0.5) * wide, (i + 0.5) * high + 4, write(i, j), { class: `middle small ${Math.abs(v) > 0.55 ? "on-dark" : ""}` }));
    }
    for (const [shade, d] of shades) inside.append(svg("path", { class: shade.split("/")[0], d, "fill-opacity": shade.split("/")[1] }));
    inside.append(...texts, svg("path", { class: "masked", d: crosses.join("") }));
  } else {
    inside.append(svg("image", { href: pixelsOf(rows, n, value, fill), width: size, height: rows * high, preserveAspectRatio: "none", style: { imageRendering: "pixelated" } }));
  }
  inside.append(svg("rect", { class: "frame", width: size, height: rows * high }));
  if (row !== undefined && row < rows) inside.append(svg("rect", { class: "ring", y: row * high, width: size, height: Math.max(high, 2), "data-step": high }));
  if (column !== undefined && column < n) inside.append(svg("rect", { class: "ring faint", x: column * wide, width: Math.max(wide, 2), height: rows * high }));
  const [rowStep, columnStep] = [high, wide].map((each) => Math.max(1, Math.ceil(13 / each)));  // names that don't touch
  const drawn = picture(width, height, label, inside,
    rowNames.map((name, i) => (i % rowStep === 0 || i === row ? text(names - 6, names + (i + 0.5) * high + 4, cut(name, 10), { class: `end tick ${i === row ? "strong" : ""}` }) : null)),
    columnNames.map((name, j) => (j % columnStep === 0 || j === column ? svg("g", { transform: `translate(${names + (j + 0.5) * wide + 4} ${names - 6}) rotate(-60)` }, text(0, 0, cut(name, 10), { class: `tick ${j === column ? "strong" : ""}` })) : null)));
  if (onPick) {
    listen(drawn, (event, locks) => {
      const { x, y } = pointer(drawn, event);
      const i = Math.floor((y - names) / high), j = Math.floor((x - names) / wide);
      if (i >= 0 && i < rows && j >= 0 && j < n) onPick(i, j, locks);
    });
    drawn.addEventListener("pointerleave", () => onLeave?.());
  }
  return drawn;
}

function pixelsOf(rows, n, value, fill) {
  const canvas = el("canvas", { width: n, height: rows });
  const context = canvas.getContext("2d");
  const image = context.createImageData(n, rows);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((each) => parseInt(each, 16));
  const [positive, negative, masked] = [colour(`--${fill}`), colour("--negative"), colour("--masked")];
  for (let i = 0, at = 0; i < rows; i += 1) for (let j = 0; j < n; j += 1, at += 4) {
    const v = value(i, j);
    const [r, g, b] = v === null ? masked : v < 0 ? negative : positive;
    image.data.set([r, g, b, v === null ? 90 : Math.round(255 * Math.min(1, Math.abs(v)))], at);
  }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}
