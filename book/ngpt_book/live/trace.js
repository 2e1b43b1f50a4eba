// What did every block do at one byte of a text? The dictionary that view.js draws, and that trace.py makes in Python.
//
// The walk is measured where the head sees it: on the directions of h, in GPT after the final norm ("logit lens"). In degrees.

const NEXT = 6, LENS = 3;

// The angle between two directions, exact for small angles too.
function degrees(a, b) {
  let minus = 0, plus = 0;
  for (let i = 0; i < a.length; i++) { minus += (a[i] - b[i]) ** 2; plus += (a[i] + b[i]) ** 2; }
  return (360 / Math.PI) * Math.atan2(Math.sqrt(minus), Math.sqrt(plus));
}

const best = (p, count) => [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, count);

function sight(r, p = r.bytes.length - 1) {
  const { model } = r, { c, head, lengths } = model, d = c.d_model, seen = r.trail[p];
  const states = seen.h.map((h) => lens(r, h)), directions = states.map(norm), last = directions[directions.length - 1];
  const row = (b) => head.subarray(b * d, (b + 1) * d), direction = (b) => norm(Float64Array.from(row(b)));
  const chance = softmax(seen.logits), likely = best(chance, NEXT), size = length(states[states.length - 1]);
  const scale = (b) => (model.s_z ? model.s_z[b] * r.knobs.s_z : lengths[b] * size);
  return {
    bytes: r.bytes.slice(0, p + 1),
    surprise: surprises(r).slice(0, p),
    next: likely.map((b) => ({ byte: b, p: chance[b], cos: dot(direction(b), last), scale: scale(b) })),
    turn: directions.slice(1).map((x, l) => degrees(directions[l], x)),
    to: likely.map((b) => directions.map((x) => degrees(direction(b), x))),
    length: seen.h.map(length),
    lens: seen.h.map((h) => { const q = softmax(logitsOf(r, h)); return best(q, LENS).map((b) => [b, q[b]]); }),
    alpha: model.blocks.map((block, l) => block.alpha ? mean(block.alpha) * (r.knobs.blocks[l] ?? 1) : null),
    experts: each("E", (l) => r.trail.slice(0, p + 1).map((t) => [...t.chosen[l]].sort((a, b) => b[1] - a[1]))),
    attention: each("*", (l) => seen.weights[l].map((w) => [...w])),
    left: each("M", (l) => left(r, l, p)),
  };
  function each(letter, f) {
    return Object.fromEntries(model.blocks.flatMap((b, l) => (b.letter === letter ? [[l, f(l)]] : [])));
  }
}

// How much of what each byte wrote into the state is left at byte p: the product of the decays since. [heads][p + 1]
function left(r, l, p) {
  return Array.from(r.trail[p].decay[l], (_, head) => {
    const out = new Array(p + 1).fill(1);
    for (let s = p - 1; s >= 0; s--) out[s] = out[s + 1] * r.trail[s + 1].decay[l][head];
    return out;
  });
}

// -log p of each byte from the second on, in nats.
function surprises(r) {
  return r.bytes.slice(1).map((byte, t) => (r.trail[t].surprise ??= -Math.log(softmax(r.trail[t].logits)[byte])));
}
const mean = (x) => x.reduce((a, b) => a + b, 0) / Math.max(1, x.length);
