"""How much of plotly.js does a page need? Only the traces that the book draws.

The installed plotly.min.js is one closure of about 1,200 lazy modules, as esbuild writes them:

    var NAME=W((exports,module)=>{ ... OTHER() ... });var NEXT=W(...

and its last module registers one module for each kind of trace. ``cut`` shortens that list to the wanted traces and leaves out
every module that no other asks for any more. This needs no other tool, and the result has the installed plotly's version.
A file of another shape is an error and never a silent return to the whole file: see ``SHAPE``.
"""

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

import plotly

SOURCE = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
TRACES = ("scatter", "bar", "heatmap")  # scatter3d and surface are drawn with scatter: explorer/scene.js

SHAPE = (
    f"{SOURCE} does not have the shape that ngpt_book/sphinx/plotly_part.py cuts: {{what}}. "
    "Install the plotly of constraints.txt, or adapt that file to the new one."
)
_COMMONJS = re.compile(r"([\w$]+)=\(\w,\w\)=>\(\)=>\{try\{return \w\|\|\w\(\(\w=\{exports:\{\}\}\)\.exports,\w\)")
_ESM = re.compile(r"([\w$]+)=\(\w,\w,\w\)=>\(\)=>\{if\(\w\)throw \w\[0\];try\{return \w&&\(\w=\w\(\w=0\)\)")
_CALLS = re.compile(r"(?<![.\w$])([A-Za-z_$][\w$]*)\(\)")  # how one module asks for another
_LIST = re.compile(r"\.register\(\[((?:[\w$]+\(\),?)+)\]\)")


def _helper(pattern: re.Pattern, text: str) -> str:
    if (found := pattern.search(text)) is None:
        raise ValueError(SHAPE.format(what="the wrapper of its modules was not found"))
    return re.escape(found[1])


def cut(text: str, traces: Collection[str]) -> str:
    """plotly.js with only these traces (scatter belongs to its core)."""
    start = re.compile(rf"(?<=[;}}\n])var ([\w$]+)={_helper(_COMMONJS, text)}\((?:\([\w$,]*\)|[\w$]+)=>\{{")
    inner = re.compile(rf"[ ,]([\w$]+)={_helper(_ESM, text)}\(\(\)=>\{{")  # modules of the other kind, behind the one before
    found = list(start.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    parts = [text[: found[0].start()], *(text[match.start() : end] for match, end in zip(found, ends))]
    where = {match[1]: place for place, match in enumerate(found, 1)}  # the name of a module -> its part
    where |= {name: place for place, part in enumerate(parts) for name in inner.findall(part)}

    listed = _LIST.search(parts[-1])
    if listed is None:
        raise ValueError(SHAPE.format(what="the list of its traces was not found"))
    entries = {}
    for call in _CALLS.findall(listed[1]):
        target = re.search(r"\.exports=([\w$]+)\(\)\}\);$", parts[where[call]])  # lib/bar.js only names traces/bar
        body = parts[where[target[1]]] if target else parts[where[call]]
        if kind := re.search(r'moduleType:"trace",name:"(\w+)"', body):
            entries[kind[1]] = f"{call}()"
    if missing := set(traces) - entries.keys() - {"scatter"}:
        raise ValueError(SHAPE.format(what=f"it has no trace {', '.join(sorted(missing))}"))
    chosen = ",".join(entries[trace] for trace in traces if trace in entries)
    parts[-1] = parts[-1][: listed.start(1)] + chosen + parts[-1][listed.end(1) :]

    reached, front = set[int](), {0, len(parts) - 1}
    while front:
        reached |= front
        front = {where[name] for place in front for name in _CALLS.findall(parts[place]) if name in where} - reached
    return "".join(part for place, part in enumerate(parts) if place in reached)


@cache
def part() -> str:
    """The installed plotly with the book's ``TRACES``."""
    return cut(SOURCE.read_text(encoding="utf-8"), TRACES)
