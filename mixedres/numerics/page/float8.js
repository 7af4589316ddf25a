// Only in pages of reports on float8: its table, which no loss scale moves.

// Lines of the table for the operands of products: [row, texts].
function float8Lines(rows) {
  return rows.filter(row => row.float8 && row.float8.products.length).map(row => {
    const cast = row.float8, format = cast.format.replace(/^float8_|fn$/g, "");
    const numbers = [cast.lost, cast.flushed, cast.subnormal, cast.error].map(percent);
    return [row, [`${row.kind} ${row.name}`, format, ...numbers, cast.verdict, cast.products.map(path => path || "(no named scope)").join(", ")]];
  });
}

function showFloat8(data) {
  const heads = ["operand of products", "format", "mass lost", "become zero", "subnormal", "error of the cast", "verdict",
    "products"];
  const lines = float8Lines(data.rows);
  const table = tableOf(heads, lines.map(([, texts]) => texts.map((text, i) => i === 6 ? verdictNode(text) : text)), 0);
  const { keep_bfloat16: names, keep_bfloat16_pattern: pattern } = data.float8;
  const kept = names.length ? make("pre", { tabIndex: 0 }, `Float8(keep_bfloat16=r"${pattern}")`) : null;
  $("maps").after(make("section", { id: "float8" }, make("h2", {}, "products in float8"),
    make("p", { className: "soft" }, "Each tensor is scaled as a whole by a power of two, so that its largest element fits: " +
      "nothing overflows, and the loss scale does not matter. Become zero, subnormal: of the nonzero elements."), kept,
    make("div", { className: "scroll" }, table)));
  const elements = table.querySelectorAll("tbody tr");
  const filter = () => lines.forEach(([row], i) => {
    const found = row.name.toLowerCase().includes(view.words);
    elements[i].hidden = !(found && (!view.problems || isProblem(row.float8.verdict)));
  });
  for (const id of ["words", "problems"]) $(id).addEventListener("input", filter);
}

if (typeof module !== "undefined") module.exports.float8Lines = float8Lines;
if (typeof document !== "undefined") showFloat8(view.data);
