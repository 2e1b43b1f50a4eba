"""How does a docstring of this package become an entry of the book's reference?

A Sphinx extension, loaded by ``extension.py``. The docstrings are written to be read in the source: formulas in plain text
(``|alpha|``, ``s_z^q``), blocks of code by indentation, arguments as ``name: what it is``. Sphinx's autodoc needs
reStructuredText. Before it sees a docstring,

1. accidental markup is escaped (a bar, a lone star, a name that ends in an underscore), and code is marked as code: a value in
   quotes, a flag;
2. an indented block becomes a literal one;
3. lines that begin with the name of an argument become a list of arguments;
4. parts of a formula that are separated by \\qquad and a line break are put below each other, since a phone is narrow;
5. a name in double backquotes that is an entry of the page becomes a link to it;

and a large dataclass is shown without a signature: its fields follow with their types, defaults and docstrings. The directive
``ngpt-commands`` lists the shell commands and their flags, from the parsers themselves.
"""

import argparse
import inspect
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

LITERAL = re.compile(r"(``.+?``|:[a-z:]+:`.+?`)")
CODE = re.compile(r'(?<![\w`"-])("[\w.+-]+ ?"|--[a-z][\w-]*)(?![\w"])')  # a value, a flag
COMMAND = re.compile(r"(torchrun .+? \.\.\.|--[a-z][\w-]* \d+)")  # in the texts of the shell
NAME = re.compile(r"``([\w.]+)(\((?:\.\.\.)?\))?``")
ENTRY = re.compile(r"^\.\. (autoclass|autofunction|py:data|py:module):: ([\w.]+)\n(?: +:members: (.+))?", re.M)
EMPHASIS = re.compile(r"(?<!\S)\*(?=\w)[^*]*\w\*(?!\w)")


def escaped(line: str) -> str:
    """The line without anything that reStructuredText would take for markup, except ``literals``, code and *emphasis*.

    >>> escaped("``a*b`` and |alpha| of *every* row: normalize_ takes *cases")
    '``a*b`` and \\\\|alpha\\\\| of *every* row: normalize\\\\_ takes \\\\*cases'
    """
    line = "".join(part if i % 2 else CODE.sub(r"``\1``", part) for i, part in enumerate(LITERAL.split(line)))
    parts = LITERAL.split(line)
    for i in range(0, len(parts), 2):
        kept = EMPHASIS.findall(parts[i])
        pieces = EMPHASIS.split(parts[i])
        for j, text in enumerate(pieces):
            text = re.sub(r"([|*])", r"\\\1", text.replace("\\", "\\\\"))
            pieces[j] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)
        parts[i] = "".join(a + b for a, b in zip(pieces, [*kept, ""]))
    return "".join(parts)


