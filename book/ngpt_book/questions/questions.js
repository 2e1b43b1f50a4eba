// How does a question answer back on a page without Python?
//
// Every <div class="ngq"> is a form with everything in it, and a JSON specification of what is right (forms.py). A kind of
// question knows how to read an answer from the controls, to judge it, and to put it back; the rest is common to all: commit,
// hint, "show it anyway", start over. An answer stays in this browser (localStorage) and is sent nowhere.
const KEY = "ngq.";
const store = {
  read(name) { try { return JSON.parse(localStorage.getItem(KEY + name)) || {}; } catch { return {}; } },
  write(name, state) { try { localStorage.setItem(KEY + name, JSON.stringify(state)); } catch { /* a private window */ } },
  forget(name) { try { localStorage.removeItem(KEY + name); } catch { /* nothing was kept */ } },
};
const clamp = (x) => Math.max(0, Math.min(1, x));
const problem = (text) => Object.assign(new Error(text), { friendly: true });

// -- the kinds: read() returns the answer or throws what is missing; judge(answer) -> { right, why }; put(answer); clear() --
function choice(element, spec) {
  const inputs = [...element.querySelectorAll(".ngq-option input")], rows = inputs.map((input) => input.closest(".ngq-option"));
  const whys = rows.map((row) => row.querySelector(".ngq-why").innerHTML);
  const shown = (chosen) => rows.forEach((row, i) => row.classList.toggle("ngq-chosen", chosen.includes(i)));
  return {
    read() {
      const chosen = inputs.flatMap((input, i) => (input.checked ? [i] : []));
      if (!chosen.length) throw problem("Choose an answer first.");
      return chosen;
    },
    judge(chosen) {
      if (!spec.many) return { right: spec.right[chosen[0]], why: whys[chosen[0]].replace(/^<b>.*?<\/b>/, "") };
      const wrong = spec.right.findIndex((right, i) => right !== chosen.includes(i));
      if (wrong < 0) return { right: true, why: "" };
      return { right: false, why: chosen.includes(wrong) ? "Something that you chose does not belong." : "Something is missing." };
    },
    put(chosen) { inputs.forEach((input, i) => { input.checked = chosen.includes(i); }); },
    reveal: shown,
    clear() { inputs.forEach((input) => { input.checked = false; }); shown([]); },
  };
}

function line(element, judge, parse) {
  const input = element.querySelector(".ngq-line input");
  return {
    read() {
      try { parse(input.value); } catch (error) { throw problem(error.message); }
      return input.value;
    },
    judge: (text) => judge(parse(text)),
    put(text) { input.value = text; },
    clear() { input.value = ""; },
  };
}

function number(element, spec) {
  const unit = element.querySelector(".ngq-line span")?.textContent || "";
  return line(element, (value) => {
    const off = Math.abs(value - spec.truth);
    if (off <= spec.reach) return { right: true, why: "" };
    const mistake = spec.mistakes.findIndex(([wrong, reach]) => Math.abs(value - wrong) <= reach);
    if (mistake >= 0) return { right: false, why: spec.why[mistake] };
    if (off <= 4 * spec.reach) return { right: false, why: "Close: look at the last digits." };
    if (value * spec.truth < 0) return { right: false, why: "The sign is another." };
    const times = value / spec.truth, factor = Math.max(times, 1 / times);
    const much = !(factor >= 3) ? "" : factor > 1000 ? ", by a factor of more than a thousand" : `, by a factor of about ${factor.toPrecision(1) * 1}`;
    return { right: false, why: `That is too ${value > spec.truth ? "large" : "small"}${much}.` };
  }, (text) => numberOf(text, unit));
}

function expression(element, spec) {
  const parse = (text) => formula(text, spec.symbols);
  return line(element, (mine) => {
    const values = spec.points.map(mine);
    if (same(values, spec.truth)) return { right: true, why: "" };
    const mistake = spec.mistakes.findIndex((wrong) => same(values, wrong));
    if (mistake >= 0) return { right: false, why: spec.why[mistake] };
    const at = spec.symbols.map((s) => `${s} = ${spec.points[0][s]}`).join(", ");
    const got = Number.isFinite(values[0]) ? `gives ${values[0].toPrecision(4)}` : "has no value";
    return { right: false, why: `At ${at} your formula ${got}, which is ${values[0] > spec.truth[0] ? "too large" : "not the right value"}.` };
  }, parse);
}

