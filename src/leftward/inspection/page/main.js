// The page: header, the text's tokens, six steps, and the strip of checks. Each step is a module of its own.
import { count, el } from "leftward/dom.js";
import { HELP, listenToKeys } from "leftward/keys.js";
import { save } from "leftward/export.js";
import { NotHere, open } from "leftward/source.js";
import { store } from "leftward/state.js";
import { tokenStrip } from "leftward/tokens.js";
import * as architecture from "leftward/steps/architecture.js";
import * as mask from "leftward/steps/mask.js";
import * as norm from "leftward/steps/norm.js";
import * as next from "leftward/steps/next.js";
import * as generation from "leftward/steps/generation.js";
import * as variants from "leftward/steps/variants.js";

const STEPS = [architecture, mask, norm, next, generation, variants];
const INITIAL = {
  step: 1, token: null, hover: null, layer: 0, head: 0,
  depth: null, compare: "",
  stage: "weights", mask: "causal", size: null,
  site: "", norm: "", dimension: 0,
  temperature: 1, k: 0, p: 1, minp: 0, pin: -1,
  written: 0,
  variant: "positions",
  text: "", theme: "",
};
const IN_ADDRESS = Object.keys(INITIAL).filter((name) => !["hover", "depth", "theme"].includes(name));
const CHECKED_AFTER = 700;  // milliseconds: what is looked at comes first
const FOLLOWED_EVERY = 4000;  // milliseconds, where a run goes on

const root = document.getElementById("page");
const state = store(INITIAL, IN_ADDRESS);
let source = open();
let shown;  // what is on the page: {context, update, close}

/** What all steps are given. */
function contextOf(about) {
  return {
    about, state, source,
    /** The token that counts: the one under the pointer, the locked one, or the prompt's last. */
    focus() {
      const { hover, token } = state.get();
      return Math.min(hover ?? token ?? about.n_prompt - 1, about.tokens.length - 1);
    },
    label: (position) => about.tokens[position]?.label ?? "–",
    labels: about.tokens.map((token) => token.label),
    layer: () => Math.min(state.get().layer, about.config.n_layers - 1),
    head: () => Math.min(state.get().head, about.config.n_heads - 1),
    /** Shows why something can't be shown, in its place. */
    fails: (element) => (error) => {
      if (!(error instanceof NotHere)) console.error(error);
      element.replaceChildren(el("p", { class: "not-here" }, error.message));
    },
    readAnew,
  };
}

async function show(next) {
  const about = (await next.get("about")).data;
  shown?.close();
  source = next;
  const context = contextOf(about);
  const strip = tokenStrip(context);
  const stage = el("main", { id: "stage", tabindex: -1 });
  const tabs = STEPS.map((step, i) => el("button", { type: "button", role: "tab", id: `tab-${i + 1}`, "aria-controls": "stage", onclick: () => state.set({ step: i + 1 }) },
    el("span", { class: "step-number" }, String(i + 1)), el("span", {}, step.title)));
  root.replaceChildren(header(context), el("nav", { role: "tablist", "aria-label": "the six steps" }, tabs), strip.element, stage, checksStrip(context));
  let current = null;

  function update(changed) {
    const { step } = state.get();
    strip.update();
    if (!current || changed.has("step")) {
      tabs.forEach((tab, i) => tab.setAttribute("aria-selected", String(i + 1 === step)));
      strip.shade(null);
      current = STEPS[step - 1].create({ ...context, strip });
      stage.replaceChildren(el("h1", {}, `${step}. ${STEPS[step - 1].title}`), el("p", { class: "lead" }, STEPS[step - 1].lead), current.element);
      stage.setAttribute("aria-labelledby", `tab-${step}`);
      current.update(new Set(Object.keys(state.get())));
    } else {
      current.update(changed);
    }
  }
  const unsubscribe = state.subscribe(update);
  shown = { context, close: unsubscribe, play: () => current.play?.(), more: (by) => current.more?.(by) };
  update(new Set(["step"]));
}

// ---- the header

function header(context) {
  const { about } = context;
  const { parameters, config } = about;
  const summary = `${count(parameters.total)} parameters · ${config.n_layers} layers of ${config.d_model} · context ${config.max_seq_len.toLocaleString("en")} · vocabulary ${config.vocab_size.toLocaleString("en")}`;
  const button = (label, title, action) => el("button", { type: "button", class: "tool", title, "aria-label": title, onclick: action }, label);
  return el("header", {},
    el("div", { class: "brand" }, el("strong", {}, about.name), el("span", { class: "summary" }, summary)),
    el("div", { class: "tools" },
      source.live ? el("a", { class: "tool", href: source.reportUrl, download: "leftward.html", title: "This page as one file" }, "HTML") : null,
      source.live ? null : button("HTML", "Save this page", () => save("leftward.html", `<!doctype html>${document.documentElement.outerHTML}`, "text/html")),
      button("◐", "Dark or light (d)", toggleTheme),
      button("?", "Keys (?)", help)),
    source.live ? promptForm(context) : reportRemark());
}

