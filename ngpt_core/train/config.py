"""What are the settings of a training run?

``TrainConfig`` holds everything about a run except the model, which ``ModelConfig`` describes. Every field of both is a flag of
``ngpt train`` (``seq_len`` is ``--seq-len``) and a setting in a config file (TOML or JSON, ``--config``). Flags override the
file, and the file overrides the preset. The text under a field is its help.

    B    batch_size, sequences per optimizer step over all ranks: it does not depend on the number of ranks
    T    seq_len, tokens per sequence; a step has B T tokens
"""

import argparse
import ast
import inspect
import json
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from .. import recipe
from ..config import CHOICES, ModelConfig
from ..optim.pmen import PMEN
from ..presets import FULL_SIZE, PRESETS, preset

__all__ = [
    "TrainConfig",
    "add_flags",
    "check_length",
    "check_recipe",
    "field_help",
    "given",
    "in_force",
    "model_config",
    "preset_help",
    "read_file",
    "recipe_numbers",
    "run_defaults",
    "settled",
    "total_steps",
]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run. Frozen, so that config.json records what was asked for."""

    out: str = ""
    """The run's folder: config.json, metrics.jsonl, samples.jsonl, checkpoints/ and at the end export/. Required."""
    steps: int | None = None
    """Total number of optimizer steps. Not given: as many as the model's setting --tokens requires. The laptop presets (pico,
    micro, mini) do not set that: give one of the two."""
    batch_size: int = 8
    """B: sequences per optimizer step, over all ranks together: it does not depend on the number of ranks. Presets of the
    ladder (1B to 30B) use 512 unless this is given."""
    seq_len: int = 256
    """T: tokens per sequence. Presets of the ladder (1B to 30B) use 8192 unless this is given."""
    micro_batch: int | None = None
    """Sequences that a rank processes at once; it accumulates gradients over its share of the batch. None: the whole share."""
    data: tuple[str, ...] = ("embedded",)
    """Packed corpora to train on, DIR or DIR=WEIGHT for a blend; embedded: 1 MB of Python source; stdlib: your own Python's.
    Token files of nanoGPT, llm.c (FILE.bin, or their folder) and Megatron (FILE.bin with FILE.idx) are read in place."""
    val_data: tuple[str, ...] = ()
    """Packed corpora or token files to evaluate on. Not given: the held-out split of --data."""
    tokenizer: str | None = None
    """The tokenizer of token files, which do not record it: bytes, a tokenizer.json, a Hugging Face name, or tiktoken:NAME."""
    verify_data: bool | None = None
    """Verify the checksums of all shards before the first step (the ranks share the work). Not given: only of shards whose
    size or modification time has changed since they were verified; a corpus below 1 GiB is always verified."""
    seed: int = 0
    """Determines the initial weights, the order of the data, the exploration noise and the samples."""

    recipe: tuple[str, ...] = ()
    """Numbers of the recipe to change, as NAME=VALUE, such as rho=0.1. The names are the fields of ``recipe.Settings`` (nGPT)
    or ``recipe.Baseline`` (GPT); a dot reaches into PMEN, SMGC, AutoGate: smgc.R=2, or eps_gate=auto eps_gate.quantile=0.9."""
    scaled: bool = True
    """Adapt the recipe's numbers to a short run or a narrow model (``recipe.scaled``). The full-size presets (1B to 30B,
    8B-dense) use the paper's unless this is given. --recipe takes precedence. config.json records the result in recipe, with
    scaled false, so that a resumed run keeps its numbers."""

    eval_every: int = 50
    """Evaluate every N steps and at the end; 0: only at the end."""
    eval_windows: int = 64
    """Windows of T tokens per evaluation; always the same ones, drawn once from the held-out split."""
    diagnostics_every: int = 25
    """Write the optimizer's diagnostics every N steps; 0: never."""
    sample_every: int = 0
    """Write a text sample every N steps and at the end; 0: only at the end."""
    sample_prompt: str | None = None
    """The text that a sample continues. Not given: the start of the first held-out document."""
    sample_tokens: int = 128
    """Tokens per sample; 0: no samples."""
    tensorboard: bool = True
    """Also write TensorBoard events, if the package tensorboard is installed."""
    wandb: str | None = None
    """The Weights & Biases project to report to (needs the package wandb). --resume continues the same run there."""
    mlflow: str | None = None
    """The MLflow experiment to report to (needs the package mlflow). --resume continues the same run there."""
    callback: tuple[str, ...] = ()
    """Your own callbacks, package.module:Name (see ngpt_core/train/callbacks.py)."""

    save_every: int = 500
    """Write a checkpoint every N steps and at the end; 0: only at the end (and on SIGTERM)."""
    keep: int = 2
    """How many checkpoints to keep: the newest ones."""
    keep_every: int = 0
    """Also keep the checkpoint of every Nth step permanently; 0: none."""
    async_save: bool = False
    """Write checkpoints in the background of the next step, which waits for them at its end."""
    re_anchor: bool = False
    """With --resume: accept a new number of steps, and spread the rest of the schedule over the remaining steps."""

    sentinel: int = 0
    """Watch for hardware that corrupts numbers: compare checksums of all parameters and moments before every update and every
    checkpoint, and compute every Nth step twice. Damage is reported, and training goes back to the last checkpoint. 0: off."""
    timeout: int = 1800
    """On many ranks: after N seconds without progress, name the rank that the others wait for and end the run."""

    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is a GPU."""
    precision: str = "auto"
    """The precision of matrix products: fp32, or bf16 with fp32 master weights. auto: bf16 on a GPU with bf16 units
    (Ampere or newer), otherwise fp32."""
    stream: str = "bf16"
    """The hidden state between blocks in a bf16 run: bf16, or fp32. The step on the sphere is computed in fp32 either way. bf16
    rounds its result, which rotates the state by 10 mrad over 52 blocks; no measured loss changed by more than 0.00004 nats (9
    blocks). fp32 does not round; at 30B it costs 2 GiB more per 8192 tokens and 0.2% of a step (simulated)."""
    compile: bool | None = None
    """torch.compile each block. Not given: on a GPU."""
    activation_checkpointing: str = "none"
    """none; selective: keep the results of matrix products and recompute the rest; full: recompute each block."""
    replicas: int = 1
    """HSDP: the number of replicas, each sharded over ranks/replicas ranks. 1: FSDP over all ranks."""
    expert_parallel: int = 1
    """The number of ranks that share the experts of a layer and exchange tokens; works together with FSDP and HSDP."""
    reshard: bool = True
    """FSDP: free a block's gathered weights after its forward pass (less memory) and gather them again for the backward."""
    float8: bool = False
    """Compute matrix products in float8 with torchao (CUDA sm_89 or newer)."""

    def __post_init__(self) -> None:
        for name in _FROM_ONE:
            self._at_least(name, 1)
        for name in _FROM_ZERO:
            self._at_least(name, 0)
        for name in ("steps", "micro_batch"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"--{_flag(name)} must be one of {', '.join(choices)}; got {getattr(self, name)!r}.")
        for name in ("verify_data", "compile"):
            if not (getattr(self, name) is None or isinstance(getattr(self, name), bool)):
                raise ValueError(f"{name} must be true or false; got {getattr(self, name)!r}.")
        if not self.data:
            raise ValueError("--data needs at least one corpus; leave it out for the embedded one.")
        if self.seed >= 2**63 - 2**32:  # steps are added to it
            raise ValueError(f"--seed must be below 2^63 - 2^32; got {self.seed}.")
        names = {"wandb": "the name of a project", "mlflow": "the name of an experiment", "sample_prompt": "a string"}
        for name, what in names.items():
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"{name} must be {what}; got {value!r}.")
        for f in fields(self):  # a file may hold anything, and the string "false" is true
            value, kind = getattr(self, f.name), type(f.default)
            if kind in (bool, str) and type(value) is not kind:
                want = "true or false" if kind is bool else "a string"
                raise ValueError(f"{f.name} must be {want}; got {value!r}.")
            if kind is tuple and not (isinstance(value, tuple) and all(isinstance(x, str) for x in value)):
                raise ValueError(f'{f.name} must be a list of strings, as in ["embedded"]; got {value!r}.')

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"--{_flag(name)} must be an integer of at least {least}; got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored in config.json."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """From plain values. ValueError for an unknown name."""
        return cls(**_typed(cls, values))

    def with_values(self, values: Mapping[str, Any]) -> "TrainConfig":
        """A copy with these values changed."""
        return replace(self, **_typed(type(self), values))


