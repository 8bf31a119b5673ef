// Attention: a small map of every head to choose from, and one token's weights on all tokens.

import {make, percent} from "./elements.js";
import {bytesOf} from "./server.js";

const THUMBNAIL = 40;
const STEPS = {
  ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
};

/**
 * The attention weights of a sequence.
 *
 * @typedef {object} Maps
 * @property {{token: string, segment: number}[]} tokens
 * @property {number} layers
 * @property {number} heads
 * @property {(layer: number, head: number) => Float32Array} matrix in row-major order; a
 *   row is a query token. Both numbers count from 1; head 0 is the mean of all heads.
 */

/** @returns {Maps} the maps in a response of /v1/attention-maps. */
function mapsOf({tokens, layers, heads, weights}) {
  const bytes = bytesOf(weights), size = tokens.length ** 2;
  const matrix = (layer, head) => {
    const chosen = head ? [head] : Array.from({length: heads}, (_, i) => i + 1);
    const sum = new Float32Array(size);
    for (const one of chosen) {
      const start = ((layer - 1) * heads + one - 1) * size;
      for (let i = 0; i < size; i++) sum[i] += (bytes[start + i] / 255) ** 2 / chosen.length;
    }
    return sum;
  };
  return {tokens, layers, heads, matrix};
}

const headName = (head) => (head ? `head ${head}` : "mean of all heads");

/** @returns {Node[]} the panel for a response of /v1/attention-maps. */
export function showMaps(answer) {
  const maps = mapsOf(answer);
  const state = {layer: maps.layers, head: 0, from: 0};
  const chosen = make("h3", {id: "chosen"});
  const words = make("p", {class: "text", id: "looks", "aria-live": "polite"});
  const grid = headGrid(maps, choose);
  const strip = tokenStrip(maps.tokens, look);
  let weights;

  function choose(layer, head) {
    Object.assign(state, {layer, head});
    weights = maps.matrix(layer, head);
    grid.press(layer, head);
    chosen.textContent = `Layer ${layer} of ${maps.layers}, ${headName(head)}`;
    look(state.from);
  }

  function look(from) {
    state.from = from;
    const n = maps.tokens.length;
    const row = weights.subarray(from * n, (from + 1) * n);
    strip.press(from, row);
    const best = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 4);
    const named = best.map((i) => `${maps.tokens[i].token} (${i}) ${percent(row[i])}`).join(", ");
    words.textContent = `${maps.tokens[from].token} (${from}) attends to ${named}`;
  }

  choose(state.layer, state.head);
  return [
    make("p", {class: "quiet"}, "Choose a head, then point at a token. Arrow keys move between " +
      "heads or tokens. The last layer is at the top."),
    make("div", {class: "wide"}, grid.element), chosen, strip.element, words,
  ];
}

/** A grid of layers x heads as buttons, the mean first; Tab reaches only the chosen one. */
function headGrid({tokens, layers, heads, matrix}, choose) {
  const buttons = new Map();
  const element = make("table", {class: "heads", keydown: walk, "aria-label": "layers and heads"});
  const names = Array.from({length: heads + 1}, (_, head) => (head ? String(head) : "all"));
  element.style.setProperty("--columns", heads + 2);
  element.append(make("thead", {}, make("tr", {}, make("td"),
    ...names.map((name) => make("th", {scope: "col"}, name)))));
  const body = make("tbody");
  for (let layer = layers; layer >= 1; layer--) { // the last layer at the top
    const cells = names.map((_, head) => {
      const canvas = make("canvas");
      drawWhenSeen(canvas, () => ({n: tokens.length, weights: matrix(layer, head)}));
      const button = make("button", {type: "button", click: () => choose(layer, head),
        "aria-label": `layer ${layer}, ${headName(head)}`, tabindex: -1}, canvas);
      buttons.set(`${layer} ${head}`, button);
      return make("td", {}, button);
    });
    body.append(make("tr", {}, make("th", {scope: "row"}, String(layer)), ...cells));
  }
  element.append(body);
  let pressed;

  function press(layer, head) {
    const button = buttons.get(`${layer} ${head}`);
    if (pressed) {
      pressed.button.setAttribute("aria-pressed", false);
      pressed.button.tabIndex = -1;
    }
    button.setAttribute("aria-pressed", true);
    button.tabIndex = 0;
    pressed = {layer, head, button};
  }

  function walk(event) {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const layer = Math.min(layers, Math.max(1, pressed.layer + step[0]));
    choose(layer, Math.min(heads, Math.max(0, pressed.head + step[1])));
    pressed.button.focus();
  }

  return {element, press};
}

/** The tokens as buttons; Tab reaches only the chosen one. */
function tokenStrip(tokens, look) {
  const buttons = tokens.map(({token, segment}, i) => make("button",
    {type: "button", class: `segment-${segment}`, tabindex: -1, pointerenter: () => look(i),
      focus: () => look(i), click: () => look(i)}, token, make("small")));
  const element = make("div", {class: "chips looking", role: "group", "aria-label": "tokens",
    keydown: walk}, ...buttons);
  let pressed = 0;

  function press(from, row) {
    pressed = from;
    buttons.forEach((button, i) => {
      button.style.setProperty("--share", `${50 * Math.sqrt(row[i])}%`); // text stays legible
      button.lastChild.textContent = row[i] >= 0.01 ? percent(row[i]) : "";
      button.setAttribute("aria-pressed", i === from);
      button.tabIndex = i === from ? 0 : -1;
    });
  }

  function walk(event) {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const to = pressed + (step[1] || -step[0]);
    buttons[Math.min(buttons.length - 1, Math.max(0, to))].focus();
  }

  return {element, press};
}

/**
 * Draw a map when it first becomes visible.
 * @param {HTMLCanvasElement} canvas
 * @param {() => {n: number, weights: Float32Array}} of
 */
function drawWhenSeen(canvas, of) {
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    draw(canvas, of());
  });
  observer.observe(canvas);
}

/** Draw large weights from a token (row) to a token (column) dark; a cell shows its largest. */
function draw(canvas, {n, weights}) {
  const size = Math.min(n, THUMBNAIL), context = canvas.getContext("2d");
  const largest = new Float32Array(size * size);
  for (let i = 0; i < n * n; i++) {
    const row = Math.floor(Math.floor(i / n) * size / n);
    const cell = row * size + Math.floor((i % n) * size / n);
    largest[cell] = Math.max(largest[cell], weights[i]);
  }
  canvas.width = canvas.height = size;
  context.fillStyle = getComputedStyle(canvas).color;
  largest.forEach((weight, cell) => {
    context.globalAlpha = Math.sqrt(weight);
    context.fillRect(cell % size, Math.floor(cell / size), 1, 1);
  });
}
