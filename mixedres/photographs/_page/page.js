const grid = document.getElementById('tiles'), tiles = [...grid.children];
const control = name => document.getElementById(name);
const classes = new Set(tiles.flatMap(tile => [tile.dataset.truth, tile.dataset.predicted]).filter(Boolean));
for (const name of [...classes].sort((a, b) => a.localeCompare(b))) control('class').add(new Option(name, name));
const hasTruth = tiles.some(tile => tile.dataset.truth);
control('verdict').hidden = new Set(tiles.map(tile => tile.className)).size < 2;
for (const option of [...control('sort').options]) if (option.value.endsWith('loss') && !hasTruth) option.remove();

const STEP = 60;
let limit = STEP; // tiles that are shown

function filter() {
  const words = control('words').value.normalize().toLowerCase(), wanted = control('class').value;
  const verdict = control('verdict').value;
  let count = 0;
  for (const tile of grid.children) {
    const {name, truth, predicted} = tile.dataset;
    const fits = name.normalize().toLowerCase().includes(words) && (!wanted || truth === wanted || predicted === wanted)
      && (!verdict || tile.classList.contains(verdict));
    count += fits;
    tile.hidden = !fits || count > limit;
  }
  control('more').hidden = count <= limit;
  control('more').textContent = `show ${Math.min(STEP, count - limit)} more`;
  control('shown').textContent = `${count} of ${tiles.length} images`;
}

function sort() {
  const by = control('sort').value, key = by.replace('-', ''), sign = by.startsWith('-') ? -1 : 1;
  // A tile without a loss comes last in either order.
  const number = tile => tile.dataset[key] === undefined ? Infinity : sign * tile.dataset[key];
  const order = key === 'name' ? (a, b) => a.dataset.name.localeCompare(b.dataset.name, undefined, {numeric: true})
    : (a, b) => number(a) - number(b) || tiles.indexOf(a) - tiles.indexOf(b);
  grid.append(...(by ? [...tiles].sort(order) : tiles));
  filter();
}

for (const name of ['words', 'class', 'verdict']) control(name).addEventListener('input', () => { limit = STEP; filter(); });
control('more').addEventListener('click', () => { limit += STEP; filter(); });
control('sort').addEventListener('input', sort);
filter();
