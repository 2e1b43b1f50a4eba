"""One address: found when the book is built, written everywhere by one command; and cells that stop when installing fails."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason='needs the book: pip install "ngpt-core[book]"')
from ngpt_book.sphinx.address import PICTURES, address, is_real, main, normalized, write, written

ROOT = Path(__file__).parent.parent
FILES = ("README.md", "pyproject.toml", "_config.yml", "CITATION.cff")


@pytest.mark.parametrize(
    "given",
    [
        "https://git.example.org/owner/name", "https://git.example.org/owner/name.git", "https://git.example.org/owner/name/",
        "git@git.example.org:owner/name.git", "ssh://git@git.example.org/owner/name", "https://me:token@git.example.org/owner/name",
    ],
)  # fmt: skip
def test_every_form_of_a_remote_is_one_address_without_a_token(given):
    assert normalized(given) == "https://git.example.org/owner/name"


def test_an_invalid_address_is_refused(capsys):
    for url in ("owner/name", "/srv/git/name", "https://git.example.org", "https://git.example.org/"):
        with pytest.raises(ValueError, match=r"must be like https://github.com/OWNER/NAME"):
            normalized(url)
    assert main(["nonsense"]) == 1
    assert "make address: The address must be like" in capsys.readouterr().err


def test_a_build_takes_githubs_address_then_the_remotes_then_the_configured_one(tmp_path):
    git = ["git", "-C", str(tmp_path)]
    configured = "https://example.invalid/name"
    assert address(configured, tmp_path, {}) == configured  # no repository at all
    subprocess.run([*git, "init", "-q"], check=True)
    assert address(configured, tmp_path, {}) == configured
    subprocess.run([*git, "remote", "add", "origin", "git@git.example.org:owner/name.git"], check=True)
    assert address(configured, tmp_path, {}) == "https://git.example.org/owner/name"
    assert address(configured, tmp_path, {"GITHUB_REPOSITORY": "other/fork"}) == "https://github.com/other/fork"
    own = {"GITHUB_REPOSITORY": "other/fork", "GITHUB_SERVER_URL": "https://git.example.org"}
    assert address(configured, tmp_path, own) == "https://git.example.org/other/fork"
    subprocess.run([*git, "remote", "set-url", "origin", str(tmp_path)], check=True)
    assert address(configured, tmp_path, {}) == configured  # a clone of a folder


def test_one_command_writes_the_address_everywhere_and_back(tmp_path):
    (tmp_path / "book").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    for path in (ROOT / "book").glob("*.ipynb"):
        shutil.copy(path, tmp_path / "book" / path.name)
    before = {p: p.read_text() for p in tmp_path.rglob("*.*") if p.is_file()}
    placeholder, new = written(tmp_path), "https://git.example.org/owner/name"
    assert not is_real(placeholder) and is_real(new)
    changed = write(new + ".git", tmp_path)
    assert len(changed) == len(list((tmp_path / "book").glob("*.ipynb"))) + 3
    assert written(tmp_path) == new
    assert [p for p in before if placeholder in p.read_text()] == []
    assert all(f"]({new}/raw/main/{picture})" in (tmp_path / "README.md").read_text() for picture in PICTURES)
    for path in (tmp_path / "book").glob("*.ipynb"):
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert f'git+{new}"' in "".join(cells[0]["source"])
        assert all(c["execution_count"] for c in cells)  # outputs stay
    assert write(new, tmp_path) == []
    write(placeholder, tmp_path)
    assert all(p.read_text() == text for p, text in before.items())


FAILS = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "ngpt_core" else find(name, *rest)
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.register_magic_function(lambda line: print("ERROR: no such host"), magic_name="pip")
done = shell.run_cell(sys.stdin.read())
print("stopped:", repr(done.error_in_exec))
"""


def test_the_first_cell_stops_with_a_sentence_when_the_installation_fails():
    import sys

    cells = json.loads((ROOT / "book" / "intro.ipynb").read_text())["cells"]
    source = "".join(next(c for c in cells if c["cell_type"] == "code")["source"])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FAILS], input=source, capture_output=True, text=True)
    assert "stopped: SystemExit('The installation failed: the lines above say why. Run this cell again.')" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    others = [p for p in (ROOT / "book").glob("*.ipynb") if source.splitlines()[-1] not in p.read_text().replace('\\"', '"')]
    assert others == []