_FROM_ONE = "batch_size seq_len eval_windows keep timeout replicas expert_parallel".split()
_FROM_ZERO = "eval_every diagnostics_every sample_every sample_tokens save_every keep_every sentinel seed".split()
_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "fp32", "bf16"),
    "stream": ("fp32", "bf16"),
    "activation_checkpointing": ("none", "selective", "full"),
}
_OF_MODEL = [f for f in fields(ModelConfig) if f.name not in ("name", "normalized")]  # those two are --preset and --baseline


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _typed(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with lists turned into tuples. ValueError for a name that is not a field of ``cls``."""
    known = {f.name for f in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"there is no setting {', '.join(map(repr, unknown))}; the settings are {', '.join(sorted(known))}.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@cache
def field_help(cls: type) -> dict[str, str]:
    """Field -> the text under it in the source, written once for the file, ``--help`` and the book."""
    [body] = [n.body for n in ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body if isinstance(n, ast.ClassDef)]
    return {
        ast.unparse(node.target): " ".join(ast.literal_eval(text.value).replace("``", "").split())
        for node, text in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _parser_of(kind: Any) -> tuple[Callable[[str], Any], bool]:
    """(the callable that parses one value of a flag, whether it takes several) for a field's type."""
    if get_origin(kind) in (types.UnionType, Union):
        plain = next(k for k in get_args(kind) if k is not type(None))

        def convert(text: str) -> object:
            return None if text.lower() == "none" else plain(text)

        convert.__name__ = f"{plain.__name__} or none"  # argparse names it: invalid int or none value: 'abc'
        return convert, False
    if get_origin(kind) is tuple:
        return get_args(kind)[0], True
    return kind, False


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of TrainConfig and ModelConfig. A flag that is not given sets nothing (see ``given``)."""
    parser.add_argument("--preset", metavar="NAME", help=preset_help(), default=argparse.SUPPRESS)
    kind = parser.add_mutually_exclusive_group()
    for flag, value, text in (("--normalized", True, "train nGPT (the default)"), ("--baseline", False, "train its GPT twin")):
        kind.add_argument(flag, dest="normalized", action="store_const", const=value, help=text, default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML or JSON file; flags override them", default=None)
    for title, cls, own in (
        ("the run", TrainConfig, fields(TrainConfig)),
        ("the model (default: the preset's)", ModelConfig, _OF_MODEL),
    ):
        group, helps, hints = parser.add_argument_group(title), field_help(cls), get_type_hints(cls)
        for f in own:
            convert, many = _parser_of(hints[f.name])
            text = helps[f.name].replace("%", "%%")
            if cls is TrainConfig and f.name != "out":
                default = getattr(cls, f.name)
                text += f" (default: {' '.join(default) if many else default})"
            options: dict[str, Any] = {"dest": f.name, "help": text, "default": argparse.SUPPRESS}
            if convert is bool or bool in get_args(hints[f.name]):
                group.add_argument(f"--{_flag(f.name)}", action=argparse.BooleanOptionalAction, **options)
            else:
                options |= {"nargs": "*" if f.name == "callback" else "+"} if many else {}
                choices = _CHOICES.get(f.name) or (CHOICES.get(f.name) if cls is ModelConfig else None)
                metavar = f"{{{','.join(choices)}}}" if choices else f.name.upper()
                group.add_argument(f"--{_flag(f.name)}", type=convert, metavar=metavar, **options)


def preset_help() -> str:
    """The help of --preset, with every name."""
    return f"the model to start from: {', '.join(PRESETS)} (default: pico)"


def read_file(path: str) -> dict[str, Any]:
    """The settings in a flat TOML or JSON file, named like the fields."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            values = json.loads(text)
        elif sys.version_info >= (3, 11):
            import tomllib

            values = tomllib.loads(text)
        else:
            raise ValueError("TOML needs Python 3.11 or newer; write the settings as JSON.")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as settings: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values, as in: seq_len = 512.")
    names = [key.replace("-", "_") for key in values]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path} gives {twice[0]} twice, with - and with _: keep one of them.")
    return dict(zip(names, values.values()))


