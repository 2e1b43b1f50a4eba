"""How do the notebooks get the outputs that are committed with them?

    python book/execute.py [NOTEBOOK ...]         (make notebooks)

Executes each in a fresh kernel, in the book's mode (no widget state), and writes it back without what differs from one
machine or run to the next: timings, kernel versions, transient metadata. nbval then compares every later run with it.
"""

import os
import sys
from pathlib import Path

os.environ["NGPT_BOOK"] = "1"  # read by ngpt_book: static HTML only
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two notebooks at once must not compete for the cores

import nbformat
import numpy as np
from nbclient import NotebookClient

BOOK = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    settings = {"timeout": 600, "kernel_name": "python3", "coalesce_streams": True}  # what is printed is stored in one piece
    NotebookClient(notebook, **settings, resources={"metadata": {"path": str(path.parent)}}).execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)
    size = path.stat().st_size
    print(f"notebooks: {path.name}, {size / 1000:.0f} kB")
    if size > 1_000_000:
        sys.exit(f"{path.name} has {size:,} bytes with its outputs; the rule is at most 1,000,000. Use fewer grid points.")


def picture() -> None:
    """The README's picture: the walk of the first page, as a still. Mid-grey text reads on white and in the dark.

    A picture that did not change is left alone.
    """
    from ngpt_book.explorer.svg import to_svg
    from ngpt_book.figures import hypersphere

    arrays = {key: np.asarray(value) for key, value in hypersphere.forward_pass(0.2, 0.2, 5).items()}
    still = to_svg(hypersphere.forward_pass_figure(arrays), alt="A hidden state walks on the sphere towards a word.")
    path, still = BOOK / "_assets" / "walk.svg", still.replace("currentColor", "#78808c")
    if not path.exists() or path.read_text() != still:
        path.write_text(still)


if __name__ == "__main__":
    paths = [Path(p) for p in sys.argv[1:]] or sorted(BOOK.glob("*.ipynb"))
    if any(path.name == "intro.ipynb" for path in paths):
        picture()
    for path in paths:
        execute(path)
