const body = document.querySelector('tbody'), rows = [...body.rows], words = document.getElementById('words');
words.addEventListener('input', () => rows.forEach(row => {
  row.hidden = !row.textContent.toLowerCase().includes(words.value.toLowerCase());
}));
const text = (row, i) => row.cells[i].textContent;
const value = (row, i) => text(row, i) === 'inf' ? Infinity : Number(text(row, i).replace(' %', ''));
document.querySelectorAll('th').forEach((head, i) => head.addEventListener('click', () => {
  const words = rows.some(row => Number.isNaN(value(row, i)));
  const order = words ? (a, b) => text(a, i).localeCompare(text(b, i)) : (a, b) => value(b, i) - value(a, i);
  body.append(...[...rows].sort(order));
}));
