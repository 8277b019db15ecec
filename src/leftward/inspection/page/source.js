// Where the numbers come from: a server that has the model, or the file that this page is. One way to ask for both:
//   const part = await source.get("attention", {layer: 3, head: 1});   // {data, arrays}, see inspection/part.py

const KINDS = { f32: Float32Array, u8: Uint8Array, i32: Int32Array };
const KEPT = 200;

export class NotHere extends Error {}

/** A part's bytes → {name, params, data, arrays: {name: typed array with a `shape`}}. */
export function decode(buffer) {
  const view = new DataView(buffer);
  if (new TextDecoder().decode(new Uint8Array(buffer, 0, 4)) !== "LWP1") throw new Error("this is no part of a trace");
  const start = 8 + view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  if (header.version > 1) throw new Error("a newer leftward made this trace");
  const arrays = {};
  for (const { name, dtype, shape, offset } of header.arrays) {
    const size = shape.reduce((a, b) => a * b, 1);
    arrays[name] = Object.assign(new KINDS[dtype](buffer, start + offset, size), { shape });
  }
  return { ...header, arrays };
}

const keyOf = (name, params) => name + Object.keys(params).sort().map((key) => `&${key}=${params[key]}`).join("");

function remembered(fetchPart) {
  const known = new Map();
  return (name, params = {}) => {
    const key = keyOf(name, params);
    if (!known.has(key)) {
      const asked = fetchPart(name, params, key);
      known.set(key, asked);
      asked.catch(() => known.delete(key));
      if (known.size > KEPT) known.delete(known.keys().next().value);
    }
    return known.get(key);
  };
}

/** Base64 → bytes. A loop: a callback for each letter would take most of the time that a slider has. */
function bytesOf(text) {
  const letters = atob(text), found = new Uint8Array(letters.length);
  for (let i = 0; i < found.length; i += 1) found[i] = letters.charCodeAt(i);
  return found;
}

/** The parts that stand in this file. */
function embedded() {
  const blocks = new Map([...document.querySelectorAll("script[data-part]")].map((each) => [each.dataset.part, each]));
  const remark = JSON.parse(document.getElementById("report")?.textContent ?? "{}");
  const get = remembered(async (name, params, key) => {
    if (!blocks.has(key)) throw new NotHere("not in this report: run  leftward explore MODEL");
    const stream = new Blob([bytesOf(blocks.get(key).textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
    return decode(await new Response(stream).arrayBuffer());
  });
  const has = (name, params = {}) => blocks.has(keyOf(name, params));
  return { live: false, get, has, leftOut: remark.left_out ?? {}, keys: [...blocks.keys()] };
}

async function answered(response) {
  if (response.ok) return response;
  throw new NotHere((await response.json().catch(() => ({}))).error ?? `the server answers ${response.status}`);
}

/** The server that gave this page. `trace` names the text that it read; null is the newest. */
function served(trace) {
  const get = remembered(async (name, params) => {
    const query = new URLSearchParams({ ...params, ...(trace ? { trace } : {}) });
    return decode(await (await answered(await fetch(`/api/part/${name}?${query}`))).arrayBuffer());
  });
  return {
    live: true,
    trace,
    get,
    has: () => true,
    leftOut: {},
    keys: [],
    /** Another text, or another way to write on: {prompt: text or ids, max_tokens, seed …} → its source. */
    async read(asked, signal) {
      const body = JSON.stringify(asked);
      const headers = { "Content-Type": "application/json" };
      const response = await answered(await fetch("/api/trace", { method: "POST", headers, body, signal }));
      return served((await response.json()).trace);
    },
    async status() { return (await answered(await fetch("/api/status"))).json(); },
    of: served,
    reportUrl: `/api/report${trace ? `?trace=${trace}` : ""}`,
  };
}

export const open = () => (document.querySelector("script[data-part]") ? embedded() : served(null));
