// How is a 3-D scene drawn, and how does a hand turn it?
//
// In the plane, as its camera sees it: points, lines and surfaces, in the projection of the still picture (svg/space.py). plotly's
// own scenes need WebGL, half as much script again and a second until the first one is there, and they keep every touch. Here a
// mouse turns the scene, a finger turns it sideways, and an upward swipe scrolls the page.
const solid = (trace) => trace.type === "scatter3d" || trace.type === "surface";
const number = (v) => (v === null || v === undefined ? NaN : v);
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const scaled = (a, c) => a.map((v) => v * c);
const unit = (a) => scaled(a, 1 / Math.hypot(...a));
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const gap = [NaN, NaN, NaN];  // the pen is lifted
const KEPT = "name meta mode line marker text textposition textfont hovertemplate hoverinfo showlegend opacity visible".split(" ");

const counted = (values) => Array.from(values, (_, i) => i);
// A surface's [x, y, z] in row i and column j.
function grid({ x, y, z }) {
  const across = (i, j) => (!x ? j : x[0].length ? x[i][j] : x[j]), along = (i, j) => (!y ? i : y[0].length ? y[i][j] : y[i]);
  return (i, j) => [across(i, j), along(i, j), z[i][j]].map(number);
}
// The trace's points, one [x, y, z] each; of a surface its rows and its columns.
function points(trace) {
  if (trace.type !== "surface") return Array.from(trace.x, (_, i) => ["x", "y", "z"].map((c) => number(trace[c][i])));
  const at = grid(trace), rows = counted(trace.z), columns = counted(trace.z[0]);
  const some = (all) => all.filter((i) => i % Math.ceil(all.length / 18) === 0 || i === all.length - 1);
  return [...some(rows).map((i) => columns.map((j) => at(i, j))), ...some(columns).map((j) => rows.map((i) => at(i, j)))]
    .flatMap((line) => [...line, gap]);
}
// Of a surface in one color only its outline is seen: all its cells as one area. They turn the same way, or front and back cancel.
function area(trace, look) {
  const at = grid(trace), rows = counted(trace.z), columns = counted(trace.z[0]);
  return rows.slice(1).flatMap((i) => columns.slice(1).flatMap((j) => {
    const cell = [at(i - 1, j - 1), at(i - 1, j), at(i, j), at(i, j - 1)].map(look), next = [...cell.slice(1), cell[0]];
    const turned = cell.reduce((sum, [x, y], k) => sum + x * next[k][1] - y * next[k][0], 0);
    return [...(turned < 0 ? cell.reverse() : cell), gap];
  }));
}

// The camera's place when a hand has turned the scene by [around, up] radians.
function seen(eye, [around, up]) {
  const far = Math.hypot(...eye), height = Math.max(-1.5, Math.min(1.5, Math.asin(eye[2] / far) + up));
  const side = Math.atan2(eye[1], eye[0]) + around;
  return [Math.cos(height) * Math.cos(side), Math.cos(height) * Math.sin(side), Math.sin(height)].map((v) => far * v);
}

function flattened({ data, layout }, turn) {
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
    const eye = seen(["x", "y", "z"].map((c) => scene.camera.eye[c]), turn), ahead = unit(scaled(eye, -1));
    const right = unit(cross(ahead, [0, 0, 1])), up = cross(right, ahead);
    const look = (p) => {
      const q = p.map((v, c) => ((v - (ends[c][0] + ends[c][1]) / 2) * ratio[c]) / sides[c] - eye[c]);
      return [dot(right, q) / dot(ahead, q), dot(up, q) / dot(ahead, q)];
    };
    mine.forEach(([trace, i], n) => {
      const colors = (trace.colorscale || layout.template.layout.colorscale.sequential).map(([, color]) => color);
      const full = trace.type === "surface" && colors.every((color) => color === colors[0]);
      const places = full ? area(trace, look) : clouds[n].map(look), xy = { x: places.map((p) => p[0]), y: places.map((p) => p[1]) };
      const kept = Object.fromEntries(Object.entries(trace).filter(([key]) => KEPT.includes(key)));
      const net = { mode: "lines", line: { width: full ? 0 : 1, color: colors.at(-1) }, ...(full && { fill: "toself", fillcolor: colors[0] }) };
      const line = { ...kept.line, width: 0.55 * (kept.line?.width ?? 2) };  // 3-D widths are finer than pixels,
      const strokes = { line, marker: { ...kept.marker, size: 1.5 * (kept.marker?.size ?? 4) } };  // and its dots larger
      flat.data[i] = { ...kept, ...(trace.type === "surface" ? net : strokes), ...xy, ...axes, type: "scatter" };
    });
    const axis = (c) => ({ visible: false, range: [-0.4, 0.4], domain: scene.domain?.[c] || [0, 1], fixedrange: true });
    flat.layout[`xaxis9${k}`] = { ...axis("x"), anchor: axes.yaxis };
    flat.layout[`yaxis9${k}`] = { ...axis("y"), anchor: axes.xaxis, scaleanchor: axes.xaxis };
    flat.layout.dragmode = false;
    delete flat.layout[name];
  });
  return flat;
}

// A hand on the drawing changes `turn` in place: half a turn for the drawing's width.
function turnable(plot, turn, again) {
  let last = null, turning = false;
  plot.classList.add("ngx-scene");
  plot.addEventListener("pointerdown", (event) => {
    if (event.isPrimary && !event.button) [last, turning] = [event, event.pointerType !== "touch"];
  }, true);
  window.addEventListener("pointermove", (event) => {  // of the window: plotly lays a cover over the page while a button is down
    if (last?.pointerId !== event.pointerId) return;
    const [dx, dy] = [event.clientX - last.clientX, event.clientY - last.clientY];
    turning ||= Math.abs(dx) > Math.abs(dy);  // or else the finger scrolls the page
    if (!turning) return;
    plot.classList.add("ngx-turned");
    turn[0] -= (Math.PI * dx) / plot.clientWidth;
    turn[1] += (Math.PI * dy) / plot.clientWidth;
    last = event;
    again();
  });
  for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, () => { last = null; });
}
