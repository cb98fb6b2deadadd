"use strict";
// The page of `offbeat report`. Data are in #data as JSON; nothing is fetched. Names reach the page as text, never as
// markup. Pure functions come first, what touches the page after them.

// ---- pure ----------------------------------------------------------------------------------------
/** Round ticks between two numbers, at most `most` + 1 of them. */
function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const raw = (high - low) / most;
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999999);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(i * step);
  return out;
}

/** A number with as many digits as a reader wants. */
function spoken(x) {
  if (!isFinite(x)) return "-";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e7 || size < 1e-4) return x.toExponential(2).replace("e+", "e");
  return String(Number(x.toPrecision(size >= 1000 ? 6 : 4)));
}

function seconds(x) {
  const units = [[4 * 86400, 86400, "days"], [7200, 3600, "h"], [300, 60, "min"], [0, 1, "s"]];
  const [, size, name] = units.find((unit) => Math.abs(x) >= unit[0]) || units[3];
  return spoken(x / size) + " " + name;
}

/** A timeline's columns as typed arrays, sorted by client and start, with where each client's spans begin. */
function unpack(line) {
  const n = line.d.length, start = new Float64Array(n), end = new Float64Array(n);
  const client = Int32Array.from(line.c), kind = Uint8Array.from(line.k);
  const version = Int32Array.from(line.v);
  let now = 0;
  for (let i = 0; i < n; i++) {
    now += line.s[i];
    start[i] = now * line.tick;
    end[i] = (now + line.d[i]) * line.tick;
  }
  const order = new Uint32Array(n);
  const first = new Uint32Array(line.rows + 1);
  for (let i = 0; i < n; i++) first[client[i] + 1]++;
  for (let r = 0; r < line.rows; r++) first[r + 1] += first[r];
  const place = first.slice();
  for (let i = 0; i < n; i++) order[place[client[i]]++] = i; // starts ascend, so they do within a client
  return { start, end, client, kind, version, order, first };
}

/** The first of a client's spans that could reach into the view: spans of a client do not overlap by much. */
function firstVisible(spans, row, from) {
  let low = spans.first[row], high = spans.first[row + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.end[spans.order[middle]] < from) low = middle + 1; else high = middle;
  }
  return Math.max(spans.first[row], low - 2);
}

/** The view after zooming by a factor around a place; never beyond the run, never deeper than a millionth of it. */
function zoomed(view, factor, at, whole) {
  const width = Math.min(whole, Math.max(whole * 1e-6, (view[1] - view[0]) * factor));
  const share = (at - view[0]) / (view[1] - view[0]);
  const from = Math.min(Math.max(0, at - share * width), whole - width);
  return [from, from + width];
}

function moved(view, by, whole) {
  const width = view[1] - view[0];
  const from = Math.min(Math.max(0, view[0] + by), whole - width);
  return [from, from + width];
}

/** Labels' heights, moved apart from the top down until they are `gap` apart. */
function apart(heights, gap) {
  const order = heights.map((h, i) => [h, i]).sort((a, b) => a[0] - b[0]);
  const out = new Array(heights.length);
  let last = -Infinity;
  for (const [h, i] of order) { last = Math.max(h, last + gap); out[i] = last; }
  return out;
}

if (typeof module !== "undefined") module.exports = { ticks, spoken, seconds, unpack, firstVisible, zoomed, moved, apart };

// ---- the page ------------------------------------------------------------------------------------
const KINDS = ["download", "compute", "unused", "wait", "upload", "lost", "away"];
const SVG = "http://www.w3.org/2000/svg";
const redraws = []; // what must be drawn anew when the theme changes

function el(name, attributes, ...inside) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  for (const child of inside) node.appendChild(child);
  return node;
}

function svg(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "text") node.textContent = value; else node.setAttribute(key, value);
  }
  if (parent) parent.appendChild(node);
  return node;
}

