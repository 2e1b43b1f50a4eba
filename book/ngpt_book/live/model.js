// What does the model remember from byte to byte, and how does it read the next one?
//
// The weights arrive in pieces (pack.py) and are expanded to float32 once: products straight from int8 are three times slower. A
// reading holds the caches of one text and, for the view, what every block did at every byte.

const NEUTRAL = { blocks: {}, s_qk: 1, s_mamba: 1, s_moe: 1, s_z: 1 };  // factors; blocks: of alpha (GPT: of the block's output)
const encoder = new TextEncoder();
const models = {}, arrived = {}, promises = {};

// ---- weights -----------------------------------------------------------------------------------------------------
function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// A safetensors file: the length of the header, the header in JSON, the data.
function tensors(bytes) {
  const size = Number(new DataView(bytes.buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + size)));
  const facts = JSON.parse(header.__metadata__.ngpt), found = {};
  delete header.__metadata__;
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    const data = bytes.slice(8 + size + from, 8 + size + to).buffer;
    found[name] = { shape, data: dtype === "I8" ? new Int8Array(data) : new Float32Array(data) };
  }
  return { facts, found };
}

// nGPT: w = Norm(q); GPT: w = scale * q                                                                    pack.py
function expanded({ shape, data }, scale) {
  if (!(data instanceof Int8Array)) return data;
  const out = new Float32Array(data.length), d = shape[shape.length - 1];
  for (let row = 0; row < data.length; row += d) {
    let square = 0;
    for (let j = row; j < row + d; j++) square += data[j] * data[j];
    const factor = scale ? scale.data[row / d] : square > 0 ? 1 / Math.sqrt(square) : 0;
    for (let j = row; j < row + d; j++) out[j] = factor * data[j];
  }
  return out;
}

// Parameters by the names of ngpt_core; a trained scale has its value, s_eff = weight * init / scale.
function build(bytes) {
  const { facts, found } = tensors(bytes), c = facts.config, p = {};
  const init = { s_mamba: 0.5 * Math.sqrt(c.d_model), s_moe: 0.5 * Math.sqrt(c.d_model) };
  for (const [name, tensor] of Object.entries(found)) {
    if (name.endsWith(".scale")) continue;
    const values = expanded(tensor, found[`${name}.scale`]), scale = /\.(alpha|s_\w+)\.weight$/.exec(name);
    const factor = scale ? (c[`${scale[1]}_init`] ?? init[scale[1]]) / c[`${scale[1]}_scale`] : 1;
    p[scale ? name.slice(0, -".weight".length) : name] = factor === 1 ? values : values.map((v) => v * factor);
  }
  const blocks = [...c.pattern].map((letter, l) => {
    const own = { letter }, prefix = `blocks.${l}.`;
    for (const name in p) if (name.startsWith(prefix)) own[name.slice(prefix.length).replace(/^mixer\./, "")] = p[name];
    if (own.alpha) own.alpha = own.alpha.map((a) => (c.abs_alpha ? Math.abs(a) : a));
    own.norm = p[`${prefix}norm_weight`];
    own.norm_weight = p[`${prefix}mixer.norm_weight`];
    return own;
  });
  const rows = Array.from({ length: c.vocab_size }, (_, i) => p["head.weight"].subarray(i * c.d_model, (i + 1) * c.d_model));
  return { c, facts, blocks, embedding: p["embedding.weight"], head: p["head.weight"], lengths: rows.map(length),
           s_z: p["head.s_z"] || null, norm: p.norm_weight || null };
}

function piece(which, index, count, base64) {
  const have = (arrived[which] ||= { count, parts: [] });
  have.parts[index] = bytesOf(base64);
}

const progress = (which) => {
  if (models[which]) return 1;
  const have = arrived[which];
  return have ? have.parts.filter(Boolean).length / have.count : 0;
};

