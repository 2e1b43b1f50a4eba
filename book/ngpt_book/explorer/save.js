// How does a reader keep a figure? As PNG or SVG, on the ground of the page, with its caption.
async function save(plot, shown, format, name, caption) {
  let ground = plot, color;
  do { color = getComputedStyle(ground).backgroundColor; ground = ground.parentElement; }
  while (ground && /, 0\)|transparent/.test(color));
  const words = caption.match(/.{1,90}(\s|$)/g) || [], height = plot._fullLayout.height + 18 * words.length + 12;
  const note = { text: words.join("<br>"), showarrow: false, xref: "paper", yref: "paper", x: 0, y: 0, align: "left", xanchor: "left",
    yanchor: "top", yshift: -plot._fullLayout.margin.b - 8, font: { size: 12 } };
  const margin = { ...plot._fullLayout.margin, b: plot._fullLayout.margin.b + 18 * words.length + 12 };
  const layout = { ...shown.layout, paper_bgcolor: color, height, margin, annotations: [...(shown.layout.annotations || []), note] };
  const size = { width: plot._fullLayout.width, height, scale: format === "png" ? 2 : 1 };
  const url = await Plotly.toImage({ data: shown.data, layout }, { format, ...size });
  Object.assign(document.createElement("a"), { href: url, download: `${name}.${format}` }).click();
}
