// How do frames become a GIF? A palette of 255 colors for all of them, and per frame only the rectangle that changed, by LZW.
//
// Colors are counted with five bits per channel; the most frequent ones become the palette, each as the mean of what it stands
// for, and every other color takes the nearest. Index 255 is transparent: a pixel that is as before.

const CLEAR = 256, END = 257, NOTHING = 255;
const colorKey = (rgba, i) => ((rgba[i] >> 3) << 10) | ((rgba[i + 1] >> 3) << 5) | (rgba[i + 2] >> 3);

// The palette of some frames: [[r, g, b], ...], and a function from a color's key to its index.
function palette(samples) {
  const sums = new Map();
  for (const rgba of samples)
    for (let i = 0; i < rgba.length; i += 4) {
      const key = colorKey(rgba, i), s = sums.get(key) ?? sums.set(key, [0, 0, 0, 0]).get(key);
      s[0]++; s[1] += rgba[i]; s[2] += rgba[i + 1]; s[3] += rgba[i + 2];
    }
  const colors = [...sums.values()].sort((a, b) => b[0] - a[0]).slice(0, NOTHING).map(([n, ...rgb]) => rgb.map((v) => Math.round(v / n)));
  const known = new Int16Array(1 << 15).fill(-1);
  const index = (key) => {
    if (known[key] < 0) {
      const at = [key >> 10, (key >> 5) & 31, key & 31].map((v) => v * 8 + 4);
      let least = Infinity;
      colors.forEach((c, j) => {
        const d = (c[0] - at[0]) ** 2 + (c[1] - at[1]) ** 2 + (c[2] - at[2]) ** 2;
        if (d < least) [least, known[key]] = [d, j];
      });
    }
    return known[key];
  };
  return { colors, index };
}

// LZW as GIF has it: codes of 9 to 12 bits, lowest bit first, in blocks of at most 255 bytes.
function lzw(indices) {
  const bytes = [];
  let bits = 0, held = 0, size = 9, next = 258, known = new Map(), prefix = indices[0];
  const put = (code) => {
    held |= code << bits;
    bits += size;
    for (; bits >= 8; bits -= 8, held >>>= 8) bytes.push(held & 255);
  };
  put(CLEAR);
  for (let i = 1; i < indices.length; i++) {
    const key = (prefix << 8) | indices[i], code = known.get(key);
    if (code !== undefined) { prefix = code; continue; }
    put(prefix);
    if (next < 4096) {
      if (next === 1 << size) size++;
      known.set(key, next++);
    } else {
      put(CLEAR);
      [size, next, known] = [9, 258, new Map()];
    }
    prefix = indices[i];
  }
  put(prefix);
  if (next === 1 << size && size < 12) size++;  // the reader has added one more code by now
  put(END);
  if (bits) bytes.push(held & 255);
  const blocks = [8];
  for (let i = 0; i < bytes.length; i += 255) blocks.push(Math.min(255, bytes.length - i), ...bytes.slice(i, i + 255));
  return Uint8Array.from([...blocks, 0]);
}

// { add(rgba, hundredths), blob() } for frames of one size; `samples`: frames from which the palette is chosen.
function gif(width, height, samples) {
  const two = (n) => [n & 255, n >> 8], text = (s) => [...s].map((c) => c.charCodeAt(0));
  const { colors, index } = palette(samples), table = colors.flat();
  while (table.length < 768) table.push(0);
  const parts = [Uint8Array.from([...text("GIF89a"), ...two(width), ...two(height), 0xf7, 0, 0, ...table, 0x21, 0xff, 11, ...text("NETSCAPE2.0"), 3, 1, 0, 0, 0])];
  let before = null;
  return {
    add(rgba, hundredths) {
      const now = new Uint8Array(width * height);
      let [left, top, right, bottom] = [width, height, -1, -1];
      for (let i = 0, y = 0; y < height; y++)
        for (let x = 0; x < width; x++, i++) {
          now[i] = index(colorKey(rgba, 4 * i));
          if (before && before[i] === now[i]) continue;
          left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y);
        }
      if (right < 0) [left, top, right, bottom] = [0, 0, 0, 0];  // nothing changed: one pixel, for the delay
      const w = right - left + 1, h = bottom - top + 1, cut = new Uint8Array(w * h);
      for (let y = 0; y < h; y++)
        for (let x = 0; x < w; x++) {
          const i = (y + top) * width + x + left;
          cut[y * w + x] = before && before[i] === now[i] ? NOTHING : now[i];
        }
      parts.push(Uint8Array.from([0x21, 0xf9, 4, before ? 5 : 4, ...two(hundredths), NOTHING, 0, 0x2c, ...two(left), ...two(top), ...two(w), ...two(h), 0]), lzw(cut));
      before = now;
    },
    blob: () => new Blob([...parts, Uint8Array.of(0x3b)], { type: "image/gif" }),
  };
}
