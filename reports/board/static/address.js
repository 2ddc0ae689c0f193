"use strict";
/* The view in the address, behind `#`: a link or a reload shows it again, and a link to a step opens its rows.
 * What is usual is left out. A browser sends no part of it to a server. */

const WRITE_AFTER = 200; // milliseconds
const TICKS = ["logX", "logY", "full"];
let opened = null; // run and step of the open drawer

function writeAddress() {
  const words = new URLSearchParams(), set = (name, value, usual) => value !== usual && value !== null && words.set(name, value);
  set("tab", state.tab, "Curves");
  set("run", state.focus);
  set("axis", state.axis, "step");
  if (state.low !== null) words.set("window", `${state.low}..${state.high}`);
  set("smooth", state.smooth, 0);
  for (const name of TICKS) if (state[name]) words.set(name, "1");
  set("filter", state.filter, "");
  set("group", state.group, "");
  const shownIds = state.runs.map(run => run.id).filter(id => !state.hidden.has(id));
  if (state.hidden.size) words.set(...(shownIds.length < state.hidden.size ? ["show", shownIds.join(" ")] : ["hide", [...state.hidden].join(" ")]));
  if (opened) words.set("step", `${opened.id} ${opened.step}`);
  history.replaceState(null, "", words.size ? `#${words}` : location.pathname);
}

/* Take the view from the address. The runs are known later: `openLinked` opens the step. */
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1)), list = name => (words.get(name) || "").split(" ").filter(Boolean);
  const [low, high] = (words.get("window") || "").split("..").map(Number);
  const smooth = Number(words.get("smooth"));
  Object.assign(state, {
    tab: Object.hasOwn(TABS, words.get("tab")) ? words.get("tab") : "Curves",
    focus: words.get("run"), filter: words.get("filter") || "", group: words.get("group") || "",
    axis: Object.hasOwn(AXES, words.get("axis")) ? words.get("axis") : "step",
    low: high > low ? low : null, high: high > low ? high : null,
    smooth: smooth > 0 ? smooth : 0, hidden: new Set(list("hide")),
  });
  for (const name of TICKS) state[name] = words.get(name) === "1";
  state.only = words.has("show") ? new Set(list("show")) : null;
  const [id, step] = list("step");
  state.linked = id && /^\d+$/.test(step) ? { id, step: Number(step) } : null;
  $("filter").value = state.filter;
}
/* Do what waits for the list of runs. */
function openLinked() {
  if (state.only && state.runs.length) {
    state.hidden = new Set(state.runs.map(run => run.id).filter(id => !state.only.has(id)));
    state.only = null;
  }
  const linked = state.linked, run = linked && runOf(linked.id);
  if (!run || !run.entries) return;
  state.linked = null;
  openStep(linked.id, linked.step);
}

let writing = null;
function writeSoon() {
  clearTimeout(writing);
  writing = setTimeout(() => { if (state.runs.length && !state.linked && !state.only) writeAddress(); }, WRITE_AFTER);
}
for (const kind of ["click", "input", "change", "keydown", "pointerup", "wheel"]) addEventListener(kind, writeSoon, { passive: true });
addEventListener("hashchange", () => { readAddress(); controls(); changed(); openLinked(); });
