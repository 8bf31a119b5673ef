// The attention panel of `bertkit explain --html`: layers x heads to choose from, the tokens, and a
// heat map. The weights are bytes, 255 times the square root of a weight, so that small ones stay.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("trace").textContent);
  const {tokens: names, layers, heads, entropy} = data;
  const n = names.length;
  const bytes = Uint8Array.from(atob(data.weights), (c) => c.charCodeAt(0));
  const element = (id) => document.getElementById(id);
  const [grid, tokens, map] = ["heads", "tokens", "map"].map(element);
  const state = {layer: layers, head: 0, from: 0, to: -1}; // from 1; head 0 is the mean of all
  let weights = matrix(state.layer, state.head);

  function matrix(layer, head) {
    const chosen = head ? [head] : Array.from({length: heads}, (_, i) => i + 1);
    const sum = new Float32Array(n * n);
    for (const one of chosen) {
      const start = ((layer - 1) * heads + one - 1) * n * n;
      for (let i = 0; i < n * n; i++) sum[i] += (bytes[start + i] / 255) ** 2 / chosen.length;
    }
    return sum;
  }

  const percent = (weight) => `${(100 * weight).toFixed(weight < 0.1 ? 1 : 0)} %`;
  const headName = (head) => (head ? `head ${head}` : "mean of the heads");
  const styled = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

  function thumbnail(canvas, layer, head) {
    const size = Math.min(n, 48), context = canvas.getContext("2d"), own = matrix(layer, head);
    canvas.width = canvas.height = size;
    context.fillStyle = styled("--training");
    const largest = new Float32Array(size * size);
    for (let row = 0; row < n; row++) {
      for (let column = 0; column < n; column++) {
        const cell = Math.floor(row * size / n) * size + Math.floor(column * size / n);
        largest[cell] = Math.max(largest[cell], own[row * n + column]);
      }
    }
    largest.forEach((weight, cell) => {
      context.globalAlpha = Math.sqrt(weight);
      context.fillRect(cell % size, Math.floor(cell / size), 1, 1);
    });
  }

  function buildGrid() {
    const corner = grid.createTHead().insertRow();
    corner.append(document.createElement("td"));
    for (let head = 0; head <= heads; head++) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = head || "mean";
      corner.append(cell);
    }
    const body = grid.createTBody();
    for (let layer = layers; layer >= 1; layer--) { // the last layer on top, as it is drawn
      const row = body.insertRow(), name = document.createElement("th");
      name.scope = "row";
      name.textContent = layer;
      row.append(name);
      for (let head = 0; head <= heads; head++) {
        const button = document.createElement("button");
        button.type = "button";
        button.id = `layer-${layer}-head-${head}`;
        button.setAttribute("aria-label", `layer ${layer}, ${headName(head)}`);
        button.append(document.createElement("canvas"));
        button.addEventListener("click", () => choose(layer, head));
        row.insertCell().append(button);
      }
    }
    grid.addEventListener("keydown", (event) => {
      const [up, right] = {
        ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      }[event.key] ?? [0, 0];
      if (!up && !right) return;
      event.preventDefault();
      choose(Math.min(layers, Math.max(1, state.layer + up)),
        Math.min(heads, Math.max(0, state.head + right)), true);
    });
  }

  function buildTokens() {
    names.forEach((name, index) => {
      const button = document.createElement("button"), share = document.createElement("small");
      button.type = "button";
      button.append(name, share);
      button.addEventListener("pointerenter", () => look(index));
      button.addEventListener("focus", () => look(index));
      button.addEventListener("click", () => look(index));
      tokens.append(button);
    });
    tokens.addEventListener("keydown", (event) => {
      const step = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1}[event.key];
      if (!step) return;
      event.preventDefault();
      tokens.children[Math.min(n - 1, Math.max(0, state.from + step))].focus();
    });
  }

  function choose(layer, head, focus = false) {
    Object.assign(state, {layer, head});
    weights = matrix(layer, head);
    for (const button of grid.querySelectorAll("button")) {
      const chosen = button.id === `layer-${layer}-head-${head}`;
      button.setAttribute("aria-pressed", chosen);
      button.tabIndex = chosen ? 0 : -1;
      if (chosen && focus) button.focus();
    }
    const own = head ? entropy[layer - 1][head - 1]
      : entropy[layer - 1].reduce((sum, value) => sum + value / heads, 0);
    element("chosen").textContent = `Layer ${layer} of ${layers}, ${headName(head)}` +
      `; ${head ? "" : "mean "}entropy ${own.toFixed(2)} of at most ${Math.log(n).toFixed(2)} nats`;
    look(state.from);
  }

  function look(from, to = -1) {
    Object.assign(state, {from, to});
    const row = weights.subarray(from * n, (from + 1) * n);
    [...tokens.children].forEach((button, index) => {
      button.style.setProperty("--share", `${50 * Math.sqrt(row[index])}%`); // text stays legible
      button.lastChild.textContent = row[index] >= 0.01 ? percent(row[index]) : "";
      button.setAttribute("aria-pressed", index === from);
      button.tabIndex = index === from ? 0 : -1;
    });
    const best = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 5);
    const named = best.map((i) => `${names[i]} (${i}) ${percent(row[i])}`).join(", ");
    element("looks").textContent = `${names[from]} (${from}) attends to ${named}` +
      (to < 0 ? "" : `; at ${names[to]} (${to}) ${percent(row[to])}`);
    drawMap();
  }

  const layout = () => {
    const room = map.parentElement.clientWidth, margin = n <= 64 ? 84 : 0;
    return {margin, cell: Math.max(n <= 64 ? 9 : 3, Math.min(20, (room - margin) / n))};
  };

  function drawMap() {
    const {margin, cell} = layout(), side = margin + n * cell, scale = devicePixelRatio || 1;
    map.width = map.height = Math.ceil(side * scale);
    map.style.width = map.style.height = `${side}px`;
    const context = map.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = styled("--training");
    for (let i = 0; i < n * n; i++) {
      context.globalAlpha = Math.sqrt(weights[i]);
      context.fillRect(margin + (i % n) * cell, margin + Math.floor(i / n) * cell, cell, cell);
    }
    context.globalAlpha = 1;
    context.strokeStyle = styled("--held-out");
    context.strokeRect(margin, margin + state.from * cell, n * cell, cell);
    if (!margin) return;
    context.font = `${Math.min(12, cell)}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    names.forEach((name, index) => {
      const middle = margin + (index + 0.5) * cell;
      context.fillStyle = styled(index === state.from ? "--held-out" : "--text");
      context.textAlign = "right";
      context.fillText(name, margin - 4, middle, margin - 6);
      context.save();
      context.translate(middle, margin - 4);
      context.rotate(-Math.PI / 2);
      context.fillStyle = styled("--text");
      context.textAlign = "left";
      context.fillText(name, 0, 0, margin - 6);
      context.restore();
    });
  }

  const drawAll = () => {
    for (const button of grid.querySelectorAll("button")) {
      const [, layer, , head] = button.id.split("-");
      thumbnail(button.firstChild, Number(layer), Number(head));
    }
    drawMap();
  };
  const point = (event) => {
    const {margin, cell} = layout(), box = map.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - margin) / cell);
    const column = Math.floor((event.clientX - box.left - margin) / cell);
    if (row >= 0 && row < n && column >= 0 && column < n) look(row, column);
  };

  map.addEventListener("pointermove", point);
  map.addEventListener("click", point);
  addEventListener("resize", drawMap);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  buildGrid();
  buildTokens();
  choose(state.layer, state.head);
  drawAll();
})();
