// What each route found, as elements. Every function takes the answer and what was asked.

import {bars, folded, make, percent, quoted, table} from "./elements.js";
import {linesOf, MASK, slicer} from "./texts.js";

const COLOURS = 6;

/** @returns {Node} what reading the texts took, and whether anything was lost. */
function usage({usage: used}) {
  const parts = [`${used.tokens} tokens`];
  if (used.windowed) parts.push("read through several windows");
  for (const what of Object.keys(used.cut)) parts.push(what);
  return make("p", {class: "quiet"}, parts.join(", "));
}

const sorted = (probabilities) => Object.entries(probabilities).sort((a, b) => b[1] - a[1]);

/** One label of several, or any number of labels. */
export function showLabels(answer, {values}) {
  const [found] = answer.predictions;
  const chosen = found.labels ?? [found.label];
  const rows = sorted(found.probabilities)
    .map(([name, share]) => ({name, share, best: chosen.includes(name)}));
  const heading = chosen.length ? chosen.join(", ") : "no label above a half";
  return [
    quoted(values.text, ...(values.pair.trim() ? [values.pair] : [])),
    make("p", {class: "outcome"}, heading), bars(rows), usage(answer),
  ];
}

/** A number. */
export function showValue(answer, {values}) {
  const {value} = answer.predictions[0];
  return [
    quoted(values.text, ...(values.pair.trim() ? [values.pair] : [])),
    make("p", {class: "outcome"}, value.toFixed(3)), usage(answer),
  ];
}

/** The choices in their own order. */
export function showChoice(answer, {values}) {
  const [found] = answer.predictions;
  const rows = linesOf(values.choices).map((name, i) =>
    ({name, share: found.probabilities[i], best: i === found.choice}));
  return [
    quoted(values.text), make("p", {class: "outcome"}, found.text), bars(rows, rows.length),
    usage(answer),
  ];
}

/** The text with its entities, and every word. */
export function showTags(answer, {values, model}) {
  const [{words, entities}] = answer.predictions;
  const types = [...new Set(model.labels.map((label) => label.replace(/^[BIES]-/, "")))]
    .filter((type) => type !== "O");
  const slice = slicer(values.text);
  const text = make("p", {class: "text"});
  let end = 0;
  for (const entity of entities) {
    const colour = Math.max(0, types.indexOf(entity.type)) % COLOURS;
    text.append(slice(end, entity.start),
      make("mark", {class: `entity colour-${colour}`}, entity.text,
        make("small", {}, `\u00a0${entity.type}`)));
    end = entity.end;
  }
  text.append(slice(end));
  const rows = words.map(({word, tag, probability}) => [word, tag, percent(probability)]);
  const every = folded("Every word", table(["word", "tag", "probability"], rows));
  every.open = !entities.length;
  const count = entities.length === 1 ? "1 entity" : `${entities.length || "No"} entities`;
  return [make("p", {class: "outcome"}, count), text, every, usage(answer)];
}

/** The context with the answer in it. */
export function showAnswer(answer, {values}) {
  const [found] = answer.predictions;
  const none = found.start === null;
  const slice = slicer(values.context);
  const text = make("p", {class: "text scroll", tabindex: 0, role: "group",
    "aria-label": "context"});
  if (none) text.append(values.context);
  else {
    text.append(slice(0, found.start),
      make("mark", {class: "answer"}, slice(found.start, found.end)), slice(found.end));
    requestAnimationFrame(() => { // a long context: the answer into the middle of its box
      const mark = text.querySelector("mark");
      text.scrollTop = mark.offsetTop - text.clientHeight / 2;
    });
  }
  const rows = [
    {name: none ? "any answer" : "this answer", best: !none,
      share: none ? 1 - found.probability : found.probability},
    {name: "no answer in the context", share: found.no_answer_probability, best: none},
  ];
  const outcome = none ? "No answer in the context" : found.answer;
  return [quoted(values.question), make("p", {class: "outcome"}, outcome), bars(rows), text,
    usage(answer)];
}

/** Guesses at each mask; a click puts one in, another click takes it out again. */
export function showMasks(answer, {values, field}) {
  const parts = values.text.split(MASK);
  const [masks] = answer.predictions;
  const chosen = masks.map(() => null);
  const sentence = make("p", {class: "text", "aria-live": "polite"});
  const note = make("p", {class: "quiet"});
  const buttons = masks.map((guesses, mask) =>
    guesses.map(({piece}) => make("button", {type: "button", click: () => put(mask, piece)},
      piece)));
  let written = values.text;

  function put(mask, piece) {
    chosen[mask] = chosen[mask] === piece ? null : piece;
    const area = field("text");
    const untouched = area?.value === written;
    written = fill();
    if (untouched) area.value = written;
    note.textContent = untouched || !area ? "" :
      "The text of the form has changed since; it is left as it is.";
    draw();
  }

  function fill() {
    return parts.slice(1).reduce((text, part, mask) => {
      const [before, piece] = joined(text, chosen[mask] ?? MASK);
      return before + piece + part;
    }, parts[0]);
  }

  function draw() {
    let before = parts[0];
    sentence.replaceChildren();
    parts.slice(1).forEach((part, mask) => {
      const [text, piece] = joined(before, chosen[mask] ?? MASK);
      sentence.append(text, make("mark", {class: chosen[mask] ? "answer" : "open"}, piece));
      before = part;
    });
    sentence.append(before);
    buttons.forEach((own, mask) => own.forEach((button) =>
      button.setAttribute("aria-pressed", button.textContent === chosen[mask])));
  }

  draw();
  const lists = masks.map((guesses, mask) => make("section", {},
    make("h3", {}, masks.length > 1 ? `Mask ${mask + 1}` : "Guesses"),
    bars(guesses.map(({probability}, i) => ({name: buttons[mask][i], share: probability})))));
  return [sentence, note, ...lists, usage(answer)];
}

/** A piece that goes on with a word stands right behind it. */
function joined(before, piece) {
  return piece.startsWith("##") ? [before.trimEnd(), piece.slice(2)] : [before, piece];
}

/** Whether a text follows. */
export function showFollows(answer, {values}) {
  const {probability} = answer.predictions[0];
  const follows = probability >= 0.5;
  return [
    quoted(values.text, values.following),
    make("p", {class: "outcome"}, follows ? "It follows" : "It does not follow"),
    bars([{name: "follows", share: probability, best: follows},
      {name: "does not follow", share: 1 - probability, best: !follows}]),
    usage(answer),
  ];
}

/** The sequence, and a table of it. */
export function showPieces(answer, {values}) {
  const slices = [slicer(values.text), slicer(values.pair ?? "")];
  const {pieces} = answer;
  const chips = pieces.map(({piece, id, segment, part}) => {
    const kind = part === null ? "chip special" : "chip";
    return make("li", {class: `${kind} segment-${segment}`}, piece, make("small", {}, String(id)));
  });
  const rows = pieces.map(({piece, id, segment, start, end, part}, position) =>
    [position, piece, id, segment, part === null ? "" : `${start}-${end}`,
      part === null ? "" : slices[part](start, end)]);
  const segments = pieces.some(({segment}) => segment);
  return [
    make("p", {class: "outcome"}, `${pieces.length} pieces`),
    make("ol", {class: "chips"}, ...chips),
    make("p", {class: "quiet"}, "Under each piece is its id in the vocabulary." +
      (segments ? " A coloured line below it: segment 1; none: segment 0." : "")),
    folded("As a table",
      table(["position", "piece", "id", "segment", "characters", "text"], rows)),
  ];
}
