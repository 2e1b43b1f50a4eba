// In which colors and sizes does a figure stand on this page?
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
// A word in a curve's color takes a part of the ink: 3:1 is enough to see a curve, and not to read a word (4.5:1).
const worded = (color, rgb) => `rgb(${rgb.split(",").map((v, i) => Math.round(0.7 * parseInt(color.slice(1 + 2 * i, 3 + 2 * i), 16) + 0.3 * v))})`;

const repaint = new Set();  // one function a drawing: redraw it if its ink is another
function watchTheme() {
  const all = () => requestAnimationFrame(() => repaint.forEach((look) => look()));
  const attributes = ["data-theme", "data-mode", "class", "theme", "data-jp-theme-light", "data-vscode-theme-kind"];
  for (const node of [document.documentElement, document.body]) {
    new MutationObserver(all).observe(node, { attributes: true, attributeFilter: attributes });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
}
