// The keyboard's path through the page.

export const HELP = [
  ["← →", "step before, step after"],
  ["1 … 6", "go to a step"],
  ["↑ ↓", "token before, token after"],
  ["[ ]", "layer below, layer above"],
  [", .", "head before, head after"],
  ["space", "play or stop (step 5)"],
  ["n b", "write one token more, one less (step 5)"],
  ["t", "pictures as tables"],
  ["d", "dark, light"],
  ["Esc", "free the locked token"],
  ["?", "this help"],
];

/** actions: {left, right, up, down, layer, head, play, more, table, dark, free, help, step}. */
export function listenToKeys(actions) {
  const table = {
    ArrowLeft: () => actions.step(-1), ArrowRight: () => actions.step(1),
    ArrowUp: () => actions.token(-1), ArrowDown: () => actions.token(1),
    "[": () => actions.layer(-1), "]": () => actions.layer(1),
    ",": () => actions.head(-1), ".": () => actions.head(1),
    " ": actions.play, n: () => actions.more(1), b: () => actions.more(-1),
    t: actions.table, d: actions.dark, Escape: actions.free, "?": actions.help,
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]") && event.key !== "?") return;  // it has its own
    const target = event.target;
    const writes = target.matches?.("input:not([type=range]), textarea, select");
    if (writes && event.key !== "Escape") return;
    const slides = target.matches?.("input[type=range]") && event.key.startsWith("Arrow");
    const presses = target.matches?.("button, [role=button], summary, a") && event.key === " ";
    if (slides || presses) return;
    const number = Number(event.key);
    const action = number >= 1 && number <= 6 ? () => actions.goTo(number) : table[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
