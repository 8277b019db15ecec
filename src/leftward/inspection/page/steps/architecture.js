// Step 1: this model's stack, one of its blocks opened, and what its parts weigh.
import { bytes, count, el, num, svg } from "leftward/dom.js";
import { bars, cut, picture, text } from "leftward/charts.js";
import { formula, latest, picker, readouts, slider } from "leftward/controls.js";
import { figure } from "leftward/figure.js";
import { tableView } from "leftward/table.js";

export const title = "Architecture";
export const lead = "Tokens become vectors, pass a stack of like blocks, and leave as one score for each token of the vocabulary.";

const BLOCKS = {
  pre: "a norm before each sublayer; the stream itself is never normalised (pre-norm)",
  post: "a norm behind each addition, on the stream itself (post-norm, as in 2017 and GPT-1)",
  sandwich: "norms before and behind each sublayer (as Gemma 2)",
  output: "a norm behind each sublayer (as OLMo 2)",
  parallel: "attention and feed-forward side by side, a norm each (as GPT-NeoX)",
  parallel_shared: "attention and feed-forward side by side behind one norm (as GPT-J)",
};
const NAMES = { swiglu: "SwiGLU", geglu: "GEGLU", geglu_tanh: "GEGLU (tanh)", swiglu_clamped: "SwiGLU, clamped", gelu: "GELU", gelu_tanh: "GELU (tanh)", relu: "ReLU", relu2: "ReLU²", rmsnorm: "RMSNorm", layernorm: "LayerNorm" };
const PARTS = [["token_embedding", "token embedding"], ["position_embedding", "positions"], ["attention", "attention"], ["feed_forward", "feed-forward"], ["router", "router"], ["norms", "norms"], ["head", "head"]];

const attentionName = ({ n_heads: heads, n_kv_heads: kv }) => (kv === heads ? "multi-head" : kv === 1 ? "multi-query" : `grouped-query, ${heads / kv} to a key`);
const positionsName = (config) => ({ rotary: `rotary, base ${num(config.rope_base)}`, learned: "learned", sinusoidal: "sinusoidal", alibi: "ALiBi", alibi_mpt: "ALiBi (MPT)", none: "none" })[config.positions];

/** The stack: a bar a block, global ones and window ones apart. */
function stack(shape, depth, chosen, onPick) {
  const { config } = shape;
  const top = 66, bottom = 74;
  const each = Math.min(28, 330 / depth), height = top + depth * each + bottom;
  const box = (y, h, name, cls, note) => svg("g", { class: cls }, svg("rect", { x: 20, y, width: 180, height: h, rx: 5, class: `box ${cls}` }), text(110, y + h / 2 + 4, name, { class: "middle" }), note ? text(208, y + h / 2 + 4, note, { class: "tick" }) : null);
  const y0 = top + depth * each;
  const blocks = Array.from({ length: depth }, (_, i) => {
    const layer = shape.layers[i % shape.layers.length];
    const y = y0 - (i + 1) * each;
    return svg("g", { class: "pickable", onclick: () => onPick(i) },
      svg("rect", { x: 20, y: y + 1, width: 180, height: Math.max(each - 2, 1), rx: 3, class: `box block ${layer.window ? "window" : ""} ${i === chosen ? "chosen" : ""}` }),
      each > 11 ? text(110, y + each / 2 + 4, `block ${i}${layer.window ? ` · window ${layer.window.toLocaleString("en")}` : ""}`, { class: "middle small" }) : null);
  });
  return picture(330, height, `${depth} blocks between embedding and head`,
    svg("line", { class: "flow", x1: 110, x2: 110, y1: 4, y2: height - 4 }),
    box(10, 24, config.tie_embeddings ? "head (the embedding again)" : "head", "part head"),
    config.block === "post" ? null : box(38, 18, NAMES[config.norm], "part norm"),
    blocks,
    svg("path", { class: "brace", d: `M206,${y0 - 2}h8v${-(depth * each - 4)}h-8` }),
    text(222, y0 - (depth * each) / 2 + 4, `${depth} blocks`, { class: "strong" }),
    box(y0 + 8, 24, "token embedding", "part embedding", `${config.vocab_size.toLocaleString("en")} × ${config.d_model.toLocaleString("en")}`),
    ["learned", "sinusoidal"].includes(config.positions) ? box(y0 + 36, 20, `+ ${config.positions} positions`, "part embedding") : null);
}

