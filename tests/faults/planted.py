"""Does a pickle that is planted in a checkpoint run? In every file of both formats, through every command that reads it."""

import pickle
import shutil
from collections.abc import Iterator

import cases
import torch
from test_checkpoint import Payload, as_format_1

from ngpt_core.train.checkpoint import newest


def planted(place: cases.Place) -> Iterator[tuple[str, str]]:
    """(what, outcome): "silent" if the payload has run."""
    run, proof, entry = place.folder / "planted", place.folder / "the payload ran", "an entry of the state"

    def copy(is_old: bool, entries: dict | None = None) -> list[str]:
        shutil.copytree(place.run, run)
        shutil.rmtree(run / "export")
        if is_old:
            as_format_1(run, entries)
        return sorted(path.name for path in newest(run).iterdir())  # type: ignore[union-attr]  # the run has checkpoints

    for is_old in (True, False):
        names = copy(is_old)
        shutil.rmtree(run)
        for name in [*names, entry] if is_old else names:
            copy(is_old, {"model.embedding.weight": Payload(proof)} if name == entry else None)
            for path in (run / "checkpoints").iterdir():
                if name.endswith(".pt"):
                    torch.save({"cpu": Payload(proof)}, path / name)
                elif name != entry:
                    (path / name).write_bytes(pickle.dumps(Payload(proof)))
            for command in (["eval", run], ["generate", run, "--max-new-tokens=1"], ["export", run, place.folder / "exported"],
                            ["check", run], [*place.train(run), "--resume"]):  # fmt: skip
                outcome = cases.outcome_of(*cases.command(*command))
                shutil.rmtree(place.folder / "exported", ignore_errors=True)
                yield f"format {1 if is_old else 2}, {name}, ngpt {command[0]}", "silent" if proof.exists() else outcome
                if proof.exists():
                    proof.rmdir()
            shutil.rmtree(run)
