// Elements of the page. Text goes in as text nodes only, so nothing in it can become an element.

/**
 * @param {string} tag
 * @param {Object<string, string|number|boolean|Function>} [attributes] a function listens to the
 *   event of that name; true stands without a value, false is left out.
 * @param {...(Node|string)} children
 * @returns {HTMLElement}
 */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** @param {number} share between 0 and 1. */
export const percent = (share) => `${(100 * share).toFixed(1)} %`;

/**
 * A list of names with bars.
 * @param {{name: string|Node, share: number, shown?: string, best?: boolean}[]} rows `share`
 *   between 0 and 1 is the bar's length, `shown` stands beside it instead of percents.
 * @param {number} [most] rows that are shown at once; the rest can be unfolded.
 * @returns {Node}
 */
export function bars(rows, most = 12) {
  const list = (some) => make("ul", {class: "bars"}, ...some.map(bar));
  const rest = rows.slice(most);
  const whole = make("div", {}, list(rows.slice(0, most)));
  if (rest.length) whole.append(folded(`${rest.length} more`, list(rest)));
  return whole;
}

function bar({name, share, shown, best}) {
  const fill = make("span", {class: "fill"});
  fill.style.setProperty("--share", `${100 * Math.min(1, Math.max(0, share))}%`);
  return make("li", best ? {class: "best"} : {},
    make("span", {class: "name"}, name),
    make("span", {class: "track", "aria-hidden": "true"}, fill),
    make("span", {class: "number"}, shown ?? percent(share)));
}

/** Something that is shown when the reader asks for it. */
export const folded = (title, ...body) =>
  make("details", {}, make("summary", {}, title), ...body);

/**
 * @param {string[]} names of the columns.
 * @param {(string|number)[][]} rows
 * @returns {Node}
 */
export function table(names, rows) {
  const head = make("tr", {}, ...names.map((name) => make("th", {scope: "col"}, name)));
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((value) => make("td", {}, String(value)))));
  const whole = make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  return make("div", {class: "wide", tabindex: 0, role: "group", "aria-label": "table"}, whole);
}

/** Which texts were asked about, above what was found. */
export const quoted = (...texts) =>
  make("p", {class: "asked"}, ...texts.map((text) => make("q", {}, text)));
