// What is seen: tables and controls here, the heat map in page_map.js.

const $ = id => document.getElementById(id);
const NAMES = {
  "activation": "activations", "gradient": "gradients of activations", "parameter": "parameters",
  "weight gradient": "weight gradients",
};
const SIGNS = { bad: "✕", warn: "!", good: "✓", none: "·" };
const view = { data: null, shift: 0, present: 0, kinds: new Set(), words: "", problems: false };

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

function scaleText(shift) { return shift === null || shift === undefined ? "none" : `${power(shift)} = ${plain(shift)}`; }

function showFacts(data) {
  const limit = data.limited_by;
  const limited = limit ? make("span", {}, ` (limited by the ${limit.kind} `, make("code", {}, limit.name), ")") : null;
  const facts = [
    ["now", [data.present_shift === null ? "none in use" : scaleText(data.present_shift)]],
    ["recommended", [make("b", { className: "good" }, scaleText(data.recommended_shift))]],
    ["largest safe", [scaleText(data.largest_safe_shift), limited]],
    ["enough", [scaleText(data.enough_shift)]],
  ];
  const rows = facts.map(([name, values]) =>
    make("tr", {}, make("th", {}, name), make("td", {}, ...values.filter(value => value !== null))));
  const boxes = [make("div", { style: { maxWidth: "24rem" } }, make("h2", {}, "loss scale"),
    make("table", { className: "facts" }, make("tbody", {}, ...rows)),
    data.keep_float32.length ? keepBox(data) : null)];
  if (data.probes.length > 1) {
    const lines = data.probes.map(p => [String(p.step), ...["enough", "recommended", "largest_safe"].map(key =>
      p[`${key}_shift`] === null ? "–" : power(p[`${key}_shift`]))]);
    boxes.push(make("div", {}, make("h2", {}, "over the steps"),
      tableOf(["step", "enough", "recommended", "largest safe"], lines)));
  }
  if (data.comparison.length) {
    const lines = data.comparison.map(c =>
      [c.preset, power(c.shift), percent(c.median), percent(c.worst), c.worst_name || ""]);
    boxes.push(make("div", {}, make("h2", {}, "error of weight gradients against float32"),
      tableOf(["preset", "scale", "median", "worst", "worst in"], lines, 4)));
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
  const strip = make("span", { className: "strip" }, make("b", {}, "share of the tensor in an octave: 10⁻⁵"));
  for (let i = 0; i < STEPS; i++) strip.append(make("i", { style: { background: `var(--c${i})` } }));
  strip.append(make("b", {}, "0.3"));
  const key = (name, text) => make("span", {}, make("i", { className: name }), text);
  $("legend").append(strip, key("box now", "float16 now"), key("box recommended", "recommended"),
    key("zero", "becomes zero"), key("fewer", "subnormal"), key("over", "overflows"),
    make("span", {}, "(bfloat16: a window over everything)"));
}

function showMarks(data) {
  const place = shift => `${(Math.min(Math.max(shift, -24), 40) + 24) / 64 * 100}%`;
  const marks = $("marks"), { enough_shift: enough, largest_safe_shift: largest } = data;
  if (enough !== null && largest !== null && enough <= largest)
    marks.append(make("div", { style: { left: place(enough), right: `calc(100% - ${place(largest)})` } }));
  for (const [name, shift] of [["now", view.present], ["recommended", data.recommended_shift]])
    marks.append(make("i", { style: { left: place(shift), background: `var(--${name})` } }));
  const jumps = [["now", "now", view.present], ["recommended", "recommended", data.recommended_shift]];
  if (largest !== null) jumps.push(["largest", "largest safe", largest]);
  $("jumps").append(...jumps.map(([name, text, shift]) => make("button",
    { type: "button", className: name, onclick: () => setShift(shift) }, `${text} ${power(shift)}`)));
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

// The counts of verdicts, now and at the slider, of what the scale moves; and the problems of every kind.
function showCounts() {
  const { rows, rules } = view.data, moved = rows.filter(row => SCALED.has(row.kind));
  const now = countVerdicts(moved, view.present, rules), then = countVerdicts(moved, view.shift, rules);
  const parts = Object.keys(LEVELS).filter(verdict => now[verdict] || then[verdict]).map(verdict => {
    const level = LEVELS[verdict], change = now[verdict] === then[verdict] ? "" : `${now[verdict]} → `;
    return make("span", { className: level }, `${SIGNS[level]} ${verdict} `, change,
      make("b", {}, String(then[verdict])));
  });
  $("counts").replaceChildren(
    make("span", { className: "soft" }, `${moved.length} gradients, now → at ${power(view.shift)}:`), ...parts);
  for (const label of $("kinds").children) {
    const kind = label.firstChild.value, counts = countVerdicts(rows.filter(row => row.kind === kind), view.shift, rules);
    const troubles = Object.keys(counts).filter(isProblem).reduce((sum, verdict) => sum + counts[verdict], 0);
    label.lastChild.textContent = troubles ? ` ! ${troubles}` : "";
    label.lastChild.className = "trouble warn";
  }
}

function setShift(shift) {
  if (!Number.isFinite(shift)) return;
  view.shift = Math.min(Math.max(Math.round(shift), -24), 40);
  $("slider").value = view.shift;
  if (Number($("shift").value) !== view.shift || !$("shift").value) $("shift").value = view.shift;
  $("value").textContent = `= ${plain(view.shift)}`;
  showCounts();
  updateMaps();
}

function listen() {
  $("slider").addEventListener("input", event => setShift(event.target.valueAsNumber));
  $("shift").addEventListener("input", event => setShift(event.target.valueAsNumber));
  $("words").addEventListener("input", event => { view.words = event.target.value.toLowerCase(); updateMaps(); });
  $("problems").addEventListener("input", event => { view.problems = event.target.checked; updateMaps(); });
  document.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.target.closest("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    setShift(view.shift + step);
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
  view.present = data.present_shift ?? 0;
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
  setShift(data.recommended_shift);
}
