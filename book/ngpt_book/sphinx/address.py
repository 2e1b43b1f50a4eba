"""What is the repository's address, and where is it written?

When the book is built, the address is GitHub's own (GITHUB_SERVER_URL, GITHUB_REPOSITORY), or that of the git remote "origin",
or the one in ``_config.yml``. Whatever is read without a build has to contain it: the first cells of the notebooks, the README,
pyproject.toml, ``_config.yml``. ``make address URL=https://github.com/OWNER/NAME`` writes it there:

    python -m ngpt_book.sphinx.address              prints the address that a build would use
    python -m ngpt_book.sphinx.address URL          writes URL into the files, and prints which
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlparse

ROOT = Path(__file__).parents[3]
PICTURES = ("book/_assets/walk.svg", "book/_assets/race.png")  # the README's; a package index needs their full addresses


def normalized(url: str) -> str:
    """The address as a browser takes it. ValueError if it is none.

    >>> normalized("git@github.com:owner/name.git")
    'https://github.com/owner/name'
    """
    url = re.sub(r"^(ssh://)?git@([^:/]+)[:/]", r"https://\2/", url.strip())
    place = urlparse(url)
    if place.scheme not in ("http", "https") or not place.hostname or place.path.count("/") < 1 or len(place.path) < 2:
        raise ValueError(f"The address must be like https://github.com/OWNER/NAME; got {url!r}.")
    path = place.path.rstrip("/").removesuffix(".git")
    return f"https://{place.hostname}{path}"  # without a user's name or token


def is_real(url: str) -> bool:
    """Whether it is more than a placeholder."""
    return not (urlparse(url).hostname or ".invalid").endswith(".invalid")


def address(configured: str, root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """The address of the repository that is being built; ``configured`` is the one in ``_config.yml``."""
    if repository := environment.get("GITHUB_REPOSITORY"):
        return f"{environment.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        return normalized(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):  # no git, no remote, or a folder as the remote
        return configured


def written(root: Path = ROOT) -> str:
    """The address in ``_config.yml``."""
    found = re.search(r"^repository:\n  url: (\S+)$", (root / "_config.yml").read_text(encoding="utf-8"), re.M)
    assert found is not None  # tests/test_project.py reads it too
    return found[1]


def write(url: str, root: Path = ROOT) -> list[Path]:
    """Replace the address that the files contain by ``url``; returns the files that changed."""
    old, new = written(root), normalized(url)
    raw = f"{new}/raw/main/" if is_real(new) else ""
    changed = []
    files = [root / name for name in ("README.md", "pyproject.toml", "_config.yml", "CITATION.cff")]
    for path in [*files, *sorted((root / "book").glob("*.ipynb"))]:
        if not path.is_file():  # a source distribution has not all of them
            continue
        text = before = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            book = json.loads(text)
            for cell in book["cells"]:
                cell["source"] = [line.replace(old, new) for line in cell["source"]]
            text = json.dumps(book, indent=1, ensure_ascii=False) + "\n"
        else:
            text = text.replace(old, new)
            if path.name == "README.md":
                for picture in PICTURES:
                    text = re.sub(rf"\]\([^()\s]*{re.escape(picture)}\)", f"]({raw}{picture})", text)
        if text != before:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def main(arguments: list[str]) -> int:
    try:
        if not arguments:
            print(address(written()))
        for url in arguments[:1]:
            for path in write(url):
                print(path.relative_to(ROOT))
    except ValueError as error:
        print(f"make address: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main([argument for argument in sys.argv[1:] if argument]))
