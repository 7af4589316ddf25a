"use strict";
// The arithmetic of the page, without the DOM, so that tests can load it.

const SCALED = new Set(["gradient", "weight gradient"]); // the kinds that a loss scale moves
const STEPS = 12, FAINT = 1e-5, STRONG = 0.3; // number of colors; fractions of the first and the last
const LOWEST = -72, HIGHEST = 40; // exponents; the outermost cells include all beyond
const FOLD = 12; // empty octaves

function clamp(x, low, high) { return Math.min(Math.max(x, low), high); }

// The effect of float16 on a row at the scale 2**log2Scale, as the report computed it.
function effectOf(row, log2Scale, data) {
  const moved = SCALED.has(row.kind), i = moved ? log2Scale - data.slider[0] : 0;
  const [verdict, level] = Object.entries(data.rules.levels)[row.verdicts[i]];
  const isProblem = level === "bad" || level === "warn";
  return { verdict, level, isProblem, lost: row.lost[i] ?? 0, log2Scale: moved ? log2Scale : 0 };
}

// The fractions of the nonzero elements that become zero, subnormal and infinite.
function fractionsOf(row, log2Scale, rules) {
  const { left, normal, right } = windowAt(log2Scale, rules);
  const sum = (from, to) => row.counts.reduce((sum, count, i) =>
    from <= row.first + i && row.first + i < to ? sum + count : sum, 0);
  const all = sum(-Infinity, Infinity) || 1;
  return { zero: sum(-Infinity, left) / all, subnormal: sum(left, normal) / all, infinite: sum(right, Infinity) / all };
}

// Number of rows by verdict, in the order of severity.
function countVerdicts(rows, log2Scale, data) {
  const counts = Object.fromEntries(Object.keys(data.rules.levels).map(verdict => [verdict, 0]));
  for (const row of rows) counts[effectOf(row, log2Scale, data).verdict] += 1;
  return counts;
}

// The exponents where float16's window at a scale begins, becomes normal, and ends (exclusive).
function windowAt(log2Scale, rules) {
  const { smallest, smallest_normal: normal, top } = rules;
  return { left: smallest - 1 - log2Scale, normal: normal - log2Scale, right: top + 1 - log2Scale };
}

// The exponents [low, high) that a panel shows: those of the windows at these scales, and those of all rows up to a gap
// of FOLD empty octaves. What lies behind such a gap is counted in the outermost cell.
function axisOf(rows, log2Scales, rules) {
  const windows = log2Scales.map(log2Scale => windowAt(log2Scale, rules));
  let low = Math.min(...windows.map(w => w.left)), high = Math.max(...windows.map(w => w.right));
  const used = rows.flatMap(row => row.counts.flatMap((count, i) => count ? [row.first + i] : []));
  const ascending = [...new Set(used.map(e => clamp(e, LOWEST, HIGHEST - 1)))].sort((a, b) => a - b);
  for (const e of ascending) if (e >= high && e - high < FOLD) high = e + 1;
  for (const e of ascending.reverse()) if (e < low && low - e <= FOLD) low = e;
  return { low: low - 2, high: high + 2 };
}

// Counts of a row by the cells of an axis.
function cellsOf(row, axis) {
  const cells = new Array(axis.high - axis.low).fill(0);
  row.counts.forEach((count, i) => { cells[clamp(row.first + i - axis.low, 0, cells.length - 1)] += count; });
  return cells;
}

// The color of a fraction on a log scale.
function colorOf(fraction) {
  const step = Math.floor(Math.log(fraction / FAINT) / Math.log(STRONG / FAINT) * STEPS);
  return fraction > 0 ? `var(--c${clamp(step, 0, STEPS - 1)})` : "transparent";
}

// Lists of rows side by side by their names, in the order of the first list; [[row or null of every list], ...].
function align(lists) {
  const lines = [];
  lists.forEach((rows, which) => {
    let after = -1;
    for (const row of rows) {
      // A name that comes twice is two lines.
      let at = lines.findIndex(line => line.name === row.name && !line.rows[which]);
      if (at < 0) lines.splice(at = after + 1, 0, { name: row.name, rows: lists.map(() => null) });
      lines[at].rows[which] = row;
      after = at;
    }
  });
  return lines;
}

