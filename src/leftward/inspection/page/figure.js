// A picture with its title, the same as a table, and both as files.
import { el } from "leftward/dom.js";
import { pixels, save, standalone } from "leftward/export.js";
import { csv, json, tableView } from "leftward/table.js";

/**
 * `draw()` gives an SVG element, or none where there is nothing to draw, or not yet: then `table()`
 * isn't asked either. That gives {columns, rows}. Where it is written and not drawn (`isText`) there is no picture to
 * save. The result's `refresh()` draws anew.
 */
export function figure({ name, title, draw, table, wide = false, isText = false }) {
  const body = el("div", { class: "figure-body" });
  let asTable = false;
  const button = (text, label, action) => el("button", { type: "button", class: "tool", title: label, "aria-label": `${label}: ${title}`, onclick: action }, text);
  const toggle = button("table", "Show as a table", () => {
    asTable = !asTable;
    toggle.textContent = asTable ? "picture" : "table";
    toggle.setAttribute("aria-pressed", asTable);
    refresh();
  });
  toggle.setAttribute("aria-pressed", "false");
  const files = el("div", { class: "menu" },
    isText ? null : button("SVG", "Save as SVG", () => withPicture((image) => save(`${name}.svg`, standalone(image), "image/svg+xml"))),
    isText ? null : button("PNG", "Save as PNG", () => withPicture(async (image) => save(`${name}.png`, await pixels(image), "image/png"))),
    button("CSV", "Save the table as CSV", () => withTable((found) => save(`${name}.csv`, csv(found), "text/csv"))),
    button("JSON", "Save the table as JSON", () => withTable((found) => save(`${name}.json`, json(found), "application/json"))));
  const tools = el("div", { class: "tools" }, toggle, el("details", {}, el("summary", { class: "tool", title: "Save the picture or its table", "aria-label": `Save: ${title}` }, "save"), files));

  function withPicture(action) {
    if (asTable) toggle.click();  // what is saved has its style from being on the page
    const image = body.querySelector("svg");
    if (image) action(image);
  }

  function withTable(action) {
    if (draw()) action(table());
  }

  function refresh() {
    const drawn = draw();
    body.replaceChildren(...(drawn ? [asTable ? tableView(table()) : drawn] : []));
  }

  const heading = el("figcaption", {}, title);
  const element = el("figure", { class: wide ? "wide" : null, "data-figure": name }, el("div", { class: "figure-head" }, heading, tools), body);
  return { element, refresh, rename: (text) => { heading.textContent = text; } };
}
