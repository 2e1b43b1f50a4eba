"""How do definitions from many of our files become one file that imports none of them?

``definitions`` collects what a file defines and everything of ours that it needs, directly or through others, in the order of
the imports. They are copied verbatim, comments included, with two changes: imports of ours are dropped, with the prefixes
and other names that they introduced, and a private name that two files define gets the file's name as a prefix. Nothing is
copied between the lines "# ngpt_core only: begin" and "# ngpt_core only: end".
"""

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ROOT", "definitions", "sorted_imports"]

ROOT = Path(__file__).parent


@dataclass
class Source:
    """One of our files: its top-level definitions by name, what it imports from us, and its other imports."""

    path: Path
    text: str = ""
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    additions: list[ast.stmt] = field(default_factory=list)  # statements that add to a definition: op.register_fake, ...
    ours: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (file, name there)
    modules: dict[str, str] = field(default_factory=dict)  # name of a file of ours that is imported whole -> the file
    others: dict[str, str] = field(default_factory=dict)  # name -> the import statement

    def __post_init__(self) -> None:
        self.text = re.sub(
            r"(?s) *# ngpt_core only: begin\n.*?# ngpt_core only: end\n", "", self.path.read_text(encoding="utf-8")
        )
        for node in ast.parse(self.text).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = self.path.parents[node.level - 1]
                for alias in node.names:
                    file = base.joinpath(*(node.module or alias.name).split(".")).with_suffix(".py")
                    if node.module is None and file.is_file():
                        self.modules[alias.asname or alias.name] = str(file)
                    else:
                        self.ours[alias.asname or alias.name] = (str(file), alias.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = (alias.asname or alias.name).split(".")[0]
                    start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                    suffix = f" as {alias.asname}" if alias.asname else ""
                    self.others[name] = f"{start}import {alias.name}{suffix}"
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "_":
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                        self.definitions[ast.unparse(part)] = node
            elif isinstance(node, ast.FunctionDef) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                self.additions.append(node)

    def segment(self, node: ast.stmt) -> str:
        """The text of a statement, with its decorators and the comment on its last line."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        return "\n".join(self.text.splitlines()[first - 1 : node.end_lineno])


def _names(node: ast.stmt) -> set[str]:
    """Names that a statement reads, annotations included."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _added_to(node: ast.stmt) -> str:
    """The definition that a statement adds to: ``op`` of ``op.register_autograd(...)`` or of ``@op.register_fake``."""
    call = node.decorator_list[0] if isinstance(node, ast.FunctionDef) else node.value  # type: ignore[attr-defined]  # an Expr
    return ast.unparse(call.func if isinstance(call, ast.Call) else call).split(".")[0]


class _Collector:
    """Finds what a definition needs, directly or through others."""

    def __init__(self, beside: tuple[str, ...]) -> None:
        self.beside = beside
        self.sources: dict[str, Source] = {}
        self.needed: dict[str, dict[int, ast.stmt]] = {}  # file -> line -> statement; files in the order of their imports
        self.imports: set[str] = set()

    def source(self, file: str) -> Source:
        """The file, read after everything that it imports from us."""
        if file not in self.sources:
            source = Source(Path(file))
            for other in [other for other, _ in source.ours.values()] + list(source.modules.values()):
                if Path(other).is_file():
                    self.source(other)
            self.sources[file], self.needed[file] = source, {}
        return self.sources[file]

    def need(self, file: str, name: str) -> None:
        source = self.source(file)
        if name in source.ours:
            other, original = source.ours[name]
            if Path(other).stem not in self.beside:
                self.need(other, original)
        elif name in source.others:
            self.imports.add(source.others[name])
        elif name in source.definitions:
            self.statement(file, source.definitions[name])
            for node in source.additions:
                if _added_to(node) == name:
                    self.statement(file, node)

    def statement(self, file: str, node: ast.stmt) -> None:
        if node.lineno not in self.needed[file]:
            self.needed[file][node.lineno] = node
            for name in sorted(_names(node)):
                self.need(file, name)
            modules = self.source(file).modules
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in modules:
                    self.need(modules[part.value.id], part.attr)


def _renamed(text: str, names: dict[str, str]) -> str:
    """The text with these names replaced, except after a dot."""
    for old, new in names.items():
        text = re.sub(rf"(?<![\w.]){old}\b", new, text)
    return text


def definitions(file: Path, beside: tuple[str, ...] = ()) -> tuple[list[str], set[str]]:
    """(the definitions, a title before those of each file; the import statements that they need).

    ``beside``: stems of files of ours that are imported rather than copied.
    """
    start, collector = str(file), _Collector(beside)
    for name in collector.source(start).definitions:
        if name != "__all__":
            collector.need(start, name)
    defined = Counter(name for source in collector.sources.values() for name in source.definitions)
    blocks = []
    for path, statements in ((Path(name), found) for name, found in collector.needed.items()):
        source = collector.sources[str(path)]
        renames = {n: f"_{path.stem}{n}" for n in source.definitions if defined[n] > 1 and n.startswith("_") and n != "__all__"}
        renames |= {n: original for n, (_, original) in source.ours.items() if n != original}
        title = f"# ---- {path.relative_to(ROOT.parent)} "
        for i, line in enumerate(sorted(statements)):
            head = f"{title:-<119}\n" if i == 0 else ""
            text = _renamed(source.segment(statements[line]), renames)
            for module in source.modules:
                text = re.sub(rf"(?<![\w.`]){module}\.(?=\w)", "", text)
            blocks.append(head + text)
    return blocks, collector.imports


def sorted_imports(imports: set[str]) -> str:
    """The import statements as lines, plain imports first."""
    return "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line)))
