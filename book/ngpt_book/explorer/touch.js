// How does a finger scroll the page when it lands on a scene that could be turned?
//
// plotly's scenes take every touch. Here a swipe belongs to the page, until a tap on the scene hands them to it: then a finger
// turns it, and a tap outside, or scrolling it out of sight, gives the page back. A mouse is not concerned.
function sharedTouch(plot) {
  if (!navigator.maxTouchPoints) return;
  const cover = Object.assign(document.createElement("button"), { className: "ngx-cover", type: "button",
    ariaLabel: "Turn the scene with a finger", innerHTML: "<span>tap to turn</span>" });
  const give = (taken) => { cover.hidden = taken; };
  cover.addEventListener("click", () => give(true));
  cover.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") give(true); });
  document.addEventListener("pointerdown", (event) => { if (!plot.contains(event.target)) give(false); });
  new IntersectionObserver((seen) => { if (!seen.at(-1).isIntersecting) give(false); }).observe(plot);
  plot.after(cover);
}
