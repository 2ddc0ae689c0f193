"use strict";
/* Scores of checkpoints over training: a plot for each task and metric that has been measured at several steps. */

function scorePlots(scored) {
  const window = { low: null, high: null }, plots = [], keys = new Map();
  for (const { run, scores } of scored)
    for (const score of scores) {
      if (!Number.isFinite(score.number) || score[state.axis] === null) continue;
      const key = JSON.stringify([score.task, score.metric]);
      if (!keys.has(key)) keys.set(key, new Map());
      const curves = keys.get(key);
      if (!curves.has(run)) curves.set(run, new Map());
      curves.get(run).set(score.step, score); // a later score of a step replaces an earlier one
    }
  const draw = () => plots.forEach(({ plot, curves }) => plot.element.isConnected && plot.show(curves, { ...state, ...window, smooth: 0, logX: false, full: true }, [], []));
  const act = { zoom: (low, high) => { Object.assign(window, { low, high }); draw(); }, hover: (x, plot) => plots.forEach(other => other.plot.hover(x, other.plot === plot)), click: () => {} };
  const sections = [...keys].sort(([a], [b]) => byNumber(a, b)).flatMap(([key, byRun]) => {
    if (![...byRun.values()].some(scores => scores.size > 1)) return [];
    const [task, metric] = JSON.parse(key), plot = new Plot({ label: `${task} ${metric}`, height: 190, act });
    const curves = [...byRun].map(([run, byStep]) => {
      const scores = [...byStep.values()].sort((a, b) => a.step - b.step), take = name => Float64Array.from(scores, score => score[name]);
      const mean = take("number"), step = take("step");
      return { run, name: key, label: run.name, colour: colourOf(run), strong: true, x: take(state.axis), first: step, last: step, mean, low: mean, high: mean };
    });
    plots.push({ plot, curves });
    new ResizeObserver(draw).observe(plot.element); // also when it has its place on the page
    return [el("section", { class: "card", "data-score": key }, el("div", { class: "head" }, el("h2", {}, task, el("small", {}, metric))), plot.element)];
  });
  return sections.length ? el("div", { class: "panels" }, ...sections) : null;
}
