"use strict";
/* Panels of curves: those of the board, and those of a report.
 *
 * The page that uses them fills `page`: its unit of losses, the runs that match its filter, and the functions that are
 * called for a new window or a panel that comes into sight (`load`, with a delay in milliseconds) and for a click on a point.
 * Text of runs goes into the page as text nodes alone, never as HTML. */

const $ = id => document.getElementById(id);
const SETTLE = 25, PATIENCE = 120; // milliseconds
const HELD = "held-out/";
const page = { unit: "nats per token", tap: "", matches: () => true, load: () => {}, click: () => {}, asked: () => 0, answered: () => true };

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "style") for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}
/* Draw a part of the page anew. The focus goes on at its place: a reader without a mouse stays where they are. */
function anew(part, draw) {
  const places = () => [...part.querySelectorAll("button, input, select, a")], place = places().indexOf(document.activeElement);
  draw();
  if (place >= 0) places()[place]?.focus({ preventScroll: true });
}
const whole = number => Number(number).toLocaleString("en");

/* State */
const state = {
  runs: [], palette: [], hidden: new Set(), quiet: new Set(), unfolded: new Set(),
  axis: "step", low: null, high: null, smooth: 0, logX: false, logY: false, full: false,
};
const AXES = { step: "steps", tokens: "tokens", hours: "hours" };
const shown = () => state.runs.filter(run => !state.hidden.has(run.id) && page.matches(run) && run.entries);
const runOf = id => state.runs.find(run => run.id === id);
/* A run of the board has a number of its own: its colour stays when another run appears. */
const colourOf = run => state.palette[(run.number ?? state.runs.indexOf(run)) % state.palette.length];

/* Panels of curves, from the table of metrics (trainer/loop/metrics.py) */
const LOSS = "loss"; // its unit is the page's
const SPEED = "speed/", ROWS = "rows/", RATE = "tokens_per_second"; // the speed of a source follows from its rows
const FORMATS = { percent, bytes: number => bytes(number, 4) };
const noScale = run => run.noise_steps ? `Measured in ${whole(run.noise_steps)} step${run.noise_steps > 1 ? "s" : ""}: the averages of |G|² and tr(Σ) are not both above 0 yet.` : null;
const WHY = { noise_scale: noScale }; // says why a run has no such curve
let metrics = new Map(), panels = [];
/* Take the table: metrics of one title share a panel, and wide panels come first. A name with a slash at its end stands for
 * the curves of all sources or layers. */
function takeMetrics(table) {
  metrics = new Map(table.map(metric => [metric.name, metric]));
  const byTitle = new Map();
  for (const metric of table.filter(metric => metric.title)) {
    const panel = byTitle.get(metric.title) || { ...metric, format: FORMATS[metric.format], why: WHY[metric.name], own: [] };
    if (metric.name.endsWith("/")) panel.prefix = metric.name;
    else panel.own.push(metric.name);
    byTitle.set(metric.title, panel);
  }
  panels = [...byTitle.values()].sort((a, b) => Boolean(b.wide) - Boolean(a.wide));
}
/* Return the line of the table for a curve. */
const metricOf = name => metrics.get(name) || [...metrics.values()].find(metric => metric.name.endsWith("/") && name.startsWith(metric.name));

const byNumber = (a, b) => a.localeCompare(b, "en", { numeric: true }); // blocks.2 before blocks.10
const sourcesOf = runs => [...new Set(runs.flatMap(run => run.sources))]; // in the order of the mixture, which gives their colours
/* Return names without a prefix in order: sources as in the mixture, then the others. */
function inOrder(names, prefix, runs) {
  const sources = sourcesOf(runs), place = name => (sources.indexOf(name.slice(prefix.length)) + 1) || Infinity;
  return names.filter(name => name.startsWith(prefix)).sort((a, b) => place(a) === place(b) ? byNumber(a, b) : place(a) - place(b));
}

