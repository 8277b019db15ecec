// Step 4: what is expected next, what sampling would make of it, what the text cost, and how the layers come to it.
import { afterFrame, el, num, percent } from "leftward/dom.js";
import { bars, cut } from "leftward/charts.js";
import { formula, latest, readouts, slider } from "leftward/controls.js";
import { figure } from "leftward/figure.js";
import { descending, distribution, entropy, softmax } from "leftward/numbers.js";

export const title = "Next token";
export const lead = "At every position the model gives each token of its vocabulary a probability of coming next.";

const SHOWN = 14;
const COLUMNS = 12;  // of the lens, as inspection/parts/prediction.py has them

export function create(context) {
  const { about, state, source, strip } = context;
  const n = about.tokens.length;
  let part = null, order = null, given = null, own = null, losses = null, lens = null, pinned = null, parts = null;
  const position = () => context.focus();
  const settings = () => { const { temperature, k, p, minp } = state.get(); return { temperature, k, p, minp }; };
  const body = (of) => of.element.querySelector(".figure-body");

  // ---- the distribution

  function entries() {
    const texts = new Map(part.data.top);
    const drawn = distribution(part.arrays.logits, order, settings());
    const rows = Array.from(order.slice(0, Math.min(part.data.top.length, order.length)), (id) => ({ id, text: texts.get(id) ?? `[${id}]`, drawn: drawn[id], own: own[id] }));
    return { rows, drawn };
  }

  function drawNext() {
    if (!part) return null;
    const { rows } = given;
    const shown = rows.slice(0, SHOWN);
    const rest = Math.max(0, 1 - shown.reduce((sum, row) => sum + row.drawn, 0));
    const target = part.data.target;
    const made = shown.map((row) => ({ name: row.text, value: row.drawn, strong: target?.[0] === row.id, cls: target?.[0] === row.id ? "target" : state.get().pin === row.id ? "pinned" : "", note: row.drawn === 0 ? `out (model: ${percent(row.own)})` : Math.abs(row.drawn - row.own) > 5e-4 ? `model: ${percent(row.own)}` : "", on: () => state.set({ pin: state.get().pin === row.id ? -1 : row.id }) }));
    made.push({ name: `the rest (${(part.arrays.logits.length - shown.length).toLocaleString("en")})`, value: rest, cls: "rest" });
    return bars({ label: "probabilities of the next token", entries: made, most: Math.max(...made.map((each) => each.value)), show: percent, names: 130 });
  }

  const next = figure({ name: "next-token", title: "Next token", draw: drawNext, table: () => {
    const { rows } = given;
    return { columns: ["id", "token", "drawn with", "model's own", "logit"], rows: rows.map(({ id, text, drawn, own }) => [id, text, drawn, own, part.arrays.logits[id]]) };
  } });

  // ---- the losses along the text

  const lossOf = (i) => -losses.arrays.logprob[i - 1];
  function alternatives(i) {
    const { top_ids: ids, top_probs: probs } = losses.arrays;
    return Array.from({ length: 5 }, (_, j) => `${losses.data.texts[ids[(i - 1) * 5 + j]]} ${percent(probs[(i - 1) * 5 + j])}`);
  }
  const lossBody = el("div", { class: "loss-text" });
  const lossHint = el("p", { class: "note", role: "status" }, "Hover a token: what the model expected in its place.");
  function fillLosses() {
    lossBody.replaceChildren(...about.tokens.map((token, i) => el("span", {
      class: `loss ${i >= about.n_prompt ? "written" : ""}`,
      style: { "--loss": i ? Math.min(1, lossOf(i) / 10) : 0 },
      "data-position": i,
      title: i ? `loss ${num(lossOf(i), 2)}: ${alternatives(i).join(", ")}` : "nothing comes before it",
      onpointerenter: () => { lossHint.textContent = i ? `“${token.label}” cost ${num(lossOf(i), 2)} nats (rank ${losses.arrays.rank[i - 1] + 1}). Expected: ${alternatives(i).join(" · ")}` : "The first token is not predicted."; state.set({ hover: Math.max(0, i - 1) }); },
      onpointerleave: () => state.set({ hover: null }),
      onclick: () => state.set({ token: Math.max(0, i - 1) }),
    }, token.label)));
  }
  const along = figure({ name: "losses", title: "The loss of every token of the text (stronger colour: more surprising)", wide: true, isText: true, draw: () => losses && el("div", {}, lossBody, lossHint), table: () => ({ columns: ["position", "token", "loss", "probability", "rank", "expected instead"], rows: about.tokens.slice(1).map((token, j) => [j + 1, token.label, lossOf(j + 1), Math.exp(-lossOf(j + 1)), losses.arrays.rank[j] + 1, alternatives(j + 1)[0]]) }) });

  // ---- the lens

  const start = () => Math.floor(position() / COLUMNS) * COLUMNS;
  const lensBody = el("div", { class: "lens-scroll", tabindex: 0, role: "region", "aria-label": "the logit lens" });
  const lensPopup = el("div", { class: "popup note", role: "status" }, "Click a cell: the likeliest tokens there. Click one of them: pin it.");
  function cellTop(layer, column) {
    const columns = lens.data.stop - lens.data.start, { top_ids: ids, top_probs: probs } = lens.arrays;
    return Array.from({ length: 5 }, (_, j) => (layer * columns + column) * 5 + j).map((at) => ({ id: ids[at], text: lens.data.texts[ids[at]], p: probs[at] }));
  }
  function fillLens() {
    if (!lens) return;
    const columns = lens.data.stop - lens.data.start, depth = lens.arrays.entropy.shape[0];
    const tracked = pinned && state.get().pin >= 0 ? pinned : lens;
    const strength = (layer, column) => { const logprob = tracked.arrays.logprob[layer * columns + column]; return Number.isNaN(logprob) ? 0 : Math.exp(logprob); };
    const heading = el("tr", {}, el("th", {}, "layer"), Array.from({ length: columns }, (_, c) => el("th", { scope: "col", "data-column": c }, cut(context.label(lens.data.start + c), 9))));
    const rows = Array.from({ length: depth }, (_, k) => depth - 1 - k).map((layer) => el("tr", {},
      el("th", { scope: "row" }, layer === depth - 1 ? "output" : layer === 0 ? "embedded" : String(layer - 1)),
      Array.from({ length: columns }, (_, c) => {
        const [best] = cellTop(layer, c);
        return el("td", { "data-column": c, style: { "--p": strength(layer, c).toFixed(3) } },
          el("button", { type: "button", title: `${best.text} ${percent(best.p)}; ${tracked === lens ? "the token that follows" : `“${tracked.data.pinned}”`} ${percent(strength(layer, c))}, rank ${tracked.arrays.rank[layer * columns + c] + 1}`, onclick: () => popup(layer, c) }, cut(best.text, 9)));
      })));
    lensBody.replaceChildren(el("table", { class: "lens" }, el("thead", {}, heading), el("tbody", {}, rows)));
    markLens();
    lensFigure.rename(`Logit lens: what each layer would say${state.get().pin >= 0 && pinned ? `, shaded by “${pinned.data.pinned}”` : ", shaded by the token that follows"}`);
  }
  function markLens() {
    lensBody.querySelectorAll(".here").forEach((cell) => cell.classList.remove("here"));
    lensBody.querySelectorAll(`[data-column="${position() - lens.data.start}"]`).forEach((cell) => cell.classList.add("here"));
  }
  function popup(layer, column) {
    state.set({ token: lens.data.start + column });
    lensPopup.replaceChildren(el("span", {}, `${layer === 0 ? "the embedding" : `behind layer ${layer - 1}`}, at “${context.label(lens.data.start + column)}”: `),
      ...cellTop(layer, column).map(({ id, text, p }) => el("button", { type: "button", class: "tool", title: "pin it", onclick: () => state.set({ pin: state.get().pin === id ? -1 : id }) }, `${text} ${percent(p)}`)),
      state.get().pin >= 0 ? el("button", { type: "button", class: "tool", onclick: () => state.set({ pin: -1 }) }, "unpin") : "");
  }
  const lensFigure = figure({ name: "lens", title: "Logit lens", wide: true, isText: true, draw: () => lens && el("div", {}, lensBody, lensPopup), table: () => {
    const columns = lens.data.stop - lens.data.start;
    const rows = [];
    for (let layer = 0; layer < lens.arrays.entropy.shape[0]; layer += 1) for (let c = 0; c < columns; c += 1) {
      const [best] = cellTop(layer, c);
      rows.push([layer, lens.data.start + c, context.label(lens.data.start + c), best.text, best.p, Math.exp(lens.arrays.logprob[layer * columns + c]), lens.arrays.entropy[layer * columns + c]]);
    }
    return { columns: ["layers passed", "position", "token", "likeliest", "probability", "of the token that follows", "entropy (bits)"], rows };
  } });

  // ---- who wrote it

  const attribution = figure({ name: "attribution", title: "Which parts wrote it", draw: () => {
    if (!parts) return null;
    const largest = [...parts.data.parts].sort(([, a], [, b]) => Math.abs(b) - Math.abs(a)).slice(0, SHOWN);
    return bars({ label: "what each part adds to the logit", entries: largest.map(([name, value]) => ({ name: partName(name), value, cls: value < 0 ? "negative" : "", on: goTo(name) })), names: 170, centred: true });
  }, table: () => ({ columns: ["part", "adds to the logit"], rows: parts.data.parts }) });
  /** "layers.3.attn.heads.1" → what people call it, and a click that goes there. */
  function partName(name) {
    const [, layer, , head] = name.match(/^layers\.(\d+)\.(attn\.heads\.(\d+)|.*)$/) ?? [];
    if (head !== undefined) return `layer ${layer}, head ${head}`;
    return layer === undefined ? name : `layer ${layer}, ${name.split(".").slice(2).join(" ").replace(/^ff$/, "feed-forward")}`;
  }
  function goTo(name) {
    const [, layer, head] = name.match(/^layers\.(\d+)\.attn\.heads\.(\d+)$/) ?? [];
    return layer === undefined ? undefined : () => state.set({ layer: Number(layer), head: Number(head), step: 2 });
  }

  // ---- controls

  const knobs = {
    temperature: slider({ label: "Temperature", min: 0, max: 3, step: 0.05, value: state.get().temperature, show: (x) => (x === 0 ? "0: greedy" : x.toFixed(2)), on: (temperature) => state.set({ temperature }) }),
    k: slider({ label: "Top-k", min: 0, max: 100, value: state.get().k, show: (x) => (x ? String(x) : "off"), on: (k) => state.set({ k }) }),
    p: slider({ label: "Top-p", min: 0.05, max: 1, step: 0.01, value: state.get().p, show: (x) => (x < 1 ? x.toFixed(2) : "off"), on: (p) => state.set({ p }) }),
    minp: slider({ label: "Min-p", min: 0, max: 0.5, step: 0.01, value: state.get().minp, show: (x) => (x ? x.toFixed(2) : "off"), on: (minp) => state.set({ minp }) }),
  };
  const positions = slider({ label: "Position", min: 0, max: n - 1, value: position(), show: (i) => `${i} ${cut(context.label(i), 12)}`, on: (token) => state.set({ token, hover: null }) });
  const out = readouts(["Followed by", "Loss (T = 1)", "Perplexity (T = 1)", "Likeliest", "Entropy drawn with", "Loss of the text", "Perplexity of the text"]);
  const sums = formula();

  function draw() {
    if (!part) return;
    given = entries();
    next.rename(`Behind “${cut(context.label(position()), 16)}” (position ${position()})`);
    next.refresh();
    const { rows, drawn } = given;
    const { target } = part.data;
    const loss = target ? -Math.log(own[target[0]]) : null;
    out.show({ "Followed by": target ? target[1] : "nothing yet", "Loss (T = 1)": target ? num(loss, 3) : "–", "Perplexity (T = 1)": target ? num(Math.exp(loss), 2) : "–", Likeliest: `${cut(rows[0].text, 12)} ${percent(rows[0].own)}`, "Entropy drawn with": `${num(entropy(drawn), 2)} bits` });
    const { temperature } = state.get();
    const shown = target ?? [rows[0].id, rows[0].text];
    sums.show("p = e^(logit / T) / Σ,   loss = −ln p at T = 1",
      `“${cut(shown[1], 14)}”: logit ${num(part.arrays.logits[shown[0]], 3)}, p = ${num(own[shown[0]], 4)} at T = 1${temperature === 1 ? "" : `, ${num(softmax(part.arrays.logits, temperature)[shown[0]], 4)} at T = ${temperature}`}`,
      target ? `loss = −ln ${num(own[target[0]], 4)} = ${num(loss, 3)};  perplexity = e^${num(loss, 2)} = ${num(Math.exp(loss), 2)}` : null);
  }

  const ask = latest((i) => source.get("next", { position: i }), (found) => { part = found; order = descending(found.arrays.logits); own = softmax(found.arrays.logits); draw(); }, context.fails(body(next)));
  const askLens = latest((at, pin) => Promise.all([source.get("lens", { start: at, pin: -1 }), pin >= 0 ? source.get("lens", { start: at, pin }).catch(() => null) : null]), ([found, also]) => { lens = found; pinned = also; fillLens(); lensFigure.refresh(); }, context.fails(body(lensFigure)));
  const askParts = latest((i, token) => source.get("attribution", { position: i, token }), (found) => { parts = found; attribution.rename(`Which parts wrote “${cut(found.data.label, 14)}” (logit ${num(found.data.logit, 2)})`); attribution.refresh(); }, (error) => { attribution.rename("Which parts wrote it"); context.fails(body(attribution))(error); });
  source.get("losses").then((found) => {
    losses = found;
    fillLosses();
    along.refresh();
    const mean = about.tokens.slice(1).reduce((sum, _, j) => sum + lossOf(j + 1), 0) / Math.max(1, n - 1);
    out.show({ "Loss of the text": num(mean, 3), "Perplexity of the text": num(Math.exp(mean), 2) });
    strip.shade((i) => (i ? Math.min(1, lossOf(i) / 10) : 0));
  }, context.fails(body(along)));

  /** What takes longer than the distribution comes behind it, where it isn't shown already. */
  const asked = {};
  const askRest = afterFrame(() => {
    const { hover, pin } = state.get();
    const isNew = (name, ...what) => asked[name] !== (asked[name] = what.join());
    if (isNew("lens", start(), pin)) askLens(start(), pin);
    else if (lens) markLens();
    if (hover === null && isNew("parts", position(), pin)) askParts(position(), pin);
  });

  function update(changed) {
    const has = (...names) => names.some((name) => changed.has(name));
    positions.set(position());
    for (const [name, knob] of Object.entries(knobs)) if (has(name)) knob.set(state.get()[name]);
    if (has("token", "hover", "step")) ask(position()).then(askRest);
    else if (has("temperature", "k", "p", "minp", "pin", "theme")) draw();
    if (has("pin")) askRest();
  }

  const element = el("div", { class: "step" },
    el("div", { class: "pictures" }, next.element, attribution.element, along.element, lensFigure.element),
    el("aside", {}, positions.element, knobs.temperature.element, knobs.k.element, knobs.p.element, knobs.minp.element, out.element, sums.element,
      el("p", {}, "The sliders change what is drawn from, here in the browser and over the whole vocabulary. Loss and perplexity are always the model's own, at temperature 1: they say how it was trained, not how it is used."),
      el("p", {}, "The lens reads the stream behind each layer as if it were the last: final norm, then head. Its last row is the model's output exactly.")));
  return { element, update };
}
