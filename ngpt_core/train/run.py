"""Which run was asked for: a new one, or one that continues? And may it continue as asked?

``prepare`` answers with a ``Run``, a plain value, from the user's settings and what the folder holds (folder.py). ``POLICIES``
states for every field of both configs what a resumed run may do with it. Nothing is written here.
"""

import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checks import is_within
from ..config import ModelConfig
from ..data.corpus import BUILT_IN, Corpus, check_tokenizer, open_corpus
from ..data.foreign import is_foreign
from ..data.tokenizers import Tokenizer, load_tokenizer
from .checkpoint import Checkpoint, newest
from .config import TrainConfig, check_length, check_recipe, model_config, run_defaults, settled, total_steps
from .folder import RunFolder
from .recovery import Candidates

__all__ = ["POLICIES", "Run", "check_belongs", "named_tokenizer", "open_blend", "prepare"]

# What may a resumed run do with a field? Policy -> its fields; a test checks that every field of both configs has one policy.
POLICIES = {
    "fixed": "batch_size seq_len seed",  # another value is refused, and the checkpoint must have the same
    "given": "tokenizer",  # another value is refused: the run has a copy of the tokenizer
    "architecture": """name normalized vocab_size d_model pattern max_seq_len n_heads n_kv_heads head_dim rope_theta mamba_heads
        mamba_head_dim state groups conv chunk A_range dt_range dt_min vector_s_mamba ff activation n_experts top_k expert_ff
        shared_ff routed_scaling s_u_per_expert vector_s_moe lgp_q lgp_form positive_s_z scale_dt alpha_init alpha_scale
        abs_alpha s_qk_init
        s_qk_scale s_u_init s_u_scale s_z_init s_z_scale s_mamba_init s_mamba_scale s_moe_init s_moe_scale init_std
        norm_eps""",  # fixed too: a checkpoint continues only as the model it was saved from
    "settled": "scaled",  # another value is refused: the scaled numbers became items of the recipe when the run started
    "merged": "recipe",  # a new item replaces the one of the same name; the others stay
    "rate": "C",  # the new value holds from now on, but is refused if the recipe has an item C=: that takes precedence
    "re-anchored": "steps tokens",  # another number of steps needs --re-anchor
    "once": "re_anchor",  # holds for one command only
    "same data": "data",  # another path is accepted, other content is not: the loader compares checksums
    "free": """out micro_batch val_data verify_data eval_every eval_windows diagnostics_every sample_every sample_prompt
        sample_tokens tensorboard wandb mlflow callback save_every keep keep_every async_save sentinel timeout
        device precision stream compile activation_checkpointing replicas expert_parallel reshard float8 gpt_lr
        router_bias_rate balance_loss""",  # the new value holds from now on
}
_POLICY = {field: policy for policy, names in POLICIES.items() for field in names.split()}
_POLICY["preset"] = _POLICY["name"]  # the flag that sets it
_REFUSED = {
    "fixed": "A resumed run cannot change this: leave the flag out, or choose another --out.",
    "given": "A resumed run keeps its tokenizer: leave the flag out, or choose another --out.",
    "architecture": "A checkpoint continues only as the model it was saved from: leave the flag out, or choose another --out.",
    "settled": "A resumed run keeps its numbers: leave the flag out, and change single numbers with --recipe.",
}


@dataclass(frozen=True)
class Run:
    """A run to train: a new one, or one that continues from a checkpoint."""

    folder: Path
    config: TrainConfig
    model: ModelConfig
    steps: int
    scaled: bool  # as asked for at the start; the config itself has the numbers that followed from it
    checkpoint: Checkpoint | None = None  # to continue from: the newest that can be opened
    tokenizer: dict | None = None  # the description in config.json, if the run continues
    finished: bool = False
    damaged: tuple[Path, ...] = ()  # newer checkpoints, which cannot be opened
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # in config.json and in every checkpoint of the run


