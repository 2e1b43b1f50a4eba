// Where does the walk lie on a map? Around one of the likely next bytes, which is the pole.
//
// In 136 dimensions a walk does not fit on a globe, but one triangle at a time does: the pole w, the state before a block and
// the state after it. Its three sides are the true angles, so its angle at the pole follows (spherical law of cosines):
//
//     cos(turn) = cos(a) cos(b) + sin(a) sin(b) cos(bearing),      a, b the angles from w to the two states
//
// The triangles are laid side by side around the pole, and the globe is drawn from above it: distances from the center are true.
// Which way round a triangle turns is free; here all turn the same way. (still.py has the same lines.)

const RAD = Math.PI / 180;

// Longitude, in radians, of the states; the middle of the walk is up.
function longitudes(to, turn) {
  const found = [0];
  turn.forEach((c, l) => {
    const a = to[l] * RAD, b = to[l + 1] * RAD, apart = Math.sin(a) * Math.sin(b);
    const cosine = apart > 1e-9 ? (Math.cos(c * RAD) - Math.cos(a) * Math.cos(b)) / apart : 1;
    found.push(found[l] + Math.acos(Math.max(-1, Math.min(1, cosine))));
  });
  const middle = found[found.length - 1] / 2;
  return found.map((x) => Math.PI / 2 + middle - x);
}

// Points [angle to the pole, longitude] of the great circle from one state to the next.
function greatCircle([a, x], [b, y], steps = 14) {
  const point = (t, u) => [Math.sin(t) * Math.cos(u), Math.sin(t) * Math.sin(u), Math.cos(t)];
  const from = point(a * RAD, x), to = point(b * RAD, y), phi = degrees(from, to) * RAD;
  return Array.from({ length: steps + 1 }, (_, i) => {
    const t = i / steps, [k, m] = phi > 1e-9 ? [Math.sin((1 - t) * phi) / Math.sin(phi), Math.sin(t * phi) / Math.sin(phi)] : [1 - t, t];
    const q = norm(from.map((v, j) => k * v + m * to[j]));
    return [Math.acos(Math.max(-1, Math.min(1, q[2]))) / RAD, Math.atan2(q[1], q[0])];
  });
}
