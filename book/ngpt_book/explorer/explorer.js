// How does an Explorer move on a page without Python?
//
// Every <div class="ngx"> carries a specification: a plotly figure without its moving parts, the sliders' values, the arrays of the
// Explorer's function over the whole grid of slider values, and the places of the figure that each array fills. A move of a slider
// picks a cell of the grid, fills it in, and hands the figure to Plotly.react. ../lazy.js says when a block starts.

// The address: #key.slider=value&..., for every slider of the page that is not at its default. (The frames in which notebooks show
// their outputs have no address of their own.)
const shared = window === window.top, moved = new Map();
const decoded = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
const address = () => new Map(location.hash.slice(1).split("&").filter((s) => s.includes("=")).map((s) => s.split("=").map(decoded)));
function write() {
  if (!shared) return;
  const hash = [...moved].map((entry) => entry.map(encodeURIComponent).join("=")).join("&");
  history.replaceState(history.state, "", hash ? "#" + hash : location.pathname + location.search);
}
// Two Explorers of one function are "key" and "key-2", in the order of the page.
function keyOf(element, name) {
  const place = [...document.querySelectorAll(".ngx")].filter((other) => other.dataset.key === element.dataset.key).indexOf(element);
  return place > 0 ? `${name}-${place + 1}` : name;
}

