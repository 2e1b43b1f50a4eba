// How does a mark look at a frame? The elements that still.py made, moved. A frame may be a fraction: places are then between two.

const LEADING = 1.42;

function decode({ shape: [frames, n], lo, hi, u2 }) {
  const codes = new Uint16Array(Uint8Array.from(atob(u2), (c) => c.charCodeAt(0)).buffer);
  const values = Float64Array.from(codes, (code) => lo + ((hi - lo) * code) / 65535);
  return Array.from({ length: frames }, (_, f) => values.subarray(f * n, (f + 1) * n));
}

function prepared(spec) {
  const found = { ...spec };
  for (const key of ["x", "y", "r"]) if (found[key]?.u2) found[key] = decode(found[key]);
  return found;
}

function between(array, frame) {
  if (array.length === 1) return array[0];
  const i = Math.min(Math.floor(frame), array.length - 2), a = array[i], b = array[i + 1], t = frame - i;
  return typeof a === "number" ? a + t * (b - a) : a.map((v, j) => v + t * (b[j] - v));
}

const atX = (box, x) => box[0] + x * box[2], atY = (box, y) => box[1] + (1 - y) * box[3];
const points = (box, xs, ys, n = xs.length) => Array.from({ length: n }, (_, i) => `${atX(box, xs[i]).toFixed(1)},${atY(box, ys[i]).toFixed(1)}`);
const set = (element, names) => Object.entries(names).forEach(([name, value]) => element.setAttribute(name, value));

const KINDS = {
  curve(spec, g, box, frame) {
    const xs = spec.x[0], ys = spec.y[0], shown = between(spec.upto, frame);
    const n = Math.max(1, Math.min(xs.length, Math.floor(shown))), rest = n < xs.length ? shown - n : 0;
    const line = points(box, xs, ys, n), last = n - 1;
    let x = xs[last], y = ys[last];
    if (rest > 0) {
      x += rest * (xs[n] - x);
      y += rest * (ys[n] - y);
      line.push(...points(box, [x], [y]));
    }
    const visibility = shown < 1 ? "hidden" : "visible";
    for (const part of g.children) {
      if (part.tagName === "polyline") set(part, { points: line.join(" "), visibility });
      else if (part.tagName === "circle") set(part, { cx: atX(box, x).toFixed(1), cy: atY(box, y).toFixed(1), visibility });
      else set(part, { x: (atX(box, x) + 8).toFixed(1), y: (atY(box, y) + spec.drop).toFixed(1), visibility });
    }
  },
  shape(spec, g, box, frame) {
    g.firstChild.setAttribute("points", points(box, between(spec.x, frame), between(spec.y, frame)).join(" "));
  },
  ring(spec, g, box, frame) {
    g.firstChild.setAttribute("r", (between(spec.r, frame)[0] * box[2]).toFixed(1));
  },
  bars(spec, g, box, frame) {
    const xs = between(spec.x, frame), ys = between(spec.y, frame), wide = spec.wide * box[2];
    [...g.firstChild.children].forEach((bar, i) => set(bar, { x: (atX(box, xs[i]) - wide / 2).toFixed(1), y: atY(box, ys[i]).toFixed(1), height: (ys[i] * box[3]).toFixed(1) }));
  },
  words(spec, g, box, frame) {
    const lines = spec.lines[Math.min(Math.floor(frame), spec.lines.length - 1)];
    [...g.firstChild.children].forEach((text, i) => { if (text.textContent !== lines[i]) text.textContent = lines[i]; });
  },
};

// Every mark of a picture at a frame, and the label of the frame.
function drawFrame(svg, data, frame) {
  svg.querySelectorAll(".ngm-panel").forEach((panel, i) => {
    const box = panel.dataset.box.split(" ").map(Number);
    data.panels[i].forEach((spec, j) => KINDS[spec.kind](spec, panel.children[j], box, frame));
  });
  svg.querySelector(".ngm-step").textContent = data.labels[Math.floor(frame)];
}
