"""Is everything in this folder still exactly what was written? ``ngpt check`` reads every byte of it.

The folder is a run (its config.json and tokenizer, every checkpoint, the export), one checkpoint, an export or a model that
``ngpt_core.save`` wrote, or a packed corpus. Each artifact gets one line; the exit status is 1 if any of them is damaged.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..data.corpus import Corpus
from ..data.foreign import is_foreign
from ..data.tokenizers import check_copy
from ..nn.io import WEIGHTS
from ..seal import SEAL, Damaged, check_folder
from ..train.checkpoint import STATE, by_step, open_checkpoint
from ..train.folder import RunFolder

__all__ = ["check"]


def check(path: str) -> tuple[str, bool]:
    """One line for each artifact in ``path``, and whether all of them are whole. ValueError if there is none."""
    lines, whole = [], True
    for name, verify in _artifacts(Path(path)):
        begin = time.perf_counter()
        try:
            size = verify()
        except Damaged as error:
            lines.append(f"damaged  {error}")
            whole = False
            continue
        speed = f", {size / (time.perf_counter() - begin) / 1e9:.2f} GB/s" if size and size > 1 << 24 else ""
        lines.append(
            f"no seal  {name}: made by an older version" if size is None else f"whole    {name}: {size:,} bytes{speed}"
        )
    return "\n".join(lines), whole


def _artifacts(path: Path) -> Iterator[tuple[Path, Callable[[], int | None]]]:
    """Each artifact in the folder, and what verifies it and returns its size, None if it has no seal."""
    if is_foreign(str(path)) and not path.is_dir():
        raise ValueError(
            f"{path} is a token file without checksums, so there is nothing to compare it with: ngpt data check {path} "
            "--tokenizer NAME checks its layout and its ids."
        )
    if (path / STATE).is_file():
        yield path, partial(_checkpoint, path)
    elif (path / "manifest.json").is_file():
        yield path, partial(_corpus, path)
    elif (path / SEAL).is_file() or (path / WEIGHTS).is_file():
        yield path, partial(_folder, path)
    elif RunFolder(path).has_run():
        yield path / "config.json", partial(_config, path)
        for checkpoint in by_step(path).values():
            yield checkpoint, partial(_checkpoint, checkpoint)
        if (path / "export").is_dir():
            yield path / "export", partial(_folder, path / "export")
    else:
        raise ValueError(f"{path} holds nothing to check: give a run, a checkpoint, an export or a packed corpus.")


def _config(run: Path) -> int | None:
    record = RunFolder(run).record  # reading it verifies it
    return (run / "config.json").stat().st_size + check_copy(record["tokenizer"], run)


def _checkpoint(path: Path) -> int | None:
    checkpoint = open_checkpoint(path)
    size = checkpoint.verify()
    checkpoint.check_tensors()
    return size if checkpoint.files else None


def _folder(path: Path) -> int | None:
    files = check_folder(path)
    return None if files is None else sum(about["bytes"] for about in files.values())


def _corpus(path: Path) -> int | None:
    corpus = Corpus(path)
    return corpus.verify()
