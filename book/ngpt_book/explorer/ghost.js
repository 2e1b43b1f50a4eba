// What stays on the page of the setting before, so that two settings can be compared?
//
// When a hand begins to move a slider, the curves that the sliders move are kept as they stand: faint, dotted, and without an entry
// in the legend. The next move replaces them, Reset removes them. A run of keys is one move.
const PAUSE = 1200;  // ms without a key: the next one begins another move

// Faint copies of the traces in which `moving` (indices of data) says that their points move.
function ghosts(data, moving) {
  const copies = [];
  for (const index of moving) {
    const trace = data[index], faint = { opacity: 0.4, showlegend: false, hoverinfo: "skip", hovertemplate: null, meta: "ghost" };
    if (trace.visible === false) continue;
    if (trace.type === "scatter" || trace.type === "scatter3d") {
      const plain = typeof trace.line?.color === "string" ? trace.line.color : undefined;
      const line = { ...trace.line, color: plain, dash: "dot", width: trace.type === "scatter" ? 1.5 : 3 };
      copies.push({ ...trace, ...faint, line, fill: "none", text: null, mode: (trace.mode || "lines").replace(/\+?text/, "") || "markers" });
    } else if (trace.type === "bar") {
      copies.push({ ...trace, ...faint, text: null, marker: { color: "rgba(0,0,0,0)", line: { color: "rgb(127,135,148)", width: 2 } },
        offsetgroup: trace.offsetgroup ?? `${index}` });
    }
  }
  return copies;
}

// The traces whose places, and not only colors or texts, follow the sliders.
const movingTraces = (bind, data) => [...new Set(bind.filter(({ path }) => path[0] === "data" && ["x", "y", "z"].includes(path[2])
  && data[path[1]].type !== "surface" && data[path[1]].type !== "heatmap").map(({ path }) => path[1]))];
