"""Which text is embedded? Every third suitable file of CPython 3.11.7's library; this script writes them into its folder.

    python ngpt_core/data/embedded/make_embedded.py        with CPython 3.11.7; the same bytes every time

The files are those of ``--data stdlib`` (no tests, no generated tables) in the order of their names. Suitable are files of 2 to
45 kB, so that none weighs much, in ASCII, that the build of Python did not make (such names have a hyphen), and without the
words copyright and license: a file that states its own terms is left out. Every third, from the first on, covers all packages.
"""

import gzip
import hashlib
import json
import platform
import re
from pathlib import Path

from ngpt_core.data.sources import stdlib_files
from ngpt_core.files import write_json

HERE, VERSION = Path(__file__).parent, "3.11.7"


def chosen() -> list[tuple[str, bytes]]:
    """(name, text) of the files, from the library of the Python that runs this."""
    files = ((name, path.read_bytes()) for name, path in stdlib_files() if "-" not in name)
    plain = [(name, text) for name, text in files if 2000 <= len(text) <= 45_000 and text.isascii()]
    return [file for file in plain if not re.search(rb"copyright|licen[cs]e", file[1], re.IGNORECASE)][::3]


if __name__ == "__main__":
    if platform.python_version() != VERSION:
        raise SystemExit(f"the embedded text is from CPython {VERSION}, and this is {platform.python_version()}.")
    lines = [json.dumps({"name": name, "text": text.decode()}) + "\n" for name, text in chosen()]
    (HERE / "text.jsonl.gz").write_bytes(packed := gzip.compress("".join(lines).encode(), mtime=0))
    files = [{"name": name, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()} for name, text in chosen()]
    seal = hashlib.sha256(packed).hexdigest()
    about = {"cpython": VERSION, "license": "PSF-2.0, in LICENSE.txt", "sha256": seal, "files": files}
    write_json(HERE / "manifest.json", about)