/** One block, in its own variant. */
function block(shape, layer) {
  const { config } = shape;
  const kind = config.block;
  const width = 400, height = 470, spine = kind.startsWith("parallel") ? 28 : 48;
  const here = shape.layers[Math.min(layer, shape.layers.length - 1)];
  const parts = [];
  let above = 0;  // of the plane, what the drawing doesn't need
  const rect = (x, y, w, h, cls, ...inside) => parts.push(svg("rect", { x, y, width: w, height: h, rx: 6, class: `box ${cls}` }), ...inside);
  const norm = (x, y, w) => rect(x, y, w, 22, "part norm", text(x + w / 2, y + 15, NAMES[config.norm], { class: "middle small" }));
  const arrow = (d) => parts.push(svg("path", { class: "flow", d }));
  const plus = (y) => parts.push(svg("circle", { class: "plus", cx: spine, cy: y, r: 10 }), text(spine, y + 5, "+", { class: "middle strong" }));

  function attention(x, y, w) {
    const group = config.n_heads / config.n_kv_heads;
    const n = Math.min(config.n_heads, 32), step = Math.min(14, (w - 20) / n);
    const heads = Array.from({ length: n }, (_, i) => svg("g", {},
      svg("circle", { class: `head-dot ${Math.floor(i / group) % 2 ? "odd" : "even"}`, cx: x + 14 + i * step, cy: y + 46, r: step * 0.38 }),
      i % group === 0 ? svg("rect", { class: `head-dot ${Math.floor(i / group) % 2 ? "odd" : "even"}`, x: x + 14 + i * step - step * 0.35, y: y + 56, width: Math.max(step * Math.min(group, n - i) - step * 0.3, step * 0.7), height: 8, rx: 2 }) : null));
    const notes = [`${config.n_heads} query heads, ${config.n_kv_heads} key/value heads × ${config.head_dim}`, here.window ? `sees the last ${here.window.toLocaleString("en")} tokens` : config.causal ? "sees all of the past" : "sees everything"];
    const more = [here.positions && !["learned", "sinusoidal", "none"].includes(config.positions) ? positionsName(config) : null, config.qk_norm === "none" ? null : "norms of q and k", config.attn_softcap ? `cap ${config.attn_softcap}` : null, config.attn_sinks ? "sinks" : null].filter(Boolean).join(", ");
    rect(x, y, w, 118, "part attention", text(x + w / 2, y + 18, "masked self-attention", { class: "middle strong small" }), text(x + w / 2, y + 31, attentionName(config), { class: "middle small" }), heads,
      [...notes, more].map((note, i) => text(x + 10, y + 80 + i * 14, cut(note, Math.floor(w / 5.6)), { class: "small" })));
  }

  function feedForward(x, y, w) {
    const n = config.n_experts;
    const lines = n ? [`${n} experts, ${config.n_experts_per_token} a token`, `each ${config.d_model} → ${config.d_ff} → ${config.d_model}${config.d_shared ? `, and one for all of ${config.d_shared}` : ""}`]
      : [`${config.d_model} → ${config.d_ff} → ${config.d_model}`, config.is_gated ? "three matrices: gate, up, down" : "two matrices: up, down"];
    rect(x, y, w, 74, "part feed-forward", text(x + w / 2, y + 20, `feed-forward (${NAMES[config.feed_forward]})`, { class: "middle strong small" }), lines.map((line, i) => text(x + 10, y + 40 + i * 15, cut(line, Math.floor(w / 5.6)), { class: "small" })));
    parts.push(...Array.from({ length: Math.min(n, 16) }, (_, i) => svg("rect", { class: `expert ${i < config.n_experts_per_token ? "chosen" : ""}`, x: x + w - 78 + (i % 8) * 9, y: y + 34 + Math.floor(i / 8) * 11, width: 7, height: 9 })));
  }

  arrow(`M${spine},${height - 4}V-60`);
  if (kind.startsWith("parallel")) {
    const shared = kind === "parallel_shared";
    const half = (width - spine - 44) / 2, xa = spine + 24, xf = xa + half + 12;
    parts.push(text(spine + 10, height - 8, "x", { class: "strong" }));
    arrow(`M${spine},420H${xa + half / 2}V150`);
    arrow(`M${xa + half / 2},420H${xf + half / 2}V150`);
    shared ? norm(xa, 340, 2 * half + 12) : (norm(xa, 340, half), norm(xf, 340, half));
    attention(xa, 190, half); feedForward(xf, 210, half);
    arrow(`M${xa + half / 2},190V130H${spine}`); arrow(`M${xf + half / 2},210V130H${spine}`);
    plus(130);
    above = 90;
  } else {
    const x = spine + 46, w = width - x - 10;
    const before = ["pre", "sandwich"].includes(kind), behind = ["sandwich", "output"].includes(kind), post = kind === "post";
    const sublayer = (base, draw, tall) => {
      let y = base;
      arrow(`M${spine},${base}H${x + w / 2}V${base - tall - 60}H${spine}`);
      y -= 10;
      if (before) { y -= 22; norm(x, y, w); y -= 8; }
      y -= tall; draw(x, y, w);
      if (behind) { y -= 30; norm(x, y, w); }
      return base - tall - 60;
    };
    parts.push(text(spine + 10, height - 8, "x", { class: "strong" }));
    const first = sublayer(444, attention, 118);
    plus(first);
    let y = first;
    if (post) { y -= 38; norm(spine - 42, y, 84); }
    const second = sublayer(y - 22, feedForward, 74);
    plus(second);
    if (post) norm(spine - 42, second - 38, 84);
    above = second - (post ? 60 : 40);
  }
  return picture(width, height - above, `block ${layer}: ${BLOCKS[kind]}`, svg("g", { transform: `translate(0 ${-above})` }, parts));
}

