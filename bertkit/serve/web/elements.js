// Elements of the page. Text is added as text nodes only, so no text can become an element.

/**
 * @param {string} tag
 * @param {Object<string, string|number|boolean|Function>} [attributes] a function becomes the
 *   listener for the event of that name; true adds an attribute without a value, false adds none.
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

/** @param {number} share a number from 0 to 1. */
export const percent = (share) => `${(100 * share).toFixed(1)} %`;

/**
 * Make a list of names with bars.
 * @param {{name: string|Node, share: number, shown?: string, best?: boolean}[]} rows `share`
 *   from 0 to 1 is the bar's length; `shown`, if given, is displayed instead of the percentage.
 * @param {number} [most] the number of rows shown at first; the rest can be unfolded.
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

/** A section that the user can unfold. */
export const folded = (title, ...body) =>
  make("details", {}, make("summary", {}, title), ...body);

/**
 * @param {string[]} names the names of the columns.
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

/** The texts of the request, displayed above the results. */
export const quoted = (...texts) =>
  make("p", {class: "asked"}, ...texts.map((text) => make("q", {}, text)));
