"use strict";
// The arithmetic of the page, without the DOM, so that tests can load it.

const SCALED = new Set(["gradient", "weight gradient"]); // the kinds that a loss scale moves
const STEPS = 12, FAINT = 1e-5, STRONG = 0.3; // number of colors; fractions of the first and the last
const LOWEST = -72, HIGHEST = 40; // exponents; the outermost cells include all beyond
const FOLD = 12; // empty octaves

// The effect of float16 on a row at the scale 2**log2Scale, as the report computed it.
function effectOf(row, log2Scale, data) {
  const moved = SCALED.has(row.kind), i = moved ? log2Scale - data.slider[0] : 0;
  const verdict = Object.keys(data.rules.levels)[row.verdicts[i]];
  return { verdict, lost: row.lost[i] ?? 0, log2Scale: moved ? log2Scale : 0 };
}

// The fractions of the nonzero elements that become zero, subnormal and infinite.
function fractionsOf(row, log2Scale, rules) {
  const { left, normal, right } = windowAt(log2Scale, rules), sums = { zero: 0, subnormal: 0, infinite: 0, regular: 0 };
  row.counts.forEach((count, i) => {
    const e = row.first + i;
    sums[e < left ? "zero" : e < normal ? "subnormal" : e < right ? "regular" : "infinite"] += count;
  });
  const number = row.counts.reduce((sum, count) => sum + count, 0) || 1;
  return { zero: sums.zero / number, subnormal: sums.subnormal / number, infinite: sums.infinite / number };
}

function isProblem(verdict, rules) { return ["bad", "warn"].includes(rules.levels[verdict]); }

// Number of rows by verdict, in the order of severity.
function countVerdicts(rows, log2Scale, data) {
  const counts = Object.fromEntries(Object.keys(data.rules.levels).map(verdict => [verdict, 0]));
  for (const row of rows) counts[effectOf(row, log2Scale, data).verdict] += 1;
  return counts;
}

// The exponents where float16's window at a scale begins, becomes normal, and ends (exclusive).
function windowAt(log2Scale, rules) {
  return { left: rules.smallest - 1 - log2Scale, normal: rules.smallest_normal - log2Scale, right: rules.top + 1 - log2Scale };
}

// The exponents [low, high) that a panel shows: those of the windows at these scales, and those of all rows up to a gap
// of FOLD empty octaves. What lies behind such a gap is counted in the outermost cell.
function axisOf(rows, log2Scales, rules) {
  const windows = log2Scales.map(log2Scale => windowAt(log2Scale, rules));
  let low = Math.min(...windows.map(w => w.left)), high = Math.max(...windows.map(w => w.right));
  const used = new Set(rows.flatMap(row => row.counts.map((count, i) =>
    count ? Math.min(Math.max(row.first + i, LOWEST), HIGHEST - 1) : null).filter(e => e !== null)));
  const ascending = [...used].sort((a, b) => a - b);
  for (const e of [...ascending].reverse()) if (e < low && low - e <= FOLD) low = e;
  for (const e of ascending) if (e >= high && e - high < FOLD) high = e + 1;
  return { low: low - 2, high: high + 2 };
}

// Counts of a row by the cells of an axis.
function cellsOf(row, axis) {
  const cells = new Array(axis.high - axis.low).fill(0);
  row.counts.forEach((count, i) => {
    cells[Math.min(Math.max(row.first + i - axis.low, 0), cells.length - 1)] += count;
  });
  return cells;
}

// The color of a fraction on a log scale; -1 for none.
function colorOf(fraction) {
  if (!(fraction > 0)) return -1;
  const t = Math.log(fraction / FAINT) / Math.log(STRONG / FAINT);
  return Math.min(Math.max(Math.floor(t * STEPS), 0), STEPS - 1);
}

// Lists of rows side by side by their names, in the order of the first list; [[row or null of every list], ...].
function align(lists) {
  const lines = [], places = new Map();
  lists.forEach((rows, which) => {
    const times = new Map();
    let after = -1;
    for (const row of rows) {
      // A name that comes twice is two lines.
      const time = times.get(row.name) || 0, key = JSON.stringify([row.name, time]);
      times.set(row.name, time + 1);
      let line = places.get(key);
      if (!line) {
        line = { name: row.name, rows: lists.map(() => null) };
        places.set(key, line);
        lines.splice(after + 1, 0, line);
      }
      line.rows[which] = row;
      after = lines.indexOf(line);
    }
  });
  return lines;
}