def prepare(settings: Mapping[str, Any], model_settings: Mapping[str, Any], resume: bool) -> Run:
    """The run that the user's settings ask for: a new one, or the one in the folder. Nothing is written yet."""
    if not settings.get("out"):
        raise ValueError("choose a folder for the run: --out RUN.")
    folder = RunFolder(os.path.expanduser(str(settings["out"])))  # no shell does this for a config file
    if folder.has_run() and resume:
        return _resumed(folder, settings, model_settings)
    if folder.has_run() and folder.has_trained():
        raise ValueError(f"{folder.path} already holds a run: continue it with --resume, or choose another --out.")
    model = model_config(model_settings)
    config = _with_absolute_paths(TrainConfig.from_dict({**run_defaults(model), **settings}))
    if config.tokenizer and not any(is_foreign(_path_and_weight(item)[0]) for item in config.data):
        raise ValueError(
            f"--tokenizer {config.tokenizer} is for token files (.bin), which do not record theirs, and --data has none: a "
            "packed corpus has its own; leave the flag out."
        )
    steps = total_steps(config, model)
    check_length(config, model)
    check_recipe(config, model, steps)
    return Run(folder.path, settled(config, model, steps), model, steps, config.scaled)


# ---- resuming --------------------------------------------------------------------------------------------------------
def _resumed(folder: RunFolder, settings: Mapping[str, Any], model_settings: Mapping[str, Any]) -> Run:
    """The run in the folder with the changes that POLICIES allow, and the checkpoint from which it continues."""
    config, model, planned = folder.config, folder.model, folder.record["steps"]
    scaled = folder.record.get("scaled", config.scaled)  # old runs have it in their config only
    verify_data = config.verify_data and None  # True was for one command only
    config = replace(settled(config, model, planned), re_anchor=False, verify_data=verify_data)
    now = {**vars(config), **vars(model), "scaled": scaled, "preset": model.name}
    given = config.with_values(settings)
    asked = {name: getattr(given, name) for name in settings}
    asked |= {name: tuple(value) if isinstance(value, list) else value for name, value in model_settings.items()}
    if "tokens" in asked:  # a length in tokens replaces one in steps
        asked.setdefault("steps", None)
    if config.callback and "callback" not in settings:  # a run's folder may come from somebody else
        raise ValueError(
            f"{folder.path} was trained with --callback {' '.join(config.callback)}, which is code: a resumed run calls only "
            "the callbacks that the command names. Give the flag again, or an empty one for none."
        )
    changes = _changes(folder, now, asked)
    model = replace(model, **{name: value for name, value in changes.items() if name in vars(model)})
    config = _with_absolute_paths(replace(config, **{k: v for k, v in changes.items() if k in vars(config)}))
    steps = total_steps(config, model) if any(_POLICY[name] == "re-anchored" for name in changes) else planned
    check_recipe(config, model, steps)
    if steps != planned and not config.re_anchor:
        raise ValueError(
            f"{folder.path} and its learning rate schedule were planned for {planned} steps, not for {steps} steps. Add "
            f"--re-anchor to spread the rest of the schedule over the steps up to {steps}."
        )
    finished, candidates = _is_finished(folder, steps, planned), Candidates(folder.path)
    checkpoint = candidates.next() if candidates.paths and not finished else None
    damaged = tuple(path for path, _ in candidates.damaged)
    same = folder.record.get("id", "")  # none in old runs
    run = Run(folder.path, config, model, steps, scaled, checkpoint, folder.record["tokenizer"], finished, damaged, same)
    if checkpoint is not None:
        check_belongs(checkpoint, run)
    return run


def _is_finished(folder: RunFolder, steps: int, planned: int) -> bool:
    """Whether nothing of the run's ``steps`` is left to train. ValueError if something is, but nothing to continue from."""
    latest, exported = newest(folder.path), folder.has_export()
    done = 0 if latest is None else int(latest.name.removeprefix("step-"))
    if done > steps:
        raise ValueError(f"{folder.path} has already trained {done} steps, more than --steps {steps}.")
    if exported and latest is None and steps != planned:
        raise ValueError(f"{folder.path} is finished and has no checkpoint left to continue from: choose another --out.")
    if not exported and latest is None and (export := folder.path / "export").is_dir():
        raise ValueError(f"{export} is damaged, and {folder.path} has no checkpoint to write it from: restore one of them.")
    return exported and steps == planned and (latest is None or done == steps)


