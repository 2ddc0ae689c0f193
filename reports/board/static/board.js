"use strict";
/* The page of `trainer board`: the list of runs, tabs of panels, and the rows of a step.
 * Text of runs goes into the page as text nodes alone, never as HTML. */

const POLL = 2500; // milliseconds

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
  return answer;
}
const json = async path => (await ask(path)).json();

/* State */
Object.assign(state, { settings: {}, focus: null, tab: "Curves", filter: "", group: "" });
Object.assign(page, { tap: "rows of the step", matches, load, click, asked: () => asking, answered: () => answered === asking });
const focused = () => runOf(state.focus) || shown()[0] || state.runs[0];
function matches(run) {
  const [key, value] = state.filter.split("=").map(word => word.trim());
  const word = state.filter.toLowerCase();
  if ([run.name, ...run.tags].some(name => name.toLowerCase().includes(word))) return true; // a name may have a "=" too
  const equal = setting => typeof setting === "number" && value && !isNaN(value) ? setting === Number(value) : String(setting).startsWith(value);
  return value !== undefined && Object.entries(state.settings[run.id] || {}).some(([name, setting]) => name.endsWith(key) && equal(setting));
}

/* Curves */
let waiting = null, asking = 0, answered = 0, changedAt = 0;

/* Return the unit of losses, and its reason if it is not nats per token: tokens of other tokenizers are other pieces of text. */
function unit(runs) {
  if (new Set(runs.map(run => run.tokenizer)).size < 2) return { name: state.units.nats, bits: false };
  if (runs.every(run => run.bytes_known)) return { name: state.units.bits, bits: true, note: state.notes.bits };
  const problem = runs.map(run => run.bytes_problem).find(Boolean) || "which are being read";
  return { name: state.units.apart, bits: false, note: state.notes.apart.replace("{}", problem) };
}
const lossOf = run => typeof run.loss !== "number" ? "not finite"
  : new Set(state.runs.map(other => other.tokenizer)).size < 2 ? run.loss.toFixed(4)
  : typeof run.bits === "number" ? `${run.bits.toFixed(4)} ${state.units.bits}` : `${run.loss.toFixed(4)} ${state.units.nats}`;

function buildCurves() {
  const runs = shown(), grid = el("div", { class: "panels" }), { name, note, bits } = unit(runs);
  page.unit = name;
  $("view").replaceChildren(...(note ? [el("p", { class: bits ? "note" : "note warning", role: "status" }, note)] : []), runs.length ? grid : nothing());
  mount(panelsOf(runs), () => grid);
}
const nothing = () => el("p", { class: "empty" }, state.runs.length ? "No run is chosen that has taken a step." : "There is no run here yet. The page shows new runs as they begin.");

/* Ask for the curves of the panels in sight, those of one width at once. */
function load(delay = SETTLE) {
  clearTimeout(waiting);
  changedAt = performance.now();
  waiting = setTimeout(fetchCurves, delay);
}
async function fetchCurves() {
  const runs = shown(), turn = ++asking, began = changedAt;
  const visible = cards.filter(card => card.seen);
  if (!runs.length || !visible.length) return;
  const widths = new Map();
  for (const card of visible) widths.set(card.width(), [...(widths.get(card.width()) || []), card]);
  try {
    await Promise.all([...widths].map(async ([width, group]) => {
      const words = new URLSearchParams({ axis: state.axis, width, log: state.logX ? "1" : "0", bits: unit(runs).bits ? "1" : "0" });
      if (state.low !== null) { words.set("low", state.low); words.set("high", state.high); }
      for (const run of runs) words.append("run", run.id);
      for (const name of new Set(group.flatMap(card => asked(card.panel)))) words.append("curve", name);
      const parts = parse(await (await ask(`api/curves?${words}`)).arrayBuffer());
      if (turn !== asking) return;
      answered = turn;
      group.forEach(card => card.show(parts));
    }));
    if (turn === asking) drawn(performance.now(), began, turn);
  } catch (error) { offline(error); }
}
/* Say when the curves were drawn, and how long after the change of the window: for tests. */
function drawn(now, began, turn) {
  const { dataset } = document.body;
  dataset.first ||= String(now);
  dataset.took = String(now - began);
  dataset.turn = String(turn);
}
function parse(buffer) {
  const size = new DataView(buffer).getUint32(0, true), head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  const take = (kind, count) => { const array = new kind(buffer, at, count); at += count * kind.BYTES_PER_ELEMENT; return array; };
  return head.map(({ run, points, curves }) => {
    const curvesOfRun = { run, x: take(Float64Array, points), first: take(Float64Array, points), last: take(Float64Array, points), curves: {} };
    for (const name of curves) curvesOfRun.curves[name] = [take(Float32Array, points), take(Float32Array, points), take(Float32Array, points)];
    at = Math.ceil(at / 8) * 8;
    return curvesOfRun;
  });
}

