// How does Python's format(value, spec) write a number?
const trim = (s) => (s.includes(".") ? s.replace(/\.?0+$/, "") : s);
const exponent = (s) => s.replace(/e([+-])(\d)$/, "e$10$2");

// Python's format(value, spec) for the specs that binding.py lets pass.
function format(value, spec) {
  if (!Number.isFinite(value)) return "–";
  const [, plus, comma, digits, type] = /^(\+?)(,?)(?:\.(\d+))?([defg%]?)$/.exec(spec || ".3g");
  const n = digits === undefined ? 6 : Number(digits);
  let text;
  if (type === "f") text = value.toFixed(n);
  else if (type === "%") text = (100 * value).toFixed(n) + "%";
  else if (type === "e") text = exponent(value.toExponential(n));
  else if (type === "d") text = String(Math.trunc(value));
  else {
    const p = Math.max(n, 1), e = value === 0 ? 0 : Number(value.toExponential(p - 1).split("e")[1]);
    if (e < -4 || e >= p) {
      const [m, x] = value.toExponential(p - 1).split("e");
      text = exponent(trim(m) + "e" + x);
    } else text = trim(value.toFixed(p - 1 - e));
  }
  if (comma) text = text.replace(/\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));
  return (plus && value >= 0 ? "+" : "") + text;
}