def _changes(folder: RunFolder, now: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The fields that are asked to differ from what the run is now, each treated by its policy. ValueError if refused."""
    different, changes = {name: value for name, value in asked.items() if value != now[name]}, {}
    hint = "" if folder.has_trained() else " The run has not trained a step yet: leave out --resume to start it again."
    for name, value in different.items():
        policy = _POLICY[name]
        if policy in _REFUSED:
            was = ", ".join(f"{other}={now[other]}" for other in different if _POLICY[other] == policy)
            raise ValueError(f"{folder.path} was started with {was}. {_REFUSED[policy]}{hint}")
        if policy == "rate" and (items := [item for item in now["recipe"] if item.startswith(f"{name}=")]):
            rule = f"its recipe has {items[0]}, which takes precedence. Use --recipe {name}=NUMBER."
            raise ValueError(f"{name}={value} would have no effect in {folder.path}: {rule}{hint}")
        if policy == "merged":
            value = tuple({item.partition("=")[0]: item for item in (*now[name], *value)}.values())
        changes[name] = value
    return changes


def check_belongs(checkpoint: Checkpoint, run: Run) -> None:
    """ValueError unless the checkpoint is one of the run that config.json describes."""
    saved, now = {**checkpoint.state["config"], **vars(checkpoint.model)}, {**vars(run.config), **vars(run.model)}
    other = [name for name in (POLICIES["fixed"] + " " + POLICIES["architecture"]).split() if saved.get(name) != now[name]]
    if run.id and checkpoint.state.get("run", run.id) != run.id:
        other.append("id")
    if other:
        file = run.folder / "config.json"
        raise ValueError(f"{file} does not belong to {checkpoint.path}: they differ in {', '.join(other)}. Restore the file.")


# ---- data ------------------------------------------------------------------------------------------------------------
def _path_and_weight(item: str) -> tuple[str, str]:
    """Split DIR or DIR=WEIGHT into its parts; a folder may have = in its name."""
    path, _, weight = item.rpartition("=")
    return (path, weight) if path and "/" not in weight and not Path(item).exists() else (item, "1")


def _with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The config with absolute paths of corpora: a run is continued and evaluated from any working directory."""

    def absolute(item: str) -> str:
        path, _ = _path_and_weight(item)
        return item if path in BUILT_IN else os.path.abspath(os.path.expanduser(path)) + item.removeprefix(path)

    return replace(config, data=tuple(map(absolute, config.data)), val_data=tuple(map(absolute, config.val_data)))


def named_tokenizer(config: TrainConfig) -> Tokenizer | None:
    """The tokenizer that --tokenizer names, for token files."""
    return None if config.tokenizer is None else load_tokenizer(config.tokenizer)


def open_blend(
    items: tuple[str, ...],
    vocab_size: int,
    tokenizer: dict | None = None,
    owner: object = "the run",
    flag: str = "--data",
    reader: Callable[[], Tokenizer | None] = lambda: None,
    split: str = "train",
) -> list[tuple[Corpus, float]]:
    """The corpora of a flag, with their weights, for a model of this vocabulary and, if known, the tokenizer of ``owner``.
    ``reader`` returns the tokenizer of token files, which do not record it; a single token file is the split ``split``."""
    corpora = []
    for item in items:
        path, text = _path_and_weight(item)
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not is_within(weight, 0, open=True):
            raise ValueError(f"{flag} {item}: the weight after '=' must be a positive number.")
        corpora.append((corpus := open_corpus(path, reader, split), weight))
        if corpus.vocab_size > vocab_size:
            raise ValueError(
                f"{corpus.name} has a vocabulary of {corpus.vocab_size} tokens, larger than the model's {vocab_size}: "
                f"train a model with --vocab-size {corpus.vocab_size}, or pack the text with a smaller tokenizer."
            )
    if tokenizer is not None:
        check_tokenizer(corpora, tokenizer, owner)
    return corpora
