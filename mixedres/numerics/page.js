"use strict";
// The arithmetic of the page. It knows no DOM, so that tests can load it.

const SCALED = new Set(["gradient", "weight gradient"]); // the kinds that a loss scale moves
const STEPS = 12, FAINT = 1e-5, STRONG = 0.3; // colours, and the shares of the first and the last
const LOWEST = -72, HIGHEST = 40; // what lies beyond is shown in the outermost cells
const LEVELS = {
  "non-finite": "bad", "OVERFLOW": "bad", "LOST": "bad", "headroom < 4x": "warn", "flushing": "warn", "low": "warn",
  "all zero": "none", "ok": "good",
};

// What float16 does to a row at the scale 2**shift; shares of mass are of the sum of magnitudes. Of a row that was seen
// in several examinations, the worst one counts.
function judge(row, shift, rules) {
  const s = SCALED.has(row.kind) ? shift : 0, whole = tally(row, s, rules);
  const parts = row.parts && row.parts.length ? row.parts.map(part => tally(part, s, rules)) : [whole];
  const lost = Math.max(...parts.map(part => part.lostMass)), low = Math.max(...parts.map(part => part.small));
  return { verdict: verdictOf(), lost, flushed: whole.flushed, subnormal: whole.subnormal,
    overflowing: whole.overflowing, top: whole.top, shift: s };

  function verdictOf() {
    if (row.infinite || row.nan) return "non-finite";
    if (whole.top === null) return "all zero";
    if (whole.top + s > rules.top) return "OVERFLOW";
    if (lost > rules.lost) return "LOST";
    if (whole.top + s + rules.margin > rules.top) return "headroom < 4x";
    if (lost > rules.flushing) return "flushing";
    return low > rules.low ? "low" : "ok";
  }
}

// Shares of the nonzero elements; lostMass of the sum of magnitudes.
function tally(part, s, rules) {
  let mass = 0, lostMass = 0, number = 0, lost = 0, subnormal = 0, overflowing = 0, top = null;
  part.counts.forEach((count, i) => {
    if (!count) return;
    const e = part.first + i, moved = e + s, weight = 1.5 * 2 ** e * count;
    mass += weight;
    number += count;
    top = e;
    if (moved > rules.top) overflowing += count;
    else if (moved < rules.smallest - 1) { lost += count; lostMass += weight; }
    else if (moved < rules.smallest_normal) subnormal += count;
  });
  const ratio = x => number ? x / number : 0;
  return { lostMass: number ? lostMass / mass : 0, flushed: ratio(lost), subnormal: ratio(subnormal),
    small: ratio(subnormal + lost), overflowing: ratio(overflowing), top };
}

function isProblem(verdict) { return LEVELS[verdict] === "bad" || LEVELS[verdict] === "warn"; }

// Number of rows by verdict, in the order of severity.
function countVerdicts(rows, shift, rules) {
  const counts = Object.fromEntries(Object.keys(LEVELS).map(verdict => [verdict, 0]));
  for (const row of rows) counts[judge(row, shift, rules).verdict] += 1;
  return counts;
}

// The exponents where float16's window at a scale begins, becomes normal, and ends (exclusive).
function windowAt(shift, rules) {
  return { left: rules.smallest - 1 - shift, normal: rules.smallest_normal - shift, right: rules.top + 1 - shift };
}

// The exponents [low, high) that a panel shows: those of all rows, and of the windows at these scales.
function axisOf(rows, shifts, rules) {
  const windows = shifts.map(shift => windowAt(shift, rules));
  let low = Math.min(...windows.map(w => w.left)), high = Math.max(...windows.map(w => w.right));
  for (const row of rows) {
    const used = row.counts.map((count, i) => count ? row.first + i : null).filter(e => e !== null);
    if (!used.length) continue;
    low = Math.min(low, Math.max(used[0], LOWEST));
    high = Math.max(high, Math.min(used[used.length - 1] + 1, HIGHEST));
  }
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

// The colour of a share on a log scale; -1 for none.
function colourOf(share) {
  if (!(share > 0)) return -1;
  const t = Math.log(share / FAINT) / Math.log(STRONG / FAINT);
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

function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "not finite";
  if (!share) return "0 %";
  const x = share * 100;
  if (x < 0.01) return "<0.01 %";
  if (share < 1 && x > 99.9) return ">99.9 %";
  return `${x >= 100 ? "100" : x.toFixed(x < 1 ? 2 : 1)} %`;
}

// A loss scale in full: 131,072 or 1/8.
function plain(shift) {
  const grouped = (2 ** Math.abs(shift)).toLocaleString("en-US");
  return shift < 0 ? `1/${grouped}` : grouped;
}

if (typeof module !== "undefined")
  module.exports = { judge, isProblem, countVerdicts, windowAt, axisOf, cellsOf, colourOf, align, power, percent, plain };