function curveNames(runs) {
  const names = new Set();
  for (const run of runs) { run.series.forEach(name => names.add(name)); run.held_out.forEach(name => names.add(HELD + name)); }
  if (names.has(RATE)) for (const name of [...names]) if (name.startsWith(ROWS)) names.add(SPEED + name.slice(ROWS.length));
  return [...names];
}
/* Return the curves that a panel asks for. */
const asked = panel => panel.curves.some(name => name.startsWith(SPEED)) ? [RATE, ...new Set(shown().flatMap(run => run.series.filter(name => name.startsWith(ROWS))))] : panel.curves;
/* Return a curve's means, least and greatest values; none if the run lacks it. */
function valuesOf(curves, name) {
  const rows = curves[ROWS + name.slice(SPEED.length)];
  if (!name.startsWith(SPEED) || !rows || !curves[RATE]) return curves[name];
  const all = Object.keys(curves).filter(other => other.startsWith(ROWS)), rate = curves[RATE][0];
  const part = i => (rows[0][i] || 0) / all.reduce((sum, other) => sum + (curves[other][0][i] || 0), 0);
  const speed = rate.map((each, i) => each * part(i));
  return [speed, speed, speed];
}
/* Return the panels that these runs have curves for. Of several runs, each source and layer has one, folded under its title. */
function panelsOf(runs) {
  const names = curveNames(runs), used = new Set(), found = [];
  for (const panel of panels) {
    const own = panel.own.filter(name => names.includes(name));
    const parts = panel.prefix ? inOrder(names, panel.prefix, runs) : [];
    [...own, ...parts].forEach(name => used.add(name));
    const empty = !own.length && panel.why && runs.some(panel.why);
    if (empty) found.push({ ...panel, curves: [], key: panel.title });
    if (runs.length > 1) {
      if (own.length) found.push({ ...panel, curves: own, key: panel.title });
      for (const name of parts.length > 1 ? parts : [])
        found.push({ ...panel, wide: false, fold: panel.title, title: panel.title.replace(/ by (source|layer)$/, ""), of: name.slice(panel.prefix.length), curves: [name], key: name });
    } else if (own.length + parts.length && (own.length || parts.length > 1))
      found.push({ ...panel, curves: [...own, ...(parts.length > 1 ? parts : [])], key: panel.title });
  }
  for (const name of names)
    if (!used.has(name) && !metricOf(name)) found.push({ title: name.replace(/_/g, " "), curves: [name], key: name });
  return found;
}
const SIGNS = { resume: "restart", skipped: "skipped step", outlier: "outlier step" };
const labelOf = (name, panel) => panel.prefix && name.startsWith(panel.prefix) ? name.slice(panel.prefix.length) : metricOf(name)?.label || name;

const GAP = 10; // usual distances between values

/* Return a curve as a line goes through it. A step without rows of a source has no loss of it, and most signals are not
 * measured in each step: the line goes on to the next value, unless that is much further than usual (a phase without the
 * source): the ends of such a gap stay. */
function joined(name, curve) {
  if (metrics.get(name)?.each_step) return curve; // a missing value is one that is not finite
  const places = [...curve.mean.keys()].filter(i => curve.mean[i] === curve.mean[i]);
  if (places.length === curve.mean.length) return curve;
  const distances = Float64Array.from(places.slice(1), (place, i) => place - places[i]);
  const usual = Float64Array.from(distances).sort()[distances.length >> 1];
  const kept = places.flatMap((place, i) => distances[i] > GAP * usual ? [place, place + 1, places[i + 1] - 1] : [place]);
  return Object.fromEntries(Object.entries(curve).map(([part, values]) => [part, kept.map(i => values[i])]));
}

