"""How is the package used from a shell?

    ngpt train | eval | generate | export | check | data pack | plan | simulate | report | demo | selftest

Each command is a function below that reads its flags and calls the package. Imports are inside the functions, so that ``ngpt
--help`` responds at once. A user's mistake ends in one sentence on stderr and exit status 1, without a traceback
(``NGPT_TRACEBACK=1`` shows it). argparse's own errors exit with status 2, a command stopped by SIGTERM with 143.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from .files import printable

__all__ = ["main"]

Command = Callable[..., argparse.ArgumentParser]  # adds a command and returns its parser, for the flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser(argv[0] if argv else "").parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):  # a model may write characters that the terminal's encoding lacks
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
    """Make SIGTERM raise SystemExit, so that the command ends its children and removes incomplete files."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _sentence(error: Exception) -> str:
    """The error in one line; for an OSError, with the name of the file."""
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    return printable(" ".join(str(error).split())) or "out of memory."  # MemoryError has no text


def _parser(chosen: str) -> argparse.ArgumentParser:
    """All commands. ``train``, ``plan`` and ``simulate`` get their flags, the configs' fields, only if chosen."""
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
    _add_export(command)
    check = command(
        "check", _check_path, "verify that a run, a checkpoint, an export or a packed corpus is exactly what was written"
    )
    check.add_argument("path", metavar="PATH", help="the folder; every file in it is read")
    _add_data(commands)
    _add_plan(command, chosen)
    _add_simulate(command, chosen)
    report = command("report", _report, "write one HTML page with interactive plots of one or several runs")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    report.add_argument("--out", default="report.html", help="the page to write (default: report.html)")
    demo = command("demo", _demo, "train GPT and nGPT side by side on the embedded corpus, and compare them")
    demo.add_argument("--out", help="folder for the runs and the report (default: the first unused of demo, demo-2, ...)")
    demo.add_argument("--minutes", type=float, default=2.0, help="approximate training time (default: 2)")
    demo.add_argument("--preset", metavar="NAME", default="pico", help=_presets(chosen))
    selftest = command(
        "selftest", _selftest, "check every fast computation on this machine against a slow one that must give the same result"
    )
    selftest.add_argument("--device", metavar="{cpu,cuda}", default="cpu", help="where to check (default: cpu)")
    return parser


def _presets(chosen: str) -> str:
    """The help of ``ngpt demo --preset``."""
    if chosen != "demo":
        return "the model (default: pico)"
    from .presets import PRESETS

    return f"the model: {', '.join(PRESETS)} (default: pico; a large one takes long on a CPU)"


# ---- train -----------------------------------------------------------------------------------------------------------
def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    from .train.config import add_flags  # imports torch

    add_flags(parser)


