// When does the code of a figure run? When the reader comes near the figure.
//
//   <div class="ngx">                    a block: its first class names the part of the book that draws it, "ngx"
//   ngptLazy.define("ngx", start)        _static/ngx.js says: start(element) brings one block to life; it may return a promise
//   ngptLazy.load("plotly-part.js")      a promise of another file of the site, which is loaded once
//   ngptLazy.wake(element)               start a block wherever it is (without an element: all); a promise
//
// element.dataset.state is "waiting" from the moment at which a block is near, then "live", or "failed". A page of the book names
// the files in data-files of this script's element; elsewhere (Colab, JupyterLab) every output brings its parts along.
(function () {
  "use strict";
  if (window.ngptLazy) return;
  const script = document.currentScript, files = JSON.parse(script?.dataset.files || "{}");
  const base = script?.src ? script.src.replace(/[^/]*$/, "") : "";
  const starts = {}, asked = new Map(), begun = new Map();
  document.documentElement.classList.add("ngpt-js");

  // A script element and not fetch: pages are also read from file://.
  function load(name) {
    if (!asked.has(name)) {
      asked.set(name, new Promise((done, fail) => document.head.append(Object.assign(document.createElement("script"), {
        src: /^https?:/.test(name) ? name : base + (files[name] || name), charset: "utf-8", onload: done,
        onerror: () => { asked.delete(name); fail(new Error(`${name} could not be loaded.`)); },
      }))));
    }
    return asked.get(name);
  }

  const kindOf = (element) => [...element.classList].find((name) => name in starts || `${name}.js` in files);

  // One block after another, so that the page answers in between; those that are asked for later wait.
  let turn = Promise.resolve();
  function begin(element) {
    if (!begun.has(element)) {
      near.unobserve(element);
      element.dataset.state = "waiting";
      begun.set(element, turn = turn.then(() => start(element)).catch((error) => {
        element.dataset.state = "failed";  // ngptLazy.wake(element) tries again
        begun.delete(element);
        console.error(error.message);
      }));
    }
    return begun.get(element);
  }
  async function start(element) {
    const kind = kindOf(element);
    if (!starts[kind]) await load(`${kind}.js`);
    await starts[kind](element);
    element.dataset.state = "live";
    await new Promise((next) => setTimeout(next));
  }

  const near = new IntersectionObserver((seen) => seen.filter((entry) => entry.isIntersecting).forEach((entry) => begin(entry.target)),
    { rootMargin: "60% 0px" });
  const all = () => {
    const kinds = new Set([...Object.keys(starts), ...Object.keys(files).map((name) => name.replace(/\.js$/, ""))]);
    return [...document.querySelectorAll([...kinds].map((kind) => `.${CSS.escape(kind)}`).join() || "none")];
  };
  const scan = () => { all().filter((element) => !begun.has(element)).forEach((element) => near.observe(element)); named(); };
  const wake = (element) => (element ? begin(element) : Promise.all(all().map(begin)));

  // An address like #key.slider=value speaks to the block with data-key="key", which starts at once.
  function named() {
    const keys = location.hash.slice(1).split("&").map((part) => part.split("=")[0].replace(/(-\d+)?\.[^.]*$/, ""));
    all().filter((element) => element.dataset.key && keys.includes(encodeURIComponent(element.dataset.key))).forEach(begin);
  }
  window.addEventListener("hashchange", named);

  window.ngptLazy = { define: (kind, start) => { starts[kind] = start; scan(); }, load, wake, scan };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", scan);
  else scan();
})();
