// What belongs to a symbol? A pointer over it, in an equation, at a slider or in a listing, highlights its other
// places on the page.
//
// symbols.py found them: data-symbols of this script's element has the names of each symbol's key in the listings, and the keys of
// the sliders' labels; the equations were drawn with data-means. A small note under the symbol leads to the places out of sight.
(function () {
  "use strict";
  const { keys, labels } = JSON.parse(document.currentScript.dataset.symbols), ofName = new Map();  // a name may stand for several
  for (const [key, names] of Object.entries(keys)) for (const name of names) ofName.set(name, [...(ofName.get(name) || []), key]);

  // The sliders.
  for (const input of document.querySelectorAll(".ngx-row input")) {
    const key = labels[input.dataset.symbol];
    if (key) input.closest(".ngx-row").dataset.means = key;
  }
  // The listings: Pygments closes its elements at the end of each line, so that lines can be wrapped one by one.
  const listings = [...document.querySelectorAll(".bd-article div.highlight pre")].filter((pre) => !pre.closest(".cell"));
  for (const pre of listings) {
    const words = new Set(pre.textContent.match(/[A-Za-z_]\w*/g));
    if (![...ofName.keys()].some((name) => words.has(name))) continue;
    pre.innerHTML = pre.innerHTML.split("\n").map((line) => (line ? `<span class="ngs-line">${line}</span>` : "")).join("\n");
    for (const token of pre.querySelectorAll("[class^=n]:not(.ngs-line)")) {
      const found = ofName.get(token.textContent);
      if (found) token.dataset.means = found.join(" ");
    }
  }

  const HOLD = 2500;  // ms
  const KINDS = { slider: ".ngx-row", equation: "div.math", code: "div.highlight" };
  const kindOf = (element) => Object.keys(KINDS).find((kind) => element.closest(KINDS[kind]));
  const places = (element) => [...document.querySelectorAll(element.dataset.means.split(" ").map((key) => `[data-means~="${CSS.escape(key)}"]`))]
    .filter(kindOf);
  const nearest = (found, element) => {
    const top = element.getBoundingClientRect().top;
    return found.map((place) => [Math.abs(place.getBoundingClientRect().top - top), place]).sort((a, b) => a[0] - b[0])[0]?.[1];
  };
  function nameOf(kind, element) {
    if (kind === "slider") return `slider, ${element.closest(".ngx").querySelector(".ngpt-number")?.textContent.replace(/\.\s*$/, "") || "below"}`;
    if (kind === "equation") return `equation ${element.closest("div.math").querySelector(".eqno")?.textContent.replace("#", "") || ""}`;
    const pre = element.closest("pre"), line = [...pre.querySelectorAll(".ngs-line")].indexOf(element.closest(".ngs-line")) + 1;
    return `${pre.querySelector(".nf, .nc")?.textContent || "code"}, line ${line}`;
  }

  const tip = Object.assign(document.createElement("div"), { className: "ngs-tip", hidden: true, role: "note" });
  document.body.append(tip);
  let lit = null, leaving = 0, held = 0;  // held: until then the place that was gone to stays highlighted

  function off() {
    clearTimeout(leaving);
    if (performance.now() < held) return;
    document.querySelectorAll(".ngs-on").forEach((element) => element.classList.remove("ngs-on"));
    tip.hidden = true;
    lit = null;
  }
  function on(element) {
    clearTimeout(leaving);
    if (lit === element) return;
    const [key] = element.dataset.means.split(" "), all = places(element), own = kindOf(element);
    const others = Object.keys(KINDS).filter((kind) => kind !== own).map((kind) => [kind, nearest(all.filter((e) => kindOf(e) === kind), element)]);
    if (!others.some(([, place]) => place)) return;
    held = 0;
    off();
    lit = element;
    all.forEach((place) => place.classList.add("ngs-on"));
    if (own === "slider") return;  // it is in use: nothing may cover it
    const [symbol, hat] = [key.replace(/_(.*)/, "<sub>$1</sub>"), "\u0302"];
    tip.innerHTML = `<b>${symbol.replace("^", hat)}</b>`;
    for (const [kind, place] of others.filter(([, found]) => found)) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: nameOf(kind, place) });
      button.addEventListener("click", () => go(place));
      tip.append(button);
    }
    tip.hidden = false;
    const box = element.getBoundingClientRect(), left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left) + scrollX}px`;
    tip.style.top = `${box.bottom + scrollY + 3}px`;
  }
  function go(place) {
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    place.closest("details:not([open])")?.setAttribute("open", "");
    place.scrollIntoView({ block: "center", behavior: calm ? "instant" : "smooth" });
    tip.hidden = true;
    held = performance.now() + HOLD;
    setTimeout(off, HOLD + 50);
  }
  const soonOff = () => { clearTimeout(leaving); leaving = setTimeout(off, 300); };

  document.addEventListener("pointerover", ({ target }) => {
    const element = target.closest("[data-means]");
    if (element && kindOf(element)) on(element);
    else if (tip.contains(target)) clearTimeout(leaving);
    else if (lit && !lit.contains(document.activeElement)) soonOff();
  });
  document.addEventListener("focusin", ({ target }) => {
    const row = target.closest(".ngx-row[data-means]");
    if (row) on(row);
    else if (!tip.contains(target)) off();
  });
  document.addEventListener("keydown", ({ key }) => { if (key === "Escape") off(); });
})();
