// The results of each route as elements. Every function takes the response and the request.

import {bars, folded, make, percent, quoted, table} from "./elements.js";
import {linesOf, MASK, slicer} from "./texts.js";

const COLOURS = 6;

/** @returns {Node} a line with the number of tokens, windows, and what was cut. */
function usage({usage: used}) {
  const parts = [`${used.tokens} tokens`];
  if (used.windowed) parts.push("read in several windows");
  for (const what of Object.keys(used.cut)) parts.push(what);
  return make("p", {class: "quiet"}, parts.join(", "));
}

const sorted = (probabilities) => Object.entries(probabilities).sort((a, b) => b[1] - a[1]);

/** One label, or any number of labels of a multi-label model, with all probabilities. */
export function showLabels(answer, {values}) {
  const [found] = answer.predictions;
  const chosen = found.labels ?? [found.label];
  const rows = sorted(found.probabilities)
    .map(([name, share]) => ({name, share, best: chosen.includes(name)}));
  const heading = chosen.length ? chosen.join(", ") : "no label above 50 %";
  return [
    quoted(values.text, ...(values.pair.trim() ? [values.pair] : [])),
    make("p", {class: "outcome"}, heading), bars(rows), usage(answer),
  ];
}

/** The predicted number. */
export function showValue(answer, {values}) {
  const {value} = answer.predictions[0];
  return [
    quoted(values.text, ...(values.pair.trim() ? [values.pair] : [])),
    make("p", {class: "outcome"}, value.toFixed(3)), usage(answer),
  ];
}

/** The choices in the order of the request, with their probabilities. */
export function showChoice(answer, {values}) {
  const [found] = answer.predictions;
  const rows = linesOf(values.choices).map((name, i) =>
    ({name, share: found.probabilities[i], best: i === found.choice}));
  return [
    quoted(values.text), make("p", {class: "outcome"}, found.text), bars(rows, rows.length),
    usage(answer),
  ];
}

/** The text with its entities marked, and a table of all words. */
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
  const every = folded("All words", table(["word", "tag", "probability"], rows));
  every.open = !entities.length;
  const count = entities.length === 1 ? "1 entity" : `${entities.length || "No"} entities`;
  return [make("p", {class: "outcome"}, count), text, every, usage(answer)];
}

/** The context with the answer marked. */
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
    requestAnimationFrame(() => { // scroll a long context so that the answer is in the middle
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

/** The candidates for each mask; a click inserts one, a second click removes it. */
export function showMasks(answer, {values, field}) {
  const parts = values.text.split(MASK);
  const [masks] = answer.predictions;
  const chosen = masks.map(() => null);
  const sentence = make("p", {class: "text", "aria-live": "polite"});
  const note = make("p", {class: "quiet"});
  const buttons = masks.map((candidates, mask) =>
    candidates.map(({token}) => make("button", {type: "button", click: () => put(mask, token)},
      token)));
  let written = values.text;

  function put(mask, token) {
    chosen[mask] = chosen[mask] === token ? null : token;
    const area = field("text");
    const untouched = area?.value === written;
    written = fill();
    if (untouched) {
      area.value = written;
      area.dispatchEvent(new Event("input")); // the page stores what a form holds
    }
    note.textContent = untouched || !area ? "" :
      "The text in the form has changed since, so it is left as it is.";
    draw();
  }

  function fill() {
    return parts.slice(1).reduce((text, part, mask) => {
      const [before, token] = joined(text, chosen[mask] ?? MASK);
      return before + token + part;
    }, parts[0]);
  }

  function draw() {
    let before = parts[0];
    sentence.replaceChildren();
    parts.slice(1).forEach((part, mask) => {
      const [text, token] = joined(before, chosen[mask] ?? MASK);
      sentence.append(text, make("mark", {class: chosen[mask] ? "answer" : "open"}, token));
      before = part;
    });
    sentence.append(before);
    buttons.forEach((own, mask) => own.forEach((button) =>
      button.setAttribute("aria-pressed", button.textContent === chosen[mask])));
  }

  draw();
  const lists = masks.map((candidates, mask) => make("section", {},
    make("h3", {}, masks.length > 1 ? `Mask ${mask + 1}` : "Candidates"),
    bars(candidates.map(({probability}, i) => ({name: buttons[mask][i], share: probability})))));
  return [sentence, note, ...lists, usage(answer)];
}

/** Join a token that continues a word to the text before it, without a space. */
function joined(before, token) {
  return token.startsWith("##") ? [before.trimEnd(), token.slice(2)] : [before, token];
}

/** Whether the second text follows the first, with the probability. */
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

/** The token sequence, and a table of its tokens. */
export function showTokens(answer, {values}) {
  const slices = [slicer(values.text), slicer(values.pair ?? "")];
  const {tokens} = answer;
  const chips = tokens.map(({token, id, segment, part}) => {
    const kind = part === null ? "chip special" : "chip";
    return make("li", {class: `${kind} segment-${segment}`}, token, make("small", {}, String(id)));
  });
  const rows = tokens.map(({token, id, segment, start, end, part}, position) =>
    [position, token, id, segment, part === null ? "" : `${start}-${end}`,
      part === null ? "" : slices[part](start, end)]);
  const segments = tokens.some(({segment}) => segment);
  return [
    make("p", {class: "outcome"}, `${tokens.length} tokens`),
    make("ol", {class: "chips"}, ...chips),
    make("p", {class: "quiet"}, "The number under each token is its id in the vocabulary." +
      (segments ? " Tokens with a coloured line are in segment 1, the others in 0." : "")),
    folded("As a table",
      table(["position", "token", "id", "segment", "characters", "text"], rows)),
  ];
}
