"""Does the book's appendix say something about every public name, every field and every acronym?"""

import ast
import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from sphinx.pycode import ModuleAnalyzer

import ngpt_book
import ngpt_core as ng
from ngpt_book.source import locate, read
from ngpt_book.sphinx.api import commands, entries, escaped, linked, restructured
from ngpt_book.sphinx.architecture import listing, source_url
from ngpt_core import cli

ROOT = Path(__file__).parent.parent
API = (ROOT / "book" / "api.md").read_text()
GLOSSARY = (ROOT / "book" / "glossary.md").read_text()

# (kind, dotted name, the text under it) of every entry of the reference
ENTRIES, MODULE = [], ""
for kind, name, text in re.findall(
    r"^\.\. (autoclass|autofunction|py:data|py:module):: ([\w.]+)\n(.*?)(?=^\.\. |^```)", API, re.M | re.S
):
    if kind == "py:module":
        MODULE = name
    else:
        ENTRIES.append((kind, f"{MODULE}.{name}" if kind == "py:data" else name, text))
NAMES = [name for _, name, _ in ENTRIES]
MODULES = {"sphere", "recipe", "hf"}  # public names that are modules: their own public names are entries


def resolve(name: str) -> object:
    """The object of a dotted name, through ngpt_core's lazy names or a submodule."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"{name} does not exist")


# ---- the reference ---------------------------------------------------------------------------------------------------
def test_every_public_name_has_an_entry():
    public = {f"ngpt_core.{name}" for name in ng._WHERE if name not in MODULES}
    for module in MODULES:
        public |= {f"ngpt_core.{module}.{name}" for name in getattr(ng, module).__all__}
        assert f".. py:module:: ngpt_core.{module}\n" in API
    own = set(ngpt_book.__all__) - {"DIVERGING", "SEQUENTIAL"}  # which stand under TEMPLATE
    public |= {f"ngpt_book.{name}" for name in own}
    assert sorted(public - set(NAMES)) == []
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("kind, name, text", ENTRIES, ids=NAMES)
def test_an_entry_has_a_docstring_and_leads_to_its_chapter(kind, name, text):
    thing = resolve(name)
    if kind != "py:data":
        assert inspect.isclass(thing) == (kind == "autoclass")
        doc = inspect.getdoc(thing) or ""
        assert len(doc) > 20 and not doc.startswith(f"{thing.__name__}("), f"{name} has no docstring of its own"
        assert thing.__doc__, "inherited"
    field = re.search(r":In the book:(.*)", text, re.S)
    assert field and ":doc:`" in field[1], f"{name} names no chapter"
    if members := re.search(r":members: (.+)", text):
        for member in members[1].split(", "):
            assert getattr(thing, member).__doc__, f"{name}.{member} has no docstring: autodoc would leave it out"


# NGPTConfig aside: its fields are ModelConfig's, some under transformers' names, and those of every config of transformers
DATACLASSES = {name: text for _, name, text in ENTRIES if is_dataclass(resolve(name)) and name != "ngpt_core.hf.NGPTConfig"}


@pytest.mark.parametrize("name", DATACLASSES)
def test_every_field_of_a_dataclass_is_described(name):
    cls, text = resolve(name), DATACLASSES[name]
    under = set()
    for c in cls.__mro__[:-1]:  # a parent may describe the field
        documented = ModuleAnalyzer.for_module(c.__module__).find_attr_docs()
        under |= {field for owner, field in documented if owner == c.__name__}
    listed = {name for names in re.findall(r"^ *(\w+(?:, \w+)*): ", cls.__doc__, re.M) for name in names.split(", ")}
    for field in fields(cls):
        described = field.name in under or field.name in listed or f"``{field.name}``" in cls.__doc__ + text
        assert described, f"{name}.{field.name} is not described"


def test_every_command_and_flag_is_explained():
    wanted = (
        "train",
        "eval",
        "generate",
        "export",
        "check",
        "data pack",
        "data check",
        "plan",
        "simulate",
        "report",
        "demo",
        "selftest",
    )
    assert sorted(name for name, _, _ in commands()) == sorted(f"ngpt {name}" for name in wanted)
    for name, about, parser in commands():
        assert about and all(action.help for action in parser._actions), name


def test_docstrings_become_clean_markup():
    assert escaped("|g| and b_ of *every* row, *cases, ``|x|_``") == r"\|g\| and b\_ of *every* row, \*cases, ``|x|_``"
    assert escaped('"lr" as ``"eta"``, --dry-run, "two words"') == '``"lr"`` as ``"eta"``, ``--dry-run``, "two words"'
    lines = ["Says.", "", "a, b: first", "    and more", "*rest: others", "", "x: not an argument", "", "    block | here"]
    assert restructured(lines, {"a", "b", "rest"}) == [
        "Says.",
        "",
        ":Arguments:",
        "    - **a, b**: first",
        "      and more",
        r"    - **\*rest**: others",
        "",
        "..",
        "",
        "x: not an argument",
        "",
        "::",
        "",
        "    block | here",
        "",
    ]


def test_names_in_docstrings_become_links():
    known = entries(ROOT / "book" / "api.md")
    assert set(NAMES) <= set(known.values()) and known["recipe.scaled"] == "ngpt_core.recipe.scaled"
    for line, place, arguments, text in (
        ("``Aux``", "ngpt_core.LanguageModel.hidden", set(), ":py:obj:`Aux <ngpt_core.nn.residual.Aux>`"),
        ("``new_cache``", "ngpt_core.LanguageModel.forward", set(), ":py:obj:`new_cache <ngpt_core.LanguageModel.new_cache>`"),
        ("``build``", "ngpt_core.recipe.table", set(), ":py:obj:`build <ngpt_core.recipe.build>`"),
        ("``step``", "ngpt_core.Diagnostics", set(), "``step``"),  # a key: the sphere's step is no neighbor
        ("``SMGC``", "ngpt_core.SMGC", set(), "``SMGC``"),  # itself
        ("``load``", "ngpt_core.save", {"load"}, "``load``"),  # an argument
    ):
        assert linked(line, place, known, arguments) == text


# ---- the glossary ----------------------------------------------------------------------------------------------------
ACRONYMS = """LGP ASC PMEN SMGC AUC WSD SSM MoE MLP GPT nGPT AdamW GatedAdamW GatedAdam GELU SwiGLU SiLU RMSNorm LayerNorm
    QKNorm SPAM FLOPs""".split()  # of the paper
CARDS = re.findall(r"((?:^\S.*\n)+)((?:^  .*\n)+)", GLOSSARY[GLOSSARY.index(":sorted:") + len(":sorted:\n") :], re.M)
TERMS = [term for terms, _ in CARDS for term in terms.splitlines()]


def test_the_papers_acronyms_are_terms():
    assert len(TERMS) > 60 and len(TERMS) == len(set(TERMS))
    assert [word for word in ACRONYMS if word not in TERMS] == []


@pytest.mark.parametrize("terms, text", CARDS, ids=[terms.split("\n")[0] for terms, _ in CARDS])
def test_a_term_takes_two_sentences_and_names_its_chapter(terms, text):
    links = re.findall(r"\]\((\w+)\)", text)
    assert links and all((ROOT / "book" / f"{page}.ipynb").exists() for page in links)
    plain = re.sub(r"\[([^\]]*)\]\(\w+\)", r"\1", text).strip()
    assert len(re.findall(r"[.?!](?= [A-Z{$*]|$)", plain)) <= 2 and plain.endswith(".")


# ---- the architecture ------------------------------------------------------------------------------------------------
ARCHITECTURE = (ROOT / "book" / "architecture.md").read_text()
PLACES = sorted(set(re.findall(r"\{src\}`([^`]+)`", ARCHITECTURE)))


@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_the_page_names_exists(place):
    path, line = locate(ROOT, place)
    last = place.partition("::")[2].rpartition(".")[2]
    assert path.exists() and (not last or last in path.read_text().splitlines()[line - 1])


def test_every_file_that_the_page_names_is_checked():
    """A path in plain backquotes would be resolved by nobody."""
    assert len(PLACES) > 80
    plain = re.findall(r"(?<!\})`([^`\n]+)`", ARCHITECTURE)
    assert [text for text in plain if re.fullmatch(r"[\w./]+\.(py|md|yml|cpp|css|js)(::[\w.]+)?", text)] == []
    folders = [text for text in plain if re.fullmatch(r"[\w./]+/", text)]
    assert folders and all((ROOT / "ngpt_core" / text).is_dir() or (ROOT / text).is_dir() for text in folders)


@pytest.mark.parametrize(
    "place, sentence",
    [
        ("nn/nothing.py", "there is no file nn/nothing.py"),
        ("nn/head.py::nothing", "nn/head.py does not define nothing"),
        ("train/trainer.py::Trainer.nothing", "does not define nothing"),
        ("nn/head.py::u", "does not define u"),  # a variable inside a function
    ],
)
def test_a_place_that_does_not_exist_is_an_error(place, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        locate(ROOT, place)


def test_every_command_has_a_row_with_the_functions_that_it_calls():
    section = ARCHITECTURE[ARCHITECTURE.index("(arch-commands)=") : ARCHITECTURE.index("(arch-mechanisms)=")]
    rows = dict(re.findall(r"^\| `(ngpt [a-z ]+[a-z])` \| (.+) \|$", section, re.M))
    assert sorted(rows) == sorted(name for name, _, _ in commands())
    for name, _, parser in commands():
        command = parser.get_default("command")
        assert command.__module__ == cli.__name__
        for file, function in re.findall(r"`([\w/]+)\.py::([\w.]+)`", rows[name]):
            source = inspect.getsource(command)
            assert re.search(rf"\b{function.rpartition('.')[2]}\b", source), f"{name} does not call {function}"
            assert f"from .{file.replace('/', '.')} import" in source, f"{name} does not import {file}"


def test_the_list_of_files_is_complete_and_goes_from_the_highest_rank_down():
    modules = read(ROOT / "ngpt_core", ROOT / "book" / "ngpt_book")
    for package, folder in (("ngpt_core", ROOT / "ngpt_core"), ("ngpt_book", ROOT / "book" / "ngpt_book")):
        rows = listing(modules, package)
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "__init__.py"}
        assert {path for path, _, _, is_folder in rows if not is_folder} == files
        assert all(about.endswith((".", "?")) for _, about, _, _ in rows), "a docstring's first paragraph is a sentence"
        total = sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))
        assert rows[0][0] == f"{package}/" and rows[0][2] == total
    tops = [path for path, _, _, _ in listing(modules, "ngpt_core") if path.count("/") == path.endswith("/")]
    ranked = ["__main__.py", "cli.py", "tools/", "hf/", "train/", "data/", "recipe/", "nn/", "optim/", "sphere.py"]
    assert tops[: 1 + len(ranked)] == ["ngpt_core/", *ranked]


def test_a_place_becomes_a_link_once_the_repository_has_an_address():
    assert source_url("https://example.invalid/x", "main", "ngpt_core/cli.py", 7) is None
    assert source_url("https://git.example.org/x", "main", "a.py", None) == "https://git.example.org/x/blob/main/a.py"


# ---- what only a GPU runs --------------------------------------------------------------------------------------------
def asks_for_cuda(function) -> bool:
    """on_gpu(x), x.is_cuda, has_kernel(x, ...), torch.cuda.*, == "cuda"."""
    nodes = list(ast.walk(function))
    names = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    words = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return bool(names & {"on_gpu", "on_cpu", "has_kernel", "is_cuda"} or words & {"cuda"}) or any(
        isinstance(n, ast.Attribute) and ast.unparse(n).startswith("torch.cuda.") for n in nodes
    )


def test_every_branch_of_cuda_is_in_the_table():
    """Except where the machine is only named: the command line, the table of cards, rehearsals and the selftest itself."""
    package, apart = ROOT / "ngpt_core", {"cli.py", "gpus.py", "rehearsal.py", "tools/selftest.py"}
    page, missing = (ROOT / "book" / "gpu.md").read_text(), []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name in apart or name.startswith(("tools/simulate/", "optim/single_file/")):
            continue
        for node in ast.parse(path.read_text()).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            for function in (x for x in inside if isinstance(x, ast.FunctionDef) and asks_for_cuda(x)):
                place = f"{name}::{node.name + '.' if function is not node else ''}{function.name}"
                missing += [place] if f"{{src}}`{place}`" not in page else []
    assert not missing, f"book/gpu.md lacks a row for {', '.join(missing)}: say what it does and how it was checked."


# ---- the contents ----------------------------------------------------------------------------------------------------
def test_chapters_are_numbered_and_the_appendix_is_not():
    first, chapters, appendix = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())["parts"]
    files = [entry["file"] for entry in chapters["chapters"]]
    assert chapters["numbered"] == 1 and [int(f[:2]) for f in files] == list(range(1, 14))
    assert all(page["file"][:2] == entry["file"][:2] for entry in chapters["chapters"] for page in entry.get("sections", ()))
    assert [entry["file"] for entry in first["chapters"]] == ["look_inside"] and "numbered" not in first
    assert "numbered" not in appendix
    pages = ["recipe_card", "notation", "architecture", "api", "promise", "gpu", "glossary", "references", "changelog"]
    assert [entry["file"] for entry in appendix["chapters"]] == pages


def test_the_changelog_has_one_source():
    assert (ROOT / "book" / "changelog.md").read_text().strip() == "```{include} ../CHANGELOG.md\n```"