async function click(curve, i, y) {
  let step = curve.first[i];
  if (curve.last[i] > step && !curve.name.startsWith(HELD)) {
    const words = new URLSearchParams({ curve: curve.name, first: step, last: curve.last[i], value: y, bits: unit(shown()).bits && /^loss(\/|$)/.test(curve.name) ? "1" : "0" });
    step = (await json(`api/nearest/${curve.run.id}?${words}`)).step ?? step;
  }
  openStep(curve.run.id, step);
}

/* List of runs */
function differing(runs) {
  const keys = new Set(runs.flatMap(run => Object.keys(state.settings[run.id] || {})));
  return [...keys].filter(key => new Set(runs.map(run => JSON.stringify(state.settings[run.id]?.[key]))).size > 1);
}
const text = value => value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);

function drawRuns() {
  const keys = state.runs.length > 1 ? differing(state.runs).filter(key => !key.startsWith("mixture.sources")) : [];
  $("count").textContent = `${shown().length} of ${state.runs.length}`;
  groupChoice();
  anew($("runs"), () => $("runs").replaceChildren(...grouped(state.runs.filter(matches), run => {
    const done = run.last_step ? Math.min(1, (run.step || 0) / run.last_step) : 0;
    const chips = keys.slice(0, 4).map(key => el("span", { class: "chip", title: key }, `${key.split(".").pop()} ${text(state.settings[run.id]?.[key]).slice(0, 24)}`));
    return el("li", { class: run.id === focused()?.id ? "run focus" : "run" },
      el("input", { type: "checkbox", checked: !state.hidden.has(run.id), "aria-label": `show ${run.name}`, style: { "accent-color": colourOf(run) },
        onchange: event => { event.target.checked ? state.hidden.delete(run.id) : state.hidden.add(run.id); changed(); } }),
      el("div", { class: "about" },
        el("button", { class: "title", title: run.url, onclick: () => { state.focus = run.id; changed(); } }, el("i", { style: { background: colourOf(run) } }), run.name),
        el("p", {}, el("span", { class: `status ${run.status}` }, run.status), ` ${run.step === null ? "no step" : whole(run.step)}${run.last_step ? " / " + whole(run.last_step) : ""}`,
          run.step === null ? "" : ` · loss ${lossOf(run)}`),
        el("div", { class: "bar" }, el("i", { style: { width: `${100 * done}%`, background: colourOf(run) } })),
        run.read < 1 && !run.problem ? el("p", { class: "reading" }, `reading its curves: ${percent(run.read)}`) : null,
        run.problem ? el("p", { class: "problem" }, run.problem) : null,
        run.missing.length ? el("button", { class: "more", onclick: () => { state.focus = run.id; state.hidden.delete(run.id); state.tab = "Scores"; changed(); } }, "scores are missing") : null,
        run.note ? el("p", { class: "said", title: run.note }, run.note.split("\n")[0]) : null,
        chips.length || run.tags.length ? el("p", { class: "chips" }, ...run.tags.map(tag => el("button", { class: "chip tag", title: "show the runs with this tag",
          onclick: () => { state.filter = $("filter").value = tag; changed(); } }, tag)), ...chips) : null));
  })));
}

/* Other tabs */
const runChoice = () => el("label", { class: "which" }, "run ", el("select", { "aria-label": "run", onchange: event => { state.focus = event.target.value; changed(); } },
  ...state.runs.map(run => el("option", { value: run.id, selected: run === focused() }, run.name))));
const table = (head, rows, kind = "") => el("div", { class: "scroll" }, el("table", { class: kind, style: { "--columns": head.length - 1 } }, el("thead", {}, el("tr", {}, ...head.map(cell => el("th", {}, cell)))), el("tbody", {}, ...rows)));
const row = (cells, kind = "") => el("tr", { class: kind }, ...cells.map((cell, i) => el(i ? "td" : "th", {}, cell)));
const card = (title, ...content) => el("section", { class: "card wide" }, el("div", { class: "head" }, el("h2", {}, title)), ...content);

