// What can the reader do with an animation? Play and pause it, move through it, save a frame as PNG or all of it as GIF.
//
// Nothing plays by itself. It pauses when nobody can see it. With prefers-reduced-motion it steps from frame to frame, two a
// second, and nothing glides in between.

const HOLD = 200, PER_SECOND = 2;  // hundredths of a second on a GIF's last frame; frames with reduced motion
const reduced = window.matchMedia("(prefers-reduced-motion: reduce)");
const ICONS = { Play: "M3 1.5v11l9-5.5z", Pause: "M3 1.5h3v11H3zM8 1.5h3v11H8z" };
const icon = (name) => `<svg viewBox="0 0 14 14" width="14" height="14" aria-hidden="true"><path d="${ICONS[name]}" fill="currentColor"/></svg><span>${name}</span>`;

const spelled = (text) => text.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`).replace(/\b([a-z])_([a-z]+)\b/g, "$1<sub>$2</sub>");

function start(element) {
  const stored = JSON.parse(element.querySelector(".ngm-data").textContent);
  const data = { ...stored, panels: stored.panels.map((marks) => marks.map(prepared)) };
  const pictures = [...element.querySelectorAll(".ngm-picture > svg")], last = data.labels.length - 1;
  const $ = (css) => element.querySelector(css);
  $(".ngm-controls").innerHTML = `<button type="button" class="ngm-play"></button>
    <input type="range" min="0" max="${last}" step="1" value="${last}" autocomplete="off" aria-label="Frame">
    <span class="ngm-keep"><button type="button" data-save="png" aria-label="Save this frame as PNG" title="Save this frame as PNG">PNG</button>
    <button type="button" data-save="gif" aria-label="Save the animation as GIF" title="Save the animation as GIF">GIF</button></span>
    <span class="ngm-hidden" role="status"></span>`;
  const play = $(".ngm-play"), slider = $("input"), status = $("[role=status]");
  let frame = last, playing = false, began = 0, next = 0;

  function show(to) {
    frame = Math.max(0, Math.min(last, to));
    const here = Math.floor(frame);
    pictures.filter((svg) => svg.getClientRects().length).forEach((svg) => drawFrame(svg, data, frame));
    slider.value = here;
    slider.style.setProperty("--at", `${(100 * here) / last}%`);
    slider.setAttribute("aria-valuetext", `${data.labels[here]}: ${data.words[here]}`);
    $(".ngm-words").innerHTML = spelled(data.words[here]);
    element.dataset.frame = frame.toFixed(3);
  }

  function run(on) {
    if (on === playing) return;
    playing = on;
    element.dataset.playing = on;
    play.innerHTML = icon(on ? "Pause" : "Play");
    cancelAnimationFrame(next);
    if (!on) return;
    if (frame >= last) show(0);
    began = performance.now() - (1000 * data.seconds * frame) / last;
    next = requestAnimationFrame(tick);
  }

  function tick(now) {
    const wanted = Math.max(0, ((now - began) / 1000 / data.seconds) * last), stride = last / data.seconds / PER_SECOND;
    const to = reduced.matches ? Math.min(last, Math.floor(Math.floor(wanted / stride) * stride)) : wanted;
    if (!reduced.matches || to !== frame) show(wanted >= last ? last : to);
    if (frame >= last) run(false);
    else next = requestAnimationFrame(tick);
  }

  play.innerHTML = icon("Play");
  play.addEventListener("click", () => run(!playing));
  $(".ngm-picture").addEventListener("click", () => run(!playing));
  slider.addEventListener("input", () => { run(false); show(Number(slider.value)); });
  new IntersectionObserver(([seen]) => { if (!seen.isIntersecting) run(false); }).observe(element);
  document.addEventListener("visibilitychange", () => { if (document.hidden) run(false); });
  new ResizeObserver(() => show(frame)).observe(element);  // the other picture may show now

  // -- images --------------------------------------------------------------------------------------------------------
  // What is behind the animation, so that a dark page gives a dark image.
  function ground() {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (!/^(transparent|rgba\(.*, 0\))$/.test(color)) return color;
    }
    return "white";
  }

  // A copy of the wide picture that draws itself on a canvas: paint(frame) -> its canvas.
  function studio(scale) {
    const svg = pictures[0].cloneNode(true), { width, height } = svg.viewBox.baseVal, canvas = document.createElement("canvas");
    const ink = getComputedStyle(element).color, context = canvas.getContext("2d", { willReadFrequently: true }), behind = ground();
    [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    set(svg, { width: canvas.width, height: canvas.height, style: `color:${ink}` });
    return async (at) => {
      drawFrame(svg, data, at);
      const image = new Image(), address = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
      await new Promise((done, failed) => Object.assign(image, { onload: done, onerror: () => failed(new Error("the picture cannot be drawn")), src: address }));
      context.fillStyle = behind;
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(image, 0, 0);
      return canvas;
    };
  }
  const pixels = (canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;

  async function asPNG() {
    const canvas = await studio(2)(frame);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  async function asGIF(progress) {
    const paint = studio(1), samples = [];
    for (const at of [0, last / 3, (2 * last) / 3, last]) samples.push(pixels(await paint(Math.floor(at))));
    const { width, height } = await paint(0), file = gif(width, height, samples), delay = Math.max(2, Math.round((100 * data.seconds) / last));
    for (let at = 0; at <= last; at++) {
      file.add(pixels(await paint(at)), at === last ? HOLD : delay);
      progress((at + 1) / (last + 1));
      await new Promise((done) => setTimeout(done));  // the page stays responsive
    }
    return file.blob();
  }

  async function save(button) {
    const kind = button.dataset.save, name = kind.toUpperCase();
    run(false);
    button.disabled = true;
    status.textContent = `Making the ${name}`;
    try {
      const blob = await (kind === "png" ? asPNG() : asGIF((share) => { button.textContent = `${Math.round(100 * share)}%`; }));
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${data.name}.${kind}` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      status.textContent = `${name} saved`;
      element.dataset.saved = `${kind} ${blob.size}`;
    } catch (error) {
      status.textContent = `The ${name} could not be made: ${error.message}`;
    } finally {
      button.textContent = name;
      button.disabled = false;
    }
  }
  element.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => save(button)));

  show(last);
  element.dataset.state = "live";
  element.ngptMotion = { show, paint: async (at) => pixels(await studio(1)(at)) };  // for tests
}

// ---- the page ----------------------------------------------------------------------------------------------------------
const scan = () => document.querySelectorAll(".ngm:not([data-state])").forEach(start);
window.ngptMotion = { scan };
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", scan);
else scan();
