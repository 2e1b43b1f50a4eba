"""Does `make` accept the Pythons that the README names, and refuse every other one before it installs anything?"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
# A Python of any version: it runs -c with that version, and notes every other call (venv, pip) without doing it.
SHIM = """#!/bin/sh
case "$1" in
  -V) echo "Python {version}.1" ;;
  -c) exec "{python}" -c "import sys; sys.version_info = ({numbers}, 1, 'final', 0); exec(sys.argv[1])" "$2" ;;
  *) echo "$@" >> calls; exit 1 ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def setup(tmp_path):
    """`make PYTHON=... setup` in a folder without a .venv: what it prints, and the calls that would install something."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(python: str) -> tuple[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        done = subprocess.run(["make", f"PYTHON={python}", "setup"], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode != 0 and not (tmp_path / ".venv").exists()
        calls = tmp_path / "calls"
        return done.stdout + done.stderr, calls.read_text() if calls.exists() else ""

    return run


@pytest.fixture
def shim(tmp_path):
    def write(version: str) -> str:
        path = tmp_path / "python3"
        path.write_text(SHIM.format(version=version, numbers=version.replace(".", ", "), python=sys.executable))
        path.chmod(0o755)
        return str(path)

    return write


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.14", "4.0"])
def test_a_python_that_is_too_old_or_too_new_is_refused_before_anything_is_installed(setup, shim, version):
    printed, calls = setup(shim(version))
    assert "Python 3.10, 3.11, 3.12 or 3.13 is required" in printed and f"is Python {version}.1" in printed
    assert "make PYTHON=python3.12" in printed and not calls and "creating" not in printed


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_supported_python_gets_an_environment(setup, shim, version):
    printed, calls = setup(shim(version))
    assert f"creating .venv with Python {version}.1" in printed and calls.startswith("-m venv")


def test_a_python_that_does_not_exist_is_named(setup):
    printed, calls = setup("/nowhere/python3")
    assert "'/nowhere/python3' was not found" in printed and "Python 3.10, 3.11, 3.12 or 3.13" in printed and not calls


def test_an_environment_keeps_its_python(tmp_path, shim):
    """With a .venv of another Python, `make PYTHON=... test` would test the other one, so it is refused."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(shim("3.11"), tmp_path / ".venv" / "bin" / "python")
    (tmp_path / ".venv" / ".ready").touch()
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "PYTHON"}

    def run(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *given, "setup"], cwd=tmp_path, env=env, capture_output=True, text=True)

    other = run(f"PYTHON={shim('3.12')}")
    assert other.returncode != 0 and ".venv was made with Python 3.11.1" in other.stdout and "rm -r .venv" in other.stdout
    assert run().returncode == run(f"PYTHON={shim('3.11')}").returncode == 0
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    "path, pattern",
    [(".github/workflows/test.yml", r'"(3\.\d+)"'), ("pyproject.toml", r"Python :: (3\.\d+)"), ("Makefile", r"\b(3\.1\d)\b")],
)
def test_every_file_names_the_same_pythons(path, pattern):
    assert set(re.findall(pattern, (ROOT / path).read_text())) == set(SUPPORTED)