function strip(label, parts, total) {
  const bar = el("div", { class: "strip", role: "img", "aria-label": label });
  for (const part of parts) {
    const column = el("div", { style: { width: `${100 * part.tokens / total}%` } });
    part.shares.forEach((share, i) => share > 0 && column.append(el("i", { style: { height: `${100 * share}%`, background: state.palette[i % state.palette.length] } })));
    bar.append(column);
  }
  return el("div", { class: "striped" }, el("span", {}, label), bar);
}

const TABS = {
  Curves: null,
  async Mixture(run) {
    const { plan, plan_problem } = await json(`api/run/${run.id}`);
    if (!plan && plan_problem) return card("Mixture", el("p", { class: "problem" }, plan_problem));
    if (!plan) return card("Mixture", el("p", { class: "empty" }, "The rows of this run are synthetic: it has no plan."));
    const total = plan.phases.reduce((sum, phase) => sum + phase.tokens, 0);
    const rows = plan.phases.map(phase => {
      const all = phase.taken.reduce((a, b) => a + b, 0);
      return row([phase.name, `${human(all * phase.seq_len)} of ${human(phase.tokens)}`, `${phase.batch_rows} × ${whole(phase.seq_len)}`,
        ...plan.sources.flatMap((_, i) => [percent(phase.planned[i]), all ? percent(phase.taken[i] / all) : "–"])]);
    });
    return el("div", {},
      card("Mixture over tokens",
        el("div", { class: "legend" }, ...plan.sources.map((name, i) => el("span", { class: "key", title: plan.urls[i] }, el("i", { style: { background: state.palette[i % state.palette.length] } }), name))),
        strip("plan", plan.phases.flatMap(phase => phase.stretches), total), strip("taken", plan.taken, total),
        el("div", { class: "striped" }, el("span"), el("div", { class: "spans" }, ...plan.phases.map(phase => el("span", { style: { width: `${100 * phase.tokens / total}%` } }, phase.name))))),
      card("Phases", table(["phase", "tokens taken", "batch", ...plan.sources.flatMap(name => [`${name}: plan`, "taken"])], rows)));
  },
  async Settings() {
    const runs = shown().length ? shown() : state.runs, differ = new Set(differing(runs));
    const keys = [...new Set(runs.flatMap(run => Object.keys(state.settings[run.id] || {})))];
    const chosen = runs.length > 1 && !state.everything ? keys.filter(key => differ.has(key)) : keys;
    return card(runs.length > 1 ? (state.everything ? "All settings" : "Settings that differ") : "Settings",
      runs.length > 1 ? el("label", { class: "which" }, el("input", { type: "checkbox", checked: Boolean(state.everything), onchange: event => { state.everything = event.target.checked; drawView(); } }), " all settings") : null,
      chosen.length ? table(["", ...runs.map(run => run.name)], chosen.map(key => row([key, ...runs.map(run => text(state.settings[run.id]?.[key]))], differ.has(key) ? "differs" : "")), "sides")
        : el("p", { class: "empty" }, "All settings of these runs are equal."));
  },
  async Machine(run) {
    const { layout } = await json(`api/run/${run.id}`);
    if (!layout.ranks) return card("Layout", el("p", { class: "empty" }, "The run has not started."));
    const axes = ["pp", "dp", "cp", "tp"].filter(axis => layout.degrees[axis] > 1), most = Math.max(...layout.ranks.map(rank => rank.memory || 0));
    const cell = rank => el("div", { class: "rank", title: [`rank ${rank.rank}`, ...Object.entries(rank.place).map(([axis, place]) => `${axis} ${place}`), rank.memory ? bytes(rank.memory) : ""].join(", ") },
      el("b", {}, String(rank.rank)), el("small", {}, axes.map(axis => `${axis}${rank.place[axis]}`).join(" ") || "alone"),
      el("div", { class: "bar" }, el("i", { style: { width: `${most ? 100 * (rank.memory || 0) / most : 0}%` } })), el("small", {}, rank.memory ? bytes(rank.memory) : "–"));
    const d = layout.degrees;
    return el("div", {},
      card("Layout", el("dl", {}, ...Object.entries({ engine: d.engine, ranks: `${d.processes} × ${d.device}`, degrees: `pp ${d.pp} × dp ${d.dp} × cp ${d.cp} × tp ${d.tp}${d.ep > 1 ? `, experts over ${d.ep}` : ""}`, precision: d.precision, starts: String(layout.starts) })
        .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]))),
      card("Ranks and their memory", el("p", { class: "note" }, layout.measured === null ? "An older version recorded the memory of rank 0 alone." : `The most bytes that each rank has held in the last start. They have hardly grown since step ${whole(layout.measured)}.`),
        el("div", { class: "ranks" }, ...layout.ranks.slice(0, 2048).map(cell))));
  },
  async Checkpoints(run) {
    const { checkpoints } = await json(`api/run/${run.id}`);
    if (!checkpoints.length) return card("Checkpoints", el("p", { class: "empty" }, "There is no checkpoint yet."));
    return card("Checkpoints", table(["step", "tokens", "size", "updates", "saved", "blocked the run", "ledger", "state"], checkpoints.map(each => row([whole(each.step),
      each.tokens === undefined ? "–" : human(each.tokens), each.size ? bytes(each.size) : "–", each.updates === undefined ? "–" : whole(each.updates),
      each.time ? new Date(1000 * each.time).toLocaleString() : "–", each.blocked === undefined || each.blocked === null ? "–" : `${each.blocked} s`,
      el("code", {}, (each.ledger || "–").slice(0, 12)), each.problem ? el("span", { class: "problem" }, each.problem) : each.remote ? "in a store" : "whole"]))));
  },
  /* The newest scores of the runs that are shown beside each other; of one run, its steps. */
  async Scores() {
    const runs = shown().length ? shown() : state.runs;
    const scored = await Promise.all(runs.map(async run => ({ run, scores: (await json(`api/run/${run.id}`)).scores })));
    const columns = runs.length > 1 ? scored.map(({ run, scores }) => ({ name: run.name, scores }))
      : [...new Set(scored[0].scores.map(score => score.step))].sort((a, b) => a - b).slice(-8).map(step => ({ name: `step ${whole(step)}`, scores: scored[0].scores.filter(score => score.step === step) }));
    const keys = [...new Set(scored.flatMap(({ scores }) => scores.map(score => JSON.stringify([score.task, score.metric]))))].sort();
    const lacking = runs.flatMap(run => run.missing.map(({ text, command }) => el("p", { class: "note" }, el("b", {}, "Missing: "), runs.length > 1 ? `${run.name}: ${text}` : text,
      command ? el("span", {}, ". To compute them: ", el("code", {}, command)) : null)));
    if (!keys.length) return card("Scores", ...lacking, el("p", { class: "empty" }, "No checkpoint has scores. trainer eval and trainer recall write them beside the run."));
    const newest = (scores, task, metric) => scores.filter(score => score.task === task && score.metric === metric).reduce((last, score) => !last || score.step >= last.step ? score : last, null);
    const rows = keys.map(key => {
      const [task, metric] = JSON.parse(key), values = columns.map(({ scores }) => newest(scores, task, metric));
      return row([task, metric, ...values.map(score => score ? el("span", {}, score.value, runs.length > 1 ? el("small", {}, ` step ${whole(score.step)}`) : null) : "–")],
        runs.length > 1 && new Set(values.map(score => score?.value)).size > 1 ? "differs" : "");
    });
    return el("div", {}, scorePlots(scored), card("Scores", ...lacking, table(["task", "metric", ...columns.map(column => column.name)], rows, "sides")));
  },
  async History(run) {
    const { events, files } = await json(`api/run/${run.id}`);
    const flat = (value, key) => value === null ? [] : typeof value === "object" && !Array.isArray(value) ? Object.entries(value).flatMap(([inner, each]) => flat(each, inner)) : [`${key} ${text(value)}`];
    const detail = ({ time, event, step, ...rest }) => flat(rest).join(", ");
    return el("div", {}, card("History", table(["when", "event", "step", ""], events.reverse().map(event => row([new Date(1000 * event.time).toLocaleString(), el("b", {}, event.event), whole(event.step), detail(event)])), "history")),
      card("Files", el("p", { class: "files" }, ...files.map(name => el("a", { href: `file/${run.id}/${name}`, target: "_blank", rel: "noopener" }, name)))));
  },
  async Notes(run) { return card(`Notes of ${run.name}`, notesForm(run)); },
};

