// Sliders, choices, numbers that are read out, and formulas.
import { el } from "leftward/dom.js";

let numbered = 0;

/** `set(value)` moves it without telling; `limit(max)` changes its range. */
export function slider({ label, min, max, step = 1, value, show = String, on }) {
  const id = `control-${numbered += 1}`;
  const output = el("output", { for: id }, show(value));
  const input = el("input", { type: "range", id, min, max, step, value, oninput: () => {
    output.textContent = show(Number(input.value));
    on(Number(input.value));
  } });
  const set = (next) => {
    input.value = next;
    output.textContent = show(Number(input.value));
  };
  const limit = (most) => { input.max = most; };
  return { element: el("div", { class: "control" }, el("label", { for: id }, label), output, input), set, limit, input };
}

/** Buttons of which one is pressed. options: [[value, text]]. */
export function choice({ label, options, value, on }) {
  const buttons = new Map(options.map(([key, text]) => [key, el("button", { type: "button", onclick: () => on(key) }, text)]));
  const set = (chosen) => buttons.forEach((button, key) => button.setAttribute("aria-pressed", String(key === chosen)));
  set(value);
  return { element: el("div", { class: "control choice", role: "group", "aria-label": label }, el("span", { class: "label" }, label), el("div", { class: "buttons" }, [...buttons.values()])), set };
}

/** A list to pick from. */
export function picker({ label, options, value, on }) {
  const id = `control-${numbered += 1}`;
  const select = el("select", { id, onchange: () => on(select.value) }, options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return { element: el("div", { class: "control" }, el("label", { for: id }, label), select), set: (key) => { select.value = key; }, select };
}

/** Numbers with names; `show({name: text})` changes them. */
export function readouts(names) {
  const values = new Map(names.map((name) => [name, el("dd", {}, "–")]));
  const element = el("dl", { class: "readouts", "aria-live": "polite" }, names.map((name) => el("div", {}, el("dt", {}, name), values.get(name))));
  return { element, show: (texts) => Object.entries(texts).forEach(([name, text]) => values.get(name).replaceChildren(text)) };
}

/** The formula, and below it the same with this cell's numbers. */
export function formula() {
  const element = el("div", { class: "formula" });
  return { element, show: (general, ...lines) => element.replaceChildren(el("div", { class: "general" }, general), ...lines.filter(Boolean).map((line) => el("div", { class: "numbers" }, line))) };
}

/** A place for an answer that may come late: only the newest question's answer is shown. */
export function latest(ask, show, fail) {
  let newest = 0;
  return async (...given) => {
    const mine = newest += 1;
    try {
      const answer = await ask(...given);
      if (mine === newest) show(answer, ...given);
    } catch (error) {
      if (mine === newest) fail(error);
    }
  };
}