// ready(which): a promise that is kept when the weights are here. A failed load can be tried again.
function ready(which, onProgress = () => {}) {
  if (!(which in settings.pieces)) return Promise.reject(new Error(`The models in the page are "ngpt" and "gpt"; got ${which}.`));
  (listeners[which] ||= new Set()).add(onProgress);
  return (promises[which] ||= load(which).catch((error) => { delete promises[which]; throw error; }));
}
const listeners = {};

async function load(which) {
  const count = settings.pieces[which];
  const missing = [...Array(count).keys()].filter((i) => !arrived[which]?.parts[i]);
  await Promise.all(missing.map((i) => new Promise((done, failed) => {
    const script = Object.assign(document.createElement("script"), { src: `${base}live/${which}-${i}.js`, async: true });
    script.onload = () => { script.remove(); listeners[which].forEach((tell) => tell(progress(which))); done(); };
    script.onerror = () => { script.remove(); failed(new Error("The weights could not be loaded. Check the connection and try again.")); };
    document.head.append(script);
  })));
  const { parts } = arrived[which], bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) { bytes.set(part, at); at += part.length; }
  models[which] = build(bytes);
  delete arrived[which];
}

// ---- reading -----------------------------------------------------------------------------------------------------
function reading(which, knobs = NEUTRAL) {
  const model = models[which];
  if (!model) throw new Error(`The weights of ${which} are not here yet: wait for ngptLive.ready("${which}").`);
  const { c } = model, channels = c.mamba_heads * c.mamba_head_dim + 2 * c.groups * c.state;
  const caches = { M: () => ({ conv: Array.from({ length: c.conv - 1 }, () => new Float64Array(channels)),
                               S: new Float64Array(c.mamba_heads * c.mamba_head_dim * c.state) }),
                   "*": () => ({ k: [], v: [] }), E: () => null };
  return { which, model, knobs: { ...NEUTRAL, ...knobs }, bytes: [], caches: model.blocks.map((b) => caches[b.letter]()), trail: [] };
}

// One byte through all blocks. The trail keeps h after each block, and what the blocks looked at.
function read(r, byte, keep = true) {
  const { c, blocks, embedding } = r.model, d = c.d_model;
  let h = Float64Array.from(embedding.subarray(byte * d, (byte + 1) * d));
  const seen = { h: [h], decay: {}, weights: {}, chosen: {} };
  blocks.forEach((p, l) => {
    const factor = r.knobs.blocks[l] ?? 1, x = c.normalized ? h : rmsNorm(h, p.norm, c.norm_eps);
    const f = { M: mamba2, "*": attention, E: (p, c, x, _, knobs) => moe(p, c, x, knobs) }[p.letter](p, c, x, r.caches[l], r.knobs);
    h = c.normalized ? step(h, f.out, p.alpha.map((a) => a * factor)) : h.map((v, j) => v + factor * f.out[j]);
    if (!keep) return;
    seen.h.push(h);
    for (const what of ["decay", "weights", "chosen"]) if (f[what]) seen[what][l] = f[what];
  });
  r.bytes.push(byte);
  seen.logits = logitsOf(r, h);
  r.trail.push(keep ? seen : null);
  return seen.logits;
}

// What the head sees of a state: nGPT's h itself; in GPT the final norm comes first. (The logit lens looks through it too.)
const lens = (r, h) => (r.model.norm ? rmsNorm(h, r.model.norm, r.model.c.norm_eps) : h);

// z = s_z * (W h), the cosines to the rows of the output embedding times their scales                       eq. sz
function logitsOf(r, h) {
  const u = linear(r.model.head, lens(r, h)), { s_z } = r.model;
  return s_z ? u.map((v, i) => v * s_z[i] * r.knobs.s_z) : u;
}

function logits(which, text, knobs = NEUTRAL) {
  const bytes = encoder.encode(text);
  if (!bytes.length) throw new Error("The text is empty: there is no last byte whose successor could be predicted.");
  const r = reading(which, knobs);
  let z;
  for (const byte of bytes) z = read(r, byte, false);
  return Float32Array.from(z);
}