function power(exponent) {
  const digits = [...String(exponent)].map(c => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);
  return "2" + digits.join("");
}

function percent(fraction) {
  if (fraction === null || fraction === undefined || !Number.isFinite(fraction)) return "not finite";
  if (!fraction) return "0 %";
  const x = fraction * 100;
  if (x < 0.01) return "<0.01 %";
  if (fraction < 1 && x > 99.9) return ">99.9 %";
  return `${x >= 100 ? "100" : x.toFixed(x < 1 ? 2 : 1)} %`;
}

// A loss scale in full: 131,072 or 1/8.
function plain(log2Scale) {
  const grouped = (2 ** Math.abs(log2Scale)).toLocaleString("en-US");
  return log2Scale < 0 ? `1/${grouped}` : grouped;
}

if (typeof module !== "undefined")
  module.exports = { effectOf, fractionsOf, isProblem, countVerdicts, windowAt, axisOf, cellsOf, colorOf, align, power, percent, plain };
// The view: tables and controls, then the heat map.

const $ = id => document.getElementById(id);
const NAMES = {
  "activation": "activations", "gradient": "gradients of activations", "parameter": "parameters",
  "weight gradient": "weight gradients",
};
const SIGNS = { bad: "✕", warn: "!", good: "✓", none: "·" };
const view = { data: null, log2Scale: 0, present: 0, kinds: new Set(), words: "", problems: false };

// An element; texts are never read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(element.style, value);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element[key] = value;
  }
  element.append(...children.filter(child => child !== null));
  return element;
}

function tableOf(heads, lines, nameColumn = -1) {
  const row = (tag, values) => make("tr", {}, ...values.map((value, i) =>
    make(tag, { className: i === nameColumn ? "name" : "" }, value)));
  return make("table", {}, make("thead", {}, row("th", heads)),
    make("tbody", {}, ...lines.map(line => row("td", line))));
}

function scaleText(log2Scale) { return log2Scale === null || log2Scale === undefined ? "none" : `${power(log2Scale)} = ${plain(log2Scale)}`; }

function showFacts(data) {
  const limit = data.limited_by;
  const limited = limit ? make("span", {}, ` (limited by the ${limit.kind} `, make("code", {}, limit.name), ")") : null;
  const facts = [
    ["now", [data.present_log2_scale === null ? "none in use" : scaleText(data.present_log2_scale)]],
    ["recommended", [make("b", { className: "good" }, scaleText(data.recommended_log2_scale))]],
    ["largest safe", [scaleText(data.max_safe_log2_scale), limited]],
    ["enough", [scaleText(data.min_sufficient_log2_scale)]],
  ];
  const rows = facts.map(([name, values]) =>
    make("tr", {}, make("th", {}, name), make("td", {}, ...values.filter(value => value !== null))));
  const boxes = [make("div", { style: { maxWidth: "24rem" } }, make("h2", {}, "loss scale"),
    make("table", { className: "facts" }, make("tbody", {}, ...rows)),
    data.keep_float32.length ? keepBox(data) : null)];
  if (data.probes.length > 1) {
    const lines = data.probes.map(p => [String(p.step), ...["min_sufficient", "recommended", "max_safe"].map(key =>
      p[`${key}_log2_scale`] === null ? "–" : power(p[`${key}_log2_scale`]))]);
    boxes.push(make("div", {}, make("h2", {}, "over the steps"),
      tableOf(["step", "enough", "recommended", "largest safe"], lines)));
  }
  if (data.comparison.length) {
    const lines = data.comparison.map(c =>
      [c.preset, power(c.log2_scale), percent(c.median), percent(c.worst), c.worst_name || ""]);
    boxes.push(make("div", {}, make("h2", {}, "error of weight gradients against float32"),
      tableOf(["preset", "scale", "median", "worst", "worst in"], lines, 4),
      make("p", { className: "soft" }, data.usual_errors)));
  }
  $("facts").append(...boxes);
}

