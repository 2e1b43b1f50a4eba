"""What does the architecture page draw? Which part of ngpt_core imports which: a staircase in which every arrow points down.

    python -m ngpt_book.figures.architecture         (writes book/_assets/architecture.svg; a test compares it with the source)

Each step of the staircase is one part, with the highest rank on top. From the end of a step a line runs to the right; a dot on
it marks the column of a part that it imports, and the column leads down to that part. An import against the ranks would have
to lead up. The colors are readable on white and on black: white names on filled steps, lines in mid-gray.
"""

from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

from ..source import RANKS, edges, read
from ..theme import COLORS, FONT

ROOT = Path(__file__).parents[3]
FILE = ROOT / "book" / "_assets" / "architecture.svg"

INK = "#78808c"  # as in walk.svg: about 4:1 against white and against the dark page
FILLS = {"ngpt_book": COLORS["magenta"], "packages": COLORS["blue"], "files": "#5f6b7c"}  # white on each: at least 4.5:1
LEFT, FIRST, STEP = 30, 92, 20  # of the first step, its length, and how much longer the next one is
TOP, ROW, HEIGHT = 8, 32, 22  # of the first step, from one to the next, of one


def steps(imports: dict[str, set[str]]) -> list[str]:
    """The parts from top to bottom: the book, then by rank; within a rank, a part is above those that it imports."""
    found = ["ngpt_book"]
    for parts in reversed(RANKS):
        above = {part: [other for other in parts if part in imports[other]] for part in parts}
        found += TopologicalSorter(above).static_order()
    return found


def draw(imports: dict[str, set[str]]) -> str:
    """The picture as SVG, from ``source.edges``."""
    order = steps(imports)
    top = {part: TOP + ROW * i for i, part in enumerate(order)}
    end = {part: LEFT + FIRST + STEP * i for i, part in enumerate(order)}
    column = {part: end[part] - STEP // 2 for part in order}
    width, height = end[order[-1]] + 6, TOP + ROW * len(order)
    files = set(RANKS[0]) | {"cli"}

    bands, lines, dots, boxes = [], [], [], []
    for rank, parts in enumerate(RANKS):
        first = min(top[part] for part in parts) - (ROW - HEIGHT) // 2
        bands.append(f'<text x="12" y="{first + ROW * len(parts) // 2 + 5}" text-anchor="middle" font-size="14">{rank}</text>')
        bands.append(f'<path d="M0,{first}H{width}" stroke="{INK}" stroke-opacity=".3"/>')
    for part in order:
        middle = top[part] + HEIGHT // 2
        if targets := [other for other in order if other in imports[part]]:
            lines.append(f"M{end[part]},{middle}H{column[targets[-1]]}")
            dots += [f'<circle cx="{column[other]}" cy="{middle}" r="3"/>' for other in targets]
        if sources := [other for other in order if part in imports[other]]:
            tip = top[part] - 1
            lines.append(f"M{column[part]},{top[sources[0]] + HEIGHT // 2}V{tip - 4}")
            dots.append(f'<path d="M{column[part] - 4},{tip - 6}h8l-4,6Z"/>')
        fill = FILLS["ngpt_book"] if part == "ngpt_book" else FILLS["files" if part in RANKS[0] else "packages"]
        name = escape(f"{part}.py" if part in files else f"{part}/")
        boxes.append(
            f'<rect x="{LEFT}" y="{top[part]}" width="{end[part] - LEFT}" height="{HEIGHT}" rx="3" fill="{fill}"/>'
            f'<text x="{LEFT + 8}" y="{middle + 5}" font-size="14" fill="#fff">{name}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'fill="{INK}" font-family="{escape(FONT, quote=True)}" role="img" '
        'aria-label="The parts of ngpt_core by rank, and which of them import which: every arrow points down.">\n'
        + "\n".join([*bands, f'<path d="{"".join(lines)}" fill="none" stroke="{INK}" stroke-width="1.3"/>', *dots, *boxes])
        + "\n</svg>\n"
    )


def drawn() -> str:
    """The picture of the current source."""
    return draw(edges(read(ROOT / "ngpt_core", ROOT / "book" / "ngpt_book")))


if __name__ == "__main__":
    FILE.write_text(drawn(), encoding="utf-8")
    print(f"wrote {FILE}")
