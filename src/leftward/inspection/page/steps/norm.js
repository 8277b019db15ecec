// Step 3: what a norm makes of one token's numbers, and how the stream grows through the layers.
import { el, num } from "leftward/dom.js";
import { columns, lines } from "leftward/charts.js";
import { choice, formula, latest, picker, readouts, slider } from "leftward/controls.js";
import { figure } from "leftward/figure.js";
import { largest, mean, normalised, rms, std } from "leftward/numbers.js";

export const title = "Normalisation";
export const lead = "Each sublayer reads its input brought to one size. What was large or small before comes out alike.";

const SITES = { attn_norm: "before attention", attn_out_norm: "behind attention", ff_norm: "before the feed-forward", ff_out_norm: "behind the feed-forward", norm: "before the head" };
const POST = { attn_norm: "behind attention's addition", ff_norm: "behind the feed-forward's addition" };
const KINDS = [["rmsnorm", "RMSNorm"], ["layernorm", "LayerNorm"]];

export function create(context) {
  const { about, state, source } = context;
  let part = null, growth = null, medians = null, factor = 1;
  const siteName = (site) => (about.config.block === "post" && POST[site]) || SITES[site];
  const kind = () => state.get().norm || part?.data.kind || about.config.norm;
  const input = () => Float64Array.from(part.arrays.before, (x) => x * factor);
  const output = () => normalised(input(), kind(), part.data.eps, part.arrays.factor, kind() === "layernorm" ? part.arrays.bias : null);
  const dimension = () => Math.min(state.get().dimension, about.config.d_model - 1);
  const pick = (i) => state.set({ dimension: i });

  const bars = (values, label, cls) => columns({ label, values, cls, width: 720, height: 150, chosen: dimension(), onPick: pick });
  const both = () => ({ columns: ["number", "before", "after"], rows: Array.from(input(), (x, i) => [i, x, output()[i]]) });
  const before = figure({ name: "before-norm", title: "Before", wide: true, draw: () => part && bars(input(), "numbers before the norm", "raw"), table: both });
  const after = figure({ name: "after-norm", title: "After", wide: true, draw: () => part && bars(output(), "numbers after the norm", "normed"), table: both });

  function drawGrowth() {
    if (!growth) return null;
    const [depth, n] = growth.arrays.rms.shape;
    const at = (array, layer, i) => array[layer * n + i];
    const position = context.focus();
    medians ??= Array.from({ length: depth }, (_, layer) => growth.arrays.rms.slice(layer * n, (layer + 1) * n).sort()[Math.floor(n / 2)]);
    const through = (value) => Array.from({ length: depth }, (_, layer) => [layer, value(layer)]);
    return lines({
      label: "size of the residual stream over depth", width: 720, height: 250, logY: true, xLabel: "before layer (the last: behind all)", yLabel: "RMS",
      series: [
        { name: `“${context.label(position)}”`, cls: "first", points: through((layer) => at(growth.arrays.rms, layer, position)) },
        { name: "its standard deviation", cls: "second", points: through((layer) => at(growth.arrays.std, layer, position)) },
        { name: "median of all tokens", cls: "third", points: through((layer) => medians[layer]) },
      ],
      marks: [{ x: context.layer() }],
    });
  }
  const stream = figure({ name: "stream", title: "The stream over depth", wide: true, draw: drawGrowth, table: () => {
    const n = growth.arrays.rms.shape[1], i = context.focus();
    return { columns: ["before layer", "mean", "std", "RMS"], rows: Array.from({ length: growth.arrays.rms.shape[0] }, (_, layer) => [layer, growth.arrays.mean[layer * n + i], growth.arrays.std[layer * n + i], growth.arrays.rms[layer * n + i]]) };
  } });

  const layers = slider({ label: "Layer", min: 0, max: about.config.n_layers - 1, value: context.layer(), on: (layer) => state.set({ layer }) });
  const tokens = slider({ label: "Token", min: 0, max: about.tokens.length - 1, value: context.focus(), show: (i) => `${i} ${context.label(i)}`, on: (token) => state.set({ token, hover: null }) });
  const sites = picker({ label: "Norm", options: Object.entries(SITES), value: state.get().site, on: (site) => state.set({ site }) });
  const scale = slider({ label: "Activations times", min: -2, max: 2, step: 0.05, value: 0, show: (x) => `${num(10 ** x, 2)} ×`, on: (x) => { factor = 10 ** x; draw(); } });
  const kinds = choice({ label: "Computed as", options: KINDS, value: kind(), on: (norm) => state.set({ norm }) });
  const out = readouts(["Mean", "Std", "RMS", "Mean after", "Std after", "RMS after"]);
  const sums = formula();
  const remark = el("p", { class: "note" });

  function draw() {
    if (!part) return;
    const x = input(), y = output(), i = dimension(), own = kind() === part.data.kind;
    before.rename(`“${context.label(context.focus())}” ${siteName(part.data.site)}${part.data.site === "norm" ? "" : ` of layer ${context.layer()}`}: ${x.length} numbers`);
    after.rename(`After ${kind() === "layernorm" ? "LayerNorm" : "RMSNorm"}${own ? ", the model's own" : " (the model has the other)"}`);
    before.refresh();
    after.refresh();
    kinds.set(kind());
    out.show({ Mean: num(mean(x)), Std: num(std(x)), RMS: num(rms(x)), "Mean after": num(mean(y)), "Std after": num(std(y)), "RMS after": num(rms(y)) });
    const gamma = part.arrays.factor?.[i], beta = kind() === "layernorm" ? part.arrays.bias?.[i] : undefined;
    const centre = kind() === "layernorm" ? mean(x) : 0;
    const size = kind() === "layernorm" ? std(x) ** 2 : rms(x) ** 2;
    sums.show(kind() === "layernorm" ? "y = γ · (x − μ) / √(σ² + ε) + β" : "y = γ · x / √(mean(x²) + ε)",
      `number ${i}: ${gamma === undefined ? "" : `${num(gamma)} · `}${kind() === "layernorm" ? `(${num(x[i])} − ${num(centre)})` : num(x[i])} / √(${num(size)} + ${part.data.eps})${beta === undefined ? "" : ` + ${num(beta)}`} = ${num(y[i], 4)}`);
    const actual = part.arrays.behind;
    const off = largest(Array.from(y, (value, j) => Math.abs(value - actual[j])));
    remark.textContent = own && factor === 1 ? `The model's own kernel gives the same: it differs by ${num(off, 1)} at most.` : own ? `At scale 1 the model computed ${num(actual[i], 4)} here: the scale of the input is gone, but for ε.` : "";
  }

  const ask = latest((layer, site, position) => source.get("activations", { layer, site, position }), (found) => {
    part = found;
    sites.select.replaceChildren(...part.data.sites.map((site) => el("option", { value: site }, siteName(site))));
    sites.set(part.data.site);
    draw();
  }, (error) => { context.fails(before.element.querySelector(".figure-body"))(error); after.element.querySelector(".figure-body").replaceChildren(); });
  source.get("stream").then((found) => { growth = found; stream.refresh(); }, context.fails(stream.element.querySelector(".figure-body")));

  function update(changed) {
    const has = (...names) => names.some((name) => changed.has(name));
    layers.set(context.layer());
    tokens.set(context.focus());
    if (has("layer", "site", "token", "hover", "step")) {
      const site = state.get().site || (about.config.block === "output" ? "attn_out_norm" : "attn_norm");
      ask(context.layer(), site, context.focus());
    } else if (has("norm", "dimension", "theme")) draw();
    if (has("layer", "token", "hover", "theme")) stream.refresh();
  }

  const element = el("div", { class: "step" },
    el("div", { class: "pictures" }, before.element, after.element, stream.element),
    el("aside", {}, layers.element, tokens.element, sites.element, scale.element, kinds.element, out.element, sums.element, remark,
      el("p", {}, "LayerNorm takes the mean away and divides by the standard deviation; RMSNorm only divides by the root mean square. Then each number has a learned factor γ, and LayerNorm often a learned β."),
      el("p", {}, about.config.block === "post" ? "This model normalises the stream itself behind every addition (post-norm): it cannot grow, and training it takes a warmup." : "The stream itself is not normalised between the blocks: each block adds to it, and it grows with depth. A norm before the head brings it to size at the end.")));
  return { element, update };
}
