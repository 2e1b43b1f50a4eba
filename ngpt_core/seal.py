"""Are these files still exactly what was written?

Every artifact has one JSON file that lists its other files with their sizes and sha256, and that carries a seal: the sha256 of
its own content. One seal therefore covers every byte of the artifact.

    checkpoint    state.json          export, ngpt_core.save    seal.json
    corpus        manifest.json       a run's config.json       lists no files

Sealing finds damage and mixtures of files. It is not a signature: whoever can write the files can seal them again.
SHA-256 is the fastest of hashlib's hashes where the processor has instructions for it (``benchmarks/seal.py``).
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import read_json, sha256, write_json

__all__ = ["SEAL", "Damaged", "check_files", "check_folder", "entry", "is_plain", "listed", "note_unsealed", "read_sealed",
           "seal_folder", "unseal", "verify", "write_sealed"]  # fmt: skip

SEAL = "seal.json"  # in a folder without another list of its files
Entry = dict[str, Any]  # of a file: bytes, sha256


class Damaged(ValueError):
    """Files are missing, or are not what was written."""


# ---- one JSON file ---------------------------------------------------------------------------------------------------
def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as JSON with its seal, atomically."""
    content = json.loads(json.dumps(value))  # as it will be read: tuples are lists, keys are strings
    write_json(path, {**content, "seal": _digest(content)})


def read_sealed(path: Path) -> tuple[dict[str, Any], bool]:
    """The object in the file without its seal, and whether it has one. ``Damaged`` if the seal does not match."""
    try:
        value = read_json(path)
    except ValueError as error:
        raise Damaged(str(error)) from None
    seal = value.pop("seal", None)
    if seal is not None and seal != _digest(value):
        raise Damaged(f"{path} was damaged or edited: its content does not match its seal; restore it.")
    return value, seal is not None


def note_unsealed(what: object) -> None:
    """The warning about something that an older version wrote."""
    logging.getLogger("ngpt_core").warning("%s has no seal (an older version wrote it): damage in it cannot be detected.", what)


# ---- the files that it lists -----------------------------------------------------------------------------------------
def entry(path: Path) -> Entry:
    """What a list says about a file."""
    return {"bytes": os.path.getsize(path), "sha256": sha256(path)}


def is_plain(name: object) -> bool:
    """Whether ``name`` is the name of a file in the same folder, and not a path that leads elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0") and ":" not in name[1:2]


def listed(files: object, where: object) -> dict[str, Entry]:
    """``files`` if it is a list of files as ``entry`` makes it, else ``Damaged``."""
    if not isinstance(files, dict) or not all(
        is_plain(name) and isinstance(e, dict) and isinstance(e.get("bytes"), int) and isinstance(e.get("sha256"), str)
        for name, e in files.items()
    ):
        raise Damaged(f"{where} does not list its files with their sizes and sha256: it was damaged or edited; restore it.")
    return files


def check_files(folder: Path, files: Mapping[str, Entry]) -> None:
    """``Damaged`` if a file is missing or has another size: without reading it."""
    for name, wanted in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            raise Damaged(f"{path} is missing")
        if found != wanted["bytes"]:
            raise Damaged(f"{path} was cut short or changed: it has {found:,} bytes, and had {wanted['bytes']:,}")


def verify(folder: Path, files: Mapping[str, Entry]) -> int:
    """Read the files and compare them with the list; returns the number of bytes. ``Damaged`` names the first that differs."""
    check_files(folder, files)
    for name, wanted in files.items():
        if (found := sha256(folder / name)) != wanted["sha256"]:
            raise Damaged(
                f"{folder / name} was damaged or changed: its sha256 is {found[:16]}..., and was {wanted['sha256'][:16]}..."
            )
    return sum(wanted["bytes"] for wanted in files.values())


# ---- a folder with seal.json -----------------------------------------------------------------------------------------
def unseal(folder: Path) -> dict[str, Entry]:
    """Remove the seal before files are replaced, so that a crash leaves a folder without a seal, not with a wrong one. Returns
    what it listed."""
    path = folder / SEAL
    try:
        files = listed(read_sealed(path)[0].get("files"), path) if path.is_file() else {}
    except Damaged:
        files = {}
    path.unlink(missing_ok=True)
    return {name: about for name, about in files.items() if (folder / name).is_file()}


def seal_folder(folder: Path, files: Mapping[str, Entry]) -> None:
    """Write seal.json for these files of the folder."""
    write_sealed(folder / SEAL, {"format": 1, "files": dict(sorted(files.items()))})


def check_folder(folder: Path, *, read: bool = True) -> dict[str, Entry] | None:
    """Verify the folder and return its list of files; None, with a warning, if it has no seal. ``read=False``: only sizes."""
    path = folder / SEAL
    if not path.is_file():
        note_unsealed(folder)
        return None
    value, sealed = read_sealed(path)
    if not sealed or value.get("format") != 1:
        raise Damaged(f"{path} was damaged, or a newer version wrote it: it has no seal of format 1.")
    files = listed(value.get("files"), path)
    (verify if read else check_files)(folder, files)
    return files