async function start(element) {
  const spec = JSON.parse(element.querySelector(".ngx-spec").textContent), $ = (css) => element.querySelector(css);
  const all = (css) => [...element.querySelectorAll(css)];
  await ngptLazy.load(settings.plotly || "plotly-part.js");
  const plot = $(".ngx-plot"), sliders = spec.sliders || [], key = keyOf(element, spec.key || "figure");
  const inputs = all(".ngx-row input"), outputs = all(".ngx-row output"), groups = inputs.map((input) => {
    const buttons = [...input.closest(".ngx-row").querySelectorAll("[role=radio]")];
    return buttons.length ? buttons : null;
  });
  const read = Object.fromEntries(Object.entries(spec.arrays).map(([name, array]) => [name, reader(array)]));
  const figure = { data: spec.data, layout: { ...spec.layout, uirevision: 0, autosize: true } };
  const moving = movingTraces(spec.bind.filter(({ key: name }) => spec.arrays[name].dims.some((n) => n > 1)), figure.data);
  const fonts = [...(figure.layout.annotations || []).map((note) => note.font), ...figure.data.map((trace) => trace.textfont)]
    .filter((font) => /^#[0-9a-f]{6}$/.test(font?.color)).map((font) => [font, font.color]);
  const position = sliders.map((s) => s.default), names = sliders.map((s) => `${key}.${s.name}`);
  const turn = [0, 0];  // of a scene, by the reader's hand
  let width = 0, paint = "", shown = figure, past = [], lastKey = -Infinity;
  let queued = true;  // until the first drawing, which shows all that was moved before it

  const escaped = (text) => text.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`);
  const unbroken = (text) => text.replace(/[\d.]+e[-+]\d+/g, "<span>$&</span>");  // a number breaks nowhere
  const filled = (parts, slider = (text) => text) => parts.map((part) => {
    if (typeof part === "string") return part;
    const k = sliders.findIndex((s) => s.name === part[0]);
    return k >= 0 ? slider(sliders[k].texts[position[k]]) : format(read[part[0]](position)[0], part[1]);
  }).join("");

  function draw() {
    queued = false;
    for (const bind of spec.bind) put(figure, bind.path, leaf(bind, read[bind.key](position)));
    for (const [path, parts] of spec.texts || []) put(figure, path, filled(parts));
    for (const note of figure.layout.annotations || []) if (note.name === "label") note.visible = Number.isFinite(note.x);
    const ink = inkOf(element);
    if (paint !== ink + width) {
      paint = ink + width;
      figure.layout.template = painted(ink, width);
      for (const [font, color] of fonts) font.color = worded(color, ink);
      figure.layout.width = width;
    }
    const whole = { data: [...figure.data, ...past], layout: figure.layout };
    shown = flattened(whole, turn);
    (spec.readout || []).forEach((parts, i) => { all(".ngx-reading")[i].innerHTML = unbroken(filled(parts, escaped)); });
    return Plotly.react(plot, shown.data, shown.layout, { displayModeBar: false, displaylogo: false });
  }
  const soon = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };

  // A hand begins to move something: what is drawn now stays as a ghost.
  function keep() {
    past = ghosts(figure.data, moving);
    const note = $(".ngx-ghost");
    if (past.length && note) {
      note.innerHTML = `dotted: ${sliders.map((s, k) => `${inputs[k].dataset.symbol} = ${escaped(s.texts[position[k]])}`).join(", ")}`;
    }
  }
  function forget() {
    past = [];
    if ($(".ngx-ghost")) $(".ngx-ghost").textContent = "";
    soon();
  }

  function move(k, index) {
    position[k] = index;
    groups[k]?.forEach((button, i) => {
      button.setAttribute("aria-checked", i === index);
      button.tabIndex = i === index ? 0 : -1;
    });
    inputs[k].value = index;
    inputs[k].style.setProperty("--at", `${(100 * index) / (sliders[k].texts.length - 1)}%`);
    outputs[k].textContent = sliders[k].texts[index];
    inputs[k].setAttribute("aria-valuetext", sliders[k].texts[index]);
    if (index === sliders[k].default) moved.delete(names[k]);
    else moved.set(names[k], sliders[k].values[index]);
    soon();
  }
  function follow() {  // move the sliders to where the address has them
    const wanted = address();
    sliders.forEach((s, k) => {
      const index = wanted.has(names[k]) ? s.values.indexOf(wanted.get(names[k])) : s.default;
      if (index >= 0 && index !== position[k]) move(k, index);
    });
    return names.some((name) => wanted.has(name));
  }

  inputs.forEach((input, k) => {
    input.addEventListener("pointerdown", keep);
    input.addEventListener("keydown", ({ key: pressed, timeStamp }) => {
      if (!/^(Arrow|Page|Home|End)/.test(pressed)) return;
      if (timeStamp - lastKey > PAUSE) keep();
      lastKey = timeStamp;
    });
    input.addEventListener("input", () => { move(k, Number(input.value)); write(); });
  });
  groups.forEach((buttons, k) => {
    const pick = (index) => {
      if (index !== position[k]) keep();
      move(k, index);
      write();
    };
    buttons?.forEach((button, index) => button.addEventListener("click", () => pick(index)));
    buttons?.[0].parentElement.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      pick(Math.max(0, Math.min(buttons.length - 1, position[k] + step)));
      buttons[position[k]].focus();
    });
  });
  $(".ngx-reset")?.addEventListener("click", () => {
    figure.layout.uirevision += 1;  // zoom and camera go back too
    turn.fill(0);
    sliders.forEach((s, k) => move(k, s.default));
    forget();
    write();
  });
  all(".ngx-save button").forEach((button) => button.addEventListener("click", () =>
    save(plot, shown, button.dataset.format, key.replace(/\W+/g, "-"), $(".ngx-words")?.textContent || "")));
  sliders.forEach((s, k) => move(k, s.default));  // not what the browser remembers of an earlier visit

  width = plot.clientWidth || 640;  // not shown yet, in a closed box: its size is known when it opens
  const wanted = sliders.length && shared && follow();
  if (sliders.length && shared) {  // a link to a section of the page leaves the sliders where they are
    window.addEventListener("hashchange", () => { if (!location.hash || address().size) follow(); });
  }
  repaint.add(() => { if (paint !== inkOf(element) + width) soon(); });
  new ResizeObserver(() => { if (plot.clientWidth && plot.clientWidth !== width) { width = plot.clientWidth; soon(); } }).observe(plot);
  await draw();
  if (figure.data.some(solid)) turnable(plot, turn, soon);
  $(".ngx-panel")?.removeAttribute("inert");
  if (wanted && !document.querySelector(".ngx[data-wanted]")) {
    element.dataset.wanted = "";
    element.scrollIntoView({ block: "center" });
  }
}

window.ngx = { format };
watchTheme();
ngptLazy.define("ngx", start);