class Card {
  constructor(panel) {
    this.panel = panel;
    this.plot = new Plot({ label: panel.title, format: panel.format, zero: panel.zero, height: panel.wide ? 290 : 190, act: { zoom, hover, click: (...at) => page.click(...at, this) } });
    this.legend = el("div", { class: "legend" });
    this.element = el("section", { class: panel.wide ? "card wide" : "card", "data-panel": panel.key },
      el("div", { class: "head" }, el("h2", {}, panel.title, panel.of ? " · " + panel.of : "", panel.unit ? el("small", {}, panel.unit === LOSS ? page.unit : panel.unit) : null), this.legend),
      panel.curves.length ? this.plot.element : null, this.reasons = el("div"));
    this.seen = false; this.data = [];
    this.explain();
  }
  /* Say why runs have no curve in this panel. */
  explain() {
    if (!this.panel.why) return;
    const runs = shown(), lines = runs.map(run => [run, this.panel.why(run)]).filter(([, why]) => why);
    this.reasons.replaceChildren(...lines.map(([run, why]) => el("p", { class: "note" }, runs.length > 1 ? `${run.name}: ${why}` : why)));
  }
  width() { return Math.max(150, Math.round((this.plot.canvas.clientWidth - 70) / (shown().length > 2 ? 2.5 : 1.5))); }
  colour(run, name, count) {
    if (count > 1 || this.panel.curves.length === 1) return colourOf(run);
    if (name === HELD + "loss") return getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
    const parts = this.panel.prefix ? this.panel.curves.filter(other => other.startsWith(this.panel.prefix)) : this.panel.curves;
    const sources = sourcesOf([run]), source = this.panel.prefix ? sources.indexOf(name.slice(this.panel.prefix.length)) : -1;
    if (source >= 0 && sources.length <= state.palette.length) return state.palette[source];
    const place = parts.indexOf(name);
    if (parts.length > state.palette.length) return `hsl(${Math.round(225 - 225 * place / (parts.length - 1))} 62% 52%)`; // from the first layer to the last
    return state.palette[place % state.palette.length];
  }
  show(answer) { this.data = answer; this.draw(); }
  draw() {
    const runs = shown(), curves = [], key = name => `${this.panel.key} ${name}`;
    if (!runs.length) return; // the last run was switched off while the answer was on its way
    for (const part of this.data) {
      const run = runs.find(each => each.id === part.run);
      if (!run) continue;
      for (const name of this.panel.curves) {
        const values = valuesOf(part.curves, name);
        if (!values || state.quiet.has(key(name))) continue;
        const label = runs.length > 1 ? run.name + (this.panel.curves.length > 1 ? ` ${labelOf(name, this.panel)}` : "") : labelOf(name, this.panel);
        curves.push({ run, name, label, colour: this.colour(run, name, runs.length), strong: name === "loss" || name === HELD + "loss",
          ...joined(name, { x: part.x, first: part.first, last: part.last, mean: values[0], low: values[1], high: values[2] }) });
      }
    }
    const begins = runs.map(run => run.range[state.axis][0]), ends = runs.map(run => run.range[state.axis][1]);
    const view = { ...state, begin: Math.min(...begins), end: Math.max(...ends), least: state.axis === "step" ? 1 : 0 };
    this.plot.show(curves, view, this.marks(runs), this.phases(runs, view.end));
    this.keys(runs, key);
  }
  marks(runs) {
    const own = runs.flatMap(run => [...run.marks, ...(this.panel.key === "Loss" && runs.length === 1 && run.outliers || [])]);
    return own.map(mark => ({ kind: mark.kind, y: mark.y, x: mark[state.axis] })).filter(mark => mark.x !== null);
  }
  phases(runs, end) {
    const phasesByRun = runs.map(run => JSON.stringify(run.phases.map(phase => [phase.name, phase[state.axis]])));
    if (!runs.length || phasesByRun.some(phases => phases !== phasesByRun[0])) return [];
    const begun = runs[0].phases.filter(phase => phase[state.axis] !== null);
    return begun.map((phase, i) => ({ name: phase.name, from: i ? phase[state.axis] : -Infinity, to: begun[i + 1]?.[state.axis] ?? end }));
  }
  keys(runs, key) {
    const several = this.panel.curves.length > 1, kinds = new Set(this.plot.marks.map(mark => mark.kind));
    const signs = this.panel.key !== "Loss" ? [] : Object.entries(SIGNS).filter(([kind]) => kinds.has(kind)).map(([kind, name]) => el("span", { class: `sign ${kind}` }, name));
    anew(this.legend, () => this.legend.replaceChildren(...signs, ...(several ? this.panel.curves : []).map(name => el("button", {
      class: state.quiet.has(key(name)) ? "key off" : "key", "aria-pressed": String(!state.quiet.has(key(name))),
      onclick: () => { state.quiet.has(key(name)) ? state.quiet.delete(key(name)) : state.quiet.add(key(name)); this.draw(); },
    }, el("i", { style: { background: runs.length > 1 ? "var(--soft)" : this.colour(runs[0], name, runs.length) } }), labelOf(name, this.panel)))));
  }
}


