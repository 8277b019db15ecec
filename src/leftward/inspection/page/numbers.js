// The arithmetic that the browser does itself, so that a slider acts at once. Written to be read beside the formulas.

// Plain loops where a vocabulary goes through: callbacks would take ten times as long.
export function sum(values) {
  let total = 0;
  for (let i = 0; i < values.length; i += 1) total += values[i];
  return total;
}
export const mean = (values) => sum(values) / values.length;
export const rms = (values) => Math.sqrt(sum(Float64Array.from(values, (x) => x * x)) / values.length);
export function std(values) {
  const centre = mean(values);
  return Math.sqrt(sum(Float64Array.from(values, (x) => (x - centre) ** 2)) / values.length);
}
export function largest(values) {
  let most = -Infinity;
  for (let i = 0; i < values.length; i += 1) if (values[i] > most) most = values[i];
  return most;
}

/** e^((x − max) / T) / Σ. Temperature 0 is all for the largest. */
export function softmax(logits, temperature = 1) {
  const most = largest(logits), weights = new Float64Array(logits.length);
  for (let i = 0; i < weights.length; i += 1) weights[i] = temperature === 0 ? Number(logits[i] === most) : Math.exp((logits[i] - most) / temperature);
  return toOne(weights);
}

/** Divides what it is given by its sum. */
function toOne(weights) {
  const total = sum(weights);
  for (let i = 0; i < weights.length; i += 1) weights[i] /= total;
  return weights;
}

/** Bits: −Σ p log2 p. */
export function entropy(probabilities) {
  let bits = 0;
  for (let i = 0; i < probabilities.length; i += 1) if (probabilities[i] > 0) bits -= probabilities[i] * Math.log2(probabilities[i]);
  return bits;
}

/** γ · (x − μ) / √(σ² + ε) + β, or γ · x / √(mean(x²) + ε). */
export function normalised(x, kind, eps, factor, bias) {
  const centre = kind === "layernorm" ? mean(x) : 0;
  const scale = kind === "layernorm" ? std(x) ** 2 : rms(x) ** 2;
  return Float64Array.from(x, (value, i) =>
    ((value - centre) / Math.sqrt(scale + eps)) * (factor ? factor[i] : 1) + (bias ? bias[i] : 0));
}

/**
 * What sampling draws from: temperature, then top-k, top-p and min-p, in this order, as generation/sampling.py does it.
 * Gives the probabilities of all tokens, 0 for those that are out, and the order, the likeliest first.
 */
export function distribution(logits, order, { temperature, k, p, minp }) {
  const kept = softmax(logits, temperature);
  const keep = (keys, bound) => {
    for (let i = 0; i < kept.length; i += 1) if (keys[i] < bound) kept[i] = 0;
    toOne(kept);
  };
  if (k > 0 && k < order.length) keep(logits, logits[order[k - 1]]);
  if (p < 1) {
    let total = 0;
    let bound = 0;
    for (const i of order) {
      total += kept[i];
      bound = kept[i];
      if (total >= p) break;
    }
    keep(kept, bound);
  }
  if (minp > 0) keep(kept, minp * largest(kept));
  return kept;
}

/**
 * Indices of float32 values, the largest value first, of equal ones the lower index. Value and index become one whole
 * number (32 and 20 bits), as a sort that compares by a callback would take ten times as long.
 */
export function descending(values) {
  const bits = new Uint32Array(Float32Array.from(values).buffer), keys = new Float64Array(bits.length);
  const FEWEST = 2 ** 20;  // above all indices
  for (let i = 0; i < bits.length; i += 1) {
    const rising = bits[i] >>> 31 ? ~bits[i] >>> 0 : bits[i] | 0x80000000;  // in the order of the floats, as bits of negative ones are not
    keys[i] = (~rising >>> 0) * FEWEST + i;
  }
  keys.sort();
  const order = new Uint32Array(keys.length);
  for (let i = 0; i < order.length; i += 1) order[i] = keys[i] % FEWEST;
  return order;
}
