"""What is a run, on the disk: where it is, what it was asked to be, whether it may go on?

    RUN/config.json      both configs, the total of steps, the corpora with their checksums, versions. Written once.
        metrics.jsonl, samples.jsonl, checkpoints/, tensorboard/
        export/          the finished model (safetensors): its presence is what "finished" means
        tokenizer.json   a copy, where the tokenizer is not bytes
        .lock            while it trains: who does (lock.py)

A folder is never overwritten: starting where a run already is is refused, and so is resuming it as another one. Only a run that
has not trained a step, because memory ran out or it was killed before, may be started again as if it were not there.
"""

import math
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from .. import __version__
from ..checks import is_within
from ..config import ModelConfig
from ..data.corpus import BUILT_IN, Corpus, check_tokenizer, open_corpus
from ..data.tokenizers import Tokenizer, check_description, describe, from_description
from ..files import read_json, write_json
from ..nn.io import CONFIG, WEIGHTS
from .checkpoint import newest, read_state
from .config import TrainConfig, check_length, check_recipe, model_config, run_defaults, settled, total_steps
from .lock import LOCK, Lock, take
from .metrics import read_lines

__all__ = ["Run", "open_blend", "prepare"]

FORMAT = 1
_NUMBERS = ("C", "gpt_lr", "balance_loss", "router_bias_rate", "tokens")  # of the model's config, and not its architecture
_BEFORE_A_STEP = {"config.json", "metrics.jsonl", "tokenizer.json", "tensorboard", "checkpoints", LOCK}  # all there is then
_FIXED = ("batch_size", "seq_len", "seed")  # what a resumed run may not change; the data is compared by its checksum


@dataclass
class Run:
    """A run that is to be trained, or goes on."""

    folder: Path
    config: TrainConfig
    model: ModelConfig
    steps: int
    checkpoint: Path | None = None  # to resume from
    finished: bool = False
    packed_with: dict | None = None  # the tokenizer of a run that is there
    scaled: bool = False  # was it started with --scaled? Its config has the numbers that came of it

    def claim(self) -> Lock:
        """Lock the folder. What was read of it before must still be so."""
        lock = take(self.folder)
        if newest(self.folder) != self.checkpoint:
            lock.close()
            raise ValueError(f"{self.folder} was trained by another process a moment ago: start again.")
        return lock

    def begin(self, corpora: list[tuple[Corpus, float]]) -> None:
        """Write config.json, and the tokenizer beside it. A model that was exported is the run's no longer once it goes on: the
        checkpoint from which it goes on has the same weights."""
        if (export := self.folder / "export").is_dir():
            where = self.checkpoint or "its start"
            print(f"{export} is removed: the run goes on from {where} and exports its model anew.", file=sys.stderr)
            shutil.rmtree(export)
        tokenizer = corpora[0][0].tokenizer()
        write_json(
            self.folder / "config.json",
            {
                "format": FORMAT,
                "steps": self.steps,
                "scaled": self.scaled,
                "model": self.model.to_dict(),
                "train": self.config.to_dict(),
                "corpora": [
                    {"folder": str(c.folder), "weight": weight, "checksum": c.checksum, "sources": c.manifest.get("sources")}
                    for c, weight in corpora
                ],
                "tokenizer": describe(tokenizer, self.folder),
                "versions": {"python": platform.python_version(), "torch": torch.__version__, "ngpt_core": __version__},
            },
        )

    @staticmethod
    def read(folder: Path | str) -> dict:
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not a run: it has no config.json (ngpt train --out {folder} makes one).")
        record = read_json(folder / "config.json")
        if record.get("format") != FORMAT:
            raise ValueError(f"{folder} has the run format {record.get('format')}; this version reads {FORMAT}.")
        for name, kind in {"steps": int, "model": dict, "train": dict}.items():
            if not isinstance(record.get(name), kind):
                raise ValueError(f"{folder / 'config.json'} lacks {name!r}, or it is of a wrong kind: restore the file.")
        check_description(record.get("tokenizer"), folder / "config.json")
        return record

    @staticmethod
    def train_config(folder: Path | str) -> TrainConfig:
        """What the run was asked to be."""
        return _recorded(folder, TrainConfig, "train")

    @staticmethod
    def architecture(folder: Path | str) -> ModelConfig:
        """Its model."""
        return _recorded(folder, ModelConfig, "model")

    @staticmethod
    def tokenizer(folder: Path | str) -> Tokenizer:
        return from_description(Run.read(folder)["tokenizer"], Path(folder))


