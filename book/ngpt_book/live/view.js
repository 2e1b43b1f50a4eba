// What does the reader do with the model, and what happens then?
//
// A view first draws its stored example. The first touch loads the weights of the model that is shown; from then on the text, the
// knobs and the chosen byte determine a reading (model.js), and its sight (trace.js) is drawn (drawing.js). Long readings are
// cut into slices of a few milliseconds, so that the page stays responsive; a newer one ends an older one.

const SLICE = 12, LONGEST = 500, decoder = new TextDecoder();
const NAMES = { ngpt: "nGPT", gpt: "GPT" };
const SCALES = { s_qk: ["s<sub>qk</sub>", "how sharply attention chooses"], s_mamba: ["s<sub>mamba</sub>", "the input of Mamba-2"],
  s_moe: ["s<sub>moe</sub>", "how decided the routers are"], s_z: ["s<sub>z</sub>", "how sharp the prediction is"] };
const STARTS = ["import os\nimport ", "for i in range(", "class Point:\n    def __init__(self, x, y):\n        self.", "The sphere is "];
const pause = () => new Promise((done) => setTimeout(done));

const frame = (size) => `
  <div class="ngl-bar-top"><div class="ngl-which" role="group" aria-label="Model">
    ${Object.entries(NAMES).map(([w, name]) => `<button type="button" data-which="${w}">${name}</button>`).join("")}</div>
    <div class="ngl-status" role="status"><span></span><progress max="1" value="0" hidden></progress></div></div>
  <label class="ngl-label">Type something: the model has read Python, and predicts the next byte.
    <textarea rows="${size === "small" ? 2 : 3}" spellcheck="false" autocapitalize="off" autocomplete="off" autocorrect="off" maxlength="${LONGEST}"></textarea></label>
  <div class="ngl-tools"><button type="button" class="ngl-go">▸ Continue the text</button>
    <label class="ngl-heat">temperature <input type="range" min="0" max="1.5" step="0.05" value="0.7"><output>0.70</output></label>
    <span class="ngl-starts">${STARTS.map((text, i) => `<button type="button" data-start="${i}">${escape(text.split("\n").pop().trim())}…</button>`).join("")}</span></div>
  <div class="ngl-whole"><div class="ngl-bytes" tabindex="0" role="group" aria-label="The bytes of the text: choose one with the arrow keys"></div>
    <p class="ngl-note">Each byte is shaded by how much it surprised the model. Choose one to see what happened there. <b class="ngl-loss"></b></p></div>
  <div class="ngl-two">
    <figure><figcaption>What comes next</figcaption><div class="ngl-nexts"></div><p class="ngl-note ngl-next-note"></p>
      <div class="ngl-only-small"><p class="ngl-note">Its best guess before the first block, and after each:</p><div class="ngl-guesses"></div></div></figure>
    <figure><figcaption>The walk, seen from above <b class="ngl-pole"></b></figcaption><div class="ngl-map"></div>
      <p class="ngl-note ngl-map-note"></p></figure>
  </div>
  <div class="ngl-whole">
    <h4>Block by block, and what if a block were different?</h4>
    <div class="ngl-blocks"></div>
    <div class="ngl-scales"></div>
    <div class="ngl-foot"><span class="ngl-moved" role="status"></span><button type="button" class="ngl-reset">All knobs as trained</button></div>
    <div class="ngl-two">
      <figure><figcaption>The angle to every likely byte</figcaption><div class="ngl-way"></div>
        <p class="ngl-note">Both axes have the same scale, so a line that falls at 45° walks straight towards its byte: no block can do better.</p></figure>
      <figure><figcaption class="ngl-side-title"></figcaption><div class="ngl-side"></div><p class="ngl-note ngl-side-note"></p></figure>
    </div>
    <h4>What each block looked at</h4>
    <div class="ngl-memory"></div>
    <p class="ngl-note">One column per byte, up to the one that is chosen. <span class="ngl-key ngl-mamba"></span> Mamba-2: how much of what that byte wrote into the state is left now. <span class="ngl-key ngl-attention"></span> Attention: how much the last byte looks at it. <span class="ngl-key ngl-moe"></span> Experts: the number of the expert with the largest weight. Press a block to open its heads or experts.</p>
  </div>`;