function dark() {
  const chosen = document.documentElement.getAttribute("data-theme");
  return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function colour(data, number) {
  const table = dark() ? data.palette.dark : data.palette.light;
  return table[number % table.length];
}

function dash(data, number) {
  const lap = Math.floor(number / data.palette.dashes.length);
  return data.palette.dashes[(number + lap) % data.palette.dashes.length].map((d) => d * 1.3).join(" ");
}

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || "#888"; }

function tip(text, event) {
  const box = document.getElementById("tip");
  box.style.display = text ? "block" : "none";
  if (!text) return;
  box.textContent = text;
  box.style.left = Math.min(event.clientX + 14, window.innerWidth - 260) + "px";
  box.style.top = event.clientY + 14 + "px";
}

function section(main, title, note) {
  const box = el("section", {}, el("h2", { text: title }));
  if (note) box.appendChild(el("p", { class: "note", text: note }));
  main.appendChild(box);
  return box;
}

function choice(label, options, changed) {
  const select = el("select", { "aria-label": label });
  for (const [value, text] of options) select.appendChild(el("option", { value, text }));
  select.addEventListener("change", () => changed(select.value));
  return el("label", { text: label + " " }, select);
}

function table(columns, rows) {
  const head = el("tr", {}, ...columns.map((text) => el("th", { text })));
  const body = rows.map((row) => el("tr", {}, ...row.map((text) => el("td", { text }))));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

/** Axes of a plot: a frame of the given ranges, with ticks that do not collide. Returns x and y as functions. */
function frame(root, box, xs, ys, xLabel, yLabel, logX, marks) {
  const inner = { left: 62, top: 12, right: box.w - (box.margin || 16), bottom: box.h - 40 };
  const span = (r) => (r[1] > r[0] ? r : [r[0] - 0.5, r[0] + 0.5]);
  xs = span(xs); ys = span(ys);
  const fx = logX ? (v) => Math.log10(Math.max(v, xs[0])) : (v) => v;
  const x = (v) => inner.left + ((fx(v) - fx(xs[0])) / (fx(xs[1]) - fx(xs[0]))) * (inner.right - inner.left);
  const y = (v) => inner.bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (inner.bottom - inner.top);
  const places = marks ? marks.map(([v]) => v) : logX ? powers(xs) : ticks(xs[0], xs[1], Math.max(2, Math.floor((inner.right - inner.left) / 90)));
  for (const v of places) {
    svg("line", { class: "grid", x1: x(v), x2: x(v), y1: inner.top, y2: inner.bottom }, root);
    svg("text", { x: x(v), y: inner.bottom + 16, "text-anchor": "middle",
      text: marks ? marks.find((mark) => mark[0] === v)[1] : spoken(v) }, root);
  }
  for (const v of ticks(ys[0], ys[1], 6)) {
    svg("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(v), y2: y(v) }, root);
    svg("text", { x: inner.left - 6, y: y(v) + 4, "text-anchor": "end", text: spoken(v) }, root);
  }
  svg("path", { class: "axis", d: `M${inner.left},${inner.top}V${inner.bottom}H${inner.right}` }, root);
  svg("text", { x: (inner.left + inner.right) / 2, y: box.h - 6, "text-anchor": "middle", text: xLabel }, root);
  svg("text", {
    x: 14, y: (inner.top + inner.bottom) / 2, "text-anchor": "middle", text: yLabel,
    transform: `rotate(-90 14 ${(inner.top + inner.bottom) / 2})`,
  }, root);
  return { x, y, inner };
}

function powers(range) {
  const out = [];
  for (let p = Math.ceil(Math.log10(range[0]) - 1e-9); p <= Math.log10(range[1]) + 1e-9; p++) out.push(Math.pow(10, p));
  return out.length > 1 ? out : [range[0], range[1]];
}

function path(xs, ys, x, y) {
  return xs.map((v, i) => (i ? "L" : "M") + x(v).toFixed(1) + "," + y(ys[i]).toFixed(1)).join("");
}

function fresh(holder, w, h, label) {
  holder.textContent = "";
  const root = svg("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": label });
  holder.appendChild(root);
  return root;
}

// ---- curves --------------------------------------------------------------------------------------
function curves(main, data) {
  const seeds = Math.max(...data.lines.map((line) => line.seeds));
  const note = seeds > 1 ? "Mean over seeds; the band is its 95 % interval (Student). " : "One seed each. ";
  const box = section(main, "Curves", note + "A line goes as far as its shortest seed. Click a name to hide it.");
  const holder = el("div", {}), keys = el("div", { class: "keys" });
  const state = { score: data.scores[0], axis: Object.keys(data.axes)[0], off: new Set() };
  const draw = () => {
    const axis = data.axes[state.axis], w = 1100, h = 440, margin = 150;
    const shown = data.lines.map((line, number) => ({ line, number, band: (line.bands[state.score] || {})[state.axis] }))
      .filter((one) => one.band && one.band.x.length && !state.off.has(one.number));
    const root = fresh(holder, w, h, state.score + " against " + axis.label);
    if (!shown.length) return;
    const all = shown.flatMap((one) => one.band.mean), xAll = shown.flatMap((one) => one.band.x.map((v) => v / axis.size));
    let low = Math.min(...all), high = Math.max(...all);
    const pad = (high - low || 1) * 0.05;
    low = low >= 0 ? Math.max(0, low - pad) : low - pad; high = high <= 1 && low >= 0 ? Math.min(1.01, high + pad) : high + pad;
    const f = frame(root, { w, h, margin }, [Math.min(...xAll), Math.max(...xAll)], [low, high], axis.label, state.score);
    const clip = (v) => Math.min(high, Math.max(low, v));
    if (state.score === "accuracy") for (const target of data.targets) {
      svg("line", { x1: f.inner.left, x2: f.inner.right, y1: f.y(clip(target)), y2: f.y(clip(target)),
        stroke: css("faint"), "stroke-dasharray": "2 4" }, root);
      svg("text", { class: "faint", x: f.inner.left + 6, y: f.y(clip(target)) - 4, text: "target " + spoken(target) }, root);
    }
    for (const { number, band } of shown) if (band.low) {
      const xs = band.x.map((v) => v / axis.size);
      const back = xs.slice().reverse(), lows = band.low.map(clip).reverse();
      svg("path", { d: path(xs, band.high.map(clip), f.x, f.y) + path(back, lows, f.x, f.y).replace("M", "L") + "Z",
        fill: colour(data, number), opacity: 0.15 }, root);
    }
    const heights = apart(shown.map((one) => f.y(one.band.mean[one.band.mean.length - 1])), 14);
    shown.forEach(({ line, number, band }, place) => {
      const xs = band.x.map((v) => v / axis.size);
      const node = svg("path", { d: path(xs, band.mean, f.x, f.y), fill: "none", stroke: colour(data, number),
        "stroke-width": 2, "stroke-dasharray": dash(data, number) }, root);
      node.addEventListener("mousemove", (event) => tip(describe(line, band, axis, event, f, xs, state.score), event));
      node.addEventListener("mouseleave", () => tip(""));
      const text = svg("text", { x: f.x(xs[xs.length - 1]) + 6, y: heights[place] + 4, text: line.label }, root);
      text.setAttribute("style", "fill:" + colour(data, number));
    });
  };
  const describe = (line, band, axis, event, f, xs, score) => {
    const svgBox = holder.firstChild.getBoundingClientRect();
    const at = ((event.clientX - svgBox.left) / svgBox.width) * 1100;
    let best = 0;
    xs.forEach((v, i) => { if (Math.abs(f.x(v) - at) < Math.abs(f.x(xs[best]) - at)) best = i; });
    const range = band.low ? ` (${spoken(band.low[best])} to ${spoken(band.high[best])})` : "";
    return `${line.label}: ${score} ${spoken(band.mean[best])}${range} at ${axis.label} ${spoken(xs[best])}`;
  };
  const axes = Object.entries(data.axes).map(([name, axis]) => [name, axis.label]);
  box.appendChild(el("div", { class: "tools" },
    choice("of", data.scores.map((name) => [name, name]), (value) => { state.score = value; draw(); }),
    choice("against", axes, (value) => { state.axis = value; draw(); })));
  const swatches = [];
  data.lines.forEach((line, number) => {
    const mark = el("span", { class: "swatch" });
    swatches.push(() => { mark.style.background = colour(data, number); });
    const key = el("span", { class: "key toggle", tabindex: "0", role: "button" }, mark,
      el("span", { text: line.label + (line.seeds > 1 ? ` (${line.seeds} seeds)` : "") }));
    const flip = () => { state.off.has(number) ? state.off.delete(number) : state.off.add(number);
      key.classList.toggle("off"); draw(); };
    key.addEventListener("click", flip);
    key.addEventListener("keydown", (event) => { if (event.key === "Enter") flip(); });
    keys.appendChild(key);
  });
  box.appendChild(keys);
  box.appendChild(holder);
  const all = () => { swatches.forEach((paint) => paint()); draw(); };
  redraws.push(all);
  all();
}

// ---- timeline ------------------------------------------------------------------------------------
function timeline(main, data) {
  if (!data.timelines.length) return;
  const box = section(main, "Who did what when",
    "A row for each client (or cluster): wheel or + and - zoom, dragging or arrows move, double click shows all. "
    + "Lines are commits. One seed of each method.");
  const canvas = el("canvas", { tabindex: "0", "aria-label": "timeline of clients" });
  const note = el("p", { class: "note" });
  const state = { number: 0, spans: null, view: [0, 1], top: 0, rows: 1, by: "number", order: [] };
  const choose = (number) => {
    const line = data.timelines[number];
    Object.assign(state, { number, spans: unpack(line), view: [0, line.end], top: 0 });
    state.rows = Math.min(line.rows, 40);
    sort();
    note.textContent = line.note;
    draw();
  };
  const sort = () => {
    const line = data.timelines[state.number];
    state.order = Array.from({ length: line.rows }, (_, i) => i);
    if (state.by === "speed" && line.pace) state.order.sort((a, b) => line.pace[a] - line.pace[b] || a - b);
  };
  const draw = () => {
    const line = data.timelines[state.number], spans = state.spans;
    const ratio = window.devicePixelRatio || 1;
    const w = Math.max(300, canvas.clientWidth || 1100), rowHeight = Math.max(4, Math.min(22, 480 / state.rows));
    const left = 54, top = 18, h = top + rowHeight * state.rows + 30;
    canvas.width = w * ratio; canvas.height = h * ratio; canvas.style.height = h + "px";
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = css("ground"); pen.fillRect(0, 0, w, h);
    const [from, to] = state.view, x = (t) => left + ((t - from) / (to - from)) * (w - left - 8);
    const shades = KINDS.map(css);
    let drawn = 0;
    pen.save(); pen.beginPath(); pen.rect(left, 0, w - left - 8, h); pen.clip();
    for (let place = 0; place < state.rows && place + state.top < line.rows; place++) {
      const row = state.order[place + state.top], y = top + place * rowHeight;
      if (line.overview && to > line.until) overview(pen, line, row, x, y, rowHeight, from, to);
      let last = -1, lastKind = -1;
      for (let i = firstVisible(spans, row, from); i < spans.first[row + 1]; i++) {
        const s = spans.order[i];
        if (spans.start[s] > to) break;
        if (spans.end[s] < from) continue;
        const a = x(spans.start[s]), b = Math.max(a + 0.6, x(spans.end[s]));
        if (b - last < 0.5 && spans.kind[s] === lastKind) continue; // less than half a pixel more of the same
        pen.fillStyle = shades[spans.kind[s]];
        pen.fillRect(a, y + 1, b - a, rowHeight - 2);
        if (b - a > 26 && rowHeight > 11 && (spans.kind[s] === 1 || spans.kind[s] === 2)) {
          pen.fillStyle = dark() ? "#111" : "#fff";
          pen.font = "10px system-ui"; pen.textAlign = "center";
          pen.fillText("v" + spans.version[s], (a + b) / 2, y + rowHeight / 2 + 3.5);
        }
        last = b; lastKind = spans.kind[s]; drawn++;
      }
    }
    pen.strokeStyle = css("commit"); pen.lineWidth = 1;
    const visible = line.commits.filter((t) => t >= from && t <= to);
    if (visible.length < (w - left) / 3) for (const t of visible) {
      pen.beginPath(); pen.moveTo(x(t), top - 6); pen.lineTo(x(t), h - 26); pen.stroke();
    }
    pen.restore();
    pen.fillStyle = css("ink"); pen.font = "11px system-ui"; pen.textAlign = "right";
    const every = Math.max(1, Math.ceil(13 / rowHeight));
    for (let place = 0; place < state.rows && place + state.top < line.rows; place += every) {
      pen.fillText(line.unit + " " + state.order[place + state.top], left - 5, top + place * rowHeight + rowHeight / 2 + 4);
    }
    pen.textAlign = "center";
    const size = [[4 * 86400, 86400, "days"], [7200, 3600, "h"], [300, 60, "min"], [0, 1, "s"]].find((u) => to >= u[0]);
    for (const t of ticks(from / size[1], to / size[1], Math.floor(w / 110))) {
      pen.fillText(spoken(t) + " " + size[2], x(t * size[1]), h - 10);
    }
    pen.textAlign = "left";
    pen.fillText(visible.length + " commits in view", left, 11);
    canvas.dataset.drawn = drawn;
    canvas.dataset.view = from + " " + to;
  };
  const overview = (pen, line, row, x, y, height, from, to) => {
    const group = Math.floor((row * line.overview.rows) / line.rows), bins = line.overview.bins, each = line.end / bins;
    for (let bin = Math.max(0, Math.floor(from / each)); bin < bins && bin * each < to; bin++) {
      const a = Math.max(bin * each, line.until), b = (bin + 1) * each;
      if (b <= a) continue;
      const busy = parseInt(line.overview.busy[group * bins + bin], 10) / 9;
      pen.globalAlpha = 0.12 + 0.6 * busy;
      pen.fillStyle = css("compute");
      pen.fillRect(x(a), y + 1, Math.max(0.6, x(b) - x(a)), height - 2);
    }
    pen.globalAlpha = 1;
  };
  const timeAt = (event) => {
    const bounds = canvas.getBoundingClientRect();
    return state.view[0] + ((event.clientX - bounds.left - 54) / (bounds.width - 62)) * (state.view[1] - state.view[0]);
  };
  const whole = () => data.timelines[state.number].end;
  const scroll = (by) => {
    const line = data.timelines[state.number];
    state.top = Math.max(0, Math.min(line.rows - state.rows, state.top + by));
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey) scroll(Math.sign(event.deltaY) * 3);
    else state.view = zoomed(state.view, Math.pow(1.0015, event.deltaY), timeAt(event), whole());
    draw();
  }, { passive: false });
  let grabbed = null;
  canvas.addEventListener("pointerdown", (event) => { grabbed = { at: timeAt(event), y: event.clientY, top: state.top };
    canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { grabbed = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (grabbed) {
      state.view = moved(state.view, grabbed.at - timeAt(event), whole());
      state.top = grabbed.top; scroll(Math.round((grabbed.y - event.clientY) / Math.max(4, Math.min(22, 480 / state.rows))));
      draw();
    } else tip(under(event), event);
  });
  canvas.addEventListener("pointerleave", () => tip(""));
  canvas.addEventListener("dblclick", () => { state.view = [0, whole()]; state.top = 0; draw(); });
  canvas.addEventListener("keydown", (event) => {
    const middle = (state.view[0] + state.view[1]) / 2, width = state.view[1] - state.view[0];
    if (event.key === "+" || event.key === "=") state.view = zoomed(state.view, 0.5, middle, whole());
    else if (event.key === "-") state.view = zoomed(state.view, 2, middle, whole());
    else if (event.key === "ArrowLeft") state.view = moved(state.view, -width / 5, whole());
    else if (event.key === "ArrowRight") state.view = moved(state.view, width / 5, whole());
    else if (event.key === "ArrowUp") scroll(-3);
    else if (event.key === "ArrowDown") scroll(3);
    else if (event.key === "0") { state.view = [0, whole()]; state.top = 0; } else return;
    event.preventDefault();
    draw();
  });
  const under = (event) => {
    const line = data.timelines[state.number], spans = state.spans, bounds = canvas.getBoundingClientRect();
    const place = Math.floor((event.clientY - bounds.top - 18) / Math.max(4, Math.min(22, 480 / state.rows)));
    if (place < 0 || place >= state.rows || place + state.top >= line.rows) return "";
    const row = state.order[place + state.top], now = timeAt(event);
    for (let i = firstVisible(spans, row, now); i < spans.first[row + 1]; i++) {
      const s = spans.order[i];
      if (spans.start[s] > now) break;
      if (spans.end[s] >= now) {
        const from = spans.version[s] >= 0 ? ` from version ${spans.version[s]}` : "";
        return `${line.unit} ${row}: ${data.means[KINDS[spans.kind[s]]]}${from}, `
          + `${seconds(spans.start[s])} to ${seconds(spans.end[s])}`;
      }
    }
    return `${line.unit} ${row}: idle at ${seconds(now)}`;
  };
  const tools = el("div", { class: "tools" },
    choice("run", data.timelines.map((line, i) => [String(i), line.label]), (value) => choose(Number(value))),
    choice("rows by", [["number", "number"], ["speed", "speed"]], (value) => { state.by = value; sort(); draw(); }),
    el("button", { type: "button", text: "closer", onclick: () => { state.view = zoomed(state.view, 0.5, (state.view[0] + state.view[1]) / 2, whole()); draw(); } }),
    el("button", { type: "button", text: "farther", onclick: () => { state.view = zoomed(state.view, 2, (state.view[0] + state.view[1]) / 2, whole()); draw(); } }),
    el("button", { type: "button", text: "more rows", onclick: () => { state.rows = Math.min(data.timelines[state.number].rows, state.rows * 2, 120); scroll(0); draw(); } }),
    el("button", { type: "button", text: "fewer rows", onclick: () => { state.rows = Math.max(4, Math.floor(state.rows / 2)); draw(); } }));
  const keys = el("div", { class: "keys" });
  KINDS.forEach((kind) => keys.appendChild(el("span", { class: "key" },
    el("span", { class: "swatch", style: "background:var(--" + kind + ")" }), el("span", { text: data.means[kind] }))));
  keys.appendChild(el("span", { class: "key" }, el("span", { class: "swatch", style: "background:var(--commit)" }), el("span", { text: "commit" })));
  for (const part of [tools, keys, canvas, note]) box.appendChild(part);
  redraws.push(draw);
  window.addEventListener("resize", draw);
  choose(0);
}

