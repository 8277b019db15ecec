// Step 6: what the field has tried in each place, drawn from the model's own code, and what size and text are worth.
import { bytes, count, el, num } from "leftward/dom.js";
import { bars, columns, lines, map } from "leftward/charts.js";
import { choice, formula, readouts, slider } from "leftward/controls.js";
import { figure } from "leftward/figure.js";

export const title = "Variants and scale";
export const lead = "The same foundation with other parts, and how loss follows from size, text and compute.";

const TABS = [["positions", "positions"], ["heads", "attention"], ["feed_forward", "feed-forward"], ["scaling", "scaling"]];
const LINE = ["first", "second", "third", "fourth"];
const NAMES = { relu: "ReLU", gelu: "GELU", gelu_tanh: "GELU (tanh)", relu2: "ReLU²", swiglu: "SwiGLU", geglu: "GEGLU" };

export function create(context) {
  const { about, state, source } = context;
  let part = null;
  const pictures = el("div", { class: "pictures" }), aside = el("aside", {});
  const tabs = choice({ label: "What", options: TABS, value: state.get().variant, on: (variant) => state.set({ variant }) });
  const panes = {};

  function pane() {
    const { variant } = state.get();
    panes[variant] ??= { positions: positionsPane, heads: headsPane, feed_forward: feedForwardPane, scaling: scalingPane }[variant](context, part);
    const { figures } = panes[variant];
    figures.forEach((each) => each.refresh());
    const narrow = figures.filter((each) => !each.element.classList.contains("wide"));
    const stacks = [0, 1].map((side) => el("div", { class: "stacked" }, narrow.filter((_, i) => i % 2 === side).map((each) => each.element)));
    pictures.replaceChildren(...figures.filter((each) => !narrow.includes(each)).map((each) => each.element), ...(narrow.length ? stacks : []));
    aside.replaceChildren(tabs.element, ...panes[variant].aside);
  }
  source.get("variants").then((found) => { part = found; pane(); }, context.fails(pictures));

  function update(changed) {
    tabs.set(state.get().variant);
    if (!part) return;
    if (changed.has("variant") || changed.has("theme")) pane();
    if (changed.has("token") || changed.has("hover")) panes[state.get().variant]?.moved?.();
  }
  aside.append(tabs.element);
  return { element: el("div", { class: "step" }, pictures, aside), update };
}

// ---- positions