def _recorded(folder: Path | str, kind: type, name: str):
    values = Run.read(folder)[name]
    try:
        return kind.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'config.json'}, {name}: {error}") from None


def prepare(settings: Mapping[str, object], model_settings: Mapping[str, object], resume: bool) -> Run:
    """The run that the user's settings ask for: a new one, or the one that is there. Nothing is written yet."""
    if not settings.get("out"):
        raise ValueError("say where the run goes: --out RUN.")
    folder = Path(os.path.expanduser(str(settings["out"])))  # a file has no shell to do it
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose an empty or a new folder for --out.")
    there = (folder / "config.json").is_file()
    if not there and folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"{folder} holds other files and no run: choose an empty or a new folder for --out.")
    if not there or not (resume or _begun(folder)):
        model = model_config(model_settings)
        config = _rooted(TrainConfig.from_dict({**run_defaults(model), **settings}))
        steps = total_steps(config, model)
        check_length(config, model)
        check_recipe(config, model, steps)
        return Run(folder, settled(config, model, steps), model, steps, scaled=config.scaled)
    if not resume:
        raise ValueError(f"{folder} holds a run already: continue it with --resume, or choose another --out.")
    return _resumed(folder, settings, model_settings)


def _begun(folder: Path) -> bool:
    """Whether the run in the folder has trained a step; or there is something that is no run's."""
    metrics = folder / "metrics.jsonl"
    if newest(folder) is not None or (metrics.is_file() and read_lines(metrics)):
        return True
    return not {path.name for path in folder.iterdir()} <= _BEFORE_A_STEP