function power(exponent) {
  return "2" + [...String(exponent)].map(c => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).join("");
}

function percent(fraction) {
  if (!Number.isFinite(fraction)) return "not finite";
  if (!fraction) return "0 %";
  const x = fraction * 100;
  if (x < 0.01) return "<0.01 %";
  if (fraction < 1 && x > 99.9) return ">99.9 %";
  return `${x >= 100 ? "100" : x.toFixed(x < 1 ? 2 : 1)} %`;
}

function grouped(number) { return number.toLocaleString("en-US"); }

// A loss scale in full: 131,072 or 1/8.
function plain(log2Scale) { return (log2Scale < 0 ? "1/" : "") + grouped(2 ** Math.abs(log2Scale)); }

if (typeof module !== "undefined")
  module.exports = { effectOf, countVerdicts, windowAt, axisOf, cellsOf, align };

// The view: tables and controls, then the heat map.

const $ = id => document.getElementById(id);
const NAMES = { "activation": "activations", "gradient": "gradients of activations", "parameter": "parameters",
  "weight gradient": "weight gradients" };
const SIGNS = { bad: "✕", warn: "!", good: "✓", none: "·" };
let data, present, slider = 0, maps; // the document; the exponents of the scale in use and of the slider; the heat maps

// An element; texts are never read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(element.style, value);
    else element[key] = value;
  }
  element.append(...children.filter(child => child !== null));
  return element;
}

function box(title, ...children) { return make("div", {}, make("h2", {}, title), ...children); }

function tableOf(heads, lines, nameColumn = -1) {
  const row = (tag, values) => make("tr", {}, ...values.map((value, i) =>
    make(tag, { className: i === nameColumn ? "name" : "" }, value)));
  return make("table", {}, make("thead", {}, row("th", heads)),
    make("tbody", {}, ...lines.map(line => row("td", line))));
}

function showFacts() {
  const limit = data.limited_by, kept = data.keep_float32;
  const text = log2Scale => log2Scale === null ? "none" : `${power(log2Scale)} = ${plain(log2Scale)}`;
  const limited = limit && make("span", {}, ` (limited by the ${limit.kind} `, make("code", {}, limit.name), ")");
  const fact = (name, ...values) => make("tr", {}, make("th", {}, name), make("td", {}, ...values));
  const scales = box("loss scale", make("table", { className: "facts" }, make("tbody", {},
    fact("now", data.present_log2_scale === null ? "none in use" : text(data.present_log2_scale)),
    fact("recommended", make("b", { className: "good" }, text(data.recommended_log2_scale))),
    fact("largest safe", text(data.max_safe_log2_scale), limited),
    fact("smallest safe", text(data.min_sufficient_log2_scale)))));
  const pattern = make("pre", { tabIndex: 0 }, data.keep_float32_pattern);
  if (kept.length) scales.append(box(`keep in float32: ${kept.length}`, pattern));
  scales.style.maxWidth = "24rem";
  $("facts").append(scales);
  if (data.probes.length > 1) {
    const lines = data.probes.map(p => [String(p.step), ...["min_sufficient", "recommended", "max_safe"].map(key =>
      p[`${key}_log2_scale`] === null ? "–" : power(p[`${key}_log2_scale`]))]);
    $("facts").append(box("over the steps", tableOf(["step", "smallest safe", "recommended", "largest safe"], lines)));
  }
  if (data.comparison.length) {
    const lines = data.comparison.map(c =>
      [c.preset, power(c.log2_scale), percent(c.median), percent(c.worst), c.worst_name || ""]);
    $("facts").append(box("error of weight gradients against float32",
      tableOf(["preset", "scale", "median", "worst", "worst in"], lines, 4),
      make("p", { className: "soft" }, data.usual_errors)));
  }
}