def given(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The user's settings, with flags over the file: (those of the run, those of the model and ``preset``)."""
    values = read_file(args.config) if args.config else {}
    values |= {k: v for k, v in vars(args).items() if k in _RUN or k in _MODEL}
    if unknown := sorted(set(values) - _RUN - _MODEL):
        hint = next((_NO_SETTING[name] for name in unknown if name in _NO_SETTING), "see `ngpt train --help`")
        raise ValueError(f"{args.config}: there is no setting {', '.join(map(repr, unknown))}; {hint}.")
    return {k: v for k, v in values.items() if k in _RUN}, {k: v for k, v in values.items() if k in _MODEL}


_NO_SETTING = {"baseline": "write normalized = false", "resume": "give it as a flag, --resume"}
_RUN = {f.name for f in fields(TrainConfig)}
_MODEL = {f.name for f in _OF_MODEL} | {"preset", "normalized"}


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The preset with these values on top."""
    values = dict(values)
    name, normalized = values.pop("preset", "pico"), values.pop("normalized", True)
    return preset(name, normalized, **values)


def recipe_numbers(config: TrainConfig, model: ModelConfig, steps: int | None = None) -> recipe.Settings | recipe.Baseline:
    """The recipe's numbers for a run of ``steps``: the paper's, or those scaled to the run, with the changes of ``--recipe``.

    The trainer checks every gradient and stops before the update, so the optimizer does not check again.
    """
    numbers: recipe.Settings | recipe.Baseline
    if model.normalized:
        numbers = recipe.Settings(pmen=PMEN(seed=config.seed), nonfinite="off")
    else:
        numbers = recipe.Baseline(tokens_per_step=float(config.batch_size * config.seq_len))
    if config.scaled and steps is not None:
        numbers = recipe.scaled(model, steps, numbers)
    for item in config.recipe:
        name, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"--recipe {item}: expected NAME=VALUE.")
        if name == "nonfinite":
            raise ValueError(f"--recipe {item}: training itself checks every gradient before the update; leave this out.")
        try:
            numbers = _changed(numbers, name, text)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"--recipe {item}: {error}") from None
    return numbers


def settled(config: TrainConfig, model: ModelConfig, steps: int) -> TrainConfig:
    """The config of a new run, with its scaled numbers written out before the items of --recipe: a resumed run keeps them even
    if its length or the rule of ``recipe.scaled`` has changed since."""
    if not config.scaled:
        return config
    plain, own = (vars(recipe_numbers(replace(config, scaled=scaled, recipe=()), model, steps)) for scaled in (False, True))
    changed = {item.partition("=")[0] for item in config.recipe}
    found = (f"{name}={_written(value)}" for name, value in own.items() if value != plain[name] and name not in changed)
    return replace(config, scaled=False, recipe=(*found, *config.recipe))


def in_force(config: TrainConfig, model: ModelConfig, steps: int, scaled: bool) -> str:
    """Which numbers of the recipe a run uses, in one line. ``scaled``: whether scaled numbers were asked for, which ``settled``
    may already have written into the config."""
    plain, own = (vars(recipe_numbers(c, model, steps)) for c in (replace(config, scaled=False, recipe=()), config))
    changed = ", ".join(f"{name}={_written(value)}" for name, value in own.items() if value != plain[name])
    if not changed:
        return "recipe: the paper's numbers"
    base = "scaled to this run" if scaled else "the paper's numbers"
    return f"recipe: {base}, with {changed}"


def _written(value: object) -> str:
    """A value of the recipe as text that ``_number`` reads back exactly."""
    return ",".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def check_recipe(config: TrainConfig, model: ModelConfig, steps: int) -> None:
    """Refuse numbers that the optimizer or the schedule rejects, and name the first item of --recipe that causes it."""
    numbers = recipe_numbers(config, model, steps)
    groups = [  # one of every kind, each with a single number as its unit row
        {**numbers.group(rule, model, steps), "params": [torch.ones(1, 1)], "unit_dim": 1 if rule.unit else None}
        for rule in recipe.TABLE.values()
    ]
    try:
        numbers.build(groups, steps)
    except ValueError as error:
        if not config.recipe:
            raise
        *before, last = config.recipe
        check_recipe(replace(config, recipe=tuple(before)), model, steps)
        raise ValueError(f"--recipe {last}: {error}") from None


def check_length(config: TrainConfig, model: ModelConfig) -> None:
    """Refuse sequences that are too long for the model."""
    if model.max_seq_len is not None and config.seq_len > model.max_seq_len:
        raise ValueError(f"--seq-len {config.seq_len} is longer than --max-seq-len {model.max_seq_len}: lower it.")


def _changed(numbers: Any, name: str, text: str) -> Any:
    """``numbers`` with the field of that name, or of that part of a field (``smgc.R``), set from the text."""
    name, dot, rest = name.partition(".")
    hints = get_type_hints(type(numbers))
    if name not in hints:
        raise ValueError(f"unknown name {name!r}; the names are {', '.join(hints)}.")
    if name == "lines":
        raise ValueError("lines are objects: pass them to recipe.build in Python, as lines={...}.")
    old = getattr(numbers, name)
    if dot and old is None:
        raise ValueError(f"{name} is none, so {rest} cannot be set.")
    if dot and not is_dataclass(old):
        raise ValueError(f"{name} has no parts: write {name}=VALUE.")
    if not dot and text.lower() != "none" and is_dataclass(old) and str not in get_args(hints[name]):
        raise ValueError(f"{name} is set part by part ({name}.{fields(old)[0].name}=...), or to none.")
    return replace(numbers, **{name: _changed(old, rest, text) if dot else _number(text, hints[name])})


def _number(text: str, kind: Any) -> object:
    """A value of the recipe from text: none, true, false, a name, a number, or two numbers separated by a comma."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    options = get_args(kind)
    if bool in options and all(part in ("true", "false") for part in text.lower().split(",")):  # one for each of two
        return tuple(words[part] for part in text.lower().split(","))
    if float in options and str in options:  # a number or a name
        try:
            return float(text)
        except ValueError:
            return text
    if str in (kind, *options):
        return text
    shape = bool if bool in options else get_origin(kind) or kind
    try:
        if shape is tuple:
            return tuple(map(float, text.split(",")))
        if shape is not bool:
            return int(text) if shape is int else float(text)
    except ValueError:
        pass
    expected = {bool: "true or false", int: "a whole number", tuple: "two numbers separated by a comma"}.get(shape, "a number")
    raise ValueError(f"expected {expected}; got {text!r}.")


def run_defaults(model: ModelConfig) -> dict[str, Any]:
    """Full-size models: the paper's numbers, and 4M tokens per step (the paper does not state its batch)."""
    return {"batch_size": 512, "seq_len": 8192, "scaled": False} if model.name in FULL_SIZE else {}


def total_steps(config: TrainConfig, model: ModelConfig) -> int:
    """--steps, or as many steps as the model's training tokens require."""
    if config.steps is not None:
        return config.steps
    if model.tokens is None:
        raise ValueError("the length of the run is not set: add --steps N or --tokens N.")
    return math.ceil(model.tokens / (config.batch_size * config.seq_len))