function start(element) {
  const data = JSON.parse(element.querySelector(".ngl-data").textContent), small = element.dataset.size === "small";
  const root = Object.assign(document.createElement("div"), { className: "ngl-live", innerHTML: frame(element.dataset.size) });
  element.append(root);
  element.dataset.state = "live";
  const $ = (css) => root.querySelector(css), all = (css) => [...root.querySelectorAll(css)];
  const fresh = () => ({ blocks: {}, s_qk: 1, s_mamba: 1, s_moe: 1, s_z: 1 });
  const state = { which: "ngpt", at: null, target: 0, block: 0, open: null, knobs: { ngpt: fresh(), gpt: fresh() } };
  let current = null, shown = null, plain = null, turn = 0, writing = false;
  const pattern = () => data.blocks[state.which], textarea = $("textarea");
  textarea.value = decoder.decode(Uint8Array.from(data.examples.ngpt.bytes));

  // -- loading and reading -----------------------------------------------------------------------------------------
  function report(words, share = null) {
    $(".ngl-status span").textContent = words;
    $(".ngl-status progress").hidden = share === null;
    if (share !== null) $(".ngl-status progress").value = share;
  }
  const neutral = (k) => Object.values({ ...k, blocks: 1 }).every((v) => v === 1) && Object.values(k.blocks).every((v) => v === 1);

  // Reads `bytes` in slices; null if something newer has begun.
  async function readAll(r, bytes, mine) {
    const began = performance.now();
    while (r.bytes.length < bytes.length) {
      const until = performance.now() + SLICE;
      while (r.bytes.length < bytes.length && performance.now() < until) read(r, bytes[r.bytes.length]);
      if (performance.now() - began > 250) report("reading", r.bytes.length / bytes.length);
      if (r.bytes.length < bytes.length) await pause();
      if (mine !== turn) return null;
    }
    return r;
  }

  async function update() {
    const mine = ++turn, { which } = state;
    stop();
    if (!models[which]) {
      report(`loading the weights of ${NAMES[which]}`, progress(which));
      try {
        await ready(which, (share) => { if (state.which === which) report(`loading the weights of ${NAMES[which]}`, share); });
      } catch (error) {
        report(error.message);
        return;
      }
      if (mine !== turn) return;
    }
    const bytes = [...encoder.encode(textarea.value)], knobs = state.knobs[which], key = JSON.stringify(knobs);
    if (!bytes.length) { report("Type at least one byte."); return; }
    const longer = current && current.which === which && current.key === key && current.bytes.every((b, i) => b === bytes[i]);
    const r = await readAll(longer ? current : Object.assign(reading(which, structuredClone(knobs)), { key }), bytes, mine);
    if (!r) return;
    current = r;
    if (neutral(knobs)) plain = { which, text: textarea.value, loss: mean(surprises(r)) };
    else if (!plain || plain.which !== which || plain.text !== textarea.value) {
      const trained = await readAll(reading(which), bytes, mine);
      if (!trained) return;
      plain = { which, text: textarea.value, loss: mean(surprises(trained)) };
    }
    if (state.at !== null && state.at >= bytes.length - 1) state.at = null;
    report(`${NAMES[which]} is running in this page`);
    draw(sight(r, state.at ?? bytes.length - 1), { surprise: surprises(r), bytes: r.bytes });
    element.dataset.ready = which;
  }

  // -- drawing -----------------------------------------------------------------------------------------------------
  function draw(s, text = { surprise: s.surprise, bytes: s.bytes }) {
    shown = { s, text };
    const here = s.bytes.length - 1, letters = pattern(), nGPT = s.alpha[0] !== null, best = s.next[state.target] ?? s.next[0];
    state.target = Math.min(state.target, s.next.length - 1);
    all(".ngl-which button").forEach((b) => b.setAttribute("aria-pressed", b.dataset.which === state.which));
    $(".ngl-nexts").innerHTML = drawNext(s, state.target, nGPT);
    $(".ngl-next-note").innerHTML = nGPT ? `The numbers on the right are the logit: the cosine of <i>h</i> with the byte's vector, times <i>s<sub>z</sub></i> of that byte.`
      : `The numbers on the right are the logit: the cosine of <i>h</i> with the byte's vector, times the two lengths.`;
    $(".ngl-pole").textContent = `“${glyph(best.byte)}”`;
    $(".ngl-map").innerHTML = drawMap(s, letters, state.target, small ? -1 : state.block);
    const to = s.to[state.target], way = s.turn.reduce((a, b) => a + b, 0);
    $(".ngl-map-note").innerHTML = `The center is ${escape(word(best.byte))}; distances from it are true angles. From “${escape(glyph(s.bytes[here]))}” the ${letters.length} blocks turn <i>h</i> by ${degree(way)} in all ` +
      `and bring it from ${degree(to[0])} to ${degree(to[to.length - 1])}. ${keys()}`;
    $(".ngl-guesses").innerHTML = s.lens.map(([[b, p]], l) => `<span class="ngl-chip${l ? ` ngl-${letterClass(letters[l - 1])}` : ""}" style="--p:${p.toFixed(3)}" title="${escape(`${l ? `after block ${l}` : "before the first block"}: ${word(b)}, ${percent(p)}`)}">${escape(glyph(b))}<small>${percent(p)}</small></span>`).join("");
    if (small) return;
    $(".ngl-bytes").innerHTML = drawBytes(text.bytes, text.surprise, here);
    const loss = mean(text.surprise), moved = plain && !neutral(state.knobs[state.which]) && plain.which === state.which;
    $(".ngl-loss").textContent = text.surprise.length ? `Loss of this text: ${loss.toFixed(3)} nats per byte${moved ? `, as trained ${plain.loss.toFixed(3)}` : ""}.` : "";
    $(".ngl-moved").textContent = moved ? `Loss ${loss.toFixed(3)}: ${Math.abs(loss - plain.loss) < 0.0005 ? "unchanged" : `${loss > plain.loss ? "+" : "−"}${Math.abs(loss - plain.loss).toFixed(3)} against the trained model`}.` : "The model is as it was trained.";
    drawBlocks(s, nGPT);
    $(".ngl-way").innerHTML = drawWay(s, letters, state.target);
    drawSide(s, nGPT);
    const before = $(".ngl-scroll"), place = before && before.dataset.at === String(here) ? before.scrollLeft : 1e6;
    state.open ??= letters.indexOf("*");
    $(".ngl-memory").innerHTML = drawMemory(s, letters, state.open);
    Object.assign($(".ngl-scroll"), { scrollLeft: place }).dataset.at = here;
  }
  const keys = () => [...new Set(pattern())].map((letter) => `<span class="ngl-nowrap"><span class="ngl-key ngl-${letterClass(letter)}"></span> ${KINDS[letter]}</span>`).join(" ");

  function drawSide(s, nGPT) {
    $(".ngl-side-title").innerHTML = nGPT ? "How far each block turned, and its α" : "How far each block turned, and the length of <i>h</i>";
    const most = Math.max(...s.turn), longest = Math.max(...s.length);
    $(".ngl-side").innerHTML = `<div class="ngl-steps">${s.turn.map((x, l) => `<span class="ngl-${letterClass(pattern()[l])}"><b>${l + 1}</b><span class="ngl-bar"><i style="width:${(100 * x) / most}%"></i></span><em>${degree(x)}</em>` +
      (nGPT ? `<em>α ${s.alpha[l].toFixed(2)}</em>` : `<span class="ngl-bar ngl-long"><i style="width:${(100 * s.length[l + 1]) / longest}%"></i></span><em>${s.length[l + 1].toFixed(1)}</em>`) + `</span>`).join("")}</div>`;
    $(".ngl-side-note").innerHTML = nGPT ? `α is the mean of the block's eigen learning rates. <i>h</i> has length 1 after every block.`
      : `GPT adds every block's output to <i>h</i>, which grows from ${s.length[0].toFixed(1)} to ${s.length[s.length.length - 1].toFixed(1)}: the same output turns a longer <i>h</i> less.`;
  }

  // Built once per model; later only texts change, so that a slider stays in the hand.
  function drawBlocks(s, nGPT) {
    const box = $(".ngl-blocks"), knobs = state.knobs[state.which];
    if (box.dataset.model !== state.which) {
      box.dataset.model = state.which;
      box.innerHTML = `<div class="ngl-block ngl-head"><span>block</span><span>${nGPT ? "its α, times" : "its output, times"}</span><span></span><span>turned</span><span>next byte, if the model ended here</span></div>
        <div class="ngl-block ngl-none"><span>the byte itself</span><span></span><span></span><span></span><span class="ngl-lens"></span></div>` +
        [...pattern()].map((letter, l) => `<div class="ngl-block ngl-${letterClass(letter)}" data-block="${l}"><button type="button" class="ngl-name" data-choose="${l}"><i></i>${l + 1} ${KINDS[letter]}</button>
        <span class="ngl-knob"><input type="range" min="0" max="3" step="0.05" value="1" data-knob="${l}" aria-label="${nGPT ? "alpha" : "output"} of block ${l + 1}, times"><output>1.00</output></span>
        <label class="ngl-switch"><input type="checkbox" checked data-switch="${l}" aria-label="block ${l + 1} is on"><span>on</span></label><span class="ngl-turn"></span><span class="ngl-lens"></span></div>`).join("");
      $(".ngl-scales").innerHTML = nGPT ? Object.entries(SCALES).map(([name, [symbol, about]]) => `<label class="ngl-scale"><span><b>${symbol}</b> <small>${about}</small></span><input type="range" min="-2" max="2" step="0.1" value="0" data-scale="${name}" aria-label="${name}, times"><output>× 1.00</output></label>`).join("")
        : `<p class="ngl-note">GPT has none of nGPT's scales: no s<sub>qk</sub>, s<sub>mamba</sub>, s<sub>moe</sub> or s<sub>z</sub>. Lengths of vectors do their work.</p>`;
    }
    all("[data-knob]").forEach((input) => {
      const factor = knobs.blocks[input.dataset.knob] ?? 1, row = input.closest(".ngl-block");
      input.value = factor;
      input.style.setProperty("--at", `${(100 * factor) / 3}%`);
      input.nextElementSibling.textContent = factor.toFixed(2);
      row.querySelector("[data-switch]").checked = factor !== 0;
      row.classList.toggle("ngl-off", factor === 0);
      row.querySelector(".ngl-turn").textContent = degree(s.turn[input.dataset.knob]);
      row.classList.toggle("ngl-chosen", Number(input.dataset.knob) === state.block);
    });
    all("[data-scale]").forEach((input) => {
      const factor = knobs[input.dataset.scale];
      input.value = Math.log2(factor).toFixed(1);
      input.style.setProperty("--at", `${25 * (Math.log2(factor) + 2)}%`);
      input.nextElementSibling.textContent = `× ${factor.toFixed(2)}`;
    });
    all(".ngl-block .ngl-lens").forEach((cell, l) => {
      cell.innerHTML = s.lens[l].map(([b, p]) => `<span class="ngl-chip" style="--p:${p.toFixed(3)}" title="${escape(word(b))}: ${percent(p)}">${escape(glyph(b))}<small>${percent(p)}</small></span>`).join("");
    });
  }

  // -- writing on --------------------------------------------------------------------------------------------------
  function stop() { writing = false; $(".ngl-go").textContent = "▸ Continue the text"; }

  async function write() {
    if (writing) return stop();
    state.at = null;
    await update();
    if (!current || current.which !== state.which || models[state.which] !== current.model) return;
    const mine = ++turn, r = current, began = r.bytes.length;
    writing = true;
    $(".ngl-go").textContent = "■ Stop";
    while (writing && mine === turn && r.bytes.length < Math.min(LONGEST, began + 160)) {
      const byte = drawn(r.trail[r.bytes.length - 1].logits, Number($(".ngl-heat input").value));
      if (byte === 0) break;  // the end of a text
      read(r, byte);
      textarea.value = decoder.decode(Uint8Array.from(r.bytes));
      textarea.scrollTop = textarea.scrollHeight;
      draw(sight(r), { surprise: surprises(r), bytes: r.bytes });
      await new Promise((done) => setTimeout(done, 20));
    }
    if (mine !== turn) return;
    stop();
    if (r.bytes.length >= LONGEST) report(`The view reads at most ${LONGEST} bytes.`);
    if (encoder.encode(textarea.value).length !== r.bytes.length) update();  // the last character was cut
  }

  function drawn(logits, temperature) {
    if (temperature === 0) return best(logits, 1)[0];
    const p = softmax(logits, temperature);
    let u = Math.random(), i = 0;
    while (i < p.length - 1 && (u -= p[i]) > 0) i++;
    return i;
  }

  // -- what the reader does ----------------------------------------------------------------------------------------
  textarea.addEventListener("input", () => { state.at = null; state.target = 0; update(); });
  root.addEventListener("input", ({ target }) => {
    const knobs = state.knobs[state.which];
    if (target.dataset.knob) knobs.blocks[target.dataset.knob] = Number(target.value);
    else if (target.dataset.switch) knobs.blocks[target.dataset.switch] = target.checked ? 1 : 0;
    else if (target.dataset.scale) knobs[target.dataset.scale] = 2 ** Number(target.value);
    else if (target.closest(".ngl-heat")) { $(".ngl-heat output").textContent = Number(target.value).toFixed(2); heat(); return; }
    else return;
    if (target.dataset.knob) target.nextElementSibling.textContent = Number(target.value).toFixed(2);
    update();
  });
  const heat = () => $(".ngl-heat input").style.setProperty("--at", `${(100 * $(".ngl-heat input").value) / 1.5}%`);
  heat();
  root.addEventListener("click", ({ target }) => {
    const on = (css) => target.closest(css)?.dataset;
    let found;
    if ((found = on("[data-which]"))) choose(found.which);
    else if ((found = on("[data-start]"))) { textarea.value = STARTS[found.start]; state.at = null; state.target = 0; update(); }
    else if ((found = on("[data-target]"))) { state.target = Number(found.target); again(); }
    else if ((found = on("[data-choose]"))) { state.block = Number(found.choose); state.open = state.block; again(); }
    else if ((found = on("[data-open]"))) { state.open = Number(found.open) === state.open ? -1 : Number(found.open); again(); }
    else if ((found = on(".ngl-leg"))) { state.block = Number(found.block); state.open = state.block; again(); }
    else if ((found = on("[data-at]"))) go(Number(found.at));
    else if (on(".ngl-go")) write();
    else if (on(".ngl-reset")) { state.knobs[state.which] = fresh(); update(); }
  });
  $(".ngl-bytes")?.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], here = shown.s.bytes.length - 1;
    if (move) { event.preventDefault(); go(here + move); }
  });
  const again = () => {
    const kept = document.activeElement?.dataset ?? {}, [name] = Object.keys(kept), value = kept[name];
    draw(shown.s, shown.text);
    if (name && root.contains(root.querySelector(`[data-${name}="${value}"]`))) root.querySelector(`[data-${name}="${value}"]`).focus();
  };
  function go(at) {
    if (at < 0 || at >= shown.text.bytes.length) return;
    state.at = at === shown.text.bytes.length - 1 ? null : at;
    state.target = 0;
    update();
  }
  function choose(which) {
    if (which === state.which) return;
    state.which = which;
    state.target = 0;
    const text = decoder.decode(Uint8Array.from(data.examples[which].bytes));
    if (!models[which] && textarea.value === text && state.at === null) draw(data.examples[which]);
    update();
  }

  draw(data.examples.ngpt);
  report("A stored example. Type, or press anything: the weights (2 MB) load then.");
}

// ---- the page ----------------------------------------------------------------------------------------------------
const base = document.currentScript?.src ? document.currentScript.src.replace(/[^/]*$/, "") : "";
const scan = () => document.querySelectorAll(".ngl:not([data-state])").forEach(start);
window.ngptLive = { ready, logits, piece, progress, scan,
  sight: (which, text, knobs) => { const r = reading(which, knobs); encoder.encode(text).forEach((b) => read(r, b)); return sight(r); } };
document.head.append(Object.assign(document.createElement("style"), { textContent: settings.css }));
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", scan);
else scan();