// ---- staleness, participation, fleet, clusters ---------------------------------------------------
function staleness(main, data) {
  const box = section(main, "Staleness", "How many versions an update is behind when it is committed; share of the updates.");
  const holder = el("div", {});
  box.appendChild(holder);
  const draw = () => {
    const w = 1100, h = 300, root = fresh(holder, w, h, "staleness");
    const most = Math.max(1, ...data.lines.map((line) => line.staleness.edge)), at = (k) => k + 1; // on a log scale
    const marks = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].filter((k) => k <= most)
      .map((k) => [at(k), String(k)]);
    const f = frame(root, { w, h, margin: 200 }, [1, at(most)], [0, 1], "versions behind", "share at most so stale", true, marks);
    data.lines.forEach((line, number) => {
      const xs = line.staleness.at, ys = line.staleness.share;
      if (!xs.length) return;
      let d = "M" + f.x(at(xs[0])) + "," + f.y(0);
      xs.forEach((v, i) => { d += `V${f.y(ys[i]).toFixed(1)}H${f.x(at(i + 1 < xs.length ? xs[i + 1] : most)).toFixed(1)}`; });
      svg("path", { d, fill: "none", stroke: colour(data, number), "stroke-width": 2, "stroke-dasharray": dash(data, number) }, root);
      const text = svg("text", { x: f.inner.right + 8, y: 24 + 15 * number, text: line.label + ": mean " + spoken(line.staleness.mean) }, root);
      text.setAttribute("style", "fill:" + colour(data, number));
    });
  };
  redraws.push(draw);
  draw();
}

