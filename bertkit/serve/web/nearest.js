// Lines of text, ranked by the cosine similarity of their vectors to a query's.

import {bars, make, quoted} from "./elements.js";
import {bytesOf} from "./server.js";

/**
 * @param {{data: {embedding: string}[], usage: {total_tokens: number}}} answer the response; the
 *   query's vector comes first, and vectors are base64 of float32.
 * @param {string[]} lines
 * @param {string} query
 * @returns {Node[]}
 */
export function showNearest(answer, lines, query) {
  const [own, ...others] = answer.data.map(({embedding}) => vectorOf(embedding));
  const rows = others.map((vector, i) => ({name: lines[i], cosine: cosine(own, vector)}))
    .sort((a, b) => b.cosine - a.cosine)
    .map(({name, cosine: share}, i) => ({name, share, shown: share.toFixed(3), best: i === 0}));
  const count = rows.length === 1 ? "1 line" : `${rows.length} lines`;
  return [
    quoted(query), bars(rows, 10),
    make("p", {class: "quiet"},
      `cosine similarity to ${count}; ${answer.usage.total_tokens} tokens`),
  ];
}

/** @returns {number} the cosine; 0 if a vector has length 0. */
function cosine(a, b) {
  let product = 0, first = 0, second = 0;
  for (let i = 0; i < a.length; i++) {
    product += a[i] * b[i];
    first += a[i] ** 2;
    second += b[i] ** 2;
  }
  return first && second ? product / Math.sqrt(first * second) : 0;
}

/** @returns {Float32Array} the numbers, read as little-endian on every machine. */
function vectorOf(text) {
  const view = new DataView(bytesOf(text).buffer);
  return Float32Array.from({length: view.byteLength / 4}, (_, i) => view.getFloat32(4 * i, true));
}
