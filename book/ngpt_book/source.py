"""Which module imports which, and on which line is a name defined? Found in the source, without running it.

``RANKS`` is the one list of ngpt_core's parts and their ranks. tests/test_layers.py enforces it, figures/architecture.py draws
it, and sphinx/architecture.py builds the tables of the book's architecture page from it. It uses only the standard library.
"""

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

RANKS = (  # of the parts of ngpt_core, rank 0 first; a part is a package or a file directly inside it
    ("sphere", "config", "presets", "bundle", "checks", "files", "native", "gpus", "seal", "rehearsal"),
    ("nn", "optim"),
    ("data", "recipe"),
    ("train",),
    ("hf",),
    ("tools",),
    ("cli",),
)


@dataclass(frozen=True)
class Import:
    """One imported name."""

    module: str
    """The imported module by its full name: "ngpt_core.nn.head", "torch.nn"."""
    name: str | None
    """What is taken from it; None for the module itself."""
    line: int
    lazy: bool
    """True inside a function: the import runs when the function does."""


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str
    path: Path
    about: str
    """The first paragraph of its docstring, on one line."""
    lines: int
    imports: tuple[Import, ...]

    @property
    def part(self) -> str:
        """Its part of the package: "nn" for ngpt_core.nn.head, "" for ngpt_core."""
        return part_of(self.name)


def part_of(name: str) -> str:
    """The part that a module of ours belongs to, from its full name.

    >>> part_of("ngpt_core.nn.head"), part_of("ngpt_core.__main__"), part_of("ngpt_core")
    ('nn', 'cli', '')
    """
    part = f"{name}.".split(".")[1]
    return "cli" if part == "__main__" else part


def rank_of(part: str) -> int | None:
    """The rank of a part of ngpt_core; None if it has none."""
    return next((rank for rank, parts in enumerate(RANKS) if part in parts), None)


def read(*packages: Path) -> dict[str, Module]:
    """Full name -> module, for every module in the packages' folders."""
    paths = {_name(path, folder): path for folder in packages for path in sorted(folder.rglob("*.py"))}
    return {name: _module(name, path, paths.keys()) for name, path in paths.items()}


def edges(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Part -> the parts of ngpt_core that it imports. ngpt_book counts as one part, named ngpt_book."""

    def place(name: str) -> str:
        return part_of(name) if name.startswith("ngpt_core.") else name.partition(".")[0]

    found: dict[str, set[str]] = {place(name): set() for name in modules if name != "ngpt_core"}
    for name, module in modules.items():
        if name != "ngpt_core":
            found[place(name)] |= {place(i.module) for i in module.imports if i.module in modules and i.module != "ngpt_core"}
    return {part: targets - {part} for part, targets in found.items()}


# ---- one file ----------------------------------------------------------------------------------------------------------
def _name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(name: str, path: Path, known: Collection[str]) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    about = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return Module(name, path, about, text.count("\n"), tuple(_imports(tree, package, known, lazy=False)))


def _imports(node: ast.AST, package: str, known: Collection[str], lazy: bool) -> Iterator[Import]:
    """The imports in a syntax tree, except those under ``if TYPE_CHECKING``. ``known``: the names of our modules."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, None, node.lineno, lazy)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:  # one dot is the package itself, each further one its parent
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield Import(full, None, node.lineno, lazy) if full in known else Import(base, alias.name, node.lineno, lazy)
    lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    for child in node.orelse if isinstance(node, ast.If) and _for_types(node.test) else ast.iter_child_nodes(node):
        yield from _imports(child, package, known, lazy)


def _for_types(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


# ---- one name ----------------------------------------------------------------------------------------------------------
def locate(root: Path, place: str) -> tuple[Path, int | None]:
    """(file, line) of a place in the notation of the book's pages: "nn/head.py::logit_scale", "train/trainer.py::Trainer.step",
    or only a file. Paths are relative to ngpt_core or to the repository ``root``. ValueError if there is no such place."""
    where, _, dotted = place.partition("::")
    path = next((p for p in (root / "ngpt_core" / where, root / where) if p.exists()), None)
    if path is None:
        raise ValueError(f"{place}: there is no file {where} in ngpt_core or at the top of the repository.")
    if not dotted:
        return path, None
    body, line = ast.parse(path.read_text(encoding="utf-8")).body, 0
    for name in dotted.split("."):
        found = next((statement for statement in body if name in _defined(statement)), None)
        if found is None:
            raise ValueError(f"{place}: {where} does not define {name}.")
        body, line = getattr(found, "body", []), found.lineno
    return path, line


def _defined(node: ast.stmt) -> set[str]:
    """The names that a statement defines: a function, a class, a variable."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