async function drawView() {
  const name = state.tab, run = focused();
  $("controls").hidden = name !== "Curves";
  anew($("tabs"), () => $("tabs").replaceChildren(...Object.keys(TABS).map(tab => el("button", { role: "tab", "aria-selected": String(tab === name), onclick: () => { state.tab = tab; drawView(); } }, tab))));
  anew($("which"), () => $("which").replaceChildren(...(!["Curves", "Settings", "Scores"].includes(name) && state.runs.length > 1 ? [runChoice()] : [])));
  $("tabs").querySelector("[aria-selected=true]").scrollIntoView({ block: "nearest", inline: "center" });
  if (name === "Curves") return buildCurves();
  cards = [];
  if (!run) return $("view").replaceChildren(nothing());
  try {
    const content = await TABS[name](run);
    if (state.tab === name) { $("view").replaceChildren(content); markCut(); }
  } catch (error) { $("view").replaceChildren(el("p", { class: "problem" }, String(error.message))); }
}
function changed() { drawRuns(); drawView(); }

/* Rows of a step */
async function openStep(id, step, first = 0) {
  const run = runOf(id), drawer = $("drawer");
  if (!drawer.open) drawer.showModal();
  opened = { id, step };
  const head = el("div", { class: "bartop" },
    el("button", { "aria-label": "step before", disabled: step <= run.range.step[0], onclick: () => openStep(id, step - 1) }, "‹"),
    el("h2", {}, `Step ${whole(step)}`, el("small", {}, run.name)),
    el("button", { "aria-label": "step after", disabled: step >= run.range.step[1], onclick: () => openStep(id, step + 1) }, "›"),
    el("button", { class: "close", "aria-label": "close", onclick: () => drawer.close() }, "×"));
  anew(drawer, () => drawer.replaceChildren(head, el("p", { class: "empty" }, "reading the rows …")));
  let stepRows;
  try { stepRows = await json(`api/step/${id}/${step}?first=${first}`); }
  catch (error) { stepRows = { error: String(error.message) }; }
  anew(drawer, () => drawer.replaceChildren(head, proof(stepRows), measured(stepRows), shares(stepRows, id, step), ...(stepRows.rows || []).map(rowCard), pager(stepRows, id, step)));
  for (const words of drawer.querySelectorAll("pre")) words.nextElementSibling.hidden = words.scrollHeight <= words.clientHeight + 1;
  drawer.scrollTop = 0;
  markCut();
}
function proof(stepRows) {
  if (stepRows.error) return el("div", { class: "proof bad" }, el("b", {}, stepRows.error), stepRows.hint ? el("p", {}, stepRows.hint) : null);
  if (stepRows.why) return el("p", { class: "proof" }, stepRows.why);
  if (stepRows.proved) return el("p", { class: "proof good" }, el("b", {}, "Proved. "), `The ${whole(stepRows.count)} rows match their hash in the run's ledger.`);
  return el("p", { class: "proof" }, stepRows.taken ? "Not proved: the ledger does not hold the hash of the step before." : "Planned: the run has not taken this step yet.");
}
function measured({ metrics, before }) {
  if (!metrics) return null;
  const value = number => number === null || number === undefined ? "not finite" : number.toFixed(4);
  const was = previous => previous === null || previous === undefined ? "–" : previous.toFixed(4);
  const rows = [row(["all", value(metrics.loss), was(before?.loss), whole(Object.values(metrics.sources).reduce((sum, source) => sum + source.rows, 0))]),
    ...Object.entries(metrics.sources).map(([name, source]) => row([name, value(source.loss), was(before?.sources[name]?.loss), whole(source.rows)]))];
  return el("div", {}, table(["source", "loss", "step before", "rows"], rows),
    el("p", { class: "note" }, `phase ${metrics.phase} · gradient norm ${metrics.grad_norm === null ? "not finite" : human(metrics.grad_norm)} · learning rate ${human(metrics.lr)} · ${human(metrics.tokens_per_second)} tokens/s`,
      metrics.slowest_rank === undefined ? "" : ` · slowest rank ${metrics.slowest_rank}: the others wait for it in ${percent(metrics.slowest_lag)} of the step${metrics.slowest_steps > 1 ? `, for ${whole(metrics.slowest_steps)} steps in a row` : ""}`,
      metrics.skipped ? el("b", {}, ` · skipped: ${metrics.why}`) : ""));
}
function shares({ documents, documents_problem, metrics }, id, step) {
  if (documents_problem) return el("p", { class: "proof bad" }, documents_problem);
  if (!documents?.length) return null;
  const place = share => el("button", { class: "more", onclick: () => openStep(id, step, share.page) }, share.id || `document ${whole(share.document)}`);
  const number = value => value === null ? "not finite" : value.toFixed(4);
  const mean = share => metrics?.sources[share.source]?.loss;
  return el("div", { class: "shares" }, table(["document", "source", "part of the step's loss", "loss", "source's loss"],
    documents.map(share => row([place(share), share.source, share.share === null ? "–" : percent(share.share), number(share.loss), number(mean(share) ?? null)]))));
}
function rowCard(audited) {
  return el("article", { class: "rowcard" },
    el("h3", {}, `row ${whole(audited.row)}`, el("small", {}, `${audited.source} · epoch ${audited.epoch} · ${audited.phase}`), el("code", { title: "hash of the row's tokens" }, audited.hash.slice(0, 16))),
    ...audited.documents.map(piece => {
      const words = el("pre", {}, piece.text, piece.cut ? "\n…" : "");
      return el("div", { class: "piece" },
        el("p", {}, el("b", {}, piece.id || `document ${whole(piece.document)}`), ` ${piece.file}:${piece.position + 1}`, el("small", {}, ` tokens ${whole(piece.at)} to ${whole(piece.at + piece.tokens)} of the row, from its token ${whole(piece.first)} on`)),
        piece.fields ? el("p", {}, Object.entries(piece.fields).map(([name, value]) => `${name} ${text(value)}`).join(" · ")) : null,
        words, el("button", { class: "more", onclick: event => { words.classList.toggle("open"); event.target.textContent = words.classList.contains("open") ? "less" : "whole text"; } }, "whole text"));
    }));
}
function pager(stepRows, id, step) {
  if (!stepRows.rows || stepRows.count <= stepRows.page) return el("span");
  const last = Math.min(stepRows.first + stepRows.page, stepRows.count);
  return el("div", { class: "pager" },
    el("button", { disabled: !stepRows.first, onclick: () => openStep(id, step, stepRows.first - stepRows.page) }, "rows before"),
    el("span", {}, `rows ${stepRows.first + 1} to ${last} of ${whole(stepRows.count)}`),
    el("button", { disabled: last >= stepRows.count, onclick: () => openStep(id, step, stepRows.first + stepRows.page) }, "rows after"));
}

