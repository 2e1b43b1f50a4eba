// How is a cell of the grid (grid.py) read, and where in the figure do its numbers go (binding.py)?
const KINDS = { u2: Uint16Array, f4: Float32Array, f8: Float64Array };
const NAN_CODE = 65535;

// The array's values in the cell at `position`, one index for each slider.
function reader(array) {
  const bytes = Uint8Array.from(atob(array.data), (c) => c.charCodeAt(0));
  const codes = new KINDS[array.kind](bytes.buffer);
  let last = -1, values = null;
  return function (position) {
    let cell = 0;
    array.dims.forEach((n, k) => { cell = cell * n + (n > 1 ? position[k] : 0); });
    if (cell === last) return values;  // the same object: plotly sees that nothing changed
    last = cell;
    const part = codes.subarray(cell * array.size, (cell + 1) * array.size);
    values = Float64Array.from(part, array.kind !== "u2" ? (v) => v
      : (c) => (array.nan && c === NAN_CODE ? NaN : array.lo + c * array.step));
    return values;
  };
}

// A leaf of the figure out of an array: a number, a row, or rows of numbers.
function leaf(bind, values) {
  const { start, strides, shape } = bind;
  if (!shape.length) return values[start];
  if (shape.length === 1) {
    if (strides[0] === 1 && start === 0 && shape[0] === values.length) return values;
    return Float64Array.from({ length: shape[0] }, (_, i) => values[start + i * strides[0]]);
  }
  return Array.from({ length: shape[0] }, (_, i) =>
    leaf({ start: start + i * strides[0], strides: strides.slice(1), shape: shape.slice(1) }, values));
}

function put(tree, path, value) {
  for (const step of path.slice(0, -1)) tree = tree[step];
  tree[path[path.length - 1]] = value;
}
