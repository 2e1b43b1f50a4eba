// What is the value of what a reader typed? A formula is parsed and its tree evaluated; nothing is ever run as code.
//
//     sum      = product {("+" | "-") product}
//     product  = signed {("*" | "/") signed}
//     signed   = ("+" | "-") signed | power
//     power    = atom [("^" | "**") signed]
//     atom     = number | name | function "(" sum ")" | "(" sum ")"
//
// expression.py is its twin in Python.
const FUNCTIONS = {
  sqrt: Math.sqrt, log: Math.log, ln: Math.log, exp: Math.exp, abs: Math.abs,
  sin: Math.sin, cos: Math.cos, tan: Math.tan, asin: Math.asin, acos: Math.acos, atan: Math.atan,
};
const CONSTANTS = { pi: Math.PI, e: Math.E };
const TOKEN = /\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z_][A-Za-z_0-9]*)|(\*\*|[-+*/^()])|(\S))/y;
const LONGEST = 200, DEEPEST = 40;
const TYPED = { "−": "-", "–": "-", "·": "*", "×": "*", "÷": "/", "²": "^2", "√": "sqrt", "π": "pi", "ρ": "rho", "α": "alpha", "β": "beta", "χ": "chi" };

// A list of [kind, text], kind one of number, name, sign.
function tokens(text) {
  const plain = text.replace(/[−–·×÷²√πραβχ]/g, (c) => TYPED[c]), found = [];
  TOKEN.lastIndex = 0;
  while (plain.slice(TOKEN.lastIndex).trim()) {
    const [, number, name, sign, other] = TOKEN.exec(plain);
    if (other) throw new Error(`“${other}” does not belong in a formula.`);
    found.push(number ? ["number", number] : name ? ["name", name] : ["sign", sign === "**" ? "^" : sign]);
  }
  return found;
}

// The formula as a function of the symbols' values; throws an Error that says what is not understood.
function formula(text, symbols) {
  if (text.length > LONGEST) throw new Error(`A formula has at most ${LONGEST} characters.`);
  const list = tokens(text);
  let at = 0, depth = 0;
  const next = (...signs) => list[at]?.[0] === "sign" && signs.includes(list[at][1]);
  const take = (...signs) => (next(...signs) ? list[at++][1] : null);
  const place = () => (at < list.length ? `before “${list[at][1]}”` : "at the end");

  function chain(part, apply) {
    let left = part();
    for (let sign; (sign = take(...Object.keys(apply)));) {
      const a = left, b = part(), op = apply[sign];
      left = (v) => op(a(v), b(v));
    }
    return left;
  }
  const sum = () => chain(product, { "+": (a, b) => a + b, "-": (a, b) => a - b });
  const product = () => chain(signed, { "*": (a, b) => a * b, "/": (a, b) => a / b });
  function signed() {
    if (++depth > DEEPEST) throw new Error("The formula is nested too deeply.");
    const sign = take("+", "-"), part = sign ? signed() : power();
    depth -= 1;
    return sign === "-" ? (v) => -part(v) : part;
  }
  function power() {
    const base = atom();
    if (!take("^")) return base;
    const exponent = signed();
    return (v) => base(v) ** exponent(v);
  }
  function inside() {
    const part = sum();
    if (!take(")")) throw new Error(`A “)” is missing ${place()}.`);
    return part;
  }
  function atom() {
    if (take("(")) return inside();
    const [kind, word] = list[at] || [];
    if (kind === "number") { at += 1; return () => Number(word); }
    if (kind !== "name") throw new Error(`Something is missing ${place()}.`);
    at += 1;
    if (symbols.includes(word)) return (v) => v[word];
    if (Object.hasOwn(FUNCTIONS, word)) {
      if (!take("(")) throw new Error(`${word} needs its argument in parentheses: ${word}(...).`);
      const argument = inside();
      return (v) => FUNCTIONS[word](argument(v));
    }
    if (Object.hasOwn(CONSTANTS, word)) return () => CONSTANTS[word];
    throw new Error(`“${word}” is not a symbol here` + (symbols.length ? `; these are: ${symbols.join(", ")}.` : "."));
  }

  if (!list.length) throw new Error("Type an answer first.");
  const whole = sum();
  if (at < list.length) {
    const [before, after] = [list[at - 1][1], list[at][1]];
    throw new Error(after === ")" ? "There is a “)” without its “(”." : `An operator is missing between “${before}” and “${after}”; write * for a product.`);
  }
  return whole;
}

// The number that a reader typed: 1e-3, 0,5, 3/4, 12 % and 5° are all understood.
function numberOf(text, unit) {
  let plain = text.trim().replace(/^(-?0),(\d)/, "$1.$2");  // 0,125 is an eighth, and 1,000 a thousand
  plain = plain.replace(/(\d),(\d{3})(?!\d)/g, "$1$2").replace(/(\d),(\d)/g, "$1.$2");
  for (const tail of ["%", "°", unit]) if (tail && plain.endsWith(tail)) plain = plain.slice(0, -tail.length);
  const value = formula(plain, [])({});
  if (!Number.isFinite(value)) throw new Error("That has no finite value.");
  return value;
}

// Whether two lists of values are those of one formula. A formula that has no value at a point is not the true one.
const same = (mine, theirs, reach = 1e-4) => mine.every((m, i) =>
  theirs[i] === null ? !Number.isFinite(m) : Math.abs(m - theirs[i]) <= reach * Math.max(Math.abs(theirs[i]), 1e-9));