function participation(main, data) {
  const box = section(main, "Participation and fairness",
    "Left: the share of all updates that the least heard clients make; the straight line is equality. Right: what each "
    + "client was heard against its seconds per local step, where the fleet is known.");
  box.appendChild(table(data.fairness.columns, data.fairness.rows));
  const left = el("div", {}), right = el("div", {});
  box.appendChild(el("div", { class: "halves" }, left, right));
  const draw = () => {
    const w = 540, h = 330;
    let root = fresh(left, w, h, "Lorenz curves of participation");
    let f = frame(root, { w, h }, [0, 1], [0, 1], "share of the clients, least heard first", "share of the updates");
    svg("line", { class: "axis", x1: f.x(0), y1: f.y(0), x2: f.x(1), y2: f.y(1), "stroke-dasharray": "2 4" }, root);
    data.lines.forEach((line, number) => {
      svg("path", { d: path(line.lorenz[0], line.lorenz[1], f.x, f.y), fill: "none", stroke: colour(data, number),
        "stroke-width": 2, "stroke-dasharray": dash(data, number) }, root);
    });
    const paced = data.lines.map((line, number) => [line.pairs, number]).filter(([pairs]) => pairs && pairs[0].length);
    right.textContent = "";
    if (!paced.length) { right.appendChild(el("p", { class: "note", text: "The fleet cannot be built again here, so speeds are not known." })); return; }
    root = fresh(right, w, h, "updates against speed");
    const xs = paced.flatMap(([pairs]) => pairs[0]), ys = paced.flatMap(([pairs]) => pairs[1]);
    const low = Math.min(...xs), high = Math.max(...xs), log = low > 0 && high > 8 * low;
    f = frame(root, { w, h }, [low, high], [0, Math.max(1, ...ys)], "seconds per local step", "updates of a client", log);
    for (const [pairs, number] of paced) pairs[0].forEach((v, i) => {
      svg("circle", { cx: f.x(v).toFixed(1), cy: f.y(pairs[1][i]).toFixed(1), r: 2.4, fill: colour(data, number), opacity: 0.55 }, root);
    });
  };
  redraws.push(draw);
  draw();
}