def _resumed(folder: Path, settings: Mapping[str, object], model_settings: Mapping[str, object]) -> Run:
    record, was, model = Run.read(folder), Run.train_config(folder), Run.architecture(folder)
    scaled, was = record.get("scaled", was.scaled), settled(was, model, record["steps"])
    rates = {k: _plain(v) for k, v in model_settings.items() if k in _NUMBERS}
    shape = {k: _plain(v) for k, v in model_settings.items() if k not in (*_NUMBERS, "preset", "normalized")}
    anew = "" if _begun(folder) else " It has not trained a step yet: to start it anew, leave out --resume."
    changed = [k for k, v in shape.items() if getattr(model, k) != v]
    if "preset" in model_settings and model_settings["preset"] != model.name:
        changed.append("preset")
    if model_settings.get("normalized", model.normalized) != model.normalized:
        changed.append("normalized")
    if changed:
        raise ValueError(
            f"{folder} is a run of another architecture ({', '.join(changed)} differ{'s' if len(changed) == 1 else ''}): "
            f"a checkpoint continues only as the model that it is. Leave those flags out, or choose another --out.{anew}"
        )
    if own := [item for item in was.recipe if item.startswith("C=") and rates.get("C", model.C) != model.C]:
        rule = f"{folder} has {own[0]} in its recipe, which comes on top: use --recipe C=NUMBER."
        raise ValueError(f"--C {rates['C']}: {rule}{anew}")
    model = replace(model, **rates)
    if settings.get("scaled", scaled) != scaled:
        raise ValueError(
            f"{folder} was started with {'--scaled' if scaled else '--no-scaled'}: a resumed run keeps its numbers; leave the "
            f"flag out, and change single ones with --recipe.{anew}"
        )
    for name in _FIXED:
        if name in settings and settings[name] != getattr(was, name):
            raise ValueError(f"--{name.replace('_', '-')} was {getattr(was, name)} in {folder}: a resumed run keeps it.{anew}")
    if "recipe" in settings:  # one number more, or another one: what the run has besides stays
        numbers = {item.partition("=")[0]: item for item in (*was.recipe, *settings["recipe"])}
        settings = {**settings, "recipe": tuple(numbers.values())}
    if "tokens" in model_settings:  # asked for now: not the number of steps of before
        settings = {"steps": None, **settings}
    config = _rooted(was.with_values({**settings, "scaled": False, "re_anchor": settings.get("re_anchor", False)}))
    steps = total_steps(config, model) if "steps" in settings else record["steps"]
    check_recipe(config, model, steps)
    checkpoint = newest(folder)
    if steps != record["steps"] and not config.re_anchor:
        raise ValueError(
            f"{folder} was planned for {record['steps']} steps, and its learning rates with it; {steps} steps are another "
            f"schedule. Add --re-anchor to spread what is left of the schedule over the steps up to {steps}."
        )
    done = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))
    if done > steps:
        raise ValueError(f"{folder} has already trained {done} steps, more than --steps {steps}.")
    exported = all((folder / "export" / name).is_file() for name in (CONFIG, WEIGHTS))
    if exported and checkpoint is None and steps != record["steps"]:
        raise ValueError(f"{folder} is finished and has no checkpoint left to go on from: choose another --out.")
    finished = exported and steps == record["steps"] and (checkpoint is None or done == steps)
    if checkpoint is not None and not finished:
        state = read_state(checkpoint)
        saved = ModelConfig.from_dict(state["model"])
        names = [f.name for f in fields(model) if f.name not in _NUMBERS and getattr(saved, f.name) != getattr(model, f.name)]
        names += [name for name in _FIXED if state["config"].get(name) != getattr(config, name)]
        if names:
            raise ValueError(f"{folder / 'config.json'} is not that of {checkpoint} (other {', '.join(names)}): restore it.")
    return Run(folder, config, model, steps, checkpoint, finished, record["tokenizer"], scaled)


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _path_and_weight(item: str) -> tuple[str, str]:
    """DIR or DIR=WEIGHT in two; a folder may have a = in its name."""
    path, _, weight = item.rpartition("=")
    return (path, weight) if path and "/" not in weight and not Path(item).exists() else (item, "1")


def _rooted(config: TrainConfig) -> TrainConfig:
    """The config with corpora by absolute paths: a run goes on, and is evaluated, from any working directory."""

    def rooted(item: str) -> str:
        path, _ = _path_and_weight(item)
        return item if path in BUILT_IN else os.path.abspath(os.path.expanduser(path)) + item.removeprefix(path)

    return replace(config, data=tuple(map(rooted, config.data)), val_data=tuple(map(rooted, config.val_data)))


def open_blend(
    where: tuple[str, ...],
    vocab_size: int,
    packed_with: dict | None = None,
    whose: object = "the run",
    flag: str = "--data",
) -> list[tuple[Corpus, float]]:
    """The corpora of a flag, with their weights, for a model of that vocabulary, and tokenizer where it is known."""
    corpora = []
    for item in where:
        path, text = _path_and_weight(item)
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not is_within(weight, 0, open=True):
            raise ValueError(f"{flag} {item}: the weight after '=' must be a positive number.")
        corpora.append((open_corpus(path), weight))
    for corpus, _ in corpora:
        if corpus.vocab_size > vocab_size:
            raise ValueError(
                f"{corpus.folder} has a vocabulary of {corpus.vocab_size} tokens, larger than the model's {vocab_size}: "
                f"train a model with --vocab-size {corpus.vocab_size}, or pack the text with a smaller tokenizer."
            )
    if packed_with is not None:
        check_tokenizer(corpora, packed_with, whose)
    return corpora