const weights = (parameters) => PARTS.filter(([key]) => parameters[key]).map(([key, name]) => ({ key, name, value: parameters[key] }));

export function create(context) {
  const { about, state, source } = context;
  let other = null;  // the preset beside it
  const depth = () => state.get().depth ?? about.config.n_layers;
  const total = () => about.parameters.total + (depth() - about.config.n_layers) * about.parameters_per_layer;

  const whole = figure({ name: "stack", title: "The stack", draw: () => stack(about, depth(), context.layer(), (layer) => state.set({ layer: Math.min(layer, about.config.n_layers - 1) })),
    table: () => ({ columns: ["layer", "window", "knows positions"], rows: about.layers.map((layer, i) => [i, layer.window ?? "all", layer.positions ? "yes" : "no"]) }) });
  const opened = figure({ name: "block", title: "One block", draw: () => block(about, context.layer()), table: () => settings(about, null) });
  const sizes = figure({ name: "parameters", title: "Parameters by part", draw: () => parts(about), table: () => ({ columns: ["part", "parameters", "share"], rows: weights(about.parameters).map(({ name, value }) => [name, value, value / about.parameters.total]) }) });
  const cache = figure({ name: "kv-cache", title: `Keys and values of ${about.kv.tokens} tokens`, draw: () => kv(about), table: () => ({ columns: ["layer", "tokens held", "bytes"], rows: perLayer(about) }) });
  const beside = el("section", { class: "beside" });

  const deep = slider({ label: "What if it had … blocks", min: 1, max: Math.max(2 * about.config.n_layers, 12), value: depth(), on: (value) => state.set({ depth: value }) });
  const opens = slider({ label: "Block that is opened", min: 0, max: about.config.n_layers - 1, value: context.layer(), on: (layer) => state.set({ layer }) });
  const compare = picker({ label: "Compare with", options: [["", "nothing"], ...about.presets.filter((name) => source.has("preset", { name })).map((name) => [name, name])], value: state.get().compare, on: (name) => state.set({ compare: name }) });
  const out = readouts(["Parameters", "A block", "Cache a token", "FLOPs a token"]);
  const sums = formula();

  const load = latest((name) => (name ? source.get("preset", { name }) : null), (part) => { other = part?.data ?? null; besideIt(); }, (error) => context.fails(beside)(error));
  function besideIt() {
    if (!other) { beside.replaceChildren(); return; }
    const its = [
      figure({ name: `stack-${other.name}`, title: `${other.name}: the stack`, draw: () => stack(other, other.config.n_layers, -1, () => {}), table: () => settings(about, other) }),
      figure({ name: `block-${other.name}`, title: `${other.name}: one block`, draw: () => block(other, Math.min(context.layer(), other.config.n_layers - 1)), table: () => settings(about, other) }),
      figure({ name: `parameters-${other.name}`, title: `${other.name}: parameters by part (${count(other.parameters.total)})`, draw: () => parts(other), table: () => settings(about, other) }),
    ];
    its.forEach((each) => each.refresh());
    const differences = el("figure", { class: "wide" }, el("figcaption", {}, "What differs"), tableView(settings(about, other, true)));
    beside.replaceChildren(el("h2", {}, `Beside it: ${other.name}`), el("div", { class: "pictures" }, its.map((each) => each.element), differences));
  }

  function update(changed) {
    if (["layer", "depth"].some((name) => changed.has(name))) { whole.refresh(); opened.refresh(); opened.rename(`One block opened: block ${context.layer()}`); opens.set(context.layer()); deep.set(depth()); }
    if (changed.has("step") || changed.has("theme")) { sizes.refresh(); cache.refresh(); }
    if (changed.has("compare")) { compare.set(state.get().compare); load(state.get().compare); }
    out.show({ Parameters: `${num(total())}${depth() === about.config.n_layers ? "" : " (what if)"}`, "A block": num(about.parameters_per_layer), "Cache a token": bytes(about.kv.bytes_per_token), "FLOPs a token": count(about.flops_per_token) });
    sums.show("parameters = outside the blocks + blocks × a block",
      `${num(total())} = ${num(about.parameters.total - about.config.n_layers * about.parameters_per_layer)} + ${depth()} × ${num(about.parameters_per_layer)}`,
      `cache = 2 · layers · key/value heads · head width · bytes = 2 · ${about.config.n_layers} · ${about.config.n_kv_heads} · ${about.config.head_dim} · ${about.kv.bytes_per_token / (2 * about.config.n_layers * about.config.n_kv_heads * about.config.head_dim)} = ${num(about.kv.bytes_per_token)} bytes a token`);
  }

  const element = el("div", { class: "step" },
    el("div", { class: "pictures" }, whole.element, opened.element, sizes.element, cache.element),
    el("aside", {}, opens.element, deep.element, compare.element, out.element, sums.element,
      el("p", {}, `This model has ${BLOCKS[about.config.block]}. Its attention is ${attentionName(about.config)}, its positions are ${positionsName(about.config)}, its feed-forward is ${NAMES[about.config.feed_forward]}.`),
      el("p", {}, about.config.tie_embeddings ? `The head is the embedding once more: untied it would cost another ${num(about.config.vocab_size * about.config.d_model)} weights.` : `The head has ${num(about.parameters.head)} weights of its own; tied to the embedding they would be saved.`),
      el("p", {}, "One stack reads the prompt and writes the answer: the same weights serve every task.")),
    beside);
  return { element, update };
}