def paragraphs(lines: list[str]) -> list[list[str]]:
    """The lines split at blank lines."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line.rstrip())
        elif found[-1]:
            found.append([])
    return [p for p in found if p]


def _indented(line: str) -> bool:
    return line.startswith("    ")


def _begins(line: str, names: set[str]) -> re.Match | None:
    """A match for ``name: text`` or ``name, name: text`` if the names are arguments."""
    found = re.match(r"(\*{0,2}\w+(?:, \w+)*): +(.*)", line)
    return found if found and {name.strip("*") for name in found[1].split(", ")} <= names else None


def _arguments(paragraph: list[str], names: set[str]) -> list[str]:
    """A field with a list, if all lines are ``name: text`` or continue one; otherwise nothing."""
    margin = [line for line in paragraph if not _indented(line)]
    if not margin or not all(_begins(line, names) for line in margin):
        return []
    out = [":Arguments:"]
    for line in paragraph:
        begin = _begins(line, names)
        out.append(f"    - **{escaped(begin[1])}**: {escaped(begin[2])}" if begin else "      " + escaped(line.strip()))
    return out


def restructured(lines: list[str], names: set[str] = frozenset()) -> list[str]:
    """A docstring as reStructuredText. ``names``: the arguments, which may start a line.

    >>> print("\\n".join(restructured(["A rule:", "", "    z = |s| * u", "", "s: the scale"], {"s"})))
    A rule:
    <BLANKLINE>
    ::
    <BLANKLINE>
        z = |s| * u
    <BLANKLINE>
    :Arguments:
        - **s**: the scale
    <BLANKLINE>
    ..
    <BLANKLINE>
    """
    out: list[str] = []
    raw = False  # inside a directive, as ".. math::"
    for paragraph in paragraphs(lines):
        first = paragraph[0]
        raw = first.startswith(".. ") or (raw and _indented(first))
        if first == "Args:":
            paragraph = inspect.cleandoc("\n".join(["", *paragraph[1:]])).split("\n")
        if first == ".. math::" and any(line.endswith(r"\qquad") for line in paragraph):
            out += [first, "", *("    & " + line.strip().replace(r"\qquad", r"\\") for line in paragraph[1:])]
        elif raw or first.lstrip().startswith(">>>"):
            out += paragraph
        elif arguments := _arguments(paragraph, names):
            out += [*arguments, "", ".."]  # a comment ends the list: fields that the page adds are a list of their own
        elif all(map(_indented, paragraph)):
            out += ["::", "", *paragraph]
        else:
            out += map(escaped, paragraph)
        out.append("")
    return out


# ---- links -----------------------------------------------------------------------------------------------------------
@cache
def entries(page: Path) -> dict[str, str]:
    """Names by which a text may refer to an entry (``Settings``, ``recipe.Settings``, ``Schedule.at``) -> its full name."""
    found = {}
    for kind, full, members in ENTRY.findall(page.read_text(encoding="utf-8")):
        if kind == "py:module":
            module = full
            continue
        full = f"{module}.{full}" if kind == "py:data" else full  # Sphinx puts the module before a variable's name
        parts = full.split(".")
        for i, member in [(i, m) for i in range(len(parts)) for m in ("", *filter(None, members.split(", ")))]:
            found[".".join([*parts[i:], member]).rstrip(".")] = f"{full}.{member}".rstrip(".")
    return found


def linked(line: str, name: str, known: dict[str, str], arguments: set[str] = frozenset()) -> str:
    """The line, from the docstring of ``name``, with links. A short plain word is ambiguous: it is linked only from the same
    module or class.

    >>> linked("``Aux``, ``step``, ``PMEN()``", "ng.gate", {"Aux": "ng.nn.Aux", "step": "ng.sphere.step", "PMEN": "ng.PMEN"})
    ':py:obj:`Aux <ng.nn.Aux>`, ``step``, :py:obj:`PMEN() <ng.PMEN>`'
    """

    def link(found: re.Match) -> str:
        text = found[1]
        target = known.get(f"{name.rpartition('.')[0]}.{text}")
        if target is None and re.search(r"[A-Z_.]", text):
            target = known.get(text)
        return found[0] if target in (None, name) or text in arguments else f":py:obj:`{text}{found[2] or ''} <{target}>`"

    return NAME.sub(link, line)


def _argument_names(what: str, thing: object) -> set[str]:
    if what not in ("class", "function", "method"):
        return set()
    try:
        return set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return set()


def process_docstring(app: Sphinx, what: str, name: str, thing: object, options, lines: list[str]) -> None:
    if what == "class" and is_dataclass(thing) and lines and lines[0].startswith(f"{thing.__name__}("):
        lines.clear()  # not a docstring: the signature that dataclasses insert if there is none
    arguments, known = _argument_names(what, thing), entries(Path(app.srcdir) / "api.md")
    lines[:] = restructured([linked(line, name, known, arguments) for line in lines], arguments)


def process_signature(app: Sphinx, what: str, name: str, thing: object, options, signature, returns):
    """None for a large dataclass: its fields follow."""
    if what == "class" and is_dataclass(thing) and len(fields(thing)) > 8:
        return "", None
    return signature, returns


# ---- the shell -------------------------------------------------------------------------------------------------------
def commands() -> list[tuple[str, str, argparse.ArgumentParser]]:
    """(command, description, parser) of every command. Flags that are fields of a config are documented with the config."""
    from ngpt_core.cli import _parser

    def walk(name: str, about: str, parser: argparse.ArgumentParser) -> list:
        children = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not children:
            return [(name, parser.description or about, parser)]
        found = []
        for child in children:
            helps = {action.dest: action.help or "" for action in child._choices_actions}
            for key, sub in child.choices.items():
                found += walk(f"{name} {key}", helps[key], sub)
        return found

    return walk("ngpt", "", _parser(""))


def start_flags() -> list[argparse.Action]:
    """The flags of ``train``, ``plan``, ``simulate`` that are not fields of the configs: the preset, its GPT twin, a file."""
    from ngpt_core.train.config import add_flags

    add_flags(parser := argparse.ArgumentParser(add_help=False))
    return parser._optionals._group_actions


def _code(text: str) -> nodes.literal:
    return nodes.literal("", text, classes=["together"] if text.endswith(' "') else [])  # a value that ends in a space


class Commands(SphinxDirective):
    """``ngpt-commands``: one definition per command, and within it one per flag."""

    def run(self) -> list[nodes.Node]:
        """The list."""
        listing = nodes.definition_list(classes=["ngpt-commands"])
        for name, about, parser in commands():
            body = nodes.definition("", self._text(about[:1].upper() + about[1:].removesuffix(".") + "."))
            flags = nodes.definition_list(classes=["simple"])
            with_fields = name in ("ngpt train", "ngpt plan", "ngpt simulate")
            for action in [*(start_flags() if with_fields else []), *parser._actions]:
                if not isinstance(action, argparse._HelpAction):
                    flags += self._flag(action)
            if len(flags):
                body += flags
            if with_fields:
                run, model = self._link("ngpt_core.train.config.TrainConfig"), self._link("ngpt_core.ModelConfig")
                body += self._text("And the fields of ", run, " and of ", model, ", as in --seq-len 512; see below.")
            target = nodes.target("", "", ids=["command-" + name.replace(" ", "-")])
            self.state.document.note_explicit_target(target)
            listing += nodes.definition_list_item("", nodes.term("", "", target, nodes.literal("", name)), body)
        return [listing]

    def _flag(self, action: argparse.Action) -> nodes.definition_list_item:
        value = "" if action.nargs == 0 or not action.option_strings else " " + (action.metavar or action.dest).upper()
        names = ", ".join(action.option_strings) or action.metavar or action.dest
        term = nodes.term("", "", nodes.literal("", names + value))
        return nodes.definition_list_item("", term, nodes.definition("", self._text((action.help or "").replace("%%", "%"))))

    @staticmethod
    def _text(*pieces: str | nodes.Node) -> nodes.paragraph:
        """A paragraph with commands, flags and values in quotes marked as code."""
        paragraph = nodes.paragraph()
        for piece in pieces:
            if not isinstance(piece, str):
                paragraph += piece
                continue
            for i, text in enumerate(COMMAND.split(piece)):
                parts = ["", text] if i % 2 else CODE.split(text)
                paragraph += [_code(x) if j % 2 else nodes.Text(x) for j, x in enumerate(parts) if x]
        return paragraph

    def _link(self, target: str) -> addnodes.pending_xref:
        text = target.rpartition(".")[2]
        about = {"refdomain": "py", "reftype": "class", "reftarget": target, "refdoc": self.env.docname, "refwarn": True}
        return addnodes.pending_xref("", nodes.literal("", text), refexplicit=True, **about)


def setup(app: Sphinx) -> dict:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.add_directive("ngpt-commands", Commands)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
