// What does a sight (trace.js) look like? Every function takes data and returns SVG or HTML as text; view.js puts it in place.

const KINDS = { M: "Mamba-2", "*": "attention", E: "experts" };
const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)}%` : p >= 0.00095 ? `${(100 * p).toFixed(1)}%` : "<0.1%");
const degree = (x) => `${x.toFixed(x < 9.95 ? 1 : 0)}°`;

// A byte as one character, and in words.
const SIGNS = { 9: "⇥", 10: "⏎", 13: "␍", 32: "␣" }, WORDS = { 9: "tab", 10: "new line", 13: "carriage return", 32: "space", 0: "end of text" };
const glyph = (b) => SIGNS[b] ?? (b > 32 && b < 127 ? String.fromCharCode(b) : b.toString(16).toUpperCase().padStart(2, "0"));
const word = (b) => WORDS[b] ?? (b > 32 && b < 127 ? String.fromCharCode(b) : `byte ${b}`);

// ---- the map -----------------------------------------------------------------------------------------------------
function drawMap(s, pattern, target, selected) {
  const W = 420, H = 350, cx = W / 2, cy = 182, R = 158, to = s.to[target], end = to.length - 1;
  const far = Math.max(96, ...to.map((x) => x + 6)), lon = longitudes(to, s.turn);
  const at = ([angle, u]) => [cx + (R * angle / far) * Math.cos(u), cy - (R * angle / far) * Math.sin(u)];
  const xy = (p) => at(p).map((v) => v.toFixed(1)).join(",");
  const states = to.map((angle, l) => [angle, lon[l]]);
  const rings = [30, 60, 90, 120, 150].filter((x) => x <= far).map((x) => `<circle cx="${cx}" cy="${cy}" r="${(R * x / far).toFixed(1)}"/>`);
  const marks = [30, 60, 90, 120].filter((x) => x <= far).map((x) =>
    `<text x="${cx}" y="${(cy + (R * x) / far + 11).toFixed(1)}" text-anchor="middle">${x}°</text>`);
  const legs = s.turn.map((turn, l) => {
    const line = greatCircle(states[l], states[l + 1]).map(xy).join(" ");
    const what = `block ${l + 1}, ${KINDS[pattern[l]]}: turned ${degree(turn)}, now ${degree(to[l + 1])} from ${word(s.next[target].byte)}`;
    return `<polyline class="ngl-leg ngl-${letterClass(pattern[l])}${l === selected ? " ngl-chosen" : ""}" data-block="${l}" points="${line}"><title>${escape(what)}</title></polyline>`;
  });
  const dots = states.slice(1, -1).map((p) => { const [x, y] = at(p); return `<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="2.6"/>`; });
  const [sx, sy] = at(states[0]), [ex, ey] = at(states[end]), out = sx < cx ? -1 : 1;
  const beyond = at([to[end] + 11, lon[end]]);
  return `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${escape(mapWords(s, target))}">
    <g class="ngl-rings">${rings.join("")}</g><g class="ngl-marks">${marks.join("")}</g>
    <line class="ngl-toward" x1="${cx}" y1="${cy}" x2="${ex.toFixed(1)}" y2="${ey.toFixed(1)}"/>
    ${legs.join("")}<g class="ngl-dots">${dots.join("")}</g>
    ${badge(cx, cy, glyph(s.next[target].byte), "ngl-target")}
    ${badge(sx, sy, glyph(s.bytes[s.bytes.length - 1]), "ngl-start")}<circle class="ngl-end" cx="${ex.toFixed(1)}" cy="${ey.toFixed(1)}" r="5.5"/>
    <text class="ngl-word" x="${(sx + out * 16).toFixed(1)}" y="${(sy + 4).toFixed(1)}" text-anchor="${out < 0 ? "end" : "start"}">start</text>
    <text class="ngl-word" x="${beyond[0].toFixed(1)}" y="${(beyond[1] + 4).toFixed(1)}" text-anchor="middle">h</text></svg>`;
}
const badge = (x, y, text, cls) => `<g class="${cls}"><circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="12"/>` +
  `<text x="${x.toFixed(1)}" y="${(y + 4.5).toFixed(1)}" text-anchor="middle">${escape(text)}</text></g>`;
const letterClass = (letter) => ({ M: "mamba", "*": "attention", E: "moe" })[letter];
const mapWords = (s, target) => `The walk from ${word(s.bytes[s.bytes.length - 1])}, ${degree(s.to[target][0])} away from ${word(s.next[target].byte)}, ` +
  `in ${s.turn.length} steps to ${degree(s.to[target][s.turn.length])}.`;

// ---- the angles to all likely bytes, against the way walked -------------------------------------------------------
function drawWay(s, pattern, target) {
  const W = 420, H = 300, left = 34, top = 12, bottom = 34, right = 40, walked = [0];
  s.turn.forEach((x) => walked.push(walked[walked.length - 1] + x));
  const low = Math.floor((Math.min(...s.to.flat()) - 4) / 10) * 10, high = Math.ceil((Math.max(...s.to.flat()) + 2) / 10) * 10;
  const unit = Math.min((W - left - right) / walked[walked.length - 1], (H - top - bottom) / (high - low));  // the same on both axes
  const x = (v) => left + v * unit, y = (v) => top + (high - v) * unit, base = y(low);
  const each = high - low > 70 ? 20 : 10, ticks = [];
  for (let v = low; v <= high; v += each) ticks.push(`<line x1="${left}" x2="${x(walked[walked.length - 1])}" y1="${y(v)}" y2="${y(v)}"/><text x="${left - 5}" y="${y(v) + 4}" text-anchor="end">${v}°</text>`);
  const bands = s.turn.map((turn, l) => `<rect class="ngl-band ngl-${letterClass(pattern[l])}" x="${x(walked[l])}" y="${base}" width="${Math.max(0.5, turn * unit - 1)}" height="7"><title>${escape(`block ${l + 1}, ${KINDS[pattern[l]]}: ${degree(turn)}`)}</title></rect>`);
  const ends = spread(s.to.map((to) => y(to[to.length - 1])), 13);
  const lines = s.to.map((to, c) => `<g class="ngl-line${c === target ? " ngl-chosen" : ""}"><polyline points="${to.map((v, l) => `${x(walked[l]).toFixed(1)},${y(v).toFixed(1)}`).join(" ")}"/>` +
    `<text x="${x(walked[walked.length - 1]) + 8}" y="${ends[c] + 4}">${escape(glyph(s.next[c].byte))}</text></g>`);
  return `<svg viewBox="0 0 ${W} ${Math.max(base + 30, ...ends.map((v) => v + 8)).toFixed(0)}" role="img" aria-label="The angle from h to each of the likely next bytes, against the angle walked so far.">
    <g class="ngl-marks ngl-grid">${ticks.join("")}</g>${bands.join("")}${lines.join("")}
    <g class="ngl-marks"><text x="${left}" y="${base + 22}">walked: ${degree(walked[walked.length - 1])} in all</text></g></svg>`;
}

// Places at least `gap` apart, in the same order, moved as little as that needs.
function spread(places, gap) {
  const order = [...places.keys()].sort((a, b) => places[a] - places[b]), out = places.slice();
  order.forEach((k, i) => { if (i) out[k] = Math.max(out[k], out[order[i - 1]] + gap); });
  return out;
}

// ---- what comes next ---------------------------------------------------------------------------------------------
function drawNext(s, target, normalized) {
  return s.next.map((n, c) => `<button type="button" class="ngl-next" aria-pressed="${c === target}" data-target="${c}">
    <span class="ngl-glyph">${escape(glyph(n.byte))}</span><span class="ngl-bar"><i style="width:${(100 * n.p).toFixed(1)}%"></i></span>
    <span class="ngl-number">${percent(n.p)}</span><span class="ngl-why">${n.cos.toFixed(2)} × ${n.scale.toFixed(1)}</span>
    <span class="ngl-hidden">${escape(word(n.byte))}: cosine times ${normalized ? "s_z" : "length"}</span></button>`).join("");
}

// ---- the text, shaded by surprise --------------------------------------------------------------------------------
function drawBytes(bytes, surprise, p) {
  return bytes.map((b, t) => {
    const nats = t ? surprise[t - 1] : null, shade = nats === null ? 0 : Math.min(1, nats / 6);
    const label = nats == null ? word(b) : `${word(b)}: surprise ${nats.toFixed(2)} nats, it had ${percent(Math.exp(-nats))}`;
    const space = b === 10 ? "<br>" : "";
    return `<span data-at="${t}" class="${t === p ? "ngl-here" : ""}${b < 33 || b > 126 ? " ngl-sign" : ""}" style="--s:${shade.toFixed(2)}" title="${escape(label)}">${escape(glyph(b))}</span>${space}`;
  }).join("");
}

// ---- what each block looked at: one column per byte ----------------------------------------------------------------
const CELL = 15, COLUMNS = 96;

function drawMemory(s, pattern, open) {
  const skip = Math.max(0, s.bytes.length - COLUMNS), n = s.bytes.length - skip, rows = [];
  [...pattern].forEach((letter, l) => {
    rows.push({ l, letter, head: null, cells: summary(s, letter, l).slice(skip) });
    if (l === open) details(s, letter, l).forEach((cells, i) => rows.push({ l, letter, head: i, cells: cells.slice(skip) }));
  });
  let y = 20;
  const body = rows.map((row) => {
    const tall = row.head === null ? 20 : 12, top = y;
    y += tall + (row.head === null ? 3 : 1);
    const cells = row.cells.map((cell, t) => (cell.v > 0.002 ? `<rect x="${t * CELL}" y="${top}" width="${CELL - 1}" height="${tall}" rx="2" fill-opacity="${Math.min(1, row.letter === "*" ? Math.sqrt(cell.v) : cell.v).toFixed(2)}"><title>${escape(cell.title)}</title></rect>` : "") +
      (cell.text ? `<text x="${t * CELL + CELL / 2 - 0.5}" y="${top + 14}" text-anchor="middle">${cell.text}</text>` : ""));
    return { svg: `<g class="ngl-${letterClass(row.letter)}" data-block="${row.l}"><rect class="ngl-ground" x="0" y="${top}" width="${n * CELL}" height="${tall}"/>${cells.join("")}</g>`, top, tall, row };
  });
  const heads = s.bytes.slice(skip).map((b, t) => `<text x="${t * CELL + CELL / 2 - 0.5}" y="13" text-anchor="middle"${t === n - 1 ? ' class="ngl-last"' : ""}>${escape(glyph(b))}</text>`);
  const names = body.map(({ row, tall }) => row.head === null
    ? `<button type="button" class="ngl-name ngl-${letterClass(row.letter)}" style="height:${tall + 3}px" data-open="${row.l}" aria-expanded="${row.l === open}"><i></i>${row.l + 1} ${KINDS[row.letter]}</button>`
    : `<span class="ngl-name ngl-sub" style="height:${tall + 1}px">${row.letter === "E" ? "expert" : "head"} ${row.head + 1}</span>`);
  return `<div class="ngl-names"><span style="height:20px"></span>${names.join("")}</div><div class="ngl-scroll" tabindex="0" role="group" aria-label="What each block looked at, byte by byte"><svg width="${n * CELL}" height="${y}" role="img" aria-label="${escape(memoryWords(s, pattern))}"><g class="ngl-text">${heads.join("")}</g>${body.map((b) => b.svg).join("")}</svg></div>`;
}

function summary(s, letter, l) {
  if (letter === "E") return s.experts[l].map((chosen, t) => ({ v: 0.22 + 0.6 * (chosen[0][1] / 2.5 - 0.5), text: chosen[0][0] + 1,
    title: `${word(s.bytes[t])}: ${chosen.map(([e, w]) => `expert ${e + 1} with weight ${w.toFixed(2)}`).join(", ")}` }));
  const heads = letter === "*" ? s.attention[l] : s.left[l];
  return s.bytes.map((b, t) => {
    const v = mean(heads.map((h) => h[t]));
    return { v, title: letter === "*" ? `${word(b)}: ${percent(v)} of the attention of the last byte` : `${word(b)}: ${percent(v)} of what it wrote into the state is left` };
  });
}

function details(s, letter, l) {
  if (letter === "E") {
    const count = 1 + Math.max(7, ...s.experts[l].flat().map(([e]) => e));
    return Array.from({ length: count }, (_, e) => s.experts[l].map((chosen, t) => {
      const w = chosen.find(([i]) => i === e)?.[1] ?? 0;
      return { v: w / 2, title: `${word(s.bytes[t])}: expert ${e + 1} with weight ${w.toFixed(2)}` };
    }));
  }
  return (letter === "*" ? s.attention[l] : s.left[l]).map((row, i) => row.map((v, t) => ({ v, title: `head ${i + 1}, ${word(s.bytes[t])}: ${percent(v)}` })));
}

function memoryWords(s, pattern) {
  const l = pattern.indexOf("*"), heads = s.attention[l], seen = s.bytes.map((_, t) => mean(heads.map((h) => h[t]))), top = seen.indexOf(Math.max(...seen));
  return `At the last byte, attention looks most at ${word(s.bytes[top])}, ${s.bytes.length - 1 - top} bytes back.`;
}