function positionsPane(context, { arrays }) {
  const { about } = context;
  const own = about.config.positions;
  const mine = (...kinds) => (kinds.includes(own) ? " – this model's" : "");
  const [places, width] = arrays.sinusoids.shape;
  const { frequencies, slopes } = arrays;
  let distance = 8, head = 0;
  const sinusoidal = figure({ name: "sinusoidal", title: `Sinusoidal: added to the embedding${mine("sinusoidal")}`, draw: () => map({ label: "sinusoidal positions: rows are positions", rows: places, columns: width, size: 380, names: 40, value: (i, j) => arrays.sinusoids[i * width + j], rowNames: Array.from({ length: places }, (_, i) => String(i)) }), table: () => ({ columns: ["position", ...Array.from({ length: 8 }, (_, j) => `number ${j}`)], rows: Array.from({ length: places }, (_, i) => [i, ...arrays.sinusoids.slice(i * width, i * width + 8)]) }) });
  const agreement = (d) => frequencies.reduce((sum, f) => sum + Math.cos(d * f), 0) / frequencies.length;
  const points = Array.from({ length: 257 }, (_, d) => [d, agreement(d)]);
  const rotary = figure({ name: "rotary", title: `Rotary: how well a query and an equal key agree, by distance${mine("rotary")}`, draw: () => lines({ label: "rotary agreement", xLabel: "tokens apart", yLabel: "mean of cos(distance · frequency)", series: [{ cls: "first", points }], marks: [{ x: distance, y: agreement(distance), label: num(agreement(distance), 3) }] }), table: () => ({ columns: ["pair", "radians a token", "tokens a turn"], rows: Array.from(frequencies, (f, i) => [i, f, 2 * Math.PI / f]) }) });
  const turns = figure({ name: "rotary-turns", title: "Rotary: the angle of each pair", draw: () => columns({ label: "angles of the pairs", values: Array.from(frequencies, (f) => Math.cos(distance * f)), low: -1, high: 1, caption: `cos of the angle of each pair, ${distance} tokens apart` }), table: () => ({ columns: ["pair", "angle", "cos"], rows: Array.from(frequencies, (f, i) => [i, distance * f, Math.cos(distance * f)]) }) });
  const alibi = figure({ name: "alibi", title: `ALiBi: what scores lose by distance${mine("alibi", "alibi_mpt")}`, draw: () => lines({ label: "ALiBi's bias", xLabel: "tokens apart", yLabel: "added to the score", series: Array.from(slopes).slice(0, 4).map((slope, i) => ({ name: `head ${i}`, cls: LINE[i], points: [[0, 0], [64, -64 * slope]] })), marks: [{ x: distance, y: -distance * slopes[head], label: num(-distance * slopes[head], 3) }] }), table: () => ({ columns: ["head", "slope"], rows: Array.from(slopes, (slope, i) => [i, slope]) }) });
  const figures = [rotary, turns, alibi, sinusoidal];
  if (arrays.learned) {
    const n = arrays.learned.shape[0];
    figures.unshift(figure({ name: "learned", title: "Learned: how alike this model's own position vectors are", draw: () => map({ label: "cosine of position vectors", rows: n, columns: n, size: 380, names: 40, value: (i, j) => arrays.learned[i * n + j], rowNames: Array.from({ length: n }, (_, i) => String(i)) }), table: () => ({ columns: ["position", "cosine with the next"], rows: Array.from({ length: n - 1 }, (_, i) => [i, arrays.learned[i * n + i + 1]]) }) }));
  }
  const sums = formula();
  function say() {
    sums.show("rotary: pair i turns by distance · base^(−2i / width);   ALiBi: − slope · distance",
      `pair 0: ${distance} · ${num(frequencies[0], 4)} = ${num(distance * frequencies[0], 3)} rad;  the last: ${num(distance * frequencies[frequencies.length - 1], 4)} rad`,
      `head ${head}: − ${num(slopes[head], 5)} · ${distance} = ${num(-distance * slopes[head], 4)}`);
  }
  const redraw = () => { [rotary, turns, alibi].forEach((each) => each.refresh()); say(); };
  say();
  return { figures, aside: [
    slider({ label: "Tokens apart", min: 0, max: 64, value: distance, on: (value) => { distance = value; redraw(); } }).element,
    slider({ label: "Head (ALiBi)", min: 0, max: slopes.length - 1, value: head, on: (value) => { head = value; redraw(); } }).element,
    sums.element,
    el("p", {}, "Sinusoidal and learned vectors are added once, to the embedding. Rotary positions turn queries and keys in every layer, so that their product depends on the distance alone. ALiBi takes a share of the distance from each score, with no parameters at all."),
  ] };
}

// ---- attention's heads

function headsPane(context, { data }) {
  const { about } = context;
  let tokens = Math.min(4096, about.config.max_seq_len);
  const name = ({ n_kv_heads: n, name: kind, own }) => `${kind}, ${n} key/value head${n === 1 ? "" : "s"}${own ? " ★" : ""}`;
  const memory = figure({ name: "kv-by-heads", title: "Keys and values of a text, by heads that share them (★ this model)", wide: true, draw: () => bars({ label: "KV bytes by grouping", entries: data.heads.map((each) => ({ name: name(each), value: each.bytes_per_token * tokens, cls: each.own ? "chosen" : "", strong: each.own })), show: bytes, width: 700, names: 230, row: 26 }), table });
  const parameters = figure({ name: "parameters-by-heads", title: "Parameters of attention", wide: true, draw: () => bars({ label: "attention parameters", entries: data.heads.map((each) => ({ name: name(each), value: each.attention, cls: each.own ? "chosen" : "", strong: each.own })), show: count, width: 700, names: 230, row: 26 }), table });
  function table() { return { columns: ["kind", "key/value heads", "bytes a token", `bytes at ${tokens} tokens`, "attention parameters"], rows: data.heads.map((each) => [each.name, each.n_kv_heads, each.bytes_per_token, each.bytes_per_token * tokens, each.attention]) }; }
  const sums = formula();
  const say = () => { const own = data.heads.find((each) => each.own); sums.show("2 · layers · key/value heads · head width · 2 bytes · tokens", `2 · ${about.config.n_layers} · ${own.n_kv_heads} · ${about.config.head_dim} · 2 · ${tokens.toLocaleString("en")} = ${num(own.bytes_per_token * tokens)} bytes in bf16`); };
  say();
  return { figures: [memory, parameters], aside: [
    slider({ label: "Tokens", min: 1, max: about.config.max_seq_len, value: tokens, show: (x) => x.toLocaleString("en"), on: (value) => { tokens = value; memory.refresh(); say(); } }).element, sums.element,
    about.layers.some((layer) => layer.window) ? el("p", { class: "note" }, "Layers with a window hold no more than it; the bars are for layers that see everything.") : null,
    el("p", {}, "In multi-head attention every query head has keys and values of its own. Grouped heads share them: the cache shrinks by the size of a group, and a decoding step reads less memory. With one for all it is multi-query attention."),
  ].filter(Boolean) };
}

