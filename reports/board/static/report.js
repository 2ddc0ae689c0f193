"use strict";
/* The curves of a report: all of them are in the page, in buckets. */

const data = JSON.parse($("data").textContent);

function floats(text, kind) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new kind(bytes.buffer);
}
const parts = data.parts.map(part => {
  const axes = Object.fromEntries(["step", "tokens", "hours", "first", "last"].map(name => [name, floats(part[name], Float64Array)]));
  const curves = Object.entries(part.curves).map(([name, values]) => {
    const [mean, low, high] = values.map(text => floats(text, Float32Array)); // one value: a bucket is a step
    return [name, [mean, low ?? mean, high ?? mean]];
  });
  return { run: part.run, ...axes, curves: Object.fromEntries(curves) };
});

function draw() {
  for (const part of parts) part.x = part[state.axis];
  cards.filter(card => card.seen).forEach(card => card.show(parts));
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1); // for tests
}
function build() {
  $("curves").replaceChildren(); $("more").replaceChildren();
  const panels = panelsOf(shown());
  mount(panels, panel => $(panel.wide ? "curves" : "more"));
  for (const name of ["curves", "more"]) $(name).hidden = !$(name).children.length;
}
const note = el("p", { class: "note", id: "rows", role: "status" });
/* Say how to read the rows of a point's step, below the plot. */
function rows(curve, i, y, card) {
  const first = curve.first[i], last = curve.last[i], { run } = curve;
  card.element.append(note);
  note.replaceChildren(...(!run.audit ? ["The rows of this run are synthetic: there are no documents."]
    : first === last ? [`Rows of step ${whole(first)}: `, el("code", {}, `${run.audit} --step ${first} --text`)]
    : [`This point is the steps ${whole(first)} to ${whole(last)}. To find a step and read its rows: `, el("code", {}, `trainer board ${run.url}`)]));
}
function runButtons() {
  anew($("runs"), () => $("runs").replaceChildren(...(state.runs.length < 2 ? [] : state.runs.map(run => el("button", {
    class: state.hidden.has(run.id) ? "key off" : "key", "aria-pressed": String(!state.hidden.has(run.id)),
    onclick: () => { state.hidden.has(run.id) ? state.hidden.delete(run.id) : state.hidden.add(run.id); runButtons(); build(); },
  }, el("i", { style: { background: colourOf(run) } }), run.name)))));
}

Object.assign(state, { runs: data.runs, palette: data.palette, axis: "tokens" });
Object.assign(page, { unit: data.unit, tap: "rows of the step", load: draw, click: rows });
takeMetrics(data.metrics);
controls();
runButtons();
build();