// A curve: heights from 0 to 1 over the columns, null where nothing was drawn. Between two drawn columns runs a straight line.
function curve(element, spec) {
  const svg = element.querySelector(".ngq-plot svg"), pad = svg.querySelector(".ngq-pad"), mine = svg.querySelector(".ngq-mine");
  const invite = svg.querySelector(".ngq-invite"), name = svg.querySelector(".ngq-mine-name");
  const handles = [...element.querySelectorAll(".ngq-handles input")], n = spec.truth.length;
  const margin = Number(pad.dataset.margin), sign = { x: 1, y: 1, width: -2, height: -2 };
  const box = Object.entries(sign).map(([side, s]) => Number(pad.getAttribute(side)) + s * margin);  // the plot itself
  const coarse = matchMedia("(pointer: coarse)").matches;
  let heights = Array(n).fill(null), last = null, tapped = null;

  const filled = (ends = true) => {
    const known = heights.flatMap((v, i) => (v === null ? [] : [i]));
    return heights.map((v, i) => {
      if (v !== null || !known.length) return v;
      const right = known.find((k) => k > i), left = known.findLast((k) => k < i);
      if (left === undefined || right === undefined) return ends ? heights[left ?? right] : null;
      return heights[left] + ((heights[right] - heights[left]) * (i - left)) / (right - left);
    });
  };
  const value = (axis, share) => {
    const { low, high, log } = spec.axes[axis];
    return (log ? low * (high / low) ** share : low + share * (high - low)).toPrecision(3);
  };
  function draw() {
    const places = filled(false).flatMap((v, i) => (v === null ? [] : [[box[0] + (box[2] * i) / (n - 1), box[1] + box[3] * (1 - v)]]));
    mine.setAttribute("d", places.length ? "M" + places.map((p) => p.map((c) => c.toFixed(1)).join(" ")).join("L") : "");
    invite.textContent = places.length ? "" : coarse && !("armed" in element.dataset) ? "Tap, then draw" : "Draw the curve here";
    const end = places.at(-1);
    name.toggleAttribute("hidden", places.length < 2);
    if (end) Object.entries({ x: end[0] - 4, y: end[1] - 9 < 24 ? end[1] + 20 : end[1] - 9, "text-anchor": "end" }).forEach((pair) => name.setAttribute(...pair));
    const all = filled();
    handles.forEach((handle, k) => {
      const height = all[Math.round((k * (n - 1)) / (handles.length - 1))];
      if (height !== null) handle.value = 100 * height;
      handle.setAttribute("aria-valuetext", value("y", handle.value / 100));
    });
  }
  function mark(event) {  // a stroke sets every column between this place and the one before
    const place = pad.getBoundingClientRect(), unit = place.width / (box[2] + 2 * margin);
    const u = clamp(((event.clientX - place.left) / unit - margin) / box[2]);
    const v = clamp(1 - ((event.clientY - place.top) / unit - margin) / box[3]);
    const column = Math.round(u * (n - 1)), [from, height] = last || [column, v];
    const steps = Math.max(1, Math.abs(column - from));
    for (let k = 0; k <= steps; k++) heights[Math.round(from + ((column - from) * k) / steps)] = height + ((v - height) * k) / steps;
    last = [column, v];
    draw();
  }
  // A finger that swipes over the plot scrolls the page; a tap says that it will draw from now on.
  const mayDraw = (event) => event.pointerType !== "touch" || "armed" in element.dataset;
  pad.addEventListener("pointerdown", (event) => {
    if (pad.closest("fieldset").disabled || event.button) return;
    if (!mayDraw(event)) { tapped = [event.clientX, event.clientY]; return; }
    event.preventDefault();
    pad.setPointerCapture(event.pointerId);
    last = null;
    mark(event);
  });
  pad.addEventListener("pointermove", (event) => { if (last) mark(event); });
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) pad.addEventListener(end, () => { last = null; });
  pad.addEventListener("pointerup", (event) => {  // a scroll ends in pointercancel instead
    if (!mayDraw(event) && tapped && Math.hypot(event.clientX - tapped[0], event.clientY - tapped[1]) < 12) {
      element.dataset.armed = "";
      draw();
    }
    tapped = null;
  });
  pad.addEventListener("touchmove", (event) => { if ("armed" in element.dataset) event.preventDefault(); }, { passive: false });
  handles.forEach((handle) => handle.addEventListener("input", () => {
    heights = heights.map(() => null);
    handles.forEach((h, k) => { heights[Math.round((k * (n - 1)) / (handles.length - 1))] = h.value / 100; });
    draw();
  }));
  draw();

  const apart = (a, b) => a.reduce((sum, v, i) => sum + Math.abs(v - b[i]), 0) / n;
  return {
    read() {
      const known = heights.flatMap((v, i) => (v === null ? [] : [i]));
      if (!known.length || known.at(-1) - known[0] < 0.6 * n) throw problem("Draw a curve from the left side to the right side first.");
      return filled().map((v) => Number(v.toFixed(3)));
    },
    judge(drawn) {
      const off = apart(drawn, spec.truth), far = spec.sketches.map((sketch) => apart(drawn, sketch));
      const nearest = far.indexOf(Math.min(...far)), measure = `On average your curve is ${Math.round(100 * off)}% of the plot's height away.`;
      if (off <= spec.tolerance && !(far[nearest] < off)) return { right: true, why: measure };
      if (far[nearest] < off) return { right: false, why: `${spec.why[nearest]} ${measure}` };
      return { right: false, why: measure };
    },
    put(drawn) { heights = [...drawn]; draw(); },
    clear() { heights = Array(n).fill(null); delete element.dataset.armed; draw(); },
  };
}