// ---- the feed-forward

function feedForwardPane(context, { arrays, data }) {
  const { about } = context;
  let at = 1;
  const shown = ["gelu", "relu", "swiglu", "relu2"];
  const index = () => Math.max(0, Math.min(arrays.x.length - 1, Math.round((at + 4) / 0.05)));
  const curves = figure({ name: "activations", title: "Between the matrices (gated ones with 1 for what is gated)", wide: true, draw: () => lines({ label: "activation curves", width: 700, xLabel: "input", yLabel: "output", series: shown.map((key, i) => ({ name: NAMES[key], cls: LINE[i], points: Array.from(arrays.x, (x, j) => [x, Math.min(6, arrays[`curve.${key}`][j])]) })), marks: [{ x: at }] }), table: () => ({ columns: ["x", ...Object.keys(NAMES)], rows: Array.from(arrays.x, (x, j) => [x, ...Object.keys(NAMES).map((key) => arrays[`curve.${key}`][j])]) }) });
  const parameters = figure({ name: "feed-forwards", title: "Parameters of one layer's feed-forward, at the usual width", wide: true, draw: () => bars({ label: "feed-forward parameters", entries: data.feed_forwards.map((each) => ({ name: `${NAMES[each.name]}, ${each.gated ? 3 : 2} × ${about.config.d_model} × ${each.d_ff}`, value: each.parameters, cls: each.name === about.config.feed_forward ? "chosen" : "", strong: each.name === about.config.feed_forward })), show: num, width: 700, names: 230, row: 24 }), table: () => ({ columns: ["kind", "matrices", "width", "parameters"], rows: data.feed_forwards.map((each) => [each.name, each.gated ? 3 : 2, each.d_ff, each.parameters]) }) });
  const sums = formula();
  const say = () => sums.show("SwiGLU: x · σ(x) · up;   GELU: x · Φ(x)", ...shown.map((key) => `${NAMES[key]}(${num(arrays.x[index()], 2)}) = ${num(arrays[`curve.${key}`][index()], 4)}`));
  say();
  return { figures: [curves, parameters], aside: [
    slider({ label: "Input", min: -4, max: 4, step: 0.05, value: at, show: (x) => x.toFixed(2), on: (value) => { at = value; curves.refresh(); say(); } }).element, sums.element,
    el("p", {}, "A gated feed-forward has three matrices where a plain one has two. At two thirds of the width, 8/3 d for 4 d, it has as many parameters."),
    el("p", {}, `This model's is ${NAMES[about.config.feed_forward] ?? about.config.feed_forward}, ${about.config.d_ff} wide: ${num(about.config.d_ff / about.config.d_model, 2)} times its stream.`),
  ] };
}

// ---- scaling laws

