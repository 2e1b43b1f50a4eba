"""Does every import point down? The ranks of ngpt_core's parts, import cycles, and what a base install can import.

The rule: a module imports only parts of a lower rank, or its own part; rank 0 may import within itself, without cycles. Imports
inside functions count, those under ``if TYPE_CHECKING`` do not, and ngpt_core/__init__.py is exempt. The ranks themselves are
in ``ngpt_book.source.RANKS``; the picture of them, which the book shows, is kept up to date here too.
"""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason='ngpt_book needs plotly: pip install "ngpt-core[notebook]"')
from ngpt_book.figures import architecture
from ngpt_book.source import RANKS, Module, edges, part_of, rank_of, read

ROOT = Path(__file__).parent.parent
MODULES = read(ROOT / "ngpt_core", ROOT / "book" / "ngpt_book")

BASE = {"torch", "einops", "numpy", "safetensors"}  # the dependencies in pyproject.toml: what a plain install brings
OPTIONAL = {  # every other package that ngpt_core uses -> the only modules that may import it
    "plotly": {"tools.report", "tools.figures", "tools.theme"},
    "triton": {"optim.fused_triton", "nn.loss_triton"},
    "mamba_ssm": {"nn.ssd"},
    "causal_conv1d": {"nn.mamba2"},
    "pyarrow": {"data.sources"},
    "datasets": {"data.sources"},
    "tokenizers": {"data.tokenizers", "hf.tokenizer"},
    "tiktoken": {"data.tokenizers"},
    "torchao": {"train.float8"},
    "wandb": {"train.loggers"},
    "mlflow": {"train.loggers"},
    "transformers": {"hf", "hf.nemotron_h", "hf.convert", "hf.export", "hf.tokenizer", "hf.configuration_ngpt", "hf.layers",
                     "hf.modeling_ngpt"},
    "huggingface_hub": {"hf.configuration_ngpt"},
    "lm_eval": {"tools.tasks"},
}  # fmt: skip
NEED_AN_EXTRA = {  # they import it at the top: importing them requires it
    "tools.figures", "tools.theme", "optim.fused_triton", "nn.loss_triton", "hf.tokenizer", "hf.configuration_ngpt",
    "hf.layers", "hf.modeling_ngpt",
}  # fmt: skip


# ---- the rules -------------------------------------------------------------------------------------------------------
def violations(modules: dict[str, Module]) -> Iterator[str]:
    """One sentence for each import of ngpt_core that breaks a rule, and for each part without a rank."""
    core = {name: module for name, module in modules.items() if name.split(".")[0] == "ngpt_core" and name != "ngpt_core"}
    for part in sorted({module.part for module in core.values()}):
        if rank_of(part) is None:
            yield (
                f"ngpt_core/{part} has no rank. Decide which parts it needs and which parts need it, put it into RANKS in "
                "book/ngpt_book/source.py, and add a line to the tree in README.md."
            )
    for name, module in core.items():
        short = name.removeprefix("ngpt_core.")
        where = name.replace(".", "/") + ("/__init__.py" if module.path.name == "__init__.py" else ".py")
        for i in module.imports:
            reason = _import(i.module, i.name, module.part) or _package(i.module.split(".")[0], short, i.lazy)
            if reason:
                yield f"{where}:{i.line}: {reason}"
        for line in _by_string(module):
            yield f"{where}:{line}: an import by string is invisible here. Write an import statement."
    low = {part: targets for part, targets in edges(core).items() if part in RANKS[0]}
    for part, targets in low.items():  # inside functions too
        low[part] = targets & set(RANKS[0])
    if cycle := cycle_in(low):
        yield f"rank 0 may import within itself, but not in a circle: {' -> '.join(cycle)}. Move what they share to one side."


def _import(target: str, name: str | None, part: str) -> str | None:
    """Why a module of this part must not import that one of ours."""
    if target == "ngpt_core":
        if name == "__version__":
            return None
        return f"imports {name or 'ngpt_core'} from the top of the package. Import it from the module that defines it."
    if not target.startswith("ngpt_core."):
        return None
    other = part_of(target)
    own, its = rank_of(part), rank_of(other)
    if part == other or None in (own, its) or its < own or its == own == 0:
        return None
    return (
        f"{part} has rank {own} and imports {target}, but {other} has rank {its}: a module imports only lower ranks or its own "
        "part. Move what both need down, or pass it in as an argument."
    )


