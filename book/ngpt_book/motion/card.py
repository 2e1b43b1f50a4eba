"""What does the book look like where its address is shared? Writes book/_assets/race.png, the last frame of the race.

    python book/ngpt_book/motion/card.py            (needs Chromium, which takes the picture; seconds)

1200 x 630 pixels, as OpenGraph cards are; the README shows it too.
"""

import html
import sys
import tempfile
from pathlib import Path

from ngpt_book.figures import motion
from ngpt_book.printed import chromium
from ngpt_book.sphinx.social import SIZE

FILE = Path(__file__).parents[2] / "_assets" / "race.png"
LIMIT = 200_000  # bytes
TITLE, LINE = "Training nGPT", "Language models on the sphere: a book to read, to touch and to run"
STYLE = """* { margin: 0; box-sizing: border-box } body { width: 1200px; height: 630px; padding: 34px 44px 0; background: #fff;
    color: #1b1f24; font-family: system-ui, sans-serif; overflow: hidden } h1 { font-size: 52px; line-height: 1.1 }
    p { font-size: 26px; margin: 4px 0 16px; color: #4a525c } svg { display: block; width: 1112px; height: auto }"""


def page() -> str:
    picture = motion.race(height=178).to_svg()
    text = f"<h1>{html.escape(TITLE)}</h1><p>{html.escape(LINE)}</p>{picture}"
    return f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style><body>{text}</body>'


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, taken = Path(folder) / "card.html", Path(folder) / "card.png"
        source.write_text(page(), encoding="utf-8")
        try:
            chromium.png(source, taken, *SIZE)
        except chromium.NotFound as error:
            sys.exit(f"card.py: {error}")
        data = taken.read_bytes()
    if len(data) > LIMIT:
        sys.exit(f"card.py: the picture has {len(data):,} bytes; the limit is {LIMIT:,}.")
    FILE.write_bytes(data)
    print(f"{FILE.name}: {len(data) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