function promptForm({ about }) {
  const field = el("textarea", { rows: 1, "aria-label": "a text for the model to read", spellcheck: "false" });
  field.value = about.prompt;
  const said = el("span", { class: "note", role: "status" });
  const form = el("form", { class: "prompt", onsubmit: async (event) => {
    event.preventDefault();
    said.textContent = "reading…";
    await readAnew({ prompt: field.value, ...about.sampling }, said);
  } }, field, el("button", { type: "submit" }, "Read"), said);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
  });
  return form;
}

function reportRemark() {
  const left = Object.entries(source.leftOut);
  const what = left.map(([name, n]) => `${n} × ${name.replace("_", " ")}`).join(", ");
  return el("p", { class: "note report" }, "A report: all that is shown is in this file. ",
    left.length ? `Left out for its size: ${what}. ` : "", "For anything else: leftward explore MODEL.");
}

/** Another text, or the same written on in another way. */
async function readAnew(asked, said) {
  try {
    const next = await source.read(asked);
    state.set({ token: null, hover: null, written: 0, text: typeof asked.prompt === "string" ? asked.prompt : "" });
    await show(next);
  } catch (error) {
    if (!(error instanceof NotHere)) console.error(error);
    if (said) said.textContent = error.message;
  }
}

// ---- the strip of checks

function checksStrip(context) {
  const list = el("ul", {}, el("li", { class: "waiting" }, "checking…"));
  const strip = el("footer", { class: "checks", "aria-label": "self-check" }, el("span", {}, "Checked on this model and text:"), list);
  const ask = () => context.source.get("checks").then(({ data }) => list.replaceChildren(...data.checks.map(({ what, holds, said }) =>
    el("li", { class: holds ? "holds" : "fails", title: said }, el("span", { "aria-hidden": "true" }, holds ? "✓" : "✗"), ` ${what}`, el("small", {}, ` ${said}`)))),
  context.fails(list));
  setTimeout(ask, CHECKED_AFTER);
  return strip;
}

// ---- themes, help, keys

function toggleTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  state.set({ theme: document.documentElement.dataset.theme });
}

function help() {
  const known = document.getElementById("help");
  if (known) { known.close(); known.remove(); return; }
  const dialog = el("dialog", { id: "help", onclose: () => dialog.remove() },
    el("h2", {}, "Keys"),
    el("dl", {}, HELP.map(([keys, what]) => [el("dt", {}, keys), el("dd", {}, what)])),
    el("form", { method: "dialog" }, el("button", { autofocus: true }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

const within = (value, n) => Math.max(0, Math.min(n - 1, value));

listenToKeys({
  step: (by) => state.set({ step: 1 + within(state.get().step - 1 + by, STEPS.length) }),
  goTo: (step) => state.set({ step }),
  token: (by) => state.set({ hover: null, token: within((state.get().token ?? shown.context.focus()) + by, shown.context.about.tokens.length) }),
  layer: (by) => state.set({ layer: within(shown.context.layer() + by, shown.context.about.config.n_layers) }),
  head: (by) => state.set({ head: within(shown.context.head() + by, shown.context.about.config.n_heads) }),
  play: () => shown.play(),
  more: (by) => shown.more(by),
  table: () => document.querySelectorAll(".figure-head .tools button[aria-pressed]").forEach((button) => button.click()),
  dark: toggleTheme,
  free: () => state.set({ token: null, hover: null }),
  help,
});
addEventListener("hashchange", () => state.reread());

/** While a run goes on its newest weights are shown as they come, and what is chosen stays so. */
async function follow(known) {
  const { trace, follows } = await source.status().catch(() => ({ trace: known, follows: true }));  // or it asks again
  if (!follows) return;
  const isNew = known && trace !== known && trace !== source.trace;
  const waits = isNew && document.activeElement?.matches("textarea");  // until nobody writes
  if (isNew && !waits) await show(source.of(trace)).catch(console.error);
  setTimeout(() => follow(waits ? known : trace), FOLLOWED_EVERY);
}

async function begin() {
  const { text } = state.get();
  await show(source);
  if (source.live && text && text !== shown.context.about.prompt) await readAnew({ prompt: text, ...shown.context.about.sampling });
  if (source.live) await follow();
}

begin().catch((error) => {
  console.error(error);
  root.replaceChildren(el("p", { class: "not-here" }, error.message));
});