const KINDS = { choice, number, expression, curve };

// -- one question ----------------------------------------------------------------------------------------------------
function start(element) {
  const spec = JSON.parse(element.querySelector(".ngq-data").textContent);
  const [form, fieldset, verdict] = ["form", "fieldset", ".ngq-verdict"].map((css) => element.querySelector(css));
  const button = (kind) => element.querySelector(`.ngq-${kind}`);
  fieldset.disabled = false;
  const part = KINDS[spec.kind](element, spec), exercise = spec.hints.length > 0;
  let state = { hints: 0, ...store.read(spec.name) };

  const write = (words) => { verdict.innerHTML = words; };
  const plain = (text) => text.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`);
  const keep = () => store.write(spec.name, state);
  function hint() {
    const words = spec.hints[state.hints];
    if (words === undefined) return "";
    state.hints += 1;
    return `<p><b>Hint${spec.hints.length > 1 ? ` ${state.hints} of ${spec.hints.length}` : ""}:</b> ${words}</p>`;
  }
  function reveal() {  // the answer is shown from now on
    element.dataset.state = "answered";
    element.dataset.verdict = state.verdict;
    fieldset.disabled = true;
    if (state.answer !== undefined) part.reveal?.(state.answer);
  }
  function opened() {
    element.dataset.state = "open";
    delete element.dataset.verdict;
    fieldset.disabled = false;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (element.dataset.state === "answered") return;
    let answer;
    try { answer = part.read(); } catch (error) {
      if (!error.friendly) throw error;
      return write(`<p>${plain(error.message)}</p>`);
    }
    const { right, why } = part.judge(answer);
    state = { ...state, answer };
    if (right || !exercise) {
      state.verdict = right ? "right" : "wrong";
      reveal();
      write(`<p><b>${right ? "Right." : "Not so."}</b> ${why}</p>`);
    } else {
      write(`<p><b>Not yet.</b> ${why}</p>${hint()}`);
    }
    keep();
  });
  button("hint")?.addEventListener("click", () => {
    write(hint() || "<p>There are no more hints. Try once more, or let it be shown.</p>");
    keep();
  });
  button("show").addEventListener("click", () => {
    state = { ...state, verdict: "shown" };
    delete state.answer;
    reveal();
    write(`<p>Here it is.</p>`);
    keep();
  });
  button("again").addEventListener("click", () => {
    store.forget(spec.name);
    state = { hints: 0 };
    part.clear();
    opened();
    write("");
    element.querySelector("input:not([type=range]), .ngq-commit").focus();
  });

  if (state.answer !== undefined) part.put(state.answer);
  element.querySelectorAll(".ngq-buttons").forEach((row) => { row.hidden = false; });
  if (state.verdict) reveal(); else opened();
}

function scan() { document.querySelectorAll(".ngq:not([data-state])").forEach(start); }

window.ngq = { scan, formula, numberOf };
if (settings.css) document.head.append(Object.assign(document.createElement("style"), { textContent: settings.css }));
scan();
