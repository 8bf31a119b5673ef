// The views of a model: for each route its fields, its request, and the function for its results.

import {showMaps} from "./attention.js";
import {make} from "./elements.js";
import {showNearest} from "./nearest.js";
import {
  showAnswer, showChoice, showFollows, showLabels, showMasks, showTokens, showTags, showValue,
} from "./results.js";
import {linesOf, MASK} from "./texts.js";

const MOST_LINES = 2047; // with the query, this is the limit on inputs of a request

/**
 * @typedef {object} Field
 * @property {string} name
 * @property {string} label
 * @property {number} [rows] the height of the text area in lines.
 * @property {boolean} [optional]
 * @property {boolean} [masks] whether a button below it inserts a mask.
 *
 * @typedef {object} View
 * @property {string} name the name on the page.
 * @property {string} about
 * @property {string} verb the label of the button.
 * @property {Field[]} fields
 * @property {Object<string, string>} example field -> text.
 * @property {(values: Object<string, string>) => object} body makes the request's body, without the
 *   model; throws an Error that says what is wrong with the values.
 * @property {(values: Object<string, string>) => string[]} texts returns one or two
 *   texts for the token and attention views.
 * @property {(answer: any, asked: Asked) => Node[]|Promise<Node[]>} show
 *
 * @typedef {object} Asked the request, as far as results need it.
 * @property {Object<string, string>} values the values of the fields.
 * @property {object} model the model's entry in /v1/models.
 * @property {(name: string) => HTMLTextAreaElement|undefined} field returns a field of the
 *   form, if the form that sent the request is still open.
 */

const TEXT = {name: "text", label: "Text", rows: 5};
const PAIR = {name: "pair", label: "Second text, for text-pair models", rows: 3, optional: true};
const REVIEW = "The plot is thin, but the two leads are a joy to watch.";

const textAndPair = ({text, pair}) => ({text, ...(pair.trim() ? {pair} : {})});
const textOrPair = ({text, pair}) => one(pair.trim() ? [text, pair] : text);
const one = (input) => ({inputs: [input]});
const bothTexts = ({text, pair}) => (pair?.trim() ? [text, pair] : [text]);

/** The view of labels. @type {View} */
const LABELS = {
  name: "Classify", verb: "Classify", about: "", fields: [TEXT, PAIR],
  example: {text: REVIEW, pair: ""}, body: textOrPair, texts: bothTexts, show: showLabels,
};

