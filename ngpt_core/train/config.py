"""What is a training run, as a list of settings?

``TrainConfig`` holds everything about a run that is not the model; ``ModelConfig`` is the model. Every field of both is a flag
of ``ngpt train`` (``seq_len`` is ``--seq-len``), and a line of a config file (TOML or JSON, ``--config``). The order of
precedence: the preset, then the file, then the flags. The text under a field is its help.

    B    batch_size, sequences in one optimizer step over all ranks: it does not change with their number
    T    seq_len                     tokens of a step: B T
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
from ..config import ModelConfig
from ..optim.pmen import PMEN
from ..presets import LADDER, preset

__all__ = [
    "TrainConfig",
    "add_flags",
    "check_length",
    "check_recipe",
    "field_help",
    "given",
    "model_config",
    "read_file",
    "recipe_numbers",
    "run_defaults",
    "settled",
    "total_steps",
]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run. Frozen: what was asked for is what config.json records."""

    out: str = ""
    """The run's folder: config.json, metrics.jsonl, samples.jsonl, checkpoints/ and at the end export/. ngpt train needs it."""
    steps: int | None = None
    """Optimizer steps in all. Not given: as many as the model's training tokens (its field tokens) need. The laptop's presets
    (pico, micro, mini) have no such number: for them one of the two must be given."""
    batch_size: int = 8
    """B: sequences in one optimizer step, over all ranks together. It does not change with their number. Not given for a preset
    of the ladder (1B to 30B): 512."""
    seq_len: int = 256
    """T: tokens of a sequence. Not given for a preset of the ladder (1B to 30B): 8192."""
    micro_batch: int | None = None
    """Sequences that a rank processes at once; the rest of its share follows (gradient accumulation). None: its whole share."""
    data: tuple[str, ...] = ("embedded",)
    """Packed corpora to train on, DIR or DIR=WEIGHT for a blend; embedded: 1 MB of Python source; stdlib: your own Python's."""
    val_data: tuple[str, ...] = ()
    """Packed corpora to evaluate on. Not given: the held-out split of --data."""
    verify_data: bool = True
    """Compare the checksums of all shards before the first step (the ranks share the work)."""
    seed: int = 0
    """Decides the first weights, the order of the data, exploration noise and samples."""

    recipe: tuple[str, ...] = ()
    """Numbers of the recipe to change, NAME=VALUE: those of ``recipe.Settings`` (nGPT) or ``recipe.Baseline`` (GPT), e.g.
    rho=0.1. A dot reaches into ``PMEN`` and ``SMGC``: smgc.R=2."""
    scaled: bool = True
    """Give a short run or a narrow model the numbers that suit it (``recipe.scaled``); others have the paper's. --recipe comes
    on top. config.json has them as items of recipe, with scaled false: a run keeps the numbers that it starts with."""

    eval_every: int = 50
    """Evaluate every so many steps, and at the end; 0: only at the end."""
    eval_windows: int = 64
    """Windows of T tokens in an evaluation, drawn once from the held-out split: always the same."""
    diagnostics_every: int = 25
    """Write the optimizer's diagnostics every so many steps; 0: never."""
    sample_every: int = 0
    """Write a sample of text every so many steps, and at the end; 0: only at the end."""
    sample_prompt: str = "def "
    """What a sample begins with."""
    sample_tokens: int = 128
    """Tokens of a sample; 0: none."""
    tensorboard: bool = True
    """Write TensorBoard events too, where the package tensorboard is installed."""
    wandb: str | None = None
    """The Weights & Biases project to report to (needs the package wandb)."""

    save_every: int = 500
    """Write a checkpoint every so many steps, and at the end; 0: only at the end (and on SIGTERM)."""
    keep: int = 2
    """Checkpoints to keep: the newest so many."""
    keep_every: int = 0
    """Keep the checkpoints of every so many steps for good, besides; 0: none."""
    async_save: bool = False
    """Write checkpoints in the background: training waits for the copy to memory and not for the disk."""
    re_anchor: bool = False
    """With --resume: accept another number of steps; what is left of the schedule is spread over the steps that are left."""

    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    precision: str = "auto"
    """The precision of matrix products: fp32, or bf16 with fp32 master weights. auto: bf16 on a GPU with units for it (Ampere
    and newer), else fp32."""
    compile: bool = False
    """torch.compile each block."""
    activation_checkpointing: str = "none"
    """none; selective: keep what matrix products computed and compute the rest again; full: compute each block again."""
    replicas: int = 1
    """HSDP: shard within world/replicas ranks and replicate over the rest. 1: FSDP over all ranks."""
    expert_parallel: int = 1
    """Ranks that divide the experts of a layer among them, exchanging tokens; composes with FSDP and HSDP."""
    reshard: bool = True
    """FSDP: free a block's gathered weights after its forward pass (less memory), gather them again for the backward."""
    float8: bool = False
    """Matrix products in float8 through torchao (cuda sm_89 or newer)."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "eval_windows", "keep", "replicas", "expert_parallel"):
            self._at_least(name, 1)
        for name in ("eval_every", "diagnostics_every", "sample_every", "sample_tokens", "save_every", "keep_every", "seed"):
            self._at_least(name, 0)
        for name in ("steps", "micro_batch"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"--{_flag(name)} must be one of {', '.join(choices)}; got {getattr(self, name)!r}.")
        if not self.data:
            raise ValueError("--data needs at least one corpus; leave it out for the embedded one.")
        if self.seed >= 2**63 - 2**32:  # steps are added to it
            raise ValueError(f"--seed must be below 2^63 - 2^32; got {self.seed}.")
        if not isinstance(self.wandb, str | None):
            raise ValueError(f"wandb must be the name of a project; got {self.wandb!r}.")
        for f in fields(self):  # a file may hold anything, and "false" is true
            value, kind = getattr(self, f.name), type(f.default)
            if kind in (bool, str) and type(value) is not kind:
                want = "true or false" if kind is bool else "a text"
                raise ValueError(f"{f.name} must be {want}; got {value!r}.")
            if kind is tuple and not (isinstance(value, tuple) and all(isinstance(x, str) for x in value)):
                raise ValueError(f'{f.name} must be a list of texts, as in ["embedded"]; got {value!r}.')

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"--{_flag(name)} must be an integer, at least {least}; got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as config.json has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """From plain values; a name that is no field is an error that lists the fields."""
        return cls(**_typed(cls, values))

    def with_values(self, values: Mapping[str, Any]) -> "TrainConfig":
        """A copy with these values changed."""
        return replace(self, **_typed(type(self), values))


_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "fp32", "bf16"),
    "activation_checkpointing": ("none", "selective", "full"),
}
_OF_MODEL = [f for f in fields(ModelConfig) if f.name not in ("name", "normalized")]  # those two are --preset and --baseline


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _typed(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with lists turned to tuples; a name that is no field is an error that lists the fields."""
    known = {f.name for f in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"there is no setting {', '.join(map(repr, unknown))}; there are {', '.join(sorted(known))}.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@cache
def field_help(cls: type) -> dict[str, str]:
    """Field -> the text that stands under it in the source: written once, read in the file, in ``--help`` and in the book."""
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
    """One flag for each field of TrainConfig and ModelConfig. A flag that is not given leaves no trace (see ``given``)."""
    parser.add_argument("--preset", help="the model to start from (default: pico)", default=argparse.SUPPRESS)
    kind = parser.add_mutually_exclusive_group()
    for flag, value, text in (("--normalized", True, "train nGPT (the default)"), ("--baseline", False, "train its GPT twin")):
        kind.add_argument(flag, dest="normalized", action="store_const", const=value, help=text, default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML or JSON file; flags come on top", default=None)
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
            if convert is bool:
                group.add_argument(f"--{_flag(f.name)}", action=argparse.BooleanOptionalAction, **options)
            else:
                options |= {"nargs": "+"} if many else {}
                group.add_argument(f"--{_flag(f.name)}", type=convert, metavar=f.name.upper(), **options)


def read_file(path: str) -> dict[str, Any]:
    """A flat TOML or JSON file of settings, named as the fields are."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            values = json.loads(text)
        elif sys.version_info >= (3, 11):
            import tomllib

            values = tomllib.loads(text)
        else:
            raise ValueError(f"this Python reads no TOML ({path}): write the settings as JSON.")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as settings: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values, as in: seq_len = 512.")
    names = [key.replace("-", "_") for key in values]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path} gives {twice[0]} twice, with - and with _: keep one of them.")
    return dict(zip(names, values.values()))


def given(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the user said, file first and flags on top: (settings of the run, settings of the model with ``preset``)."""
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
    """The preset with what was said on top."""
    values = dict(values)
    name, normalized = values.pop("preset", "pico"), values.pop("normalized", True)
    return preset(name, normalized, **values)


def recipe_numbers(config: TrainConfig, model: ModelConfig, steps: int | None = None) -> recipe.Settings | recipe.Baseline:
    """The recipe's numbers for this run of ``steps``: the paper's, or those scaled to it, with what ``--recipe`` changes.

    The trainer looks at every gradient itself, and stops before the update: the optimizer need not look again.
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
            raise ValueError(f"--recipe {item}: want NAME=VALUE.")
        if name == "nonfinite":
            raise ValueError(f"--recipe {item}: a run looks at every gradient itself, and stops before the update.")
        try:
            numbers = _changed(numbers, name, text)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"--recipe {item}: {error}") from None
    return numbers


def settled(config: TrainConfig, model: ModelConfig, steps: int) -> TrainConfig:
    """The config of a new run, with its scaled numbers written out in front of what --recipe changes: a run that is resumed
    repeats them, even if its length has changed since, or the rule of ``recipe.scaled``."""
    if not config.scaled:
        return config
    plain, own = (vars(recipe_numbers(replace(config, scaled=scaled, recipe=()), model, steps)) for scaled in (False, True))
    said = {item.partition("=")[0] for item in config.recipe}
    found = (f"{name}={_written(value)}" for name, value in own.items() if value != plain[name] and name not in said)
    return replace(config, scaled=False, recipe=(*found, *config.recipe))


def _written(value: object) -> str:
    """A value of the recipe as text that ``_number`` reads as the very same value."""
    return ",".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def check_recipe(config: TrainConfig, model: ModelConfig, steps: int) -> None:
    """Refuse numbers that the optimizer or the schedule would not take, by the first item of --recipe with which they fail."""
    numbers = recipe_numbers(config, model, steps)
    groups = [  # of every kind, each around one number that is a unit row
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
    """``numbers`` with the field of that name, or of that part of a field (``smgc.R``), set to what the text says."""
    name, dot, rest = name.partition(".")
    hints = get_type_hints(type(numbers))
    if name not in hints:
        raise ValueError(f"want NAME=VALUE with a NAME of {', '.join(hints)}.")
    old = getattr(numbers, name)
    if dot and old is None:
        raise ValueError(f"{name} is none: there is no {rest} to set.")
    if dot and not is_dataclass(old):
        raise ValueError(f"{name} has no parts: write {name}=VALUE.")
    if not dot and text.lower() != "none" and is_dataclass(old):
        raise ValueError(f"{name} is set part by part ({name}.{fields(old)[0].name}=...), or to none.")
    return replace(numbers, **{name: _changed(old, rest, text) if dot else _number(text, hints[name])})


def _number(text: str, kind: Any) -> object:
    """A value of the recipe from text: none, true, false, a name, a number, or two numbers with a comma."""
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    if str in (kind, *get_args(kind)):
        return text
    shape = get_origin(kind) or kind
    try:
        if shape is tuple:
            return tuple(map(float, text.split(",")))
        if shape is not bool:
            return int(text) if shape is int else float(text)
    except ValueError:
        pass
    want = {bool: "true or false", int: "a whole number", tuple: "two numbers with a comma"}.get(shape, "a number")
    raise ValueError(f"want {want}; got {text!r}.")


def run_defaults(model: ModelConfig) -> dict[str, Any]:
    """Batch and length for models of the ladder (the paper does not give its own): 4M tokens a step. Others: TrainConfig's."""
    return {"batch_size": 512, "seq_len": 8192} if model.name in LADDER else {}


def total_steps(config: TrainConfig, model: ModelConfig) -> int:
    """--steps, or as many as the model's training tokens need."""
    if config.steps is not None:
        return config.steps
    if model.tokens is None:
        raise ValueError("say how long to train: --steps N (or --tokens N).")
    return math.ceil(model.tokens / (config.batch_size * config.seq_len))
