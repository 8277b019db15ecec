// Step 5: writing, a token at a time: what is read in each pass, what the cache saves and costs, and other ways to go on.
import { bytes, el, num, percent, svg } from "leftward/dom.js";
import { bars, cut, lines, picture, text } from "leftward/charts.js";
import { formula, readouts, slider } from "leftward/controls.js";
import { figure } from "leftward/figure.js";

export const title = "Generation";
export const lead = "The prompt is read in one pass. Then each new token is chosen, appended, and read alone: the rest is remembered.";

const PLAY_EVERY = 600;  // milliseconds a token
const MOST_PASSES = 40, MOST_PLACES = 90;

export function create(context) {
  const { about, state, source } = context;
  let part = null, timer = null;
  const steps = () => part?.data.steps ?? [];
  const written = () => Math.min(state.get().written, steps().length);
  const step = () => steps()[written() - 1];
  const prompt = about.n_prompt;

  // ---- the pictures

  function drawPasses() {
    if (!part || !written()) return null;
    const done = steps().slice(0, written()).slice(-MOST_PASSES), first = written() - done.length;
    const places = prompt + written() - 1, cell = Math.max(2, Math.min(18, 560 / Math.min(places, MOST_PLACES))), from = Math.max(0, places - MOST_PLACES);
    const row = 13, left = 70, width = left + (places - from) * cell + 60, height = 34 + done.length * row;
    return picture(Math.max(width, 320), height, "positions read in each pass",
      text(left, 12, `place in the text${from ? `, from ${from} on` : ""} →`, { class: "tick" }),
      done.map((each, k) => {
        const y = 22 + k * row, held = each.cache_tokens;
        return svg("g", { class: first + k === written() - 1 ? "now" : "" },
          text(left - 6, y + 10, first + k ? `decode ${first + k}` : "prefill", { class: "end tick" }),
          Array.from({ length: Math.max(0, held - from) }, (_, i) => {
            const place = from + i, isRead = each.kind === "prefill" || place === held - 1;
            return svg("rect", { class: isRead ? `read ${each.kind}` : "remembered", x: left + i * cell, y, width: Math.max(cell - 1, 1), height: row - 3 });
          }),
          text(left + (held - from) * cell + 4, y + 10, cut(each.label, 8), { class: "tick" }));
      }));
  }

  function drawCache() {
    if (!part || !steps().length) return null;
    const last = step();
    return lines({ label: "bytes of the cache", xLabel: "tokens held", yLabel: "KiB", height: 210,
      series: [{ name: "keys and values", cls: "first", points: steps().map((each) => [each.cache_tokens, each.cache_bytes / 1024]) }],
      marks: last ? [{ x: last.cache_tokens, y: last.cache_bytes / 1024, label: bytes(last.cache_bytes) }] : [] });
  }

  function drawWork() {
    const last = step();
    if (!last) return null;
    return bars({ label: "positions processed", row: 26, entries: [{ name: "without a cache", value: last.processed_without, cls: "rest" }, { name: "with a cache", value: last.processed }] });
  }

  const passes = figure({ name: "passes", title: "What each pass reads (filled) and remembers (pale)", wide: true, draw: drawPasses, table: () => ({ columns: ["pass", "kind", "positions read", "processed with a cache", "without", "cache tokens", "cache bytes", "chose", "log-probability"], rows: steps().slice(0, written()).map((each, i) => [i, each.kind, each.read, each.processed, each.processed_without, each.cache_tokens, each.cache_bytes, each.label, each.logprob]) }) });
  const cache = figure({ name: "cache", title: "The cache grows", draw: drawCache, table: () => ({ columns: ["tokens", "bytes"], rows: steps().map((each) => [each.cache_tokens, each.cache_bytes]) }) });
  const work = figure({ name: "work", title: "Positions processed so far", draw: drawWork, table: () => ({ columns: ["how", "positions"], rows: [["with a cache", step()?.processed], ["without a cache", step()?.processed_without]] }) });
  const others = figure({ name: "alternatives", title: "Chosen from", draw: drawOthers, table: () => ({ columns: ["id", "token", "model's own", "drawn with"], rows: (coming()?.top ?? []).map(([id, label, own, drawn]) => [id, label, Math.exp(own), drawn === null ? 0 : Math.exp(drawn)]) }) });

  /** The step whose choice is shown: the last one that was made. */
  const coming = () => step() ?? steps()[0];
  function drawOthers() {
    const each = coming();
    if (!each) return null;
    const entries = each.top.map(([id, label, own, drawn]) => ({ name: label, value: drawn === null ? 0 : Math.exp(drawn), strong: id === each.id, cls: id === each.id ? "chosen" : "", note: drawn === null ? `out (model: ${percent(Math.exp(own))})` : "", on: source.live && id !== each.id ? () => branch(each, id) : undefined }));
    if (!each.top.some(([id]) => id === each.id)) entries.push({ name: each.label, value: Math.exp(each.drawn_with), strong: true, cls: "chosen" });
    return bars({ label: "what the token was drawn from", entries, show: percent, most: Math.max(...entries.map((entry) => entry.value)) });
  }

  // ---- doing

  const said = el("span", { class: "note", role: "status" });
  async function branch(each, id) {
    stop();
    said.textContent = "going on from there…";
    const ids = [...about.tokens.slice(0, each.position).map((token) => token.id), id];
    await context.readAnew({ prompt: ids, ...about.sampling }, said);
  }

  const play = el("button", { type: "button", class: "primary", onclick: toggle }, "▶ Play");
  const back = el("button", { type: "button", onclick: () => move(-1) }, "− Step back");
  const forth = el("button", { type: "button", onclick: () => move(1) }, "+ Step");
  const again = el("button", { type: "button", onclick: () => state.set({ written: 0 }) }, "Start");
  function move(by) { state.set({ written: Math.max(0, Math.min(steps().length, written() + by)) }); }
  function stop() { clearInterval(timer); timer = null; play.textContent = "▶ Play"; }
  function toggle() {
    if (timer) { stop(); return; }
    if (written() >= steps().length) state.set({ written: 0 });
    play.textContent = "■ Stop";
    timer = setInterval(() => {
      if (!element.isConnected || written() >= steps().length) { stop(); return; }
      move(1);
    }, PLAY_EVERY);
    move(1);
  }

  const chosen = { max_tokens: about.sampling.max_tokens, temperature: about.sampling.temperature, seed: about.sampling.seed };
  const seed = el("input", { type: "number", min: 0, step: 1, value: chosen.seed, id: "seed", onchange: () => { chosen.seed = Number(seed.value); } });
  const knobs = source.live ? [
    slider({ label: "New tokens", min: 0, max: Math.max(200, chosen.max_tokens), value: chosen.max_tokens, on: (value) => { chosen.max_tokens = value; } }).element,
    slider({ label: "Temperature", min: 0, max: 2, step: 0.05, value: chosen.temperature, show: (x) => x.toFixed(2), on: (value) => { chosen.temperature = value; } }).element,
    el("div", { class: "control" }, el("label", { for: "seed" }, "Sampling seed"), seed),
    el("div", { class: "buttons" }, el("button", { type: "button", onclick: () => { said.textContent = "writing…"; context.readAnew({ ...about.sampling, ...chosen, prompt: about.tokens.slice(0, prompt).map((token) => token.id) }, said); } }, "Write again"), said),
  ] : [];
  const reel = el("p", { class: "written-text", "aria-live": "polite" });
  const out = readouts(["Generated", "Length", "Chose", "Probability", "Cache", "With : without"]);
  const sums = formula();
  source.get("generation").then((found) => {
    part = found;
    if (!state.get().written) state.set({ written: Math.min(1, steps().length) });
    draw();
  }, context.fails(passes.element.querySelector(".figure-body")));

  function draw() {
    for (const each of [passes, cache, work, others]) each.refresh();
    const last = step();
    reel.replaceChildren(...about.tokens.slice(0, prompt + written()).map((token, i) => el("span", { class: i >= prompt ? "written" : null }, token.text || (token.group === i && !token.control ? "" : token.control ? token.label : ""))));
    others.rename(last ? `Pass ${written() - 1} chose “${cut(last.label, 12)}” from` : "Chosen from");
    out.show({ Generated: `${written()} / ${steps().length}`, Length: String(prompt + written()), Chose: last ? last.label : "–", Probability: last ? percent(Math.exp(last.logprob)) : "–", Cache: last ? bytes(last.cache_bytes) : "–", "With : without": last ? `${last.processed} : ${last.processed_without.toLocaleString("en")}` : "–" });
    if (!last) { sums.show("Press Play or Step."); return; }
    const held = last.cache_tokens, k = written();
    sums.show("with a cache: prompt + (new − 1);   without: prompt + (prompt + 1) + …",
      `with: ${prompt} + ${k - 1} = ${last.processed};   without: ${prompt}${k > 1 ? ` + … + ${prompt + k - 1}` : ""} = ${num(last.processed_without)}`,
      about.layers.some((layer) => layer.window) ? `cache: ${num(last.cache_bytes)} bytes; window layers hold no more than their window` : `cache: ${held} tokens · ${num(part.data.bytes_per_token)} bytes = ${num(last.cache_bytes)} (${part.data.kv_dtype})`);
  }

  function update(changed) {
    if (!part) return;
    if (changed.has("token") && state.get().token !== null && state.get().token >= prompt) state.set({ written: state.get().token - prompt + 1 });
    if (["written", "theme", "step"].some((name) => changed.has(name))) draw();
  }

  const element = el("div", { class: "step" },
    el("div", { class: "pictures" }, reel, passes.element, others.element, el("div", { class: "stacked" }, work.element, cache.element)),
    el("aside", {}, el("div", { class: "buttons" }, play, forth, back, again), out.element, sums.element,
      source.live ? el("p", { class: "note" }, "Click a token under “chosen from”: the text goes on with that one instead.") : null,
      ...knobs,
      el("p", {}, "Prefill reads the whole prompt in one pass and fills the cache. Decode reads one token a pass, and takes from the cache what it needs of the others: keys and values never change, as nothing looks rightward."),
      el("p", {}, "The cache is what long texts cost: it grows with every token and layer, and a window or shared heads keep it small.")));
  return { element, update, play: toggle, more: move };
}