function showMarks() {
  const [first, last] = data.slider, { min_sufficient_log2_scale: enough, max_safe_log2_scale: largest } = data;
  const place = log2Scale => `${(clamp(log2Scale, first, last) - first) / (last - first) * 100}%`;
  const jumps = [["now", "now", present], ["recommended", "recommended", data.recommended_log2_scale]];
  if (enough !== null && largest !== null && enough <= largest)
    $("marks").append(make("div", { style: { left: place(enough), right: `calc(100% - ${place(largest)})` } }));
  $("marks").append(...jumps.map(([name, , log2Scale]) =>
    make("i", { style: { left: place(log2Scale), background: `var(--${name})` } })));
  if (largest !== null) jumps.push(["largest", "largest safe", largest]);
  $("jumps").append(...jumps.map(([name, text, log2Scale]) => make("button",
    { type: "button", className: name, onclick: () => setSlider(log2Scale) }, `${text} ${power(log2Scale)}`)));
}

function rowsOf(kind) { return data.rows.filter(row => row.kind === kind); }

function showKinds() {
  const kinds = Object.keys(NAMES).filter(kind => rowsOf(kind).length);
  const some = kinds.filter(kind => GROUPS[0].includes(kind)), checked = some.length ? some : kinds;
  $("kinds").append(...kinds.map(kind => make("label", {},
    make("input", { type: "checkbox", value: kind, checked: checked.includes(kind), oninput: drawMaps }),
    ` ${NAMES[kind]} `, make("span", { className: "soft" }, String(rowsOf(kind).length)),
    make("span", { className: "trouble warn" }))));
}

// The counts of verdicts, now and at the slider, of what the scale moves and float32 does not keep; and the problems of
// every kind.
function showCounts() {
  const { rows, rules } = data, scaled = rows.filter(row => SCALED.has(row.kind));
  const moved = scaled.filter(row => !row.keep), kept = scaled.length - moved.length;
  const now = countVerdicts(moved, present, data), then = countVerdicts(moved, slider, data);
  const parts = Object.keys(then).filter(verdict => now[verdict] || then[verdict]).map(verdict => {
    const level = rules.levels[verdict], change = now[verdict] === then[verdict] ? "" : `${now[verdict]} → `;
    return make("span", { className: level }, `${SIGNS[level]} ${verdict} `, change,
      make("b", {}, String(then[verdict])));
  });
  $("counts").replaceChildren(
    make("span", { className: "soft" }, `${moved.length} gradients, now → at ${power(slider)}:`), ...parts,
    make("span", { className: "soft" }, kept ? `${kept} to keep in float32` : ""));
  const troubled = rows.filter(row => effectOf(row, slider, data).isProblem);
  for (const label of $("kinds").children) {
    const troubles = troubled.filter(row => row.kind === label.firstChild.value).length;
    label.lastChild.textContent = troubles ? ` ! ${troubles}` : "";
  }
}

function setSlider(log2Scale) {
  if (!Number.isFinite(log2Scale)) return;
  slider = clamp(Math.round(log2Scale), ...data.slider);
  $("slider").value = slider;
  // What is typed stays as it is.
  if ($("log2-scale").valueAsNumber !== slider) $("log2-scale").value = slider;
  $("value").textContent = `= ${plain(slider)}`;
  showCounts();
  updateMaps();
}

