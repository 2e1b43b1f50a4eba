// How is a scene drawn where there is no WebGL, without which plotly has no 3-D?
//
// Points, lines and surfaces (as nets) are drawn in the plane as the camera sees them: the same projection as that of the still
// picture, svg/space.py.
const solid = (trace) => trace.type === "scatter3d" || trace.type === "surface";
let webgl;  // not known before the first scene
const hasWebgl = () => (webgl ??= !!document.createElement("canvas").getContext("webgl"));
const number = (v) => (v === null || v === undefined ? NaN : v);
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const scaled = (a, c) => a.map((v) => v * c);
const unit = (a) => scaled(a, 1 / Math.hypot(...a));
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const gap = [NaN, NaN, NaN];  // the pen is lifted
const KEPT = "name meta mode line marker text textposition textfont hovertemplate hoverinfo showlegend opacity visible".split(" ");

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