/* Cards on the page */
let cards = [], sight = null;

/* Show a card for each panel; `place` returns the element that a panel stands in. */
function mount(panels, place) {
  sight?.disconnect();
  cards = panels.map(panel => new Card(panel));
  sight = new IntersectionObserver(entries => {
    for (const entry of entries) {
      const card = cards.find(each => each.element === entry.target);
      if (card) card.seen = entry.isIntersecting;
    }
    page.load(0);
  }, { rootMargin: "300px" });
  const folds = new Map();
  for (const card of cards) {
    const { panel } = card;
    if (panel.fold && !folds.has(panel.fold)) folds.set(panel.fold, fold(panel.fold, panels.filter(other => other.fold === panel.fold).length, place(panel)));
    (folds.get(panel.fold) || place(panel)).append(card.element);
    if (panel.curves.length) sight.observe(card.element);
  }
}
/* Append a title that unfolds panels, and return their place. */
function fold(title, count, place) {
  const inner = el("div", { class: "panels" });
  place.append(el("details", { class: "fold", open: state.unfolded.has(title), ontoggle: event => { event.target.open ? state.unfolded.add(title) : state.unfolded.delete(title); } },
    el("summary", {}, title, " ", el("small", {}, `${count} panels`)), inner));
  return inner;
}
const inSight = () => cards.filter(card => card.seen).forEach(card => card.draw());
const redraw = () => cards.filter(card => card.panel.curves.length).forEach(card => card.draw());
function hover(x, plot) { for (const card of cards) if (card.seen) card.plot.hover(x, card.plot === plot); }

function zoom(low, high, goesOn = false) {
  if (low === null) { state.low = state.high = null; }
  else {
    const ranges = shown().map(run => run.range[state.axis]), first = Math.min(...ranges.map(r => r[0])), last = Math.max(...ranges.map(r => r[1]));
    if (low <= first && high >= last) state.low = state.high = null;
    else { state.low = Math.max(low, first); state.high = Math.min(Math.max(high, state.low + (last - first) * 1e-9), last); }
    if (state.low !== null && !(state.high > state.low)) state.low = state.high = null;
  }
  // While the reader moves, the curves at hand are drawn anew; else only if the answer takes long.
  const had = page.asked();
  if (goesOn) { inSight(); page.load(SETTLE); }
  else { page.load(0); setTimeout(() => { if (page.asked() > had && !page.answered()) inSight(); }, PATIENCE); }
}

/* Controls */
function controls() {
  const slide = (id, text) => el("label", { class: "slide" }, text, el("input", { id, type: "range", min: 0, max: 40, step: 1, value: Math.round((2 * state.smooth) ** (1 / 1.4)) }));
  const tick = (id, name, text) => el("label", {}, el("input", { id, type: "checkbox", checked: state[name], onchange: event => { state[name] = event.target.checked; redraw(); if (name === "logX") page.load(0); } }), text);
  $("controls").replaceChildren(el("div", { class: "choice", id: "axis", role: "radiogroup", "aria-label": "horizontal axis" }), slide("smooth", "smooth "),
    tick("logx", "logX", " log x"), tick("logy", "logY", " log y"), tick("full", "full", " outliers"),
    el("button", { id: "reset", onclick: () => zoom(null, null) }, "whole run"), el("span", { class: "hint mouse" }, `drag: zoom · shift-drag: move · ctrl-wheel: zoom · click: ${page.tap}`),
    el("span", { class: "hint touch" }, `pinch: zoom · drag: move · tap: ${page.tap}`));
  $("smooth").addEventListener("input", event => { state.smooth = Number(event.target.value) ** 1.4 / 2; redraw(); });
  axes();
}
function axes() {
  anew($("axis"), () => $("axis").replaceChildren(...Object.entries(AXES).map(([axis, name]) => el("button", { role: "radio", "aria-checked": String(state.axis === axis),
    onclick: () => { state.axis = axis; state.low = state.high = null; axes(); cards.forEach(card => { card.data = []; }); page.load(0); } }, name))));
}
addEventListener("resize", () => { redraw(); page.load(200); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
