// What is chosen, kept in the address, so that a link shows what its sender saw.

const NUMBERS = new Set(["step", "token", "layer", "head", "pin", "size", "temperature", "k", "p", "minp", "dimension", "written"]);

const WRITTEN_AFTER = 100;  // milliseconds

export function store(initial, inAddress) {
  let values = { ...initial, ...read() };
  const listeners = new Set();

  function read() {
    const found = {};
    for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
      if (!inAddress.includes(name)) continue;
      const value = NUMBERS.has(name) ? Number(text) : text;
      if (!Number.isNaN(value)) found[name] = value;
    }
    return found;
  }

  /** Soon, and once for many changes: browsers take milliseconds for it, and refuse what moves too often. */
  let due = null;
  const writeSoon = () => { due ??= setTimeout(write, WRITTEN_AFTER); };
  addEventListener("pagehide", () => { if (due !== null) write(); });

  function write() {
    clearTimeout(due);
    due = null;
    const query = new URLSearchParams();
    for (const name of inAddress) {
      if (values[name] !== initial[name] && values[name] !== null) query.set(name, values[name]);
    }
    const hash = query.toString();
    try {
      history.replaceState(null, "", hash ? `#${hash}` : "#");
    } catch {
      // In a notebook's frame there is no address to keep it in.
    }
  }

  return {
    get: () => values,
    set(patch) {
      const changed = new Set(Object.keys(patch).filter((name) => values[name] !== patch[name]));
      if (!changed.size) return;
      values = { ...values, ...patch };
      if ([...changed].some((name) => inAddress.includes(name))) writeSoon();
      for (const listener of listeners) listener(changed);
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    reread() { this.set({ ...initial, hover: values.hover, ...read() }); },
  };
}