const parts = ({ parameters }) => bars({ label: "parameters by part", entries: weights(parameters).map(({ key, name, value }) => ({ name, value, cls: `part ${key}`, note: `(${(100 * value / parameters.total).toFixed(1)} %)` })), show: count });

function perLayer({ layers, kv, config }) {
  const held = layers.map((layer) => Math.min(kv.tokens, layer.window ?? kv.tokens));
  const aToken = kv.bytes_per_token / config.n_layers;
  return held.map((tokens, i) => [i, tokens, tokens * aToken]);
}

function kv(shape) {
  const rows = perLayer(shape);
  const global = rows.filter((_, i) => !shape.layers[i].window), local = rows.filter((_, i) => shape.layers[i].window);
  const total = (list) => list.reduce((sum, row) => sum + row[2], 0);
  const entries = [["all layers", rows], ["see everything", global], ["see a window", local]].filter(([, list], i) => list.length && (i === 0 || local.length)).map(([name, list]) => ({ name, value: total(list), note: `in ${list.length} layers`, cls: "cache" }));
  return bars({ label: "bytes of keys and values", entries, show: bytes });
}

function settings(about, other, onlyDifferent = false) {
  const keys = Object.keys(about.config);
  const shown = (config, key) => (typeof config[key] === "object" && config[key] !== null ? JSON.stringify(config[key]) : config[key] ?? "none");
  const rows = keys.map((key) => [key, String(shown(about.config, key)), ...(other ? [String(shown(other.config, key))] : [])]);
  const extra = [["parameters", num(about.parameters.total), ...(other ? [num(other.parameters.total)] : [])], ["cache bytes a token", num(about.kv.bytes_per_token), ...(other ? [`${num(other.kv.bytes_per_token)} (${other.kv.dtype})`] : [])]];
  const all = [...extra, ...rows];
  return { columns: ["setting", about.name, ...(other ? [other.name] : [])], rows: onlyDifferent ? all.filter((row) => row[1] !== row[2]) : all };
}
