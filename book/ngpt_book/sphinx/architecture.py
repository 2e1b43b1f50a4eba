"""How does the architecture page name places in the source and list every file? With a role and a directive.

{src}`nn/head.py::logit_scale` becomes "logit_scale in nn/head.py:105", with the line number in the version being built, and a
link once the repository has an address. A place that does not exist is a warning, which fails the build. ``ngpt-modules`` is a
table of all files of a package, each with the first paragraph of its docstring.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from ..source import RANKS, Module, locate, part_of, read
from .address import is_real

logger = logging.getLogger(__name__)


def source_url(repository: str, branch: str, path: str, line: int | None) -> str | None:
    """The address of a line in the repository; None while that address is a placeholder.

    >>> source_url("https://github.com/owner/name", "main", "ngpt_core/cli.py", 7)
    'https://github.com/owner/name/blob/main/ngpt_core/cli.py#L7'
    """
    if not is_real(repository):
        return None
    return f"{repository}/blob/{branch}/{path}" + (f"#L{line}" if line else "")


class Place(SphinxRole):
    """``src``: a file, or a function, class or variable in it."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """The name, and the file with the line."""
        root = Path(self.env.srcdir).parent
        try:
            path, line = locate(root, self.text)
        except ValueError as error:
            logger.warning(str(error), location=self.get_location())
            return [nodes.literal("", self.text)], []
        self.env.note_dependency(str(path))  # rebuild the page when the file changes
        where, _, name = self.text.partition("::")
        text = nodes.literal("", f"{where}:{line}" if line else where)
        options = self.config.html_theme_options
        url = source_url(
            self.config.ngpt_repository, options.get("repository_branch", "main"), path.relative_to(root).as_posix(), line
        )
        place = nodes.reference("", "", text, refuri=url) if url else text
        return [nodes.literal("", name), nodes.Text(" in "), place] if name else [place], []


def listing(modules: dict[str, Module], package: str) -> list[tuple[str, str, int, bool]]:
    """(path, first paragraph of its docstring, lines, is a folder) of every file; for ngpt_core from the highest rank down.

    A folder comes before its files, and its line count is their sum.
    """
    ranks = {part: -rank for rank, parts in enumerate(RANKS) for part in parts} if package == "ngpt_core" else {}
    listed = [part for parts in RANKS for part in parts]

    def order(name: str) -> tuple:
        part = part_of(name)
        return part != "", ranks.get(part, 0), listed.index(part) if part in ranks else 0, name.split(".")

    rows = []
    for name in sorted((name for name in modules if f"{name}.".startswith(f"{package}.")), key=order):
        module, folder = modules[name], modules[name].path.name == "__init__.py"
        inside = [m.lines for other, m in modules.items() if folder and f"{other}.".startswith(f"{name}.")]
        path = name.removeprefix(f"{package}.").replace(".", "/") + ("/" if folder else ".py")
        rows.append((path, module.about, sum(inside) if folder else module.lines, folder))
    return rows


class Modules(SphinxDirective):
    """``ngpt-modules``: the table of a package's files."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table."""
        root, package = Path(self.env.srcdir).parent, self.arguments[0]
        modules = read(next(p for p in (root / package, root / "book" / package) if p.is_dir()))
        for module in modules.values():
            self.env.note_dependency(str(module.path))
        body = nodes.tbody()
        for path, about, lines, folder in listing(modules, package):
            name = nodes.literal("", path)
            cells = [nodes.strong("", "", name) if folder else name], self._text(about), [nodes.Text(f"{lines:,}")]
            body += self._row(*cells)
        head = nodes.thead("", self._row(*([nodes.Text(title)] for title in ("file", "what it answers", "lines"))))
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (30, 60, 10)), head, body, cols=3)
        return [nodes.table("", group, classes=["modules"])]

    @staticmethod
    def _row(*cells: list[nodes.Node]) -> nodes.row:
        return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))

    @staticmethod
    def _text(words: str) -> list[nodes.Node]:
        """Words with ``code`` in them."""
        parts = enumerate(re.split(r"``(.+?)``", words))
        return [nodes.literal("", part) if i % 2 else nodes.Text(part) for i, part in parts if part]


def setup(app: Sphinx) -> dict:
    app.add_role("src", Place())
    app.add_directive("ngpt-modules", Modules)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
