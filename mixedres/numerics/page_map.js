// The heat map: tables whose rows are layers; float16's windows lie over them, tints below.

const GROUPS = [["activation", "gradient"], ["parameter", "weight gradient"]]; // they share rows
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
    const axis = axisOf(rows, scaled ? [present, data.recommended_shift] : [0], data.rules);
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
  const colours = Array.from({ length: STEPS }, (_, i) => style.getPropertyValue(`--c${i}`).trim());
  maps = groups.map(panels => {
    const names = namesOf(panels, room);
    return buildMap(panels, names, octave(panels, names, room), colours);
  });
  $("maps").replaceChildren(...maps.map(map => map.element));
  if (!maps.length) $("maps").append(make("p", { className: "soft" }, "no panel is chosen"));
  updateMaps();
}

function buildMap(panels, names, fitting, colours) {
  const pixels = Math.max(fitting, 2), columns = [names];
  let left = names;
  const parts = [], heads = [make("th", { scope: "col", className: "names" }, GROUPS[0].includes(panels[0].kind) ? "layer" : "parameter")];
  for (const panel of panels) {
    const width = (panel.axis.high - panel.axis.low) * pixels;
    const place = { left: `${left}px`, width: `${width}px` };
    Object.assign(panel, {
      pixels, under: make("div", { className: "layer below", style: place }), over: make("div", { className: "layer above", style: place }),
      head: make("div", { className: "panel" }),
    });
    parts.push(panel.under, panel.over);
    columns.push(width, ...panel.columns.map(([, size]) => size));
    heads.push(make("th", { className: "heat", scope: "col" }, panel.head),
      ...panel.columns.map(([title], i) => make("th", { scope: "col", className: "",
        style: i === panel.columns.length - 1 ? { textAlign: "left", paddingLeft: "12px" } : {} }, ...broken(title))));
    left += width + panel.text;
  }
  const lines = align(panels.map(panel => panel.rows)).map(line => buildLine(line, panels, colours));
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

function buildLine(line, panels, colours) {
  const cut = line.name.lastIndexOf("/") + 1;
  const name = make("div", { className: "name", title: line.name },
    make("span", { className: "head" }, line.name.slice(0, cut)), make("span", { className: "tail" }, line.name.slice(cut)));
  if (!cut) name.firstChild.remove();
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
    const now = judge(row, view.present, view.data.rules), heat = canvasOf(row, panel, colours);
    const texts = panel.columns.map(([title]) => make("td", { className: title.startsWith("verdict") ? "verdict" : "" }));
    texts[0].textContent = percent(row.size ? row.zeros / row.size : 0);
    setLost(texts[1], now);
    element.append(make("td", {}, heat), ...texts);
    cells.push({ row, panel, now, heat, texts });
  });
  return { name: line.name, block: line.name.split("/")[0], lower: line.name.toLowerCase(), element, cells };
}

// One pixel an octave, widened by the style: crisp at every size.
function canvasOf(row, panel, colours) {
  const cells = cellsOf(row, panel.axis);
  const canvas = make("canvas", { width: cells.length, height: 1, style: { width: `${cells.length * panel.pixels}px` } });
  const context = canvas.getContext("2d");
  cells.forEach((count, i) => {
    const colour = colourOf(count / row.size);
    if (colour < 0) return;
    context.fillStyle = colours[colour];
    context.fillRect(i, 0, 1, 1);
  });
  return canvas;
}

function verdictNode(verdict) {
  const level = LEVELS[verdict];
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
        const then = cell.panel.scaled ? judge(cell.row, view.shift, view.data.rules) : cell.now;
        problem ||= isProblem(then.verdict);
        if (cell.at !== view.shift && cell.panel.scaled) setLost(cell.texts[2], then);
        cell.at = view.shift;
        // What stays as it is would cost a new layout.
        if (cell.then === then.verdict) continue;
        cell.then = then.verdict;
        const change = cell.now.verdict === then.verdict ? [] : [verdictNode(cell.now.verdict), " → "];
        cell.texts[cell.texts.length - 1].replaceChildren(...change, verdictNode(then.verdict));
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
  const { data, present, shift } = view, { axis, pixels } = panel, end = axis.high - axis.low;
  const at = e => Math.min(Math.max(e - axis.low, 0), end);
  const span = (from, to) => ({ left: `${at(from) * pixels}px`, width: `${Math.max(at(to) - at(from), 0) * pixels}px` });
  const windows = panel.scaled
    ? [["now", data.present_shift === null ? "no scale" : `now ${power(present)}`, present],
       ["recommended", `recommended ${power(data.recommended_shift)}`, data.recommended_shift],
       ["slider", `slider ${power(shift)}`, shift]]
    : [["fixed", "float16", 0]];
  const title = make("div", { className: "title" }, NAMES[panel.kind], make("small", {}, "log₂ |x|, unscaled"));
  const head = [title], over = [], under = [];
  windows.forEach(([name, text, s], lane) => {
    const w = windowAt(s, data.rules), top = `${21 + (windows.length === 1 ? 2 : lane) * 13}px`;
    const wide = (at(w.right) - at(w.normal)) * pixels > text.length * 5.8;
    head.push(make("div", { className: `lane thin ${name}`, style: { ...span(w.left, w.normal), top } }),
      make("div", { className: `lane ${name}`, style: { ...span(w.normal, w.right), top }, title: text }, wide ? text : ""));
    if (name !== "slider" || !windows.some(([other, , o]) => other !== name && o === s))
      over.push(make("div", { className: `window ${name}`, style: { ...span(w.left, w.right), ...edges(w) } }));
  });
  const w = windowAt(panel.scaled ? shift : 0, data.rules);
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
  const results = panel.scaled ? [["now", now], ["slider", judge(row, view.shift, view.data.rules)]] : [["float16", now]];
  for (const [name, r] of results)
    texts.push(`${name}${panel.scaled ? ` ${power(r.shift)}` : ""}: ${r.verdict}; of the nonzero ${percent(r.flushed)} ` +
      `become zero (${percent(r.lost)} of the mass), ${percent(r.subnormal)} subnormal, ${percent(r.overflowing)} overflow`);
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