function scalingPane(context, { arrays, data }) {
  const { scaling } = data;
  const laws = scaling.budgets[0].optima.map((optimum) => optimum.law);
  let budget = nearestTo(6 * data.parameters * 20 * data.parameters);
  function nearestTo(flops) { return scaling.budgets.reduce((best, each, i) => (Math.abs(Math.log(each.flops / flops)) < Math.abs(Math.log(scaling.budgets[best].flops / flops)) ? i : best), 0); }
  const of = (what) => laws.map((law, i) => ({ name: law, cls: LINE[i], points: scaling.budgets.map((each) => [each.flops, each.optima[i][what]]) }));
  const bandOf = (what) => { const i = laws.findIndex((law) => law.startsWith("Besiroglu")); return [{ points: [...scaling.budgets.map((each) => [each.flops, each.optima[i].band[what][0]]), ...[...scaling.budgets].reverse().map((each) => [each.flops, each.optima[i].band[what][1]])] }]; };
  const chart = (name, heading, what, yLabel) => figure({ name, title: heading, wide: true, draw: () => lines({ label: heading, width: 700, logX: true, logY: true, xLabel: "compute, FLOPs = 6 N D", yLabel, series: of(what), bands: bandOf(what), marks: [{ x: scaling.budgets[budget].flops }] }), table: () => ({ columns: ["FLOPs", ...laws], rows: scaling.budgets.map((each) => [each.flops, ...each.optima.map((optimum) => optimum[what])]) }) });
  const sizes = chart("optimal-size", "The best size for a budget, after four fits (band: 80 % of Besiroglu's)", "parameters", "parameters");
  const ratio = chart("tokens-per-parameter", "Tokens a parameter", "tokens_per_parameter", "tokens / parameter");
  const history = arrays["history.val_loss"];
  const own = figure({ name: "own-loss", title: "This run's loss, and what the fits expect of its size (of another text)", wide: true, draw: drawOwn, table: () => ({ columns: ["tokens", "validation loss"], rows: pairs(history) }) });
  function pairs(flat) { return Array.from({ length: (flat?.length ?? 0) / 2 }, (_, i) => [flat[2 * i], flat[2 * i + 1]]); }
  const expected = (fit, tokens) => fit.e + fit.a / data.parameters ** fit.alpha + fit.b / tokens ** fit.beta;
  function drawOwn() {
    const losses = pairs(arrays["history.loss"]), held = pairs(history);
    const tokens = [...losses, ...held].map(([x]) => x).filter((x) => x > 0);
    if (!tokens.length) return null;
    const most = Math.max(...tokens), least = Math.max(1, Math.min(...tokens));
    const along = Array.from({ length: 30 }, (_, i) => least * (most / least) ** (i / 29));
    return lines({ label: "losses of the run", width: 700, logX: true, xLabel: "tokens trained on", yLabel: "nats a token", series: [
      { name: "training", cls: "third", points: losses }, { name: "validation", cls: "first", points: held },
      ...scaling.fits.map((fit, i) => ({ name: fit.name, cls: `${LINE[i + 1]} dashed`, points: along.map((x) => [x, Math.min(expected(fit, x), 12)]) }))] });
  }
  const out = readouts(["Budget", ...laws]);
  const notes = el("div", {});
  const sums = formula();
  function say() {
    const here = scaling.budgets[budget];
    out.show({ Budget: `${num(here.flops, 2)} FLOPs`, ...Object.fromEntries(here.optima.map((each) => [each.law, `${count(each.parameters)}, ${num(each.tokens_per_parameter, 1)} tokens each, loss ${num(each.loss, 2)}`])) });
    notes.replaceChildren(...here.notes.map((note) => el("p", { class: "note" }, note)));
    const fit = scaling.fits[scaling.fits.length - 1], best = here.optima[here.optima.length - 1];
    sums.show("L(N, D) = E + A / N^α + B / D^β,   N D = FLOPs / 6", `${fit.name}: ${fit.e} + ${fit.a} / (${count(best.parameters)})^${fit.alpha} + ${fit.b} / (${count(best.tokens)})^${fit.beta} = ${num(best.loss, 4)}`);
  }
  say();
  const samples = (data.samples ?? []).map(({ step, prompt, text }) => el("p", { class: "note" }, `What it wrote at step ${step}: ${prompt}${text}`));
  const figures = [sizes, ratio];
  if (history) figures.unshift(own);
  return { figures, aside: [
    slider({ label: "Compute", min: 0, max: scaling.budgets.length - 1, value: budget, show: (i) => `${num(scaling.budgets[i].flops, 2)} FLOPs`, on: (value) => { budget = value; [sizes, ratio].forEach((each) => each.refresh()); say(); } }).element,
    out.element, sums.element, notes, ...samples,
    data.is_mixture ? el("p", { class: "note" }, "None of the laws speaks of a mixture of experts.") : null,
    el("p", {}, "Kaplan et al. found power laws; Hoffmann et al. (Chinchilla) fitted size and text together; Besiroglu et al. fitted the same runs anew. Only the last agrees with the rule of 20 tokens a parameter. Many models are trained much longer, as a smaller one is cheaper to run."),
  ].filter(Boolean) };
}