/** The view of a route that has none: the response as JSON. @type {View} */
const PLAIN = {
  name: "Predict", verb: "Predict", about: "The prediction for an input, as JSON.",
  fields: [{...TEXT, label: "Text, or an input as JSON"}], example: {text: REVIEW},
  body: ({text}) => one(/^\s*[[{]/.test(text) ? JSON.parse(text) : text),
  texts: ({text}) => [text],
  show: ({predictions}) => [make("pre", {}, JSON.stringify(predictions[0], null, 2))],
};

/** @returns {View} the view of a route. */
export const viewOf = (route) => VIEWS[route] ?? PLAIN;

/** Route -> its view, in the order of the page. @type {Object<string, View>} */
export const VIEWS = {
  classification: {...LABELS, about: "The probability of every label for a text or a pair."},
  "multi-label-classification": {...LABELS, about: "The labels of a text or a pair of texts."},
  regression: {
    name: "Score", verb: "Score",
    about: "A number for a text or a pair of texts.",
    fields: [TEXT, PAIR],
    example: {text: "A man is playing a guitar.", pair: "Somebody makes music on a guitar."},
    body: textOrPair, texts: bothTexts, show: showValue,
  },
  "multiple-choice": {
    name: "Choose", verb: "Choose",
    about: "The most probable of several choices.",
    fields: [TEXT, {name: "choices", label: "Choices, one per line", rows: 4}],
    example: {
      text: "Which of these is the best conductor of electricity?",
      choices: "a copper wire\na wooden spoon\na rubber band\na glass of pure water",
    },
    body: ({text, choices}) => one([text, linesOf(choices)]),
    texts: ({text, choices}) => [text, ...linesOf(choices).slice(0, 1)], show: showChoice,
  },
  "token-classification": {
    name: "Tag", verb: "Tag",
    about: "A tag for every word, and the entities that the tags form.",
    fields: [{...TEXT, rows: 6}],
    example: {text: "Ada Lovelace met Charles Babbage in London in June 1833. Their letters are " +
      "kept at the Bodleian Library of the University of Oxford."},
    body: ({text}) => one(text), texts: ({text}) => [text], show: showTags,
  },
  "question-answering": {
    name: "Answer", verb: "Answer",
    about: "The answer to a question, found in a context of any length.",
    fields: [{name: "question", label: "Question", rows: 2},
      {name: "context", label: "Context", rows: 9}],
    example: {
      question: "What does the lighthouse burn?",
      context: "The lighthouse on the northern cape was built in 1869 by two brothers from the " +
        "village. For sixty years its lamp burned whale oil, and since 1931 it has burned " +
        "paraffin. The keeper rows across the bay once a month to fetch letters and fresh bread.",
    },
    body: ({question, context}) => one([question, context]),
    texts: ({question, context}) => [question, context], show: showAnswer,
  },
  "fill-mask": {
    name: "Fill masks", verb: "Fill",
    about: `The most probable tokens for each ${MASK}. Choose one to insert it.`,
    fields: [{...TEXT, masks: true}],
    example: {text: `She opened the ${MASK} and looked out at the ${MASK}.`},
    body: ({text}) => {
      if (!text.includes(MASK)) throw new Error(`Text: insert at least one ${MASK}.`);
      return one({text, top: 8});
    },
    texts: ({text}) => [text], show: showMasks,
  },
  "next-sentence": {
    name: "Next sentence", verb: "Compare",
    about: "Whether the second text follows the first in one document.",
    fields: [{...TEXT, rows: 3}, {name: "following", label: "Does this follow?", rows: 3}],
    example: {text: "He opened the door of the old mill.", following: "It was dark inside."},
    body: ({text, following}) => one({text, following}),
    texts: ({text, following}) => [text, following], show: showFollows,
  },
  embeddings: {
    name: "Nearest", verb: "Search",
    about: "The lines that are nearest in meaning to a text, by cosine similarity.",
    fields: [{name: "query", label: "Search for", rows: 2},
      {name: "lines", label: "In these lines", rows: 9}],
    example: {
      query: "How do I get my money back?",
      lines: "Refunds are paid within five days.\nThe shop opens at nine.\nOur parcels leave the " +
        "store every evening.\nSend the goods back and we return what you paid.\nParking is free " +
        "behind the house.\nYou can pay by card or by transfer.",
    },
    body: ({query, lines}) => {
      const texts = linesOf(lines);
      if (texts.length > MOST_LINES) {
        throw new Error(
          `In these lines: ${texts.length} lines are too many; the limit is ${MOST_LINES}.`);
      }
      return {input: [query, ...texts], encoding_format: "base64"};
    },
    texts: ({query}) => [query],
    show: (answer, {values}) => showNearest(answer, linesOf(values.lines), values.query),
  },
  tokens: {
    name: "Tokens", verb: "Tokenize",
    about: "The WordPiece sequence that the model reads.",
    fields: [TEXT, {...PAIR, label: "Second text"}],
    example: {text: "Unbelievably, the antidisestablishmentarians agreed.", pair: "Nobody knew."},
    body: textAndPair, texts: bothTexts, show: showTokens,
  },
  "attention-maps": {
    name: "Attention", verb: "Show",
    about: "How much each token attends to every other, for every head of every layer.",
    fields: [TEXT, {...PAIR, label: "Second text"}],
    example: {text: "The cat sat on the mat because it was tired.", pair: ""},
    body: textAndPair, texts: bothTexts, show: showMaps,
  },
};