function listen() {
  for (const input of [$("slider"), $("log2-scale")]) {
    [input.min, input.max] = data.slider;
    input.oninput = () => setSlider(input.valueAsNumber);
  }
  $("words").oninput = $("problems").oninput = updateMaps;
  // The head of the map sticks below the bar, however many lines the bar has.
  new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${$("bar").offsetHeight}px`))
    .observe($("bar"));
  let width = $("maps").clientWidth;
  new ResizeObserver(() => {
    if ($("maps").clientWidth !== width) { width = $("maps").clientWidth; drawMaps(); }
  }).observe($("maps"));
}

function start() {
  data = JSON.parse($("data").textContent);
  present = data.present_log2_scale ?? 0;
  $("notes").append(...data.notes.map(note => make("li", {}, note)));
  showFacts();
  showKinds();
  showMarks();
  listen();
  drawMaps();
  setSlider(data.recommended_log2_scale);
}

// The heat map: tables whose rows are layers; float16's windows lie over them, tints below. The verdict comes first, so
// that a narrow screen shows it.

const GROUPS = [["activation", "gradient"], ["parameter", "weight gradient"]]; // which share rows
const COLUMNS = {
  fixed: [["zero", 58], ["lost", 58], ["verdict", 106]],
  scaled: [["zero", 58], ["lost\nnow", 60], ["lost\nat slider", 60], ["verdict\nnow → at slider", 158]],
};
const NARROW = 3.25, WIDE = 12; // pixels of an octave: below, panels are stacked; never more

function panelsOf() {
  const chosen = [...document.querySelectorAll("#kinds :checked")].map(box => box.value);
  return GROUPS.map(kinds => kinds.filter(kind => chosen.includes(kind)).map(kind => {
    const rows = rowsOf(kind), scaled = SCALED.has(kind);
    const axis = axisOf(rows, scaled ? [present, data.recommended_log2_scale] : [0], data.rules);
    const columns = COLUMNS[scaled ? "scaled" : "fixed"];
    return { kind, rows, scaled, axis, columns, text: columns.reduce((sum, [, width]) => sum + width, 0) };
  })).filter(group => group.length);
}

// The width of the names, and the pixels of an octave where the panels stand side by side.
function widthsOf(panels, room) {
  const longest = Math.max(...panels.flatMap(panel => panel.rows.map(row => row.name.length)));
  const names = Math.min(Math.max(longest * 7.3 + 12, 90), Math.max(room * (panels.length > 1 ? 0.19 : 0.27), 120));
  const text = panels.reduce((sum, panel) => sum + panel.text, names);
  const fitting = (room - text) / panels.reduce((sum, { axis }) => sum + axis.high - axis.low, 0);
  return [names, Math.min(Math.floor(fitting * 4) / 4, WIDE)];
}

function drawMaps() {
  const room = $("maps").clientWidth;
  const fit = panels => panels.length === 1 || widthsOf(panels, room)[1] >= NARROW;
  // Stacked, what the scale moves comes first.
  const groups = panelsOf().flatMap(panels => fit(panels) ? [panels] : [...panels].reverse().map(panel => [panel]));
  maps = groups.map(panels => buildMap(panels, ...widthsOf(panels, room)));
  $("maps").replaceChildren(...maps.map(map => map.element));
  if (!groups.length) $("maps").append(make("p", { className: "soft" }, "no panel is chosen"));
  updateMaps();
}

function buildMap(panels, names, fitting) {
  const pixels = Math.max(fitting, 2), columns = [names];
  let left = names, [className, tabIndex] = fitting < 2 ? ["map wide", 0] : ["map", -1];
  const parts = [], title = GROUPS[0].includes(panels[0].kind) ? "layer" : "parameter";
  const heads = [make("th", { scope: "col", className: "names" }, title)];
  for (const panel of panels) {
    const width = (panel.axis.high - panel.axis.low) * pixels, sizes = panel.columns.map(([, size]) => size);
    const verdict = sizes.pop(), place = { left: `${left + verdict}px`, width: `${width}px` };
    const [under, over] = ["below", "above"].map(name => make("div", { className: `layer ${name}`, style: place }));
    Object.assign(panel, { pixels, under, over, head: make("div", { className: "panel" }), verdict });
    parts.push(under, over);
    columns.push(verdict, width, ...sizes);
    const titles = panel.columns.map(([title]) => make("th", { scope: "col" }, title));
    titles[titles.length - 1].className = "verdict";
    heads.push(titles.pop(), make("th", { className: "heat", scope: "col" }, panel.head), ...titles);
    left += width + panel.text;
  }
  const lines = align(panels.map(panel => panel.rows)).map(line => buildLine(line, panels));
  const table = make("table", { style: { width: `${left}px` } },
    make("colgroup", {}, ...columns.map(width => make("col", { style: { width: `${width}px` } }))),
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines.map(line => line.element)));
  const element = make("div", { className, tabIndex, onmousemove: describe }, ...parts, table);
  return { element, panels, lines };
}

function buildLine(line, panels) {
  const parts = line.name.split(/(?<=\/)/).flatMap(part => [part, make("wbr")]), cells = [];
  const head = make("th", { scope: "row" }, make("div", { className: "name" }, ...parts));
  const element = make("tr", {}, head);
  if (line.rows.some(row => row && row.keep))
    head.append(make("b", { className: "keep-mark", title: "keep in float32" }, " f32"));
  line.rows.forEach((row, i) => {
    const panel = panels[i];
    if (!row) return element.append(make("td", { colSpan: panel.columns.length + 1 }));
    const cell = { row, panel, now: effectOf(row, present, data), heat: heatOf(row, panel) };
    const texts = panel.columns.slice(0, -1).map(() => make("td", { cell }));
    texts[0].textContent = percent(row.size ? row.zeros / row.size : 0);
    setLost(texts[1], cell.now);
    Object.assign(cell, { verdict: make("td", { className: "verdict", cell }), atSlider: texts[2] });
    element.append(cell.verdict, make("td", { cell }, cell.heat), ...texts);
    cells.push(cell);
  });
  return { block: line.name.split("/")[0], lower: line.name.toLowerCase(), element, cells };
}

// A strip of the color of every octave.
function heatOf(row, { axis, pixels }) {
  const stops = cellsOf(row, axis).map((count, i) =>
    `${colorOf(count / row.size)} ${i * pixels}px ${(i + 1) * pixels}px`);
  const style = { width: `${stops.length * pixels}px`, background: `linear-gradient(to right, ${stops.join(", ")})` };
  return make("div", { className: "strip", style });
}

function setLost(cell, { lost }) {
  const { rules } = data, text = percent(lost);
  if (cell.textContent !== text) cell.textContent = text;
  cell.className = lost > rules.lost ? "bad" : lost > rules.flushing ? "warn" : "soft";
}

// Writes texts, windows and what is shown.
function updateMaps() {
  const words = $("words").value.toLowerCase(), onlyProblems = $("problems").checked;
  const named = ({ verdict, level }) => make("b", { className: level }, verdict);
  let shown = 0;
  for (const map of maps) {
    let block = null, first = true;
    for (const line of map.lines) {
      let problem = false;
      for (const cell of line.cells) {
        const then = cell.panel.scaled ? effectOf(cell.row, slider, data) : cell.now;
        problem ||= then.isProblem;
        if (cell.panel.scaled) setLost(cell.atSlider, then);
        // What stays as it is would cost a new layout.
        if (cell.then === then.verdict) continue;
        cell.then = then.verdict;
        // A row that the advice keeps in float32 has no problem at the slider's scale.
        const kept = cell.row.keep && cell.now.isProblem;
        const change = kept || cell.now.verdict !== then.verdict ? [named(cell.now), " → "] : [];
        const end = kept ? make("span", { className: "soft" }, "f32") : named(then);
        cell.verdict.replaceChildren(...change, end);
      }
      line.element.hidden = !line.lower.includes(words) || (onlyProblems && !problem);
      if (line.element.hidden) continue;
      shown += 1;
      line.element.classList.toggle("block", block !== null && block !== line.block);
      [block, first] = [line.block, false];
    }
    map.element.hidden = first; // no row is shown
    map.panels.forEach(drawWindows);
  }
  $("shown").textContent = `${shown} of ${maps.reduce((sum, map) => sum + map.lines.length, 0)} rows`;
}

function drawWindows(panel) {
  const { axis, pixels } = panel;
  const at = e => clamp(e - axis.low, 0, axis.high - axis.low) * pixels;
  const span = (from, to) => ({ left: `${at(from)}px`, width: `${at(to) - at(from)}px` });
  const div = (className, style, ...children) => make("div", { className, style }, ...children);
  const windows = panel.scaled
    ? [["now", data.present_log2_scale === null ? "no scale" : `now ${power(present)}`, present],
       ["recommended", `recommended ${power(data.recommended_log2_scale)}`, data.recommended_log2_scale],
       ["slider", `slider ${power(slider)}`, slider]]
    : [["fixed", "float16", 0]];
  const title = [NAMES[panel.kind], make("small", {}, "log₂ |x|, unscaled")];
  const head = [div("title", { left: `${12 - panel.verdict}px` }, ...title)], over = [];
  windows.forEach(([name, text, s], lane) => {
    const w = windowAt(s, data.rules), top = `${21 + (panel.scaled ? lane : 2) * 13}px`;
    const wide = at(w.right) - at(w.normal) > text.length * 5.8;
    const normal = div(`lane ${name}`, { ...span(w.normal, w.right), top }, wide ? text : "");
    normal.title = text;
    head.push(div(`lane thin ${name}`, { ...span(w.left, w.normal), top }), normal);
    // The layer cuts the edges outside of the panel.
    const edges = { left: `${(w.left - axis.low) * pixels}px`, width: `${(w.right - w.left) * pixels}px` };
    if (name !== "slider" || !windows.some(([other, , o]) => other !== name && o === s))
      over.push(div(`window ${name}`, edges));
  });
  const w = windowAt(panel.scaled ? slider : 0, data.rules);
  const under = [div("tint zero", span(axis.low, w.left)), div("tint fewer", span(w.left, w.normal)),
    div("tint over", span(w.right, axis.high))];
  const step = pixels * 8 < 34 ? 16 : 8;
  for (let e = Math.ceil((axis.low + 1) / step) * step; e < axis.high; e += step) {
    const style = { left: `${at(e)}px` };
    under.push(div("grid", style));
    head.push(make("span", { className: "tick", style }, String(e).replace("-", "−")));
  }
  panel.head.replaceChildren(...head);
  panel.over.replaceChildren(...over);
  panel.under.replaceChildren(...under);
}

// The browser shows a title as a tip.
function describe(event) {
  const td = event.target.closest("td"), cell = td && td.cell;
  if (!cell) return;
  const texts = details(cell);
  if (td.contains(cell.heat)) {
    const { axis, pixels } = cell.panel, { left } = cell.heat.getBoundingClientRect();
    const i = Math.floor((event.clientX - left) / pixels), count = cellsOf(cell.row, axis)[i];
    if (count !== undefined) texts.splice(1, 0, octaveText(cell, i, count));
  }
  td.title = texts.join("\n");
}

function octaveText({ row, panel: { axis } }, i, count) {
  const e = axis.low + i;
  const range = [i && `${power(e)} ≤`, "|x|", e < axis.high - 1 && `< ${power(e + 1)}`].filter(Boolean).join(" ");
  return `${range}: ${count ? `${grouped(count)} of ${grouped(row.size)}, ${percent(count / row.size)}` : "none"}`;
}

function details({ row, now, panel }) {
  const runs = row.executions === 1 ? "" : `, ${row.executions} executions`;
  const then = effectOf(row, slider, data);
  const results = panel.scaled ? [["now", now], ["slider", then]] : [["float16", now]];
  return [
    `${row.kind} ${row.name}`,
    `${row.dtype}, ${grouped(row.size)} elements${runs}; ${grouped(row.zeros)} zero, ` +
      `${grouped(row.infinite)} infinite, ${grouped(row.nan)} NaN`,
    ...results.map(([name, { verdict, lost, log2Scale }]) => {
      const { zero, subnormal, infinite } = fractionsOf(row, log2Scale, data.rules);
      return `${name}${panel.scaled ? ` ${power(log2Scale)}` : ""}: ${verdict}; of the nonzero ${percent(zero)} ` +
        `become zero (${percent(lost)} of the mass), ${percent(subnormal)} subnormal, ${percent(infinite)} overflow`;
    }),
  ];
}

if (typeof document !== "undefined") start();
