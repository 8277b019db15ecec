// The text as tokens: one strip that every step shares. Hover previews, a click locks, Esc frees.
import { afterFrame, el } from "leftward/dom.js";

/** The strip. `element` holds a button a token; `update()` follows what is selected. */
export function tokenStrip(context) {
  const { state, about } = context;
  const { tokens, n_prompt: nPrompt } = about;
  const buttons = tokens.map((token, i) => el("button", {
    type: "button",
    role: "option",
    class: ["token", i >= nPrompt ? "written" : "", token.control ? "control" : "", token.group !== i ? "joined" : ""].join(" "),
    title: `${i}: id ${token.id}${i >= nPrompt ? ", written by the model" : ""}`,
    "data-position": i,
    "aria-label": `token ${i} ${token.label}`,
    tabindex: -1,
  }, token.label));
  const element = el("div", { class: "tokens", role: "listbox", "aria-label": "the text's tokens", tabindex: 0 }, buttons);
  const of = (event) => event.target.closest?.("[data-position]")?.dataset.position;
  element.addEventListener("pointerover", (event) => { if (of(event) !== undefined) state.set({ hover: Number(of(event)) }); });
  element.addEventListener("pointerleave", () => state.set({ hover: null }));
  element.addEventListener("click", (event) => {
    if (of(event) === undefined) return;
    const position = Number(of(event));
    state.set({ token: state.get().token === position ? null : position });
  });
  let [focused, locked] = [null, null];
  function update() {
    const before = focused;
    buttons[focused]?.classList.remove("focused");
    buttons[locked]?.classList.remove("locked");
    buttons[locked]?.removeAttribute("aria-selected");
    focused = context.focus();
    locked = state.get().token;
    buttons[focused]?.classList.add("focused");
    buttons[locked]?.classList.add("locked");
    buttons[locked]?.setAttribute("aria-selected", "true");
    if (state.get().hover === null && focused !== before) bringIntoSight(buttons[focused]);
  }
  /** Within the strip alone; when the page is laid out, as asking for a place lays it out at once. */
  const bringIntoSight = afterFrame((box) => {
    if (!box?.isConnected) return;
    if (box.offsetTop < element.scrollTop) element.scrollTop = box.offsetTop - 4;
    const below = box.offsetTop + box.offsetHeight - element.clientHeight;
    if (below > element.scrollTop) element.scrollTop = below + 4;
  });
  return { element, update, shade: (colour) => buttons.forEach((button, i) => { button.style.setProperty("--shade", colour ? colour(i) : 0); }) };
}
