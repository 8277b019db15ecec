// Step 2: who looks at whom. One head in its four stages, all heads to choose from, and what another mask would do.
import { el, num, percent, svg } from "leftward/dom.js";
import { bars, columns, cut, listen, map, moveRing, picture, pointer, text } from "leftward/charts.js";
import { choice, formula, latest, readouts, slider } from "leftward/controls.js";
import { figure } from "leftward/figure.js";
import { largest } from "leftward/numbers.js";

export const title = "Causal mask";
export const lead = "Each position mixes what stands at the positions it may see. The mask decides which; the scores decide how much.";

const STAGES = [["products", "q·k"], ["scores", "scaled"], ["masked", "masked"], ["weights", "softmax"]];
const MASKS = [["causal", "causal"], ["window", "window"], ["prefix", "prefix"], ["none", "none"]];
const MOST_BARS = 24;
const LONG = 512;  // tokens from which on the leak proof waits to be asked for

export function create(context) {
  const { about, state, source } = context;
  const n = about.tokens.length;
  let own = null, row = null, small = null, trial = null;  // parts: attention, attention_row, thumbnails, experiment

  const mask = () => state.get().mask;
  const size = () => Math.max(1, Math.min(state.get().size ?? Math.ceil(n / 4), n));
  const shownPart = () => (mask() !== "causal" && trial?.data.mask === mask() ? trial : own);
  const query = () => context.focus();

  /** A score as the softmax sees it, from q · k: scaled, capped, with ALiBi's share. */
  function scoreOf(product, i, j, data) {
    let score = product * data.scale;
    if (data.softcap) score = data.softcap * Math.tanh(score / data.softcap);
    return data.slope === null ? score : score - data.slope * Math.abs(i - j);
  }

  /** {products, weights, visible} of one query, wherever they come from; null while they are on their way. */
  function rowOf(i) {
    const part = shownPart();
    if (!part) return null;
    if (part.arrays.weights) return Object.fromEntries(["products", "weights", "visible"].filter((name) => part.arrays[name]).map((name) => [name, part.arrays[name].subarray(i * n, (i + 1) * n)]));
    return mask() === "causal" && row && Number(row.params.query) === i ? row.arrays : null;
  }

  function stageValue(stage) {
    const part = shownPart();
    const { arrays, data } = part;
    if (!arrays.weights) {
      const side = arrays.map.shape[0];
      return { side, value: (i, j) => (j > i && mask() === "causal" ? null : arrays.map[i * side + j] / 255), write: null };
    }
    const visible = (i, j) => arrays.visible[i * n + j] === 1;
    if (stage === "weights" || !arrays.products) return { side: n, value: (i, j) => (visible(i, j) ? arrays.weights[i * n + j] : null), write: (i, j) => arrays.weights[i * n + j].toFixed(2) };
    const raw = (i, j) => (stage === "products" ? arrays.products[i * n + j] : scoreOf(arrays.products[i * n + j], i, j, data));
    let most = 1e-9;
    for (let i = 0; i < n; i += 1) for (let j = 0; j < n; j += 1) most = Math.max(most, Math.abs(raw(i, j)));
    return { side: n, value: (i, j) => (stage === "masked" && !visible(i, j) ? null : raw(i, j) / most), write: (i, j) => num(raw(i, j), 1) };
  }

  /** The row of the map that a position is in: one for each, or for several where the text is long. */
  function onMap(position) {
    const { map: shades } = shownPart().arrays;
    return shades ? Math.floor((position * shades.shape[0]) / n) : position;
  }

  function drawMap() {
    if (!shownPart()) return null;
    const { side, value, write } = stageValue(state.get().stage);
    const names = side === n ? context.labels : Array.from({ length: side }, (_, i) => String(Math.floor((i * n) / side)));
    return map({
      label: `attention of layer ${context.layer()}, head ${context.head()}: a row is a query, a column a key`,
      rows: side, columns: side, value, write, rowNames: names, columnNames: names, row: onMap(query()),
      onPick: (i, j, locks) => { const position = side === n ? i : Math.floor((i * n) / side); state.set(locks ? { token: position, hover: null } : { hover: position }); },
      onLeave: () => state.set({ hover: null }),
    });
  }

  function mapTable() {
    const { arrays } = shownPart();
    if (!arrays.weights) return { columns: ["query", "entropy", "maximum"], rows: Array.from(arrays.entropy, (bits, i) => [i, bits, arrays.maximum[i]]) };
    const rows = [];
    for (let i = 0; i < n; i += 1) for (let j = 0; j < n; j += 1) if (arrays.visible[i * n + j]) rows.push([i, context.label(i), j, context.label(j), arrays.products?.[i * n + j], arrays.weights[i * n + j]]);
    return { columns: ["query", "token", "key", "key token", "q·k", "weight"], rows };
  }

  function rowEntries() {
    const here = rowOf(query());
    if (!here) return [];
    return Array.from(here.weights, (weight, j) => ({ j, weight, seen: here.visible[j] === 1 })).filter(({ seen }) => seen);
  }

  function drawRow() {
    const all = rowEntries();
    if (!all.length) return null;
    const best = all.length > MOST_BARS ? [...all].sort((a, b) => b.weight - a.weight).slice(0, MOST_BARS).sort((a, b) => a.j - b.j) : all;
    const rest = all.length - best.length;
    const entries = best.map(({ j, weight }) => ({ name: context.label(j), value: weight, strong: j === query(), cls: j === query() ? "chosen" : "", note: `at ${j}`, on: () => state.set({ token: j }) }));
    if (rest) entries.push({ name: `the other ${rest}`, value: all.reduce((sum, { weight }) => sum + weight, 0) - best.reduce((sum, { weight }) => sum + weight, 0), cls: "rest" });
    return bars({ label: `what ${context.label(query())} looks at`, entries, most: Math.max(...entries.map((entry) => entry.value)), show: percent, row: 19 });
  }

  let shades = null;  // the thumbnails as one image, kept until the theme changes
  function paintThumbnails() {
    const { n_layers: layers, n_heads: heads } = about.config, cells = small.data.n;
    const canvas = el("canvas", { width: layers * (cells + 1), height: heads * (cells + 1) });
    const paint = canvas.getContext("2d"), image = paint.createImageData(canvas.width, canvas.height);
    const [r, g, b] = getComputedStyle(document.documentElement).getPropertyValue("--heat").trim().match(/[0-9a-f]{2}/gi).map((each) => parseInt(each, 16));
    const maps = small.arrays.maps;
    for (let layer = 0, at = 0; layer < layers; layer += 1) for (let head = 0; head < heads; head += 1) for (let i = 0; i < cells; i += 1) for (let j = 0; j < cells; j += 1, at += 1) {
      const pixel = 4 * ((head * (cells + 1) + i) * canvas.width + layer * (cells + 1) + j);
      image.data.set([r, g, b, 22 + 0.91 * maps[at]], pixel);
    }
    paint.putImageData(image, 0, 0);
    return canvas.toDataURL();
  }

  function drawThumbnails() {
    if (!small) return null;
    const { n_layers: layers, n_heads: heads } = about.config;
    const cells = small.data.n, side = Math.min(58, 400 / layers, 400 / heads), left = 26;
    shades ??= paintThumbnails();
    const step = side + side / cells, width = left + layers * step + 2, height = 30 + heads * step + 2;
    const drawn = picture(width, height, `the attention of all ${layers} × ${heads} heads`,
      svg("image", { href: shades, x: left, y: 30, width: layers * step, height: heads * step, preserveAspectRatio: "none", style: { imageRendering: "pixelated" } }),
      text(left, 10, "layer →, head ↓", { class: "tick" }),
      Array.from({ length: layers }, (_, i) => (i % Math.ceil(18 / step) ? null : text(left + (i + 0.5) * step, 25, i, { class: "tick middle" }))),
      Array.from({ length: heads }, (_, i) => (i % Math.ceil(13 / step) ? null : text(left - 6, 30 + (i + 0.5) * step + 4, i, { class: "tick end" }))),
      svg("rect", { class: "ring", width: side + 2, height: side + 2, "data-step": step, "data-left": left }));
    ringAt(drawn);
    const hint = svg("title", {});
    drawn.append(hint);
    listen(drawn, (event, locks) => {
      const at = pointer(drawn, event);
      const [layer, head] = [Math.floor((at.x - left) / step), Math.floor((at.y - 30) / step)];
      if (layer < 0 || layer >= layers || head < 0 || head >= heads) return;
      hint.textContent = `layer ${layer}, head ${head}: previous token ${percent(small.arrays.previous[layer * heads + head])}, first token ${percent(small.arrays.first[layer * heads + head])}`;
      if (locks) state.set({ layer, head });
    });
    return drawn;
  }

  /** Moves the ring to the chosen head, without drawing the others anew. */
  function ringAt(drawn) {
    const ring = drawn?.querySelector(".ring");
    ring?.setAttribute("x", Number(ring.dataset.left) + context.layer() * ring.dataset.step - 1);
    ring?.setAttribute("y", 30 + context.head() * ring.dataset.step - 1);
  }

  const thumbnailTable = () => ({ columns: ["layer", "head", "entropy of its maximum", "on the first token", "on the previous token"], rows: Array.from(small.arrays.entropy, (share, i) => [Math.floor(i / about.config.n_heads), i % about.config.n_heads, share, small.arrays.first[i], small.arrays.previous[i]]) });

  function drawLeak() {
    if (!trial) return null;
    const values = trial.arrays.leak;
    return columns({ label: "how far each output moves when the last token changes", values, low: 0, high: Math.max(largest(values), 1e-6), cls: trial.data.leaks.length ? "leak" : "safe", chosen: query(), onPick: (i, locks) => state.set(locks ? { token: i, hover: null } : { hover: i }) });
  }

  const whole = figure({ name: "attention", title: "Attention", draw: drawMap, table: mapTable });
  const one = figure({ name: "attention-row", title: "The query's row", draw: drawRow, table: () => ({ columns: ["key", "token", "weight"], rows: rowEntries().map(({ j, weight }) => [j, context.label(j), weight]) }) });
  const grid = figure({ name: "heads", title: "All heads: choose one", draw: drawThumbnails, table: thumbnailTable });
  const leak = figure({ name: "leak", title: "One token is changed: which outputs move?", draw: drawLeak, table: () => ({ columns: ["position", "token", "output moves by", "the other mask moves it by"], rows: Array.from(trial.arrays.leak, (moved, i) => [i, context.label(i), moved, trial.arrays.moved[i]]) }) });

  const layers = slider({ label: "Layer", min: 0, max: about.config.n_layers - 1, value: context.layer(), on: (layer) => state.set({ layer }) });
  const heads = slider({ label: "Head", min: 0, max: about.config.n_heads - 1, value: context.head(), on: (head) => state.set({ head }) });
  const queries = slider({ label: "Query position", min: 0, max: n - 1, value: query(), show: (i) => `${i} ${cut(context.label(i), 12)}`, on: (token) => state.set({ token, hover: null }) });
  const stages = choice({ label: "Stage", options: STAGES, value: state.get().stage, on: (stage) => state.set({ stage }) });
  const masks = choice({ label: "Mask, as an experiment", options: MASKS, value: mask(), on: (chosen) => state.set({ mask: chosen }) });
  const sizes = slider({ label: "Window or prefix, tokens", min: 1, max: n, value: size(), on: (chosen) => state.set({ size: chosen }) });
  const out = readouts(["Query", "Sees", "Masked", "Entropy", "At most"]);
  const sums = formula();
  const leaks = el("p", { class: "verdict", role: "status" });

  const ask = latest((layer, head) => source.get("attention", { layer, head }), (part) => { own = part; draw(); }, (error) => context.fails(whole.element.querySelector(".figure-body"))(error));
  const askRow = latest((layer, head, position) => source.get("attention_row", { layer, head, query: position }), (part) => { row = part; drawOne(); }, context.fails(one.element.querySelector(".figure-body")));
  const askTrial = latest((kind, length, layer, head) => source.get("experiment", { mask: kind, size: length, layer, head }), (part) => { trial = part; leak.refresh(); verdict(); if (mask() !== "causal") draw(); },
    (error) => { trial = null; leaks.textContent = ""; draw(); context.fails(leak.element.querySelector(".figure-body"))(error); });
  source.get("thumbnails").then((part) => { small = part; grid.refresh(); }, context.fails(grid.element.querySelector(".figure-body")));

  function verdict() {
    const { data } = trial;
    const moved = data.leaks.length;
    const last = `The ${data.mask === "prefix" ? "prefix's last" : "last"} token, “${context.label(data.changed)}”, was changed to “${data.changed_to}”`;
    const loss = data.mask === "causal" || data.loss === null ? "" : ` The loss of the text goes from ${num(data.loss_before, 2)} to ${num(data.loss, 2)} nats a token: ${moved && data.loss < data.loss_before ? "lower, because positions now see what they are to predict." : "the model was not trained for this mask."}`;
    leaks.className = `verdict ${moved ? "leaks" : "holds"}`;
    leaks.textContent = (moved ? `${last}: ${moved} earlier output${moved === 1 ? "" : "s"} moved, by up to ${num(data.most, 2)}. The future leaks.` : `${last}: no output before it moved${data.most ? ` beyond rounding (${num(data.most, 1)})` : ", exactly"}. Nothing leaks.`) + loss;
  }

  function draw() {
    whole.rename(`Layer ${context.layer()}, head ${context.head()}: ${STAGES.find(([key]) => key === state.get().stage)[1]}${mask() === "causal" ? "" : `, mask ${mask()} (experiment)`}${shownPart()?.arrays.map ? " (shade: √weight)" : ""}`);
    if (shownPart()) whole.refresh();
    drawOne();
  }

  function drawOne() {
    const i = query(), part = shownPart();
    queries.set(i);
    one.rename(`“${context.label(i)}” (position ${i}) looks at`);
    if (!part) return;
    const here = rowOf(i);
    if (!here) { askRow(context.layer(), context.head(), i); } else one.refresh();
    const seen = Math.round(2 ** part.arrays.maximum[i]);
    out.show({ Query: context.label(i), Sees: String(seen), Masked: String(n - seen), Entropy: `${num(part.arrays.entropy[i], 2)} bits`, "At most": `log₂ ${seen} = ${num(part.arrays.maximum[i], 2)}` });
    if (!here || !here.products) { sums.show("softmax(q·kᵀ · scale + mask)", `entropy of row ${i} = −Σ p log₂ p = ${num(part.arrays.entropy[i], 4)} bits`); return; }
    let best = 0;
    here.weights.forEach((weight, j) => { if (weight > here.weights[best]) best = j; });
    const { data } = part;
    const score = scoreOf(here.products[best], i, best, data);
    const scores = Array.from(here.products, (product, j) => (here.visible[j] ? scoreOf(product, i, j, data) : -Infinity));
    const top = Math.max(...scores, data.sink ?? -Infinity);
    const below = scores.reduce((sum, each) => sum + Math.exp(each - top), data.sink === null ? 0 : Math.exp(data.sink - top));
    sums.show("softmax(q·kᵀ · scale + mask), for the key it looks at most",
      `q·k = ${num(here.products[best], 3)}   (position ${i} on ${best}, “${context.label(best)}”)`,
      `· ${num(data.scale, 4)}${data.softcap ? `, capped at ${num(data.softcap)}` : ""}${data.slope === null ? "" : ` − ${num(data.slope, 4)} · ${i - best}`} = ${num(score, 3)}`,
      `e^(${num(score, 2)} − ${num(top, 2)}) / ${num(below, 3)}${data.sink === null ? "" : " (the sink in it)"} = ${num(Math.exp(score - top) / below, 4)}`);
  }

  function update(changed) {
    const has = (...names) => names.some((name) => changed.has(name));
    stages.set(state.get().stage);
    masks.set(mask());
    sizes.set(size());
    sizes.input.disabled = !["window", "prefix"].includes(mask());
    if (has("layer", "head")) {
      layers.set(context.layer());
      heads.set(context.head());
      ringAt(grid.element.querySelector("svg"));
      row = null;
      ask(context.layer(), context.head());
    }
    const isOwn = mask() === "causal";
    if (isOwn && !has("mask", "size")) { /* its proof is of the whole model: no other for another head */ }
    else if (isOwn && n > LONG) leak.element.querySelector(".figure-body").replaceChildren(el("p", { class: "note" }, "Choose a mask: the proof then reads the text twice more, which takes a while for so many tokens."));
    else if (isOwn) askTrial(mask(), n, 0, 0);
    else if (has("layer", "head", "mask", "size")) askTrial(mask(), ["window", "prefix"].includes(mask()) ? size() : n, context.layer(), context.head());
    if (has("theme")) { shades = null; grid.refresh(); leak.refresh(); }
    if (has("stage", "mask", "theme")) draw();
    else if (has("token", "hover")) {
      if (!shownPart()) return;
      const picture = whole.element.querySelector("svg");
      if (picture) moveRing(picture, onMap(query()));
      drawOne();
    }
  }

  const element = el("div", { class: "step" },
    el("div", { class: "pictures" }, el("div", { class: "stacked" }, whole.element, el("div", {}, leak.element, leaks)), el("div", { class: "stacked" }, grid.element, one.element)),
    el("aside", {}, layers.element, heads.element, queries.element, stages.element, out.element, sums.element, masks.element, sizes.element,
      el("p", {}, "A token sees itself and what stands to its left. So nothing that is written later changes what was computed before: that is why keys and values can be kept, and why one pass over a text gives a prediction at every position."),
      el("p", {}, "The entropy says how spread out a row is; its maximum is that of even weights over all that the row sees. A trained head may stay sharp however much it sees.")));
  return { element, update };
}