def _package(top: str, short: str, lazy: bool) -> str | None:
    """Why a module must not import this package of somebody else."""
    if top in BASE or top in (*sys.stdlib_module_names, "tomllib") or top == "ngpt_core":  # tomllib: from 3.11 on
        return None
    if top == "ngpt_book":
        return "imports ngpt_book. The trainer knows nothing about the book: move what it needs into ngpt_core."
    if short not in OPTIONAL.get(top, ()):
        return f"imports {top}, which a base install does not bring. If it must, add it to OPTIONAL in tests/test_layers.py."
    if not lazy and short not in NEED_AN_EXTRA:
        return f"imports {top} at the top, so that a base install cannot import this module. Import it where it is used."
    return None


def _by_string(module: Module) -> list[int]:
    lines = module.path.read_text(encoding="utf-8").splitlines()
    return [n for n, line in enumerate(lines, 1) if re.search(r"\bimport_module\(|\b__import__\(", line)]


def at_import(modules: dict[str, Module]) -> dict[str, set[str]]:
    """What Python runs when it imports each module, of ours: what is imported at the top, and the packages around that."""
    graph = {}
    for name, module in modules.items():
        targets = {i.module for i in module.imports if not i.lazy and i.module in modules}
        parents = {".".join(t.split(".")[:n]) for t in targets for n in range(1, t.count(".") + 1)}
        graph[name] = targets | {p for p in parents if not f"{name}.".startswith(f"{p}.")}
    return graph