function fleets(main, data) {
  if (!data.fleets.length) return;
  const box = section(main, "Fleet");
  for (const fleet of data.fleets) {
    box.appendChild(el("p", { text: fleet.said }));
    for (const text of fleet.notes) box.appendChild(el("p", { class: "note", text }));
    const left = el("div", {}), right = el("div", {});
    box.appendChild(el("div", { class: "halves" }, left, right));
    const draw = () => {
      steps(left, [["step", fleet.steps]], "seconds per local step", data);
      steps(right, [["down", fleet.down], ["up", fleet.up]], "link (Mbit/s)", data);
    };
    redraws.push(draw);
    draw();
  }
}

/** How many of the clients have at most so much. */
function steps(holder, series, label, data) {
  const known = series.filter(([, values]) => values.length);
  if (!known.length) { holder.textContent = label + ": takes no time"; return; }
  const w = 540, h = 300, root = fresh(holder, w, h, label), all = known.flatMap(([, values]) => values);
  const low = Math.min(...all), high = Math.max(...all), log = low > 0 && high > 8 * low;
  const f = frame(root, { w, h }, [log ? low : 0, high], [0, 1], label, "share of the clients", log);
  known.forEach(([name, values], number) => {
    const ys = values.map((_, i) => (i + 1) / values.length);
    svg("path", { d: path([values[0], ...values], [0, ...ys], f.x, f.y), fill: "none", stroke: colour(data, number),
      "stroke-width": 2, "stroke-dasharray": dash(data, number) }, root);
    if (known.length > 1) svg("text", { x: f.inner.right - 60, y: f.inner.bottom - 12 - 16 * number, text: (number ? "- - " : "\u2014 ") + name,
      style: "fill:" + colour(data, number) }, root);
  });
}

