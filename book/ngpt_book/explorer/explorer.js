// How does an Explorer move on a page without Python?
//
// Every <div class="ngx"> carries a specification: a plotly figure without its moving parts, the sliders' values, the arrays
// of the Explorer's function over the whole grid of slider values (see grid.py), and the places of the figure that each array
// fills (see binding.py). A move of a slider picks a cell of the grid, fills it in, and hands the figure to Plotly.react.
(function (settings) {
  "use strict";
  if (window.ngx) return window.ngx.scan();

  // -- the grid ------------------------------------------------------------------------------------------------------
  const KINDS = { u2: Uint16Array, f4: Float32Array, f8: Float64Array };
  const NAN_CODE = 65535;
  const MOST_CHOICES = 8;  // drawn as buttons

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

  // -- texts ---------------------------------------------------------------------------------------------------------
  const trim = (s) => (s.includes(".") ? s.replace(/\.?0+$/, "") : s);
  const exponent = (s) => s.replace(/e([+-])(\d)$/, "e$10$2");

  // Python's format(value, spec) for the specs that binding.py lets pass.
  function format(value, spec) {
    if (!Number.isFinite(value)) return "–";
    const [, plus, comma, digits, type] = /^(\+?)(,?)(?:\.(\d+))?([defg%]?)$/.exec(spec || ".3g");
    const n = digits === undefined ? 6 : Number(digits);
    let text;
    if (type === "f") text = value.toFixed(n);
    else if (type === "%") text = (100 * value).toFixed(n) + "%";
    else if (type === "e") text = exponent(value.toExponential(n));
    else if (type === "d") text = String(Math.trunc(value));
    else {
      const p = Math.max(n, 1), e = value === 0 ? 0 : Number(value.toExponential(p - 1).split("e")[1]);
      if (e < -4 || e >= p) {
        const [m, x] = value.toExponential(p - 1).split("e");
        text = exponent(trim(m) + "e" + x);
      } else text = trim(value.toFixed(p - 1 - e));
    }
    if (comma) text = text.replace(/\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));
    return (plus && value >= 0 ? "+" : "") + text;
  }

  // -- the page around the figure --------------------------------------------------------------------------------------
  // Text, axes and grid take the colour of the text around the figure, so they can be read on any page, light or dark.
  const inkOf = (element) => getComputedStyle(element).color.match(/[\d.]+/g).slice(0, 3).join(",");
  function painted(rgb, width) {
    const ink = (a) => `rgba(${rgb},${a})`;
    const template = structuredClone(settings.template), t = template.layout;
    const lines = { gridcolor: ink(0.13), linecolor: ink(0.5), tickcolor: ink(0.5), zerolinecolor: ink(0.35) };
    Object.assign(t.font, { color: ink(1) });
    for (const axis of [t.xaxis, t.yaxis, t.scene.xaxis, t.scene.yaxis, t.scene.zaxis]) Object.assign(axis, lines);
    t.annotationdefaults = { arrowcolor: ink(0.7) };
    t.shapedefaults = { line: { color: ink(0.6) } };
    t.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";  // a finger scrolls the page
    if (width < 520) {
      t.font.size = 11;
      t.height = 340;
      Object.assign(t.margin, { l: 40, r: 8, b: 40 });
    }
    return template;
  }

  const repaint = new Set();  // one function a drawing: redraw it if its ink is another
  function watchTheme() {
    const all = () => requestAnimationFrame(() => repaint.forEach((look) => look()));
    const attributes = ["data-theme", "data-mode", "class", "theme", "data-jp-theme-light", "data-vscode-theme-kind"];
    for (const node of [document.documentElement, document.body]) {
      new MutationObserver(all).observe(node, { attributes: true, attributeFilter: attributes });
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  }

  // The address: #key.slider=value&..., for every slider of the page that is not at its default. (The frames in which
  // notebooks show their outputs have no address of their own.)
  const shared = window === window.top;
  const moved = new Map();
  const decoded = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
  const address = () => new Map(location.hash.slice(1).split("&").filter((s) => s.includes("="))
    .map((s) => s.split("=").map(decoded)));
  function write() {
    if (!shared) return;
    const hash = [...moved].map((entry) => entry.map(encodeURIComponent).join("=")).join("&");
    history.replaceState(history.state, "", hash ? "#" + hash : location.pathname + location.search);
  }
  const keys = new Map();
  function unique(key) {
    const n = (keys.get(key) || 0) + 1;
    keys.set(key, n);
    return n > 1 ? `${key}-${n}` : key;
  }

  // -- a scene without WebGL -------------------------------------------------------------------------------------------
  // Then plotly has no 3-D. Points, lines and surfaces (as nets) are drawn in the plane as the camera sees them: the same
  // projection as that of the still picture, svg/space.py.
  const solid = (trace) => trace.type === "scatter3d" || trace.type === "surface";
  let webgl;  // not known before the first scene
  const hasWebgl = () => (webgl ??= !!document.createElement("canvas").getContext("webgl"));
  const number = (v) => (v === null || v === undefined ? NaN : v);
  const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
  const scaled = (a, c) => a.map((v) => v * c);
  const unit = (a) => scaled(a, 1 / Math.hypot(...a));
  const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
  const gap = [NaN, NaN, NaN];  // the pen is lifted
  const KEPT = "name mode line marker text textposition textfont hovertemplate hoverinfo showlegend opacity visible".split(" ");

  // The trace's points, one [x, y, z] each; of a surface its rows and its columns.
  function points({ type, x, y, z }) {
    if (type !== "surface") return Array.from(x, (_, i) => [x, y, z].map((v) => number(v[i])));
    const across = (j, i) => (!x ? j : x[0].length ? x[i][j] : x[j]), along = (j, i) => (!y ? i : y[0].length ? y[i][j] : y[i]);
    const at = (i, j) => [across(j, i), along(j, i), z[i][j]].map(number);
    const [rows, columns] = [z.length, z[0].length].map((n) => Array.from({ length: n }, (_, i) => i));
    const some = (all) => all.filter((i) => i % Math.ceil(all.length / 18) === 0 || i === all.length - 1);
    return [...some(rows).map((i) => columns.map((j) => at(i, j))), ...some(columns).map((j) => rows.map((i) => at(i, j)))]
      .flatMap((line) => [...line, gap]);
  }

  function flattened({ data, layout }) {
    const flat = { data: [...data], layout: { ...layout } };
    [...new Set(data.filter(solid).map((t) => t.scene || "scene"))].forEach((name, k) => {
      const scene = { ...layout.template.layout.scene, ...layout[name] }, axes = { xaxis: `x9${k}`, yaxis: `y9${k}` };
      const mine = data.map((t, i) => [t, i]).filter(([t]) => solid(t) && (t.scene || "scene") === name);
      const clouds = mine.map(([t]) => points(t)), cloud = clouds.flat();
      const extent = (values) => [Math.min, Math.max].map((end) => values.filter(Number.isFinite).reduce((a, b) => end(a, b)));
      const ends = ["x", "y", "z"].map((c, axis) => scene[`${c}axis`]?.range || extent(cloud.map((p) => p[axis])));
      const sides = ends.map(([lo, hi]) => hi - lo || 1), r = scene.aspectratio;
      const ratios = { data: scaled(sides, 1 / Math.max(...sides)), manual: r && [r.x, r.y, r.z] };
      const ratio = ratios[scene.aspectmode] || [1, 1, 1];
      const eye = ["x", "y", "z"].map((c) => scene.camera.eye[c]), ahead = unit(scaled(eye, -1));
      const right = unit(cross(ahead, [0, 0, 1])), up = cross(right, ahead);
      const look = (p) => {
        const q = p.map((v, c) => ((v - (ends[c][0] + ends[c][1]) / 2) * ratio[c]) / sides[c] - eye[c]);
        return [dot(right, q) / dot(ahead, q), dot(up, q) / dot(ahead, q)];
      };
      mine.forEach(([trace, i], n) => {
        const seen = clouds[n].map(look), xy = { x: seen.map((p) => p[0]), y: seen.map((p) => p[1]) };
        const kept = Object.fromEntries(Object.entries(trace).filter(([key]) => KEPT.includes(key)));
        const colors = trace.colorscale || layout.template.layout.colorscale.sequential;
        const net = { mode: "lines", line: { width: 1, color: colors.at(-1)[1] } };
        const line = { ...kept.line, width: 0.55 * (kept.line?.width ?? 2) };  // 3-D widths are finer than pixels,
        const strokes = { line, marker: { ...kept.marker, size: 1.5 * (kept.marker?.size ?? 4) } };  // and its dots larger
        flat.data[i] = { ...kept, ...(trace.type === "surface" ? net : strokes), ...xy, ...axes, type: "scatter" };
      });
      const axis = (c) => ({ visible: false, range: [-0.4, 0.4], domain: scene.domain?.[c] || [0, 1], fixedrange: true });
      flat.layout[`xaxis9${k}`] = { ...axis("x"), anchor: axes.yaxis };
      flat.layout[`yaxis9${k}`] = { ...axis("y"), anchor: axes.xaxis, scaleanchor: axes.xaxis };
      delete flat.layout[name];
    });
    return flat;
  }

  // -- one drawing -----------------------------------------------------------------------------------------------------
  function start(element) {
    element.dataset.state = "waiting";
    const spec = JSON.parse(element.querySelector(".ngx-spec").textContent);
    const plot = element.querySelector(".ngx-plot");
    const sliders = spec.sliders || [], key = unique(spec.key || "figure");
    const inputs = [...element.querySelectorAll(".ngx-row input")], outputs = [...element.querySelectorAll(".ngx-row output")];
    const read = Object.fromEntries(Object.entries(spec.arrays).map(([name, array]) => [name, reader(array)]));
    const figure = { data: spec.data, layout: { ...spec.layout, uirevision: 0, autosize: true } };
    const position = sliders.map((s) => s.default);
    const names = sliders.map((s) => `${key}.${s.name}`);
    const solidly = !figure.data.some(solid) || hasWebgl();
    let width = 0, paint = "";
    let queued = true;  // until the first drawing, which shows all that was moved before it

    const said = (parts, shown = (text) => text) => parts.map((part) => {
      if (typeof part === "string") return part;
      const k = sliders.findIndex((s) => s.name === part[0]);
      return k >= 0 ? shown(sliders[k].texts[position[k]]) : format(read[part[0]](position)[0], part[1]);
    }).join("");
    const escaped = (text) => text.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`);

    function draw() {
      queued = false;
      for (const bind of spec.bind) put(figure, bind.path, leaf(bind, read[bind.key](position)));
      for (const [path, parts] of spec.texts || []) put(figure, path, said(parts));
      const ink = inkOf(element);
      if (paint !== ink + width) {
        paint = ink + width;
        figure.layout.template = painted(ink, width);
        figure.layout.width = width;
      }
      const shown = solidly ? figure : flattened(figure);
      (spec.readout || []).forEach((parts, i) => { element.querySelectorAll(".ngx-told")[i].innerHTML = said(parts, escaped); });
      return Plotly.react(plot, shown.data, shown.layout, { displayModeBar: false, displaylogo: false });
    }
    const soon = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };

    // A choice among a few words is a group of buttons. The slider behind it, now hidden, stays what is read.
    const groups = sliders.map(({ texts, values }, k) => {
      if (texts.length > MOST_CHOICES || values.every((v) => Number.isFinite(Number(v)))) return null;
      const group = Object.assign(document.createElement("div"), { className: "ngx-choices" });
      group.setAttribute("role", "radiogroup");
      group.setAttribute("aria-label", inputs[k].labels[0]?.textContent || sliders[k].name);
      group.innerHTML = texts.map((text) => `<button type="button" role="radio">${escaped(text)}</button>`).join("");
      const buttons = [...group.children], pick = (index) => { move(k, index); write(); };
      buttons.forEach((button, index) => button.addEventListener("click", () => pick(index)));
      group.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
        if (step === undefined) return;
        event.preventDefault();
        pick(Math.max(0, Math.min(texts.length - 1, position[k] + step)));
        buttons[position[k]].focus();
      });
      inputs[k].after(group);
      inputs[k].hidden = outputs[k].hidden = true;
      return buttons;
    });

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
    function obey() {  // the address says where the sliders stand
      const wanted = address();
      sliders.forEach((s, k) => {
        const index = wanted.has(names[k]) ? s.values.indexOf(wanted.get(names[k])) : s.default;
        if (index >= 0 && index !== position[k]) move(k, index);
      });
      return names.some((name) => wanted.has(name));
    }

    inputs.forEach((input, k) => input.addEventListener("input", () => { move(k, Number(input.value)); write(); }));
    element.querySelector(".ngx-reset")?.addEventListener("click", () => {
      figure.layout.uirevision += 1;  // zoom and camera go back too
      sliders.forEach((s, k) => move(k, s.default));
      write();
    });
    sliders.forEach((s, k) => move(k, s.default));  // not what the browser remembers of an earlier visit

    plot.hidden = false;
    if (!solidly) {
      const words = "This browser has no WebGL: the scene cannot be turned.";
      plot.after(Object.assign(document.createElement("p"), { className: "ngx-caption", textContent: words }));
    }
    element.querySelector(".ngx-panel")?.removeAttribute("hidden");
    element.dataset.state = "live";
    width = plot.clientWidth || 640;  // not shown yet, in a closed box: it will be told when it opens
    if (sliders.length && shared) {
      element.dataset.wanted = obey();
      // a link to a section of the page says nothing about the sliders
      window.addEventListener("hashchange", () => { if (!location.hash || address().size) obey(); });
    }
    repaint.add(() => { if (paint !== inkOf(element) + width) soon(); });
    new ResizeObserver(() => { if (plot.clientWidth && plot.clientWidth !== width) { width = plot.clientWidth; soon(); } }).observe(plot);
    return draw();
  }

  function scan() {
    if (!window.Plotly) return load();
    const drawn = [...document.querySelectorAll(".ngx:not([data-state])")].map(start);
    Promise.all(drawn).then(() => document.querySelector(".ngx[data-wanted=true]")?.scrollIntoView({ block: "center" }));
  }
  function load() {  // outside the book: plotly.js from its CDN, once
    if (!settings.plotly || document.querySelector("script[data-ngx-plotly]")) return;
    const script = Object.assign(document.createElement("script"), { src: settings.plotly, charset: "utf-8", onload: scan });
    script.dataset.ngxPlotly = "";
    document.head.append(script);
  }

  window.ngx = { scan, format };
  document.head.append(Object.assign(document.createElement("style"), { textContent: settings.css }));
  watchTheme();
  scan();
})(NGX_SETTINGS);