def cycle_in(graph: dict[str, Iterable[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


# ---- the source ------------------------------------------------------------------------------------------------------
def test_the_source_was_read():
    assert {"ngpt_core.cli", "ngpt_core.nn.head", "ngpt_core.__main__", "ngpt_book.explorer.svg.plane"} <= MODULES.keys()
    assert sum(len(module.imports) for module in MODULES.values()) > 500
    found = edges(MODULES)
    assert {"nn", "optim"} <= found["recipe"] and "data" in found["cli"]  # the last one inside a function


def test_every_import_of_the_package_follows_the_ranks():
    assert list(violations(MODULES)) == []


def test_no_module_imports_itself_through_others():
    assert cycle_in(at_import(MODULES)) is None


def test_every_rank_and_every_exception_is_in_use():
    """A stale entry in these tables would allow imports that nobody approved."""
    parts = {module.part for name, module in MODULES.items() if name.startswith("ngpt_core.")}
    assert sorted(part for row in RANKS for part in row) == sorted(parts)
    used = {
        (i.module.split(".")[0], name.removeprefix("ngpt_core.")) for name, module in MODULES.items() for i in module.imports
    }
    assert {(package, short) for package, shorts in OPTIONAL.items() for short in shorts} <= used
    assert all(
        any(not i.lazy and i.module.split(".")[0] in OPTIONAL for i in MODULES[f"ngpt_core.{short}"].imports)
        for short in NEED_AN_EXTRA
    )
    pyproject = (ROOT / "pyproject.toml").read_text()
    asked = re.search(r"^dependencies = \[\n(.*?)^\]", pyproject, re.M | re.S)[1]
    assert set(re.findall(r'^ *"([a-z]+)', asked, re.M)) == BASE


def test_a_base_install_imports_every_module_that_needs_no_extra():
    """In a process where only the base dependencies exist (and what those bring)."""
    wanted = [n for n in MODULES if n.startswith("ngpt_core") and n.removeprefix("ngpt_core.") not in NEED_AN_EXTRA]
    hidden = [*OPTIONAL, "ngpt_book", "ipywidgets", "IPython", "sphinx", "anywidget"]
    code = (
        "import importlib, sys\n"
        f"for name in {hidden!r}: sys.modules[name] = None\n"  # importing it is a ModuleNotFoundError
        f"for name in {wanted!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- the picture -----------------------------------------------------------------------------------------------------
def test_the_picture_shows_the_imports_as_they_are():
    assert architecture.FILE.read_text(encoding="utf-8") == architecture.drawn(), (
        "the imports have changed: draw them again with  python -m ngpt_book.figures.architecture"
    )


def test_the_picture_has_a_dot_for_every_import_and_an_arrow_into_every_part_that_is_imported():
    found = edges(MODULES)
    svg = ET.fromstring(architecture.draw(found))
    assert len(svg.findall("{*}circle")) == sum(map(len, found.values()))
    names = [text.text for text in svg.findall("{*}text") if not text.text.isdigit()]
    assert names[:3] == ["ngpt_book/", "cli.py", "tools/"] and len(names) == len(found)
    tops = [float(rect.get("y")) for rect in svg.findall("{*}rect")]
    assert tops == sorted(tops)
    order = architecture.steps(found)
    assert all(order.index(part) < order.index(other) for part, others in found.items() for other in others)
    other = {part: targets - {"checks"} for part, targets in found.items()}
    assert architecture.draw(other) != architecture.draw(found)


# ---- the rules catch what they should --------------------------------------------------------------------------------
def planted(folder: Path, files: dict[str, str]) -> dict[str, Module]:
    """The modules of a small package called ngpt_core with these files."""
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "ngpt_core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return read(folder / "ngpt_core")


PLANTED = {
    "a higher rank": ({"nn/a.py": "from ..train.b import x", "train/b.py": ""}, "nn has rank 1 and imports ngpt_core.train.b"),
    "the same rank": (
        {"nn/a.py": "from ..optim import b", "optim/b.py": ""},
        "ngpt_core.optim.b, but optim has rank 1",
    ),
    "by its full name": ({"data/a.py": "import ngpt_core.recipe", "recipe/b.py": ""}, "data has rank 2 and imports"),
    "inside a function": (
        {"sphere.py": "def f():\n    from .nn.a import x", "nn/a.py": ""},
        "ngpt_core/sphere.py:2: sphere",
    ),
    "inside a method": ({"files.py": "class A:\n  def f(self):\n    import ngpt_core.cli", "cli.py": ""}, "files has rank 0"),
    "from a package's page": ({"nn/__init__.py": "from ..hf import x", "hf/a.py": ""}, "ngpt_core/nn/__init__.py:1: nn"),
    "when types are not checked": (
        {
            "nn/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x = 1\nelse:\n    from ..hf import b",
            "hf/b.py": "",
        },
        "nn/a.py:5: nn has rank 1",
    ),
    "the top of the package": ({"train/a.py": "from .. import GatedAdamW"}, "imports GatedAdamW from the top of the package"),
    "all of the package": ({"train/a.py": "import ngpt_core as ng"}, "imports ngpt_core from the top of the package"),
    "the book": ({"tools/a.py": "from ngpt_book import show"}, "tools/a.py:1: imports ngpt_book"),
    "a string": ({"tools/a.py": 'import importlib\nimportlib.import_module("x")'}, "a.py:2: an import by string"),
    "a part without a rank": ({"serving/a.py": ""}, "ngpt_core/serving has no rank. Decide"),
    "plotly elsewhere": ({"train/a.py": "def f():\n    import plotly"}, "imports plotly, which a base install does not bring"),
    "an extra at the top": ({"data/sources.py": "import pyarrow.parquet"}, "imports pyarrow at the top"),
    "a circle in rank 0": (
        {"config.py": "from .checks import x", "checks.py": "def f():\n    from .config import x"},
        "not in a circle",
    ),
}


@pytest.mark.parametrize("files, sentence", PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_found(files, sentence, tmp_path):
    (found,) = violations(planted(tmp_path, files))
    assert sentence in found


def test_what_the_rules_allow_is_not_reported(tmp_path):
    text = "from typing import TYPE_CHECKING\nimport torch\nfrom .. import __version__, sphere\nfrom . import b\n"
    text += "if TYPE_CHECKING:\n    from transformers import X\n    from ..cli import main\n"
    files = {"nn/a.py": text, "nn/b.py": "", "sphere.py": "from .checks import x", "checks.py": "", "cli.py": "", "hf/c.py": ""}
    files |= {"__init__.py": "import ngpt_core.hf", "__main__.py": "from .cli import main"}  # exempt; one part with cli
    assert list(violations(planted(tmp_path, files))) == []


@pytest.mark.parametrize(
    "files",
    [
        {"nn/a.py": "from .b import x", "nn/b.py": "from . import c", "nn/c.py": "import ngpt_core.nn.a"},
        {"nn/__init__.py": "from .a import x", "nn/a.py": "from . import x"},
        {
            "train/a.py": "import ngpt_core.nn.b",
            "nn/__init__.py": "from ..train.a import x",
            "nn/b.py": "",
        },  # its package runs too
    ],
    ids=["three modules", "a package and its module", "the package around it"],
)
def test_a_planted_cycle_is_found_unless_a_function_breaks_it(files, tmp_path):
    assert cycle_in(at_import(planted(tmp_path / "cycle", files))) is not None
    broken = {name: "def f():\n    " + text if "import x" in text else text for name, text in files.items()}
    assert cycle_in(at_import(planted(tmp_path / "broken", broken))) is None