function clusters(main, data) {
  if (!data.clusters.length) return;
  const box = section(main, "Clusters", "Devices that exchange models; darker ones take longer for a step. Clusters alike are drawn once.");
  const grid = el("div", { class: "halves" });
  box.appendChild(grid);
  for (const one of data.clusters) {
    const holder = el("div", {});
    grid.appendChild(el("div", {}, el("p", { class: "note", text: one.title }), holder));
    const draw = () => {
      const w = 440, h = 330, root = fresh(holder, w, h, one.title);
      const x = (v) => w / 2 + v * (h / 2 - 24), y = (v) => h / 2 - v * (h / 2 - 24);
      for (const [i, j, weight] of one.edges) svg("line", { x1: x(one.nodes[i][0]), y1: y(one.nodes[i][1]), x2: x(one.nodes[j][0]),
        y2: y(one.nodes[j][1]), stroke: css("download"), "stroke-width": 0.8 + 3 * weight }, root);
      one.nodes.forEach(([a, b, pace, name]) => {
        const node = svg("circle", { cx: x(a), cy: y(b), r: one.nodes.length > 60 ? 4 : 10, fill: css("upload"),
          "fill-opacity": 0.15 + 0.85 * pace, stroke: css("ink"), "stroke-width": 0.8 }, root);
        svg("title", { text: "device " + name }, node);
        if (one.nodes.length <= 60) svg("text", { x: x(a), y: y(b) + 4, "text-anchor": "middle", text: String(name) }, root);
      });
    };
    redraws.push(draw);
    draw();
  }
}

function configs(main, data) {
  const box = section(main, "Config and command", "A run with the same config on the same machine has the same bits.");
  for (const run of data.runs) {
    box.appendChild(el("details", {}, el("summary", { text: run.label + ", seed " + run.seed + ": " + run.ended }),
      el("pre", { text: run.command }), el("pre", { text: run.config }), el("p", { class: "note", text: run.environment })));
  }
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  document.body.appendChild(el("div", { id: "tip" }));
  document.getElementById("lead").textContent = data.lead;
  const target = section(main, "Time to target", data.table.note);
  target.appendChild(table(data.table.columns, data.table.rows));
  for (const part of [curves, timeline, staleness, participation, fleets, clusters, configs]) part(main, data);
  const button = document.getElementById("theme"), themes = ["auto", "light", "dark"];
  const apply = (theme) => {
    if (theme === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", theme);
    button.textContent = "theme: " + theme;
    redraws.forEach((draw) => draw());
  };
  let theme = "auto";
  button.addEventListener("click", () => { theme = themes[(themes.indexOf(theme) + 1) % 3]; apply(theme); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((draw) => draw()));
  document.documentElement.setAttribute("data-ready", "1");
}

if (typeof document !== "undefined") start();
