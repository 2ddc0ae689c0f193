"use strict";
/* A plot of curves on a canvas.
 *
 * A curve has buckets: x (middle), first and last step, mean, low and high. The plot draws the mean
 * as a line and low to high as a band. It changes nothing by itself: a drag, the wheel or a pinch
 * calls `act.zoom(low, high, goes on)`, a click calls `act.click(curve, bucket, y)`, the pointer `act.hover`.
 */

const LEFT = 56, RIGHT = 14, TOP = 10, BOTTOM = 26, NAMES = 16;
const CLICK = 5; // pixels that the pointer may move in a click
const QUANTILE = 0.97, BAND = 0.6; // parts of the lines, and of the bands, that a plot shows at least

function human(number, digits = 4) {
  const size = Math.abs(number);
  for (const [suffix, unit] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]])
    if (size >= unit * 0.9995) return trim(number / unit, digits) + suffix;
  return size !== 0 && size < 1e-3 ? number.toExponential(1).replace("e-0", "e-") : trim(number, digits);
}
function trim(number, digits = 4) { return String(Number(number.toPrecision(digits))); }
function percent(number) { return trim(100 * number) + "%"; }
/* A size as the commands print it; curves take a digit more, so that the ticks of a zoomed axis differ. */
function bytes(number, digits = 3) { return human(number, digits).replace("B", "G") + "B"; }

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(m => m * size).find(s => s >= rough * 0.999);
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) values.push(n * step);
  return values.length < 2 && count < 20 ? ticks(low, high, 2 * count) : values; // one label shows no scale
}
function logTicks(low, high, count) {
  const candidates = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of [1, 2, 5]) candidates.push(m * 10 ** e);
  const inside = candidates.filter(v => v >= low * 0.999 && v <= high * 1.001);
  if (inside.length < 2) return ticks(low, high, count);
  const tens = inside.filter(v => /^1(e|0*$|\.?$)|^0?\.0*1$/.test(String(v)));
  return inside.length > count * 1.6 && tens.length > 1 ? tens : inside;
}

/* Smooth with an exponential mean forwards and backwards: no shift, gaps stay gaps. */
function smoothed(values, strength) {
  if (!strength) return values;
  const keep = strength / (1 + strength), total = new Float64Array(values.length), weight = new Float64Array(values.length);
  for (const backwards of [false, true]) {
    let sum = 0, known = 0;
    for (let i = 0; i < values.length; i++) {
      const place = backwards ? values.length - 1 - i : i, value = values[place];
      if (backwards) { total[place] += sum * keep; weight[place] += known * keep; }
      sum *= keep; known *= keep;
      if (value === value) { sum += value; known += 1; }
      if (!backwards) { total[place] += sum; weight[place] += known; }
    }
  }
  return values.map((value, i) => value === value ? total[i] / weight[i] : NaN);
}

function nearest(sorted, x) {
  let low = 0, high = sorted.length;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && (low === sorted.length || x - sorted[low - 1] < sorted[low] - x) ? low - 1 : low;
}

class Plot {
  constructor({ label, format = human, height = 200, zero = false, act }) {
    Object.assign(this, { label, format, height, zero, act });
    this.curves = []; this.marks = []; this.phases = []; this.view = {};
    this.pointers = new Map(); this.selection = null; this.hovered = null;
    this.element = document.createElement("div");
    this.element.className = "plot";
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    this.canvas.style.height = `${height}px`;
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.over = document.createElement("canvas"); // crosshair and selection: the curves stay as drawn
    this.over.className = "over";
    this.over.style.height = `${height}px`;
    this.element.append(this.canvas, this.over, this.tip);
    this.listen();
  }

  show(curves, view, marks, phases) {
    Object.assign(this, { curves, view, marks, phases });
    for (const curve of curves) curve.line = smoothed(curve.mean, view.smooth);
    this.draw();
  }

