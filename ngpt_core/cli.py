"""How is it used from a shell?

    ngpt train | eval | generate | data pack | plan | report | demo | selftest

Each command is a function below that reads its flags and calls the package; what it needs is imported there, so that ``ngpt
--help`` answers at once. A user's slip ends in one sentence on stderr and exit status 1, not in a traceback
(``NGPT_TRACEBACK=1`` shows it); argparse's own complaints end with 2, a command that was told to stop with 143.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

__all__ = ["main"]

Command = Callable[..., argparse.ArgumentParser]  # adds a command of that name and returns its parser, for the flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser(argv[0] if argv else "").parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):  # a model may write what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _ends_on_sigterm():
            return args.command(args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader is gone: `ngpt generate ... | head`
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, MemoryError) as error:
        if os.environ.get("NGPT_TRACEBACK"):
            raise
        print(f"ngpt: {_sentence(error)}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the command, so that it ends its children and removes what is half written; by itself it would not."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Python gives signals to the main thread alone
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _sentence(error: Exception) -> str:
    """What went wrong, in one line; an OSError says which file it was."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or "out of memory."  # MemoryError says nothing


def _parser(chosen: str) -> argparse.ArgumentParser:
    """All commands; the flags of ``train`` and ``plan``, which are the fields of the configs, only when they are chosen."""
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="ngpt", description="Train and use hyperspherical language models (nGPT), and their GPT twins."
    )
    parser.add_argument("--version", action="version", version=f"ngpt_core {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str, description: str | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=description or text, allow_abbrev=False)
        sub.set_defaults(command=run)
        return sub

    _add_train(command, chosen)
    _add_eval(command)
    _add_generate(command)
    _add_data(commands)
    _add_plan(command, chosen)
    report = command("report", _report, "write one HTML page with interactive plots of one or several runs")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    report.add_argument("--out", default="report.html", help="the page to write (default: report.html)")
    demo = command("demo", _demo, "train GPT and nGPT side by side on the embedded corpus, and compare them")
    demo.add_argument("--out", help="where the runs and the report go (default: the first of demo, demo-2, ... that is new)")
    demo.add_argument("--minutes", type=float, default=2.0, help="how long to train, about (default: 2)")
    demo.add_argument("--preset", default="pico", help="the model (default: pico)")
    selftest = command(
        "selftest", _selftest, "check every fast computation on this machine against a slow one that must give the same"
    )
    selftest.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    return parser


# ---- train -----------------------------------------------------------------------------------------------------------
def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    from .train.config import add_flags  # imports torch

    add_flags(parser)


def _add_train(command: Command, chosen: str) -> None:
    train = command(
        "train",
        _train,
        "train a model; the same command under torchrun trains on many ranks",
        "Train a model, into the folder --out, which is required. On many ranks: torchrun --nproc-per-node N -m ngpt_core "
        "train ... (the same flags). Every setting of the run and of the model is a flag; a config file may hold them too.",
    )
    train.add_argument(
        "--resume", action="store_true", help="continue the run in --out from its newest checkpoint, if there is one"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print the recipe's table of parameters and the run's size; write nothing"
    )
    if chosen == "train":
        _add_config_flags(train)


def _train(args: argparse.Namespace) -> int:
    from .train.config import given
    from .train.run import prepare

    settings, model_settings = given(args)
    if args.dry_run and not settings.get("out"):
        settings["out"] = os.path.join(os.devnull, "run")  # nothing is written: any name does that can be no folder
    run = prepare(settings, model_settings, args.resume)
    from .train.loop import dry_run, train

    if args.dry_run:
        print(dry_run(run))
        return 0
    return train(run)


# ---- use -------------------------------------------------------------------------------------------------------------
def _add_eval(command: Command) -> None:
    sub = command("eval", _eval, "held-out loss, bits per byte and per-position loss of a run's model")
    sub.add_argument("run", metavar="RUN", help="a run folder, or a folder that ngpt_core.save wrote")
    sub.add_argument("--data", nargs="+", help="packed corpora whose held-out splits to read (default: the run's)")
    sub.add_argument("--windows", type=int, default=256, help="windows to evaluate (default: 256)")
    sub.add_argument("--seq-len", type=int, help="tokens of a window (default: the run's)")
    sub.add_argument("--batch-size", type=int, default=8, help="windows at once (default: 8)")
    sub.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _eval(args: argparse.Namespace) -> int:
    from .tools.evaluate import evaluate_run, evaluation_text

    result = evaluate_run(args.run, args.data, args.windows, args.seq_len, args.batch_size, args.device)
    print(evaluation_text(result, args.json))
    return 0


def _add_generate(command: Command) -> None:
    sub = command("generate", _generate, "continue a text with a run's model; the text appears as it is written")
    sub.add_argument("run", metavar="RUN", help="a run folder, or a folder that ngpt_core.save wrote")
    sub.add_argument("--prompt", default="def ", help='what the text begins with (default: "def ")')
    sub.add_argument("--max-new-tokens", type=int, default=200, help="how many tokens to write at most (default: 200)")
    sub.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    sub.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only")
    sub.add_argument("--top-p", type=float, help="draw from the likeliest tokens that reach this probability only")
    sub.add_argument("--seed", type=int, default=0, help="decides the draws (default: 0)")
    sub.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")


def _generate(args: argparse.Namespace) -> int:
    from .tools.generate import generate

    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    for piece in generate(args.run, args.prompt, args.max_new_tokens, args.seed, args.device, **sampling):
        print(piece, end="", flush=True)
    print()
    return 0


# ---- data ------------------------------------------------------------------------------------------------------------
def _add_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    data = commands.add_parser("data", help="make and check packed corpora", allow_abbrev=False)
    actions = data.add_subparsers(title="actions", required=True, metavar="ACTION")
    pack = actions.add_parser(
        "pack", help="turn text into a packed corpus", description="Turn text into a packed corpus.", allow_abbrev=False
    )
    pack.add_argument(
        "files",
        nargs="+",
        metavar="FILES",
        help="text, .jsonl, .parquet (also .gz of the first two), quoted globs, URLs, hf:NAME[:SPLIT], or a public corpus by "
        "name: shakespeare, tinystories, tinystories-train",
    )
    pack.add_argument("--out", required=True, metavar="DIR", help="the new folder")
    pack.add_argument(
        "--tokenizer", default="bytes", help="bytes, a tokenizer.json, a Hugging Face name, or tiktoken:NAME (default: bytes)"
    )
    pack.add_argument("--field", default="text", help="where JSON lines, parquet and datasets have their text (default: text)")
    pack.add_argument(
        "--separator", help=r"cut text files into documents here; \n is a new line, \t a tab (default: a file is a document)"
    )
    pack.add_argument("--end-of-text", help="the token that ends a document, for a tokenizer that has several")
    pack.add_argument("--val-fraction", type=float, default=0.02, help="share of the tokens to hold out (default: 0.02)")
    pack.add_argument("--shard-tokens", type=int, default=1 << 28, help="tokens of a shard at most (default: 2^28)")
    pack.set_defaults(command=_pack)
    check = actions.add_parser("check", help="compare a packed corpus with its checksums", allow_abbrev=False)
    check.add_argument("dir", metavar="DIR", help="a packed corpus, or embedded, or stdlib (see ngpt train --data)")
    check.set_defaults(command=_check)


def _pack(args: argparse.Namespace) -> int:
    from .data.packing import pack_files
    from .data.tokenizers import load_tokenizer

    tokenizer, separator = load_tokenizer(args.tokenizer, args.end_of_text), args.separator
    if separator is not None:  # a shell hands over two characters
        separator = separator.replace(r"\n", "\n").replace(r"\t", "\t")
    manifest = pack_files(args.files, args.out, tokenizer, args.field, separator, args.val_fraction, args.shard_tokens)
    _describe(manifest, args.out)
    return 0


def _check(args: argparse.Namespace) -> int:
    from .data.corpus import open_corpus

    corpus = open_corpus(args.dir)
    corpus.verify()
    _describe(corpus.manifest, corpus.folder)
    return 0


def _describe(manifest: dict, folder: object) -> None:
    train, val = (manifest["splits"][name] for name in ("train", "val"))
    print(
        f"{folder}: {train['tokens']:,} tokens in {train['documents']:,} documents to train on, {val['tokens']:,} in "
        f"{val['documents']:,} held out (by {manifest['held_out']['rule']}); tokenizer {manifest['tokenizer']['spec']}, "
        f"vocabulary {manifest['tokenizer']['vocab_size']}; checksum {manifest['checksum'][:16]}"
    )


# ---- plan, report, demo, selftest ------------------------------------------------------------------------------------
def _add_plan(command: Command, chosen: str) -> None:
    from .gpus import GPUS

    sub = command("plan", _plan, "what a run needs on given GPUs: memory, time, learning rates, the command that starts it")
    sub.add_argument("--gpus", type=int, default=8, help="how many (default: 8)")
    sub.add_argument("--gpu", default="h100-80gb", help=f"which: {', '.join(GPUS)} (default: h100-80gb)")
    sub.add_argument(
        "--mfu", type=float, default=0.35, help="the share of the peak that the run is assumed to reach (default: 0.35)"
    )
    if chosen == "plan":
        _add_config_flags(sub)


def _plan(args: argparse.Namespace) -> int:
    from .tools.plan import plan_for
    from .train.config import given

    text, fits = plan_for(*given(args), args.gpus, args.gpu, args.mfu)
    print(text)
    return 0 if fits else 1


def _report(args: argparse.Namespace) -> int:
    from .tools.report import write_report

    print(write_report(args.runs, args.out))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from .tools.demo import demo

    return demo(args.out, args.minutes, args.preset)


def _selftest(args: argparse.Namespace) -> int:
    from .tools.selftest import main as selftest

    return selftest(args.device)
