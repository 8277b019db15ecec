// A table of numbers: what a picture shows, for those who read it, or listen to it, or copy it.
import { el, num } from "leftward/dom.js";

const MOST_ROWS = 500;

/** {columns: [name], rows: [[value]]} → an element. Long ones are cut, and say so; exports have all. */
export function tableView({ columns, rows }) {
  const shown = rows.slice(0, MOST_ROWS);
  return el("div", { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "table view" },
    el("table", {},
      el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, shown.map((row) => el("tr", {}, row.map((value) =>
        el("td", { class: typeof value === "number" ? "number" : null }, typeof value === "number" ? num(value, 4) : String(value ?? "–"))))))),
    rows.length > MOST_ROWS ? el("p", { class: "note" }, `The first ${MOST_ROWS} of ${rows.length.toLocaleString("en")} rows; CSV and JSON have all.`) : null);
}

const quoted = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

export const csv = ({ columns, rows }) => [columns, ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
export const json = ({ columns, rows }) =>
  JSON.stringify(rows.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i] ?? null]))), null, 1);