  /* Scales */
  range() {
    let low = Infinity, high = -Infinity;
    for (const { x } of this.curves) if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
    const { view } = this;
    low = view.low ?? (view.begin ?? low); high = view.high ?? (view.end ?? high);
    if (!(high > low)) { const pad = Math.abs(low) * 0.01 || 1; return [low - pad, low + pad]; }
    return view.logX ? [Math.max(low, high * 1e-7, view.least ?? 0) || 1e-9, high] : [low, high];
  }
  heights([left, right]) {
    const lines = [], lows = [], highs = [];
    for (const curve of this.curves)
      for (let i = 0; i < curve.x.length; i++) {
        if (curve.x[i] < left || curve.x[i] > right || curve.mean[i] !== curve.mean[i]) continue;
        lines.push(curve.line[i]); lows.push(curve.low[i]); highs.push(curve.high[i]);
      }
    const fine = values => Float64Array.from(this.view.logY ? values.filter(v => v > 0) : values).sort();
    const usual = fine(lines), least = fine(lows), most = fine(highs);
    if (!usual.length || !least.length) return this.view.logY ? [0.1, 1] : [0, 1];
    const at = (sorted, part) => sorted[Math.round((sorted.length - 1) * part)];
    let low = least[0], high = at(most, 1);
    if (!this.view.full && !this.view.logY) { // most of the bands, and all of the lines but their highest
      const top = Math.max(at(usual, QUANTILE), at(most, BAND)), bottom = Math.min(usual[0], at(least, 1 - BAND));
      high = Math.min(high, top + 0.3 * (top - bottom));
      low = Math.max(low, bottom - 0.1 * (top - bottom));
    }
    if (this.view.logY) return low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
    return [this.zero ? 0 : low - room, high + room];
  }
  scales() {
    const width = this.canvas.clientWidth, [x0, x1] = this.range(), [y0, y1] = this.heights([x0, x1]);
    const top = TOP + (this.phases.length > 1 ? NAMES : 0); // curves leave the names of phases free
    const { logX, logY } = this.view, inner = width - LEFT - RIGHT, tall = this.height - top - BOTTOM;
    const f = logX ? Math.log : v => v, g = logY ? Math.log : v => v, inverse = logX ? Math.exp : v => v;
    return {
      width, x0, x1, y0, y1,
      px: x => LEFT + (f(Math.max(x, logX ? x0 * 1e-3 : -Infinity)) - f(x0)) / (f(x1) - f(x0)) * inner,
      py: y => top + (1 - (g(y) - g(y0)) / (g(y1) - g(y0))) * tall,
      back: p => inverse(f(x0) + (p - LEFT) / inner * (f(x1) - f(x0))),
      up: p => { const v = g(y0) + (1 - (p - top) / tall) * (g(y1) - g(y0)); return logY ? Math.exp(v) : v; },
    };
  }

