// The page of `bertkit serve`: choose a model and a view, send a request, and see the results.
// views.js defines the views; results.js, attention.js and nearest.js show the results.

import {make} from "./elements.js";
import {Refusal, request, useToken} from "./server.js";
import {MASK} from "./texts.js";
import {VIEWS, viewOf} from "./views.js";

const element = (id) => document.getElementById(id);
const [ask, results, problem, views, fields] =
  ["ask", "results", "error", "views", "fields"].map(element);

const state = {
  /** Name -> the model's entry in /v1/models. */
  models: new Map(),
  model: null,
  /** The route of the current view. */
  route: "",
  /** Route -> field -> the text that was typed; kept while another view is open. */
  values: {},
  /** The task whose texts the token and attention views start with. */
  lastTask: "",
  busy: false,
  /** "model route" -> the element with its last results. */
  found: new Map(),
};
const INSIDE = ["tokens", "attention-maps"];

function say(message) {
  problem.textContent = message;
  problem.hidden = !message;
}

/** Run an action that may fail; after an error, the displayed results stay. */
async function trying(action) {
  try {
    await action();
    say("");
  } catch (error) {
    say(error.message);
    if (!(error instanceof Refusal)) return;
    if (error.status === 401) {
      element("token").hidden = false;
      element("token-field").focus();
    }
  }
}

async function start() {
  const {data} = await request("v1/models");
  element("token").hidden = true;
  state.models = new Map(data.map((card) => [card.id, card]));
  const select = element("model");
  select.replaceChildren(...data.map(({id}) => make("option", {value: id}, id)));
  select.disabled = false;
  const wanted = new URLSearchParams(location.hash.slice(1));
  select.value = state.models.has(wanted.get("model")) ? wanted.get("model") : data[0].id;
  ask.hidden = false;
  chooseModel(select.value, wanted.get("do"));
}

/** Show a model's views, and open the previous view if the model has it. */
function chooseModel(name, route = state.route) {
  state.model = state.models.get(name);
  const {task_type: taskType, layers, heads, precision, max_length: length, routes} = state.model;
  element("card").textContent = `${taskType}, ${layers} layers of ${heads} heads, ${precision}, ` +
    `windows of ${length} tokens`;
  const known = Object.keys(VIEWS).filter((one) => routes.includes(one));
  const able = [...routes.filter((one) => !VIEWS[one]), ...known];
  const chosen = able.includes(route) ? route : able[0];
  const legend = views.querySelector("legend");
  views.replaceChildren(legend, ...able.map((one) => make("label", {},
    make("input", {type: "radio", name: "view", value: one, checked: one === chosen,
      change: () => chooseView(one)}),
    make("span", {}, viewOf(one).name))));
  chooseView(chosen);
}

function chooseView(route) {
  const view = viewOf(route);
  state.route = route;
  const values = state.values[route] ??= {};
  if (INSIDE.includes(route)) bringTexts(values);
  else state.lastTask = route;
  element("about").textContent = view.about;
  element("go").textContent = view.verb;
  fields.replaceChildren(...view.fields.map((field) => fieldOf(field, values)));
  showFound();
  const address = new URLSearchParams({model: state.model.id, do: route});
  history.replaceState(null, "", `#${address}`);
}

/** Copy the texts of the last task, unless other texts were typed here. */
function bringTexts(values) {
  const task = state.values[state.lastTask];
  const {text: before = "", pair: beforePair = ""} = values.brought ?? {};
  if (!task || (values.text ?? "") !== before || (values.pair ?? "") !== beforePair) return;
  const [text = "", pair = ""] = viewOf(state.lastTask).texts(task);
  Object.assign(values, {text, pair, brought: {text, pair}});
}

/** Make a text area with its label. @param {import("./views.js").Field} field */
function fieldOf({name, label, rows, optional, masks}, values) {
  const id = `field-${name}`;
  const area = make("textarea", {id, name, rows, "aria-required": String(!optional),
    input: () => { values[name] = area.value; }});
  area.value = values[name] ??= "";
  const tag = make("label", {for: id}, label);
  const whole = make("div", {class: "field"}, tag, area);
  if (optional) tag.append(make("span", {class: "quiet"}, " (optional)"));
  if (masks) whole.append(make("button", {type: "button", click: () => {
    area.setRangeText(MASK, area.selectionStart, area.selectionEnd, "end");
    values[name] = area.value;
    area.focus();
  }}, `Insert ${MASK}`));
  return whole;
}

const key = () => `${state.model.id} ${state.route}`;

function showFound() {
  const found = state.found.get(key());
  results.hidden = !found;
  if (results.firstElementChild !== found) results.replaceChildren(...(found ? [found] : []));
}

/** @param {boolean} on @param {string} message a message for screen readers. */
function busy(on, message) {
  state.busy = on;
  element("status").textContent = message;
  results.setAttribute("aria-busy", on);
  const button = element("go");
  button.setAttribute("aria-disabled", on); // not `disabled`, so that it keeps the focus
  button.textContent = on ? "Working …" : viewOf(state.route).verb;
  document.body.classList.toggle("busy", on);
}

async function submit() {
  if (state.busy) return;
  const {model, route} = state, view = viewOf(route), place = key();
  const values = readFields(view);
  let done = "";
  busy(true, "Working");
  try {
    for (const {name, label, optional} of view.fields) {
      if (optional || values[name].trim()) continue;
      element(`field-${name}`).focus();
      throw new Error(`${label}: write something first.`);
    }
    const answer = await request(`v1/${route}`, {model: model.id, ...view.body(values)});
    const here = () => state.model === model && state.route === route;
    const field = (name) => (here() ? element(`field-${name}`) : undefined);
    const shown = await view.show(answer, {values, model, field});
    state.found.set(place, make("div", {}, ...shown));
    showFound();
    results.scrollIntoView({block: "nearest"}); // on a phone the results are below the form
    done = `Done. ${results.querySelector(".outcome")?.textContent ?? ""}`;
  } finally {
    busy(false, done);
  }
}

/** Store the form's current texts, and return a copy. */
function readFields(view) {
  const values = state.values[state.route];
  for (const {name} of view.fields) values[name] = element(`field-${name}`).value;
  return {...values};
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  trying(submit);
});
ask.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  trying(submit);
});
element("example").addEventListener("click", () => {
  const {example} = viewOf(state.route);
  for (const [name, text] of Object.entries(example)) element(`field-${name}`).value = text;
  readFields(viewOf(state.route));
  element(`field-${Object.keys(example)[0]}`).focus();
});
element("model").addEventListener("change", (event) => chooseModel(event.target.value));
element("token").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(element("token-field").value.trim());
  element("token-field").value = "";
  trying(start);
});
trying(start);
