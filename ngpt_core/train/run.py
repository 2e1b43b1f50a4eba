"""Which run was asked for: a new one, or one that continues? And may it continue as asked?

``prepare`` answers with a ``Run``, a plain value, from the user's settings and what the folder holds (folder.py). ``POLICIES``
states for every field of both configs what a resumed run may do with it. Nothing is written here.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checks import is_within
from ..config import ModelConfig
from ..data.corpus import BUILT_IN, Corpus, check_tokenizer, open_corpus
from .checkpoint import Checkpoint, newest, open_checkpoint
from .config import TrainConfig, check_length, check_recipe, model_config, run_defaults, settled, total_steps
from .folder import RunFolder

__all__ = ["POLICIES", "Run", "open_blend", "prepare"]

# What may a resumed run do with a field? Policy -> its fields; a test checks that every field of both configs has one policy.
POLICIES = {
    "fixed": "batch_size seq_len seed",  # another value is refused, and the checkpoint must have the same
    "architecture": """name normalized vocab_size d_model pattern max_seq_len n_heads n_kv_heads head_dim rope_theta mamba_heads
        mamba_head_dim state groups conv chunk A_range dt_range dt_min vector_s_mamba ff activation n_experts top_k expert_ff
        shared_ff routed_scaling s_u_per_expert vector_s_moe lgp_q lgp_form alpha_init alpha_scale abs_alpha s_qk_init
        s_qk_scale s_u_init s_u_scale s_z_init s_z_scale s_mamba_init s_mamba_scale s_moe_init s_moe_scale init_std
        norm_eps""",  # fixed too: a checkpoint continues only as the model it was saved from
    "settled": "scaled",  # another value is refused: the scaled numbers became items of the recipe when the run started
    "merged": "recipe",  # a new item replaces the one of the same name; the others stay
    "rate": "C",  # the new value holds from now on, but is refused if the recipe has an item C=: that takes precedence
    "re-anchored": "steps tokens",  # another number of steps needs --re-anchor
    "once": "re_anchor",  # holds for one command only
    "same data": "data",  # another path is accepted, other content is not: the loader compares checksums
    "free": """out micro_batch val_data verify_data eval_every eval_windows diagnostics_every sample_every sample_prompt
        sample_tokens tensorboard wandb save_every keep keep_every async_save device precision compile activation_checkpointing
        replicas expert_parallel reshard float8 gpt_lr router_bias_rate balance_loss""",  # the new value holds from now on
}
_POLICY = {field: policy for policy, names in POLICIES.items() for field in names.split()}
_POLICY["preset"] = _POLICY["name"]  # the flag that sets it
_REFUSED = {
    "fixed": "A resumed run cannot change this: leave the flag out, or choose another --out.",
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
    checkpoint: Checkpoint | None = None  # to continue from
    tokenizer: dict | None = None  # the description in config.json, if the run continues
    finished: bool = False


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
    steps = total_steps(config, model)
    check_length(config, model)
    check_recipe(config, model, steps)
    return Run(folder.path, settled(config, model, steps), model, steps, config.scaled)


# ---- resuming --------------------------------------------------------------------------------------------------------
def _resumed(folder: RunFolder, settings: Mapping[str, Any], model_settings: Mapping[str, Any]) -> Run:
    """The run in the folder with the changes that POLICIES allow, and the checkpoint from which it continues."""
    config, model, planned = folder.config, folder.model, folder.record["steps"]
    scaled = folder.record.get("scaled", config.scaled)  # old runs have it in their config only
    config = replace(settled(config, model, planned), re_anchor=False)
    now = {**vars(config), **vars(model), "scaled": scaled, "preset": model.name}
    given = config.with_values(settings)
    asked = {name: getattr(given, name) for name in settings}
    asked |= {name: tuple(value) if isinstance(value, list) else value for name, value in model_settings.items()}
    if "tokens" in asked:  # a length in tokens replaces one in steps
        asked.setdefault("steps", None)
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
    latest, exported = newest(folder.path), folder.has_export()
    done = 0 if latest is None else int(latest.name.removeprefix("step-"))
    if done > steps:
        raise ValueError(f"{folder.path} has already trained {done} steps, more than --steps {steps}.")
    if exported and latest is None and steps != planned:
        raise ValueError(f"{folder.path} is finished and has no checkpoint left to continue from: choose another --out.")
    finished = exported and steps == planned and (latest is None or done == steps)
    checkpoint = None if latest is None or finished else _checkpoint(latest, folder.path, now)
    return Run(folder.path, config, model, steps, scaled, checkpoint, folder.record["tokenizer"], finished)


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


def _checkpoint(path: Path, folder: Path, now: dict[str, Any]) -> Checkpoint:
    """The checkpoint at ``path``, which must be one of the run that config.json describes."""
    checkpoint = open_checkpoint(path)
    saved = {**checkpoint.state["config"], **vars(checkpoint.model)}
    if other := [name for name in (POLICIES["fixed"] + " " + POLICIES["architecture"]).split() if saved.get(name) != now[name]]:
        raise ValueError(f"{folder / 'config.json'} does not belong to {path}: it has another {', '.join(other)}. Restore it.")
    return checkpoint


# ---- data ------------------------------------------------------------------------------------------------------------
def _path_and_weight(item: str) -> tuple[str, str]:
    """DIR or DIR=WEIGHT in two parts; a folder may have a = in its name."""
    path, _, weight = item.rpartition("=")
    return (path, weight) if path and "/" not in weight and not Path(item).exists() else (item, "1")


def _with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The config with absolute paths of corpora: a run is continued and evaluated from any working directory."""

    def absolute(item: str) -> str:
        path, _ = _path_and_weight(item)
        return item if path in BUILT_IN else os.path.abspath(os.path.expanduser(path)) + item.removeprefix(path)

    return replace(config, data=tuple(map(absolute, config.data)), val_data=tuple(map(absolute, config.val_data)))


def open_blend(
    items: tuple[str, ...], vocab_size: int, tokenizer: dict | None = None, owner: object = "the run", flag: str = "--data"
) -> list[tuple[Corpus, float]]:
    """The corpora of a flag, with their weights, for a model of this vocabulary and, if known, the tokenizer of ``owner``."""
    corpora = []
    for item in items:
        path, text = _path_and_weight(item)
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not is_within(weight, 0, open=True):
            raise ValueError(f"{flag} {item}: the weight after '=' must be a positive number.")
        corpora.append((corpus := open_corpus(path), weight))
        if corpus.vocab_size > vocab_size:
            raise ValueError(
                f"{corpus.folder} has a vocabulary of {corpus.vocab_size} tokens, larger than the model's {vocab_size}: "
                f"train a model with --vocab-size {corpus.vocab_size}, or pack the text with a smaller tokenizer."
            )
    if tokenizer is not None:
        check_tokenizer(corpora, tokenizer, owner)
    return corpora