  /* Drawing */
  draw() {
    const { width } = this.fit(this.canvas);
    if (!width) return;
    const pen = this.pen(this.canvas), colour = this.colours();
    const s = this.scale = this.scales(), bottom = this.height - BOTTOM;
    pen.font = "11px ui-sans-serif, system-ui, sans-serif";
    this.drawPhases(pen, s, bottom, colour);
    pen.lineWidth = 1; pen.fillStyle = colour("--soft"); pen.textBaseline = "middle"; pen.textAlign = "right";
    const rows = Math.max(2, Math.round(this.height / 55));
    let last = null; // values that differ by less than the digits of a label have one label
    for (const y of (this.view.logY ? logTicks : ticks)(s.y0, s.y1, rows)) {
      const p = s.py(y), text = this.format(y);
      if (p < TOP - 1 || p > bottom + 1) continue;
      pen.strokeStyle = colour("--line");
      pen.beginPath(); pen.moveTo(LEFT, p); pen.lineTo(width - RIGHT, p); pen.stroke();
      if (text !== last) pen.fillText(text, LEFT - 8, p);
      last = text;
    }
    pen.textBaseline = "top"; pen.textAlign = "center";
    for (const x of (this.view.logX ? logTicks : ticks)(s.x0, s.x1, Math.max(3, Math.round(width / 110)))) {
      const p = s.px(x), text = human(x) + (this.view.axis === "hours" ? " h" : "");
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(Math.max(p, LEFT + half), width - half - 2), bottom + 8);
    }
    pen.save();
    pen.beginPath(); pen.rect(LEFT, TOP - 2, width - LEFT - RIGHT, bottom - TOP + 4); pen.clip();
    this.drawMarks(pen, s, bottom, colour);
    for (const curve of this.curves) this.drawBand(pen, s, curve);
    for (const curve of this.curves) this.drawLine(pen, s, curve);
    pen.restore();
    if (!this.curves.some(curve => curve.x.length)) {
      pen.textAlign = "center"; pen.textBaseline = "middle";
      pen.fillText("no values here", (LEFT + width - RIGHT) / 2, this.height / 2);
    }
    this.drawOver();
  }
  /* Give a canvas the size of its place; a new size costs more than a clear one. */
  fit(canvas) {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth, size = [Math.round(width * ratio), Math.round(this.height * ratio)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    return { width, ratio };
  }
  pen(canvas) {
    const pen = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.scale(ratio, ratio);
    return pen;
  }
  colours() {
    const style = getComputedStyle(document.documentElement);
    return name => style.getPropertyValue(name).trim();
  }
  drawPhases(pen, s, bottom, colour) {
    this.phases.forEach((phase, i) => {
      const from = Math.max(s.px(phase.from), LEFT), to = Math.min(s.px(phase.to), s.width - RIGHT);
      if (to <= from) return;
      pen.fillStyle = colour(i % 2 ? "--band1" : "--band0");
      pen.fillRect(from, TOP, to - from, bottom - TOP);
      const text = pen.measureText(phase.name).width;
      if (this.phases.length > 1 && text + 12 < to - from) {
        pen.fillStyle = colour("--soft"); pen.textAlign = "left"; pen.textBaseline = "top";
        pen.fillText(phase.name, from + 6, TOP + 4);
      }
    });
  }
  drawMarks(pen, s, bottom, colour) {
    for (const mark of this.marks) {
      const p = s.px(mark.x);
      if (!(p >= LEFT && p <= s.width - RIGHT)) continue;
      pen.strokeStyle = pen.fillStyle = colour(mark.kind === "resume" ? "--past" : "--mark");
      if (mark.y !== undefined) { // a ring around a point
        pen.lineWidth = 1.6; pen.beginPath(); pen.arc(p, Math.max(s.py(mark.y), TOP + 5), 5, 0, 7); pen.stroke(); pen.lineWidth = 1;
        continue;
      }
      pen.setLineDash([3, 3]); pen.beginPath(); pen.moveTo(p, TOP); pen.lineTo(p, bottom); pen.stroke(); pen.setLineDash([]);
      pen.beginPath(); pen.arc(p, bottom - 3, 3, 0, 7); pen.fill();
    }
  }
  drawBand(pen, s, curve) {
    const { x, low, high, first, last } = curve, end = x.length - 1;
    const several = x.length && (first[0] !== last[0] || first[end] !== last[end]);
    if (several) {
      // Columns of whole pixels: a jagged path of them costs many times as much.
      pen.fillStyle = curve.colour; pen.globalAlpha = Math.min(0.2, 0.4 / this.curves.length);
      let left = Math.round(s.px(x[0]));
      for (let i = 0; i <= end; i++) {
        const right = i < end ? Math.round((s.px(x[i]) + s.px(x[i + 1])) / 2) : Math.round(s.px(x[i])) + 1;
        const top = Math.round(s.py(high[i])), tall = Math.round(s.py(low[i])) - top;
        if (tall > 1 && right > left && right > LEFT && left < s.width) pen.fillRect(left, top, right - left, tall);
        left = right;
      }
      pen.globalAlpha = 1;
    }
    if (this.view.smooth) { pen.globalAlpha = 0.25; this.stroke(pen, s, curve, curve.mean, 1); }
    pen.globalAlpha = 1;
  }
  drawLine(pen, s, curve) {
    // A browser without a GPU draws lines of one pixel many times as fast as wide ones.
    const dense = curve.x.length * this.curves.length > s.width && !this.view.smooth;
    this.stroke(pen, s, curve, curve.line, dense ? 1 : curve.strong ? 2 : 1.6);
  }
  stroke(pen, s, { x, colour }, y, width) {
    pen.strokeStyle = pen.fillStyle = colour; pen.lineWidth = width; pen.lineJoin = "bevel"; pen.beginPath();
    let down = false, alone = [];
    for (let i = 0; i < x.length; i++) {
      if (y[i] !== y[i]) { down = false; continue; }
      const px = s.px(x[i]), py = s.py(y[i]);
      if (down) pen.lineTo(px, py); else pen.moveTo(px, py);
      if (!down && !(y[i + 1] === y[i + 1] && i + 1 < x.length)) alone.push([px, py]);
      down = true;
    }
    pen.stroke();
    for (const [px, py] of alone) { pen.beginPath(); pen.arc(px, py, 2.2, 0, 7); pen.fill(); }
  }
  drawOver() {
    this.fit(this.over);
    const pen = this.pen(this.over), colour = this.colours(), s = this.scale, bottom = this.height - BOTTOM;
    if (!s || !this.selection && this.hovered === null) return;
    pen.save();
    pen.beginPath(); pen.rect(LEFT, TOP - 2, s.width - LEFT - RIGHT, bottom - TOP + 4); pen.clip();
    this.drawSelection(pen, bottom, colour);
    if (this.hovered !== null) this.drawCrosshair(pen, s, bottom, colour);
    pen.restore();
  }
  drawSelection(pen, bottom, colour) {
    if (this.selection) {
      const [a, b] = this.selection;
      pen.fillStyle = colour("--water"); pen.globalAlpha = 0.15; pen.fillRect(Math.min(a, b), TOP, Math.abs(b - a), bottom - TOP); pen.globalAlpha = 1;
    }
  }
  drawCrosshair(pen, s, bottom, colour) {
    const p = s.px(this.hovered);
    pen.strokeStyle = colour("--soft"); pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(p, TOP); pen.lineTo(p, bottom); pen.stroke();
    for (const curve of this.curves) {
      const i = nearest(curve.x, this.hovered);
      if (i >= curve.x.length || curve.line[i] !== curve.line[i]) continue;
      pen.fillStyle = curve.colour; pen.strokeStyle = colour("--card"); pen.lineWidth = 1.5;
      pen.beginPath(); pen.arc(s.px(curve.x[i]), s.py(curve.line[i]), 3.6, 0, 7); pen.fill(); pen.stroke();
    }
  }

  /* Pointer */
  hover(x, own) {
    this.hovered = x; this.drawOver();
    this.tip.hidden = !own || x === null;
    if (this.tip.hidden) return;
    const rows = [];
    let title = "";
    for (const curve of this.curves) {
      const i = nearest(curve.x, x);
      if (i >= curve.x.length || curve.mean[i] !== curve.mean[i]) continue;
      if (curve.x[i] < this.scale.x0 || curve.x[i] > this.scale.x1) continue;
      const [a, b] = [curve.first[i], curve.last[i]];
      const steps = a === b ? `step ${a.toLocaleString("en")}` : `steps ${a.toLocaleString("en")} to ${b.toLocaleString("en")}`;
      title ||= steps;
      const row = document.createElement("p"), key = document.createElement("i"), value = document.createElement("b");
      key.style.background = curve.colour;
      value.textContent = this.format(curve.mean[i]);
      row.append(key, `${curve.label} `, value);
      if (a !== b) row.append(` ${this.format(curve.low[i])} … ${this.format(curve.high[i])}`);
      else if (title !== steps) row.append(` (${steps})`); // the nearest step that has a value of this curve
      rows.push(row);
    }
    this.tip.replaceChildren(Object.assign(document.createElement("p"), { textContent: title, className: "at" }), ...rows.slice(0, 14));
    this.tip.hidden = !rows.length;
    const p = this.scale.px(x), right = p > this.scale.width / 2;
    this.tip.style.left = right ? "auto" : `${p + 14}px`;
    this.tip.style.right = right ? `${this.scale.width - p + 14}px` : "auto";
  }
  closest(px, py) {
    let best = null;
    for (const curve of this.curves) {
      const i = nearest(curve.x, this.scale.back(px));
      if (i >= curve.x.length || curve.mean[i] !== curve.mean[i]) continue;
      const y = this.scale.py(curve.mean[i]), top = this.scale.py(curve.high[i]), base = this.scale.py(curve.low[i]);
      const apart = py < top ? top - py : py > base ? py - base : Math.min(Math.abs(py - y), 2);
      if (!best || apart < best.apart) best = { curve, i, apart };
    }
    return best;
  }
  zoomAt(px, factor) {
    const { back } = this.scale;
    const left = back(px + (LEFT - px) * factor), right = back(px + (this.scale.width - RIGHT - px) * factor);
    if (right > left) this.act.zoom(left, right, true);
  }
  pan(dx) { this.act.zoom(this.scale.back(LEFT + dx), this.scale.back(this.scale.width - RIGHT + dx), true); }
  place(event) { const box = this.canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; }

  listen() {
    const on = (name, act, options) => this.canvas.addEventListener(name, act, options);
    on("pointerdown", event => {
      if (event.button || !this.scale) return;
      const at = this.place(event);
      this.canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, { from: at, last: at, moved: false });
      this.panning = event.shiftKey || event.pointerType === "touch";
    });
    on("pointermove", event => {
      const at = this.place(event), held = this.pointers.get(event.pointerId);
      if (!this.scale) return;
      if (held && Math.abs(at[0] - held.from[0]) > CLICK) held.moved = true;
      if (this.pointers.size === 2) this.pinch(event.pointerId, at);
      else if (held && held.moved && this.panning) this.pan(held.last[0] - at[0]);
      else if (held && held.moved) { this.selection = [held.from[0], at[0]]; this.drawOver(); }
      if (held) held.last = at;
      if (!held || !held.moved) this.act.hover(at[0] < LEFT - 6 ? null : this.scale.back(at[0]), this);
    });
    const up = event => {
      const held = this.pointers.get(event.pointerId), at = this.place(event);
      this.pointers.delete(event.pointerId);
      const selection = this.selection;
      this.selection = null;
      this.drawOver();
      if (!held || event.type === "pointercancel") return;
      if (selection && Math.abs(selection[1] - selection[0]) > CLICK) {
        const [a, b] = selection.map(p => this.scale.back(Math.min(Math.max(p, LEFT), this.scale.width - RIGHT)));
        this.act.zoom(Math.min(a, b), Math.max(a, b));
      } else if (!held.moved) {
        if (event.pointerType === "touch") this.act.hover(this.scale.back(at[0]), this);
        const found = this.closest(...at);
        if (found && at[0] >= LEFT) this.act.click(found.curve, found.i, this.scale.up(at[1]));
      }
    };
    on("pointerup", up); on("pointercancel", up);
    on("pointerleave", event => { if (!this.pointers.size && event.pointerType !== "touch") this.act.hover(null, this); });
    on("wheel", event => {
      if (!this.scale) return;
      if (event.ctrlKey || event.metaKey || event.altKey) { event.preventDefault(); this.zoomAt(this.place(event)[0], Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006)); }
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); this.pan(event.deltaX || event.deltaY); }
    }, { passive: false });
    on("keydown", event => {
      if (!this.scale) return;
      const middle = this.scale.width / 2, inner = this.scale.width - LEFT - RIGHT;
      const keys = {
        ArrowLeft: () => this.pan(-inner / 8), ArrowRight: () => this.pan(inner / 8),
        "+": () => this.zoomAt(middle, 0.6), "-": () => this.zoomAt(middle, 1 / 0.6), 0: () => this.act.zoom(null, null),
        Enter: () => { const found = this.closest(LEFT + inner / 2, this.height / 2); if (found) this.act.click(found.curve, found.i, found.curve.mean[found.i]); },
      };
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });
  }
  pinch(id, at) {
    const [one, two] = [...this.pointers.entries()], moved = one[0] === id ? one[1] : two[1], other = one[0] === id ? two[1] : one[1];
    const before = Math.abs(moved.last[0] - other.last[0]), now = Math.abs(at[0] - other.last[0]);
    one[1].moved = two[1].moved = true;
    if (before > 8 && now > 8) this.zoomAt((at[0] + other.last[0]) / 2, before / now);
  }
}