def _add_train(command: Command, chosen: str) -> None:
    train = command(
        "train",
        _train,
        "train a model; the same command under torchrun trains on many ranks",
        "Train a model into the folder --out (required). On many ranks: torchrun --nproc-per-node N -m ngpt_core train ... "
        "with the same flags. Every setting of the run and of the model is a flag, and can also be in a config file.",
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
        settings["out"] = os.path.join(os.devnull, "run")  # nothing is written: a name that cannot be a folder
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
    sub.add_argument("--data", nargs="+", help="held-out token files, or packed corpora (default: the run's)")
    sub.add_argument("--windows", type=int, default=256, help="windows to evaluate (default: 256)")
    sub.add_argument("--seq-len", type=int, help="tokens per window (default: the run's)")
    sub.add_argument("--batch-size", type=int, default=8, help="windows per batch (default: 8)")
    sub.add_argument("--device", metavar="{auto,cpu,cuda}", default="auto", help="auto: cuda if there is a GPU (default: auto)")
    sub.add_argument("--tokenizer", help="for a model that was saved without one: bytes, a tokenizer.json, a name")
    sub.add_argument("--tasks", nargs="+", metavar="TASK", help="tasks of lm-evaluation-harness to run instead (needs lm-eval)")
    sub.add_argument("--task-folder", metavar="DIR", help="with --tasks: a folder with your own tasks")
    sub.add_argument("--limit", type=int, help="with --tasks: the maximum number of examples per task")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _eval(args: argparse.Namespace) -> int:
    from .tools.evaluate import evaluate_run, evaluation_text

    if args.tasks:
        from .tools.tasks import run_tasks, tasks_text

        scores = run_tasks(args.run, args.tasks, args.task_folder, args.batch_size, args.limit, args.device, args.tokenizer)
        print(tasks_text(scores, args.json))
        return 0
    result = evaluate_run(args.run, args.data, args.windows, args.seq_len, args.batch_size, args.device, args.tokenizer)
    print(evaluation_text(result, args.json))
    return 0


def _add_generate(command: Command) -> None:
    sub = command("generate", _generate, "continue a text with a run's model; the text appears as it is generated")
    sub.add_argument("run", metavar="RUN", help="a run folder, or a folder that ngpt_core.save wrote")
    sub.add_argument("--prompt", default="def ", help='the text to continue (default: "def ")')
    sub.add_argument("--max-new-tokens", type=int, default=200, help="maximum number of tokens to generate (default: 200)")
    sub.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    sub.add_argument("--top-k", type=int, help="draw only from the k most likely tokens")
    sub.add_argument("--top-p", type=float, help="draw only from the most likely tokens that together reach this probability")
    sub.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    sub.add_argument("--device", metavar="{auto,cpu,cuda}", default="auto", help="auto: cuda if there is a GPU (default: auto)")
    sub.add_argument("--tokenizer", help="for a model that was saved without one: bytes, a tokenizer.json, a name")


def _generate(args: argparse.Namespace) -> int:
    from .tools.generate import generate

    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    for piece in generate(args.run, args.prompt, args.max_new_tokens, args.seed, args.device, args.tokenizer, **sampling):
        print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print()
    return 0


def _add_export(command: Command) -> None:
    sub = command("export", _export, "write a run's model as a folder for other libraries")
    sub.add_argument("run", metavar="RUN", help="a run folder, or a folder that ngpt_core.save wrote")
    sub.add_argument("folder", metavar="FOLDER", help="the new folder")
    sub.add_argument("--to", choices=("hf",), default="hf", help="hf: for transformers and the Hugging Face Hub (default: hf)")
    sub.add_argument("--tokenizer", help="for a model that was saved without one: bytes, a tokenizer.json, a name")


def _export(args: argparse.Namespace) -> int:
    from .hf.export import export

    try:
        print(printable(str(export(args.run, args.folder, args.tokenizer))))
    except ImportError as error:
        raise ValueError(str(error)) from None
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
    pack.add_argument(
        "--field", default="text", help="the field with the text in JSON lines, parquet and datasets (default: text)"
    )
    pack.add_argument(
        "--separator",
        help=r"split text files into documents here; \n is a newline, \t a tab (default: one document per file)",
    )
    pack.add_argument("--end-of-text", help="the token that ends a document, for a tokenizer that has several")
    pack.add_argument("--val-fraction", type=float, default=0.02, help="share of the tokens to hold out (default: 0.02)")
    pack.add_argument("--shard-tokens", type=int, default=1 << 28, help="maximum number of tokens per shard (default: 2^28)")
    pack.set_defaults(command=_pack)
    check = actions.add_parser(
        "check", help="verify the checksums of a packed corpus, or the layout of token files", allow_abbrev=False
    )
    check.add_argument("dir", metavar="DIR", help="a packed corpus, token files, embedded, or stdlib (see ngpt train --data)")
    check.add_argument("--tokenizer", help="for token files, which do not record it: bytes, a tokenizer.json, a name")
    check.set_defaults(command=_check)


def _pack(args: argparse.Namespace) -> int:
    from .data.packing import pack_files
    from .data.tokenizers import load_tokenizer

    tokenizer, separator = load_tokenizer(args.tokenizer, args.end_of_text), args.separator
    if separator is not None:  # a shell passes \n as two characters
        separator = separator.replace(r"\n", "\n").replace(r"\t", "\t")
    manifest = pack_files(args.files, args.out, tokenizer, args.field, separator, args.val_fraction, args.shard_tokens)
    _describe(manifest, args.out)
    return 0


def _check(args: argparse.Namespace) -> int:
    from .data.corpus import open_corpus
    from .data.tokenizers import load_tokenizer

    corpus = open_corpus(args.dir, lambda: load_tokenizer(args.tokenizer) if args.tokenizer else None)
    corpus.verify()
    _describe(corpus.manifest, corpus.name)
    return 0


def _check_path(args: argparse.Namespace) -> int:
    from .tools.check import check

    text, whole = check(args.path)
    print(printable(text))
    return 0 if whole else 1


def _describe(manifest: dict, folder: object) -> None:
    train, val = (manifest["splits"][name] for name in ("train", "val"))
    text = (
        f"{folder}: {train['tokens']:,} tokens in {train['documents']:,} documents to train on, {val['tokens']:,} in "
        f"{val['documents']:,} held out (by {manifest['held_out']['rule']}); tokenizer {manifest['tokenizer']['spec']}, "
        f"vocabulary {manifest['tokenizer']['vocab_size']}; checksum {manifest['checksum'][:16]}"
    )
    print(printable(text))


# ---- plan, simulate, report, demo, selftest --------------------------------------------------------------------------
def _add_plan(command: Command, chosen: str) -> None:
    from .gpus import GPUS

    sub = command(
        "plan",
        _plan,
        "what a run needs on given GPUs: memory, time, messages, learning rates, the command that starts it",
        "What a run needs on given GPUs. Micro-batch, activation checkpointing, expert parallelism and replicas are chosen for "
        "the shortest step that fits; those that you set are kept. Exits with 1 if the run does not fit.",
    )
    sub.add_argument("--gpus", type=int, default=8, help="number of GPUs (default: 8)")
    sub.add_argument("--gpu", default="h100-80gb", help=f"the kind of GPU: {', '.join(GPUS)} (default: h100-80gb)")
    sub.add_argument(
        "--mfu", type=float, default=0.35, help="assumed MFU: the share of the peak FLOP/s that the run reaches (default: 0.35)"
    )
    _add_document_length(sub)
    if chosen == "plan":
        _add_config_flags(sub)


def _add_document_length(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--document-length",
        type=int,
        default=2000,
        metavar="TOKENS",
        help="mean tokens per document of a synthetic corpus; 0: each sequence is one document (default: 2000)",
    )


def _add_simulate(command: Command, chosen: str) -> None:
    from .gpus import GPUS

    sub = command(
        "simulate",
        _simulate,
        "run the real training step on a simulated cluster: memory, messages, waits, time",
        "Run one real training step on tensors without memory and ranks that do not exist, and report what a GPU would do: "
        "memory by kind and where its peak is, messages between ranks, waits of the host, an estimate of the time. Takes every "
        "flag of ngpt train; --out is an HTML page with a picture of the memory. Without --data it reads a "
        "synthetic corpus. A full-size preset without any layout flag (--micro-batch, --activation-checkpointing, "
        "--expert-parallel, --replicas) gets the layout that ngpt plan chooses. Exits with 1 if the run does not fit.",
    )
    sub.add_argument("--gpus", type=int, default=8, help="number of GPUs (default: 8)")
    sub.add_argument("--gpu", default="h100-80gb", help=f"the kind of GPU: {', '.join(GPUS)} (default: h100-80gb)")
    sub.add_argument(
        "--routing",
        default="balanced",
        help="balanced: every expert gets the same number of tokens; skewed: from none to twice the mean",
    )
    sub.add_argument(
        "--kernels",
        default="cuda",
        help="which branches run: cuda (its kernels), or cpu (torch's own operations) (default: cuda)",
    )
    _add_document_length(sub)
    sub.add_argument("--json", metavar="FILE", dest="json_file", help="also write the figures as JSON")
    if chosen == "simulate":
        _add_config_flags(sub)


def _simulate(args: argparse.Namespace) -> int:
    from .presets import FULL_SIZE
    from .tools.layout import LAYOUT
    from .tools.plan import alternatives, as_flag
    from .tools.simulate.step import simulate_for
    from .train.config import given

    settings, model_settings = given(args)
    page = str(settings.pop("out", ""))  # train's --out is the run's folder; here it is a page
    result = simulate_for(settings, model_settings, args.gpus, args.gpu, args.routing, args.kernels, args.document_length)
    advice = [] if result.fits else alternatives(result.model, result.config, args.gpus, args.gpu, args.document_length)
    print(result.text(advice))
    if result.fits and result.model.name in FULL_SIZE and not set(LAYOUT) & set(settings):
        flags = " ".join(as_flag(name, getattr(result.config, name)) for name in LAYOUT)
        print(f"\nngpt plan chose this layout. ngpt train does not choose one: give it these flags: {flags}")
    if args.json_file:
        result.write_json(args.json_file)
    if page:
        result.write_html(page, advice)
    return 0 if result.fits else 1


def _plan(args: argparse.Namespace) -> int:
    from .tools.plan import plan_for
    from .train.config import given

    text, fits = plan_for(*given(args), args.gpus, args.gpu, args.mfu, args.document_length)
    print(text)
    return 0 if fits else 1


def _report(args: argparse.Namespace) -> int:
    from .tools.report import write_report

    print(printable(write_report(args.runs, args.out)))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from .tools.demo import demo

    return demo(args.out, args.minutes, args.preset)


def _selftest(args: argparse.Namespace) -> int:
    from .tools.selftest import main as selftest

    return selftest(args.device)