/* Polling */
function offline(error) {
  $("live").className = "live off";
  $("live").textContent = error.status === 403 ? "the board was started anew: open its new URL" : "no answer from the board";
  document.body.dataset.error = String(error.message);
}
let shape = "", read = "";
async function poll() {
  try {
    if (!panels.length) takeMetrics(await json("api/metrics"));
    const list = await json("api/runs");
    const files = JSON.stringify(list.runs.map(run => [run.id, run.version])); // a start may change settings
    if (files !== read) { state.settings = await json("api/settings"); read = files; }
    const before = JSON.stringify(state.runs.map(run => [run.entries, run.evaluations]));
    Object.assign(state, { runs: list.runs, palette: list.palette, units: list.units, notes: list.notes });
    $("live").className = list.problems.length ? "live off" : "live";
    $("live").textContent = list.problems[0] || "live";
    const now = JSON.stringify(state.runs.map(run => [run.id, run.version, run.series, run.held_out, Boolean(run.entries), Boolean(run.noise_steps), run.tokenizer, run.bytes_known, run.bytes_problem]));
    openLinked();
    drawRuns();
    cards.forEach(card => card.explain());
    if (now !== shape) { shape = now; drawView(); }
    else if (before !== JSON.stringify(state.runs.map(run => [run.entries, run.evaluations])) && state.tab === "Curves") load(0);
  } catch (error) { offline(error); }
  setTimeout(poll, POLL);
}

/* Controls */
$("filter").addEventListener("input", event => { state.filter = event.target.value.trim(); changed(); });
$("all").addEventListener("click", () => { state.hidden.clear(); changed(); });
$("none").addEventListener("click", () => { state.runs.forEach(run => state.hidden.add(run.id)); changed(); });
$("drawer").addEventListener("click", event => { // beside it: a tap on a point ends in a click, when the drawer lies there already
  if (event.target === $("drawer") && event.clientX < $("drawer").getBoundingClientRect().left) $("drawer").close();
});
$("drawer").addEventListener("close", () => { opened = null; writeSoon(); });
if (matchMedia("(max-width: 900px)").matches) $("list").open = false;
readAddress();
controls();
poll();