function keepBox(data) {
  const names = data.keep_float32;
  const list = make("pre", { tabIndex: 0 }, data.keep_float32_pattern || names.join(" "));
  const button = make("button", { type: "button", onclick: copy }, "copy");
  return make("div", { className: "keep" }, make("h2", {}, `keep in float32: ${names.length} `, button), list);

  async function copy() {
    // Selected as well, for browsers that let no file write to the clipboard.
    getSelection().selectAllChildren(list);
    try {
      await navigator.clipboard.writeText(list.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = "selected";
    }
  }
}

function showLegend() {
  const strip = make("span", { className: "strip" }, make("b", {}, "fraction of the tensor in an octave: 10⁻⁵"));
  for (let i = 0; i < STEPS; i++) strip.append(make("i", { style: { background: `var(--c${i})` } }));
  strip.append(make("b", {}, "0.3"));
  const key = (name, text) => make("span", {}, make("i", { className: name }), text);
  $("legend").append(strip, key("box now", "float16 now"), key("box recommended", "recommended"),
    key("zero", "becomes zero"), key("fewer", "subnormal"), key("over", "overflows"),
    make("span", {}, "(the first and the last cell: all beyond; bfloat16: a window over everything)"));
}

function showMarks(data) {
  const [first, last] = data.slider, inside = log2Scale => Math.min(Math.max(log2Scale, first), last);
  const place = log2Scale => `${(inside(log2Scale) - first) / (last - first) * 100}%`;
  const marks = $("marks"), { min_sufficient_log2_scale: enough, max_safe_log2_scale: largest } = data;
  if (enough !== null && largest !== null && enough <= largest)
    marks.append(make("div", { style: { left: place(enough), right: `calc(100% - ${place(largest)})` } }));
  for (const [name, log2Scale] of [["now", view.present], ["recommended", data.recommended_log2_scale]])
    marks.append(make("i", { style: { left: place(log2Scale), background: `var(--${name})` } }));
  const jumps = [["now", "now", view.present], ["recommended", "recommended", data.recommended_log2_scale]];
  if (largest !== null) jumps.push(["largest", "largest safe", largest]);
  $("jumps").append(...jumps.map(([name, text, log2Scale]) => make("button",
    { type: "button", className: name, onclick: () => setLog2Scale(log2Scale) }, `${text} ${power(log2Scale)}`)));
}

function showKinds(data) {
  for (const kind of Object.keys(NAMES)) {
    const count = data.rows.filter(row => row.kind === kind).length;
    if (!count) continue;
    const box = make("input", { type: "checkbox", value: kind, checked: view.kinds.has(kind) });
    box.addEventListener("input", () => {
      if (box.checked) view.kinds.add(kind); else view.kinds.delete(kind);
      drawMaps();
    });
    $("kinds").append(make("label", {}, box, ` ${NAMES[kind]} `, make("span", { className: "soft" }, String(count)),
      make("span", { className: "trouble" })));
  }
}

// The counts of verdicts, now and at the slider, of what the scale moves and float32 does not keep; and the problems of
// every kind.
function showCounts() {
  const { rows, rules } = view.data, scaled = rows.filter(row => SCALED.has(row.kind));
  const moved = scaled.filter(row => !row.keep), kept = scaled.length - moved.length;
  const now = countVerdicts(moved, view.present, view.data), then = countVerdicts(moved, view.log2Scale, view.data);
  const parts = Object.keys(rules.levels).filter(verdict => now[verdict] || then[verdict]).map(verdict => {
    const level = rules.levels[verdict], change = now[verdict] === then[verdict] ? "" : `${now[verdict]} → `;
    return make("span", { className: level }, `${SIGNS[level]} ${verdict} `, change,
      make("b", {}, String(then[verdict])));
  });
  $("counts").replaceChildren(
    make("span", { className: "soft" }, `${moved.length} gradients, now → at ${power(view.log2Scale)}:`), ...parts,
    make("span", { className: "soft" }, kept ? `${kept} to keep in float32` : ""));
  for (const label of $("kinds").children) {
    const kind = label.firstChild.value, counts = countVerdicts(rows.filter(row => row.kind === kind), view.log2Scale, view.data);
    const troubles = Object.keys(counts).filter(verdict => isProblem(verdict, rules)).reduce((sum, verdict) => sum + counts[verdict], 0);
    label.lastChild.textContent = troubles ? ` ! ${troubles}` : "";
    label.lastChild.className = "trouble warn";
  }
}

function setLog2Scale(log2Scale) {
  if (!Number.isFinite(log2Scale)) return;
  const [first, last] = view.data.slider;
  view.log2Scale = Math.min(Math.max(Math.round(log2Scale), first), last);
  $("slider").value = view.log2Scale;
  if (Number($("log2-scale").value) !== view.log2Scale || !$("log2-scale").value) $("log2-scale").value = view.log2Scale;
  $("value").textContent = `= ${plain(view.log2Scale)}`;
  showCounts();
  updateMaps();
}

function listen() {
  for (const input of [$("slider"), $("log2-scale")]) [input.min, input.max] = view.data.slider;
  $("slider").addEventListener("input", event => setLog2Scale(event.target.valueAsNumber));
  $("log2-scale").addEventListener("input", event => setLog2Scale(event.target.valueAsNumber));
  $("words").addEventListener("input", event => { view.words = event.target.value.toLowerCase(); updateMaps(); });
  $("problems").addEventListener("input", event => { view.problems = event.target.checked; updateMaps(); });
  document.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.target.closest("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    setLog2Scale(view.log2Scale + step);
  });
  // The head of the map sticks below the bar, however many lines the bar has.
  new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${$("bar").offsetHeight}px`))
    .observe($("bar"));
  let width = $("maps").clientWidth;
  new ResizeObserver(() => {
    if ($("maps").clientWidth !== width) { width = $("maps").clientWidth; drawMaps(); }
  }).observe($("maps"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMaps);
}

function start() {
  const data = view.data = JSON.parse($("data").textContent);
  view.present = data.present_log2_scale ?? 0;
  const has = kind => data.rows.some(row => row.kind === kind);
  view.kinds = new Set(["activation", "gradient"].filter(has));
  if (!view.kinds.size) view.kinds = new Set(Object.keys(NAMES).filter(has));
  $("notes").append(...data.notes.map(note => make("li", {}, note)));
  showFacts(data);
  showKinds(data);
  showLegend();
  showMarks(data);
  listen();
  drawMaps();
  setLog2Scale(data.recommended_log2_scale);
}
// The heat map: tables whose rows are layers; float16's windows lie over them, tints below. The verdict comes before the
// heat map, so that a narrow screen shows it.

const GROUPS = [["activation", "gradient"], ["parameter", "weight gradient"]]; // which share rows
const COLUMNS = {
  fixed: [["zero", 58], ["lost", 58], ["verdict", 106]],
  scaled: [["zero", 58], ["lost now", 60], ["lost at slider", 60], ["verdict now → at slider", 158]],
};
const NARROW = 3.25, WIDE = 12; // pixels of an octave: below, panels are stacked; never more
let maps = [];

function panelsOf() {
  const { data, present } = view, all = kind => data.rows.filter(row => row.kind === kind);
  return GROUPS.map(kinds => kinds.filter(kind => view.kinds.has(kind)).map(kind => {
    const rows = all(kind), scaled = SCALED.has(kind);
    const axis = axisOf(rows, scaled ? [present, data.recommended_log2_scale] : [0], data.rules);
    const columns = COLUMNS[scaled ? "scaled" : "fixed"];
    return { kind, rows, scaled, axis, columns, text: columns.reduce((sum, [, width]) => sum + width, 0) };
  }).filter(panel => panel.rows.length)).filter(group => group.length);
}

// The pixels of an octave where the panels stand side by side.
function octave(panels, names, room) {
  const text = panels.reduce((sum, panel) => sum + panel.text, names);
  const fitting = (room - text) / panels.reduce((sum, { axis }) => sum + axis.high - axis.low, 0);
  return Math.min(Math.floor(fitting * 4) / 4, WIDE);
}

// The width of the names.
function namesOf(panels, room) {
  const longest = Math.max(...panels.flatMap(panel => panel.rows.map(row => row.name.length)));
  return Math.min(Math.max(longest * 7.3 + 12, 90), Math.max(room * (panels.length > 1 ? 0.19 : 0.27), 120));
}

function drawMaps() {
  const room = $("maps").clientWidth;
  const fit = panels => panels.length === 1 || octave(panels, namesOf(panels, room), room) >= NARROW;
  // Stacked, what the scale moves comes first.
  const groups = panelsOf().flatMap(panels => fit(panels) ? [panels] : [...panels].reverse().map(panel => [panel]));
  const style = getComputedStyle(document.documentElement);
  const colors = Array.from({ length: STEPS }, (_, i) => style.getPropertyValue(`--c${i}`).trim());
  maps = groups.map(panels => {
    const names = namesOf(panels, room);
    return buildMap(panels, names, octave(panels, names, room), colors);
  });
  $("maps").replaceChildren(...maps.map(map => map.element));
  if (!maps.length) $("maps").append(make("p", { className: "soft" }, "no panel is chosen"));
  updateMaps();
}

function buildMap(panels, names, fitting, colors) {
  const pixels = Math.max(fitting, 2), columns = [names];
  let left = names;
  const parts = [], heads = [make("th", { scope: "col", className: "names" }, GROUPS[0].includes(panels[0].kind) ? "layer" : "parameter")];
  for (const panel of panels) {
    const width = (panel.axis.high - panel.axis.low) * pixels, sizes = panel.columns.map(([, size]) => size);
    const verdict = sizes.pop(), place = { left: `${left + verdict}px`, width: `${width}px` };
    Object.assign(panel, {
      pixels, under: make("div", { className: "layer below", style: place }), over: make("div", { className: "layer above", style: place }),
      head: make("div", { className: "panel" }), verdict,
    });
    parts.push(panel.under, panel.over);
    columns.push(verdict, width, ...sizes);
    const titles = panel.columns.map(([title]) => make("th", { scope: "col" }, ...broken(title)));
    titles[titles.length - 1].className = "verdict";
    heads.push(titles.pop(), make("th", { className: "heat", scope: "col" }, panel.head), ...titles);
    left += width + panel.text;
  }
  const lines = align(panels.map(panel => panel.rows)).map(line => buildLine(line, panels, colors));
  const table = make("table", { style: { width: `${left}px` } },
    make("colgroup", {}, ...columns.map(width => make("col", { style: { width: `${width}px` } }))),
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines.map(line => line.element)));
  const element = make("div", { className: fitting < 2 ? "map wide" : "map" }, ...parts, table);
  element.addEventListener("mousemove", event => hover(event, lines));
  element.addEventListener("mouseleave", hideTip);
  element.addEventListener("focusin", event => focusTip(event.target, lines));
  element.addEventListener("focusout", hideTip);
  element.addEventListener("keydown", walk);
  return { element, panels, lines };
}

// A title of a column in two lines.
function broken(title) {
  const [first, ...rest] = title.split(/ (?=now|at)/);
  return rest.length ? [first, make("br"), rest.join(" ")] : [first];
}

function buildLine(line, panels, colors) {
  const parts = line.name.split(/(?<=\/)/).flatMap(part => [part, make("wbr")]);
  const name = make("div", { className: "name" }, ...parts);
  const element = make("tr", { tabIndex: -1 }, make("th", { scope: "row" }, name)), cells = [];
  if (line.rows.some(row => row && row.keep)) {
    element.firstChild.append(make("b", { className: "keep-mark", title: "keep in float32" }, " f32"));
  }
  line.rows.forEach((row, i) => {
    const panel = panels[i];
    if (!row) {
      element.append(make("td", { colSpan: panel.columns.length + 1 }));
      return;
    }
    const now = effectOf(row, view.present, view.data), heat = canvasOf(row, panel, colors);
    const texts = panel.columns.map(([title]) => make("td", { className: title.startsWith("verdict") ? "verdict" : "" }));
    texts[0].textContent = percent(row.size ? row.zeros / row.size : 0);
    setLost(texts[1], now);
    element.append(texts[texts.length - 1], make("td", {}, heat), ...texts.slice(0, -1));
    cells.push({ row, panel, now, heat, texts });
  });
  return { name: line.name, block: line.name.split("/")[0], lower: line.name.toLowerCase(), element, cells };
}

// One pixel an octave, widened by the style: crisp at every size.
function canvasOf(row, panel, colors) {
  const cells = cellsOf(row, panel.axis);
  const canvas = make("canvas", { width: cells.length, height: 1, style: { width: `${cells.length * panel.pixels}px` } });
  const context = canvas.getContext("2d");
  cells.forEach((count, i) => {
    const color = colorOf(count / row.size);
    if (color < 0) return;
    context.fillStyle = colors[color];
    context.fillRect(i, 0, 1, 1);
  });
  return canvas;
}

function verdictNode(verdict) {
  const level = view.data.rules.levels[verdict];
  return make("b", { className: level }, verdict);
}

function setLost(cell, result) {
  const { rules } = view.data;
  const text = percent(result.lost);
  if (cell.textContent !== text) cell.textContent = text;
  cell.classList.toggle("bad", result.lost > rules.lost);
  cell.classList.toggle("warn", result.lost > rules.flushing && result.lost <= rules.lost);
  cell.classList.toggle("soft", result.lost <= rules.flushing);
}

// Texts, windows and what is shown, for the slider and the filters.
function updateMaps() {
  let shown = 0, total = 0;
  for (const map of maps) {
    let block = null, first = true;
    for (const line of map.lines) {
      let problem = false;
      for (const cell of line.cells) {
        const then = cell.panel.scaled ? effectOf(cell.row, view.log2Scale, view.data) : cell.now;
        problem ||= isProblem(then.verdict, view.data.rules);
        if (cell.at !== view.log2Scale && cell.panel.scaled) setLost(cell.texts[2], then);
        cell.at = view.log2Scale;
        // What stays as it is would cost a new layout.
        if (cell.then === then.verdict) continue;
        cell.then = then.verdict;
        // A row that the advice keeps in float32 has no problem at the slider's scale.
        const kept = cell.row.keep && isProblem(cell.now.verdict, view.data.rules);
        const change = kept || cell.now.verdict !== then.verdict ? [verdictNode(cell.now.verdict), " → "] : [];
        const end = kept ? make("span", { className: "soft" }, "f32") : verdictNode(then.verdict);
        cell.texts[cell.texts.length - 1].replaceChildren(...change, end);
      }
      const visible = line.lower.includes(view.words) && (problem || !view.problems);
      line.element.hidden = !visible;
      total += 1;
      if (!visible) continue;
      shown += 1;
      line.element.classList.toggle("block", block !== null && block !== line.block);
      line.element.tabIndex = first ? 0 : -1;
      [block, first] = [line.block, false];
    }
    map.element.hidden = first; // no row is shown
    map.panels.forEach(drawWindows);
  }
  $("shown").textContent = `${shown} of ${total} rows`;
}

function drawWindows(panel) {
  const { data, present, log2Scale } = view, { axis, pixels } = panel, end = axis.high - axis.low;
  const at = e => Math.min(Math.max(e - axis.low, 0), end);
  const span = (from, to) => ({ left: `${at(from) * pixels}px`, width: `${Math.max(at(to) - at(from), 0) * pixels}px` });
  const windows = panel.scaled
    ? [["now", data.present_log2_scale === null ? "no scale" : `now ${power(present)}`, present],
       ["recommended", `recommended ${power(data.recommended_log2_scale)}`, data.recommended_log2_scale],
       ["slider", `slider ${power(log2Scale)}`, log2Scale]]
    : [["fixed", "float16", 0]];
  const title = make("div", { className: "title", style: { left: `${12 - panel.verdict}px` } }, NAMES[panel.kind], make("small", {}, "log₂ |x|, unscaled"));
  const head = [title], over = [], under = [];
  windows.forEach(([name, text, s], lane) => {
    const w = windowAt(s, data.rules), top = `${21 + (windows.length === 1 ? 2 : lane) * 13}px`;
    const wide = (at(w.right) - at(w.normal)) * pixels > text.length * 5.8;
    head.push(make("div", { className: `lane thin ${name}`, style: { ...span(w.left, w.normal), top } }),
      make("div", { className: `lane ${name}`, style: { ...span(w.normal, w.right), top }, title: text }, wide ? text : ""));
    if (name !== "slider" || !windows.some(([other, , o]) => other !== name && o === s))
      over.push(make("div", { className: `window ${name}`, style: { ...span(w.left, w.right), ...edges(w) } }));
  });
  const w = windowAt(panel.scaled ? log2Scale : 0, data.rules);
  under.push(make("div", { className: "tint zero", style: span(axis.low, w.left) }),
    make("div", { className: "tint fewer", style: span(w.left, w.normal) }),
    make("div", { className: "tint over", style: span(w.right, axis.high) }));
  const step = pixels * 8 < 34 ? 16 : 8;
  for (let e = Math.ceil((axis.low + 1) / step) * step; e < axis.high; e += step) {
    const left = `${at(e) * pixels}px`;
    under.push(make("div", { className: "grid", style: { left } }));
    head.push(make("span", { className: "tick", style: { left } }, String(e).replace("-", "−")));
  }
  panel.head.replaceChildren(...head);
  panel.over.replaceChildren(...over);
  panel.under.replaceChildren(...under);

  // A window that goes on outside of the panel has no edge there.
  function edges(w) {
    return { ...(w.left < axis.low ? { borderLeft: "0" } : {}), ...(w.right > axis.high ? { borderRight: "0" } : {}) };
  }
}

function find(target, lines) {
  const tr = target.closest("tbody tr");
  return tr && lines.find(line => line.element === tr);
}

function hover(event, lines) {
  const line = find(event.target, lines), td = event.target.closest("td");
  const cell = line && td && line.cells.find(c => c.texts.includes(td) || td.contains(c.heat));
  if (!cell) return hideTip();
  const texts = details(cell);
  if (td.contains(cell.heat)) {
    const box = cell.heat.getBoundingClientRect(), { axis } = cell.panel;
    const i = Math.floor((event.clientX - box.left) / cell.panel.pixels), count = cellsOf(cell.row, axis)[i];
    if (count !== undefined) texts.splice(1, 0, octaveText(cell, i, count));
  }
  showTip(texts, event.clientX + 14, event.clientY + 16);
}

function octaveText({ row, panel: { axis } }, i, count) {
  const e = axis.low + i, number = count.toLocaleString("en-US");
  const range = i === 0 ? `|x| < ${power(e + 1)}` : e === axis.high - 1 ? `|x| ≥ ${power(e)}`
    : `${power(e)} ≤ |x| < ${power(e + 1)}`;
  return count ? `${range}: ${number} of ${row.size.toLocaleString("en-US")}, ${percent(count / row.size)}` : `${range}: none`;
}

function details({ row, now, panel }) {
  const texts = [`${row.kind} ${row.name}`], numbers = n => n.toLocaleString("en-US");
  const runs = row.executions === 1 ? "" : `, ${row.executions} executions`;
  texts.push(`${row.dtype}, ${numbers(row.size)} elements${runs}; ${numbers(row.zeros)} zero, ` +
    `${numbers(row.infinite)} infinite, ${numbers(row.nan)} NaN`);
  const results = panel.scaled ? [["now", now], ["slider", effectOf(row, view.log2Scale, view.data)]] : [["float16", now]];
  for (const [name, r] of results) {
    const fractions = fractionsOf(row, r.log2Scale, view.data.rules);
    texts.push(`${name}${panel.scaled ? ` ${power(r.log2Scale)}` : ""}: ${r.verdict}; of the nonzero ${percent(fractions.zero)} ` +
      `become zero (${percent(r.lost)} of the mass), ${percent(fractions.subnormal)} subnormal, ${percent(fractions.infinite)} overflow`);
  }
  return texts;
}

function showTip(texts, x, y) {
  const tip = $("tip");
  tip.replaceChildren(...texts.map(text => make("div", {}, text)));
  tip.hidden = false;
  tip.style.left = `${Math.max(Math.min(x, innerWidth - tip.offsetWidth - 8), 4)}px`;
  tip.style.top = `${y + tip.offsetHeight > innerHeight - 4 ? y - tip.offsetHeight - 28 : y}px`;
}

function hideTip() { $("tip").hidden = true; }

function focusTip(target, lines) {
  const line = find(target, lines);
  if (!line || !line.element.matches(":focus-visible")) return;
  showTip(line.cells.flatMap(details), innerWidth, innerHeight); // in the corner, away from the rows
}

// Up and down go from row to row, as one stop of the tab key.
function walk(event) {
  const way = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  let row = event.target.closest("tbody tr");
  if (!way || !row) return;
  event.preventDefault();
  do row = row[way]; while (row && row.hidden);
  if (row) row.focus();
}

if (typeof document !== "undefined") start();
