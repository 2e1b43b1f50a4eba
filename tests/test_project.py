"""Do the project's own files agree with each other?"""

import json
import re
from pathlib import Path

import pytest
import yaml

tomllib = pytest.importorskip("tomllib")  # Python 3.11 brings it

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENVIRONMENT = (ROOT / "environment.yml").read_text()
REQUESTED = {"jupyter-book", "torch", "mamba-ssm", "ipywidgets", "plotly", "nbval", "einops"}


def name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower()


def declared() -> set[str]:
    extras = PYPROJECT["project"]["optional-dependencies"]
    asked = [*PYPROJECT["project"]["dependencies"], *(r for extra in ("notebook", "book", "hf", "dev") for r in extras[extra])]
    return {name(r) for r in asked} - {PYPROJECT["project"]["name"]}  # an extra may name another of ours


def test_environment_yml_names_exactly_what_pyproject_asks_for():
    pip = yaml.safe_load(ENVIRONMENT)["dependencies"][-1]["pip"]
    named = {name(line) for line in pip if not line.startswith("-")}
    assert named == declared()


def test_environment_yml_names_every_requested_package():
    named = {name(line.strip(" #-")) for line in ENVIRONMENT.splitlines() if re.match(r"\s*(# )?- \w", line)}
    assert named >= REQUESTED, REQUESTED - named


def test_every_dependency_of_ours_is_pinned_once():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = [name(line) for line in lines]
    for marker in ('< "3.11"', '>= "3.11"'):  # one version for each Python
        here = [name(line) for line in lines if ";" not in line or marker in line]
        assert len(here) == len(set(here))
    assert set(pinned) >= declared(), declared() - set(pinned)


def test_what_an_error_tells_the_user_to_install_is_in_an_extra():
    """Each optional package has an extra that brings it, and an extra that is named exists."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    known = {name(r) for requirements in extras.values() for r in requirements}
    named = set()
    for path in (ROOT / "ngpt_core").rglob("*.py"):
        text = path.read_text()
        named |= set(re.findall(r'pip install \\?"?([A-Za-z][\w-]*(?:\[\w+\])?)', text))
        named |= set(re.findall(r'check_installed\("--[\w-]+", "(\w+)"', text))
    assert named >= {"torchao", "wandb", "mlflow", "tiktoken", "pyarrow", "ngpt-core[hf]"}  # the search finds what there is
    for package in named - {"triton"}:  # which torch brings on Linux
        extra = re.fullmatch(r"ngpt-core\[(\w+)\]", package)
        assert extra[1] in extras if extra else package in known, package


def test_the_repository_address_is_the_same_in_both_places():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert config["repository"]["url"] == PYPROJECT["project"]["urls"]["Repository"]


@pytest.mark.parametrize("path", sorted((ROOT / "book").glob("*.ipynb")), ids=lambda p: p.name)
def test_notebooks_are_stored_with_outputs_and_small(path):
    assert path.stat().st_size < 1_000_000
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(c["execution_count"] for c in cells), "run make notebooks: a cell has never been executed"
    assert not any("widget-state" in json.dumps(c["outputs"]) for c in cells)
    seen = ("".join(c["source"]).splitlines() for c in cells if not c["metadata"].get("tags"))
    assert [line for lines in seen for line in lines if len(line) > 92] == []  # so many columns fit on a page


@pytest.mark.parametrize("path", sorted((ROOT / "book").glob("*.ipynb")), ids=lambda p: p.name)
def test_stored_outputs_carry_todays_scripts(path):
    """Outside the book (Colab, a preview) a figure runs the script that was stored with it."""
    pytest.importorskip("plotly", reason='the figures need plotly: pip install "ngpt-core[notebook]"')
    from ngpt_book import explorer, live, motion, questions  # noqa: F401  (each registers its part)
    from ngpt_book.lazy import PARTS, bundles

    cells = json.loads(path.read_text())["cells"]
    pages = ["".join(o["data"].get("text/html", "")) for c in cells for o in c.get("outputs", []) if "data" in o]
    for name, part in PARTS.items():
        wanted = part.bundle()
        stored = {found[0] for page in pages for found in bundles(name).finditer(page)}
        assert all(one in wanted for one in stored), f"{name}: run make notebooks ONLY=book/{path.name}"


def test_every_public_name_resolves():
    import ngpt_core as ng

    for public in ng.__all__:
        assert getattr(ng, public) is not None
    with pytest.raises(AttributeError, match="has no name"):
        ng.__getattr__("nothing_of_the_kind")


@pytest.mark.parametrize("path", sorted((ROOT / "book").glob("*.ipynb")), ids=lambda p: p.name)
def test_the_first_cell_of_a_notebook_installs_from_the_repositorys_address(path):
    first = next(c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code")
    address = PYPROJECT["project"]["urls"]["Repository"]
    assert f'    %pip install -q "ngpt-core[notebook] @ git+{address}"\n' in first["source"]
    assert "remove-cell" in first["metadata"]["tags"]  # Colab runs it, the page does not show it


def test_the_readmes_tree_has_every_part_of_the_packages_and_nothing_else():
    tree = re.search(r"## What is where\n\n((?:    .+\n)+)", (ROOT / "README.md").read_text())[1]
    listed, folders = {}, []
    for line in tree.splitlines():
        indent, path, about = re.fullmatch(r"    ( *)(\S+) {2,}(\S.*)", line).groups()
        folders = [*folders[: len(indent) // 2], path]
        listed["".join(folders)] = about
    assert [path for path in listed if not (ROOT / path).exists()] == []
    for package in ("ngpt_core", "book/ngpt_book"):
        inside = {p.name + "/" if p.is_dir() else p.name for p in (ROOT / package).iterdir() if p.suffix in ("", ".py")}
        wanted = {f"{package}/{name}" for name in inside - {"__init__.py", "__pycache__/"}}
        assert {path for path in listed if re.fullmatch(rf"{package}/[^/]+/?", path)} == wanted
