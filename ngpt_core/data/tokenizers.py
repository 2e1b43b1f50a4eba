"""How does text become integers, and integers become text?

Three kinds of tokenizer share one small interface: ``bytes`` (built in: each byte is a token, nothing to download), a Hugging
Face ``tokenizers`` file or name, and ``tiktoken:NAME``. The last two are imported only when they are used.

A tokenizer takes documents as UTF-8 bytes and has
    spec            its name, as given to ``--tokenizer`` and written to a corpus's manifest
    vocab_size      V: ids lie in [0, V)
    end_of_text     the id appended to each document, with which a model ends its text, or None. For bytes it is byte 0, which
                    no text contains. The boundaries of documents are in the corpus's index in any case.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from ..files import sha256, write_text
from ..seal import Damaged

__all__ = ["ByteTokenizer", "Tokenizer", "check_copy", "check_description", "content", "describe", "from_description",
           "load_tokenizer", "stream_text"]  # fmt: skip

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[EOS]")  # tried in this order


class Tokenizer(Protocol):
    """The interface of a tokenizer: its name, its vocabulary size, the token that ends a document, and both directions."""

    spec: str
    vocab_size: int
    end_of_text: int | None

    def encode(self, documents: list[bytes]) -> list[np.ndarray]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """Each byte is a token.

    >>> ByteTokenizer().encode(["né".encode()])[0].tolist()
    [110, 195, 169]
    """

    spec, vocab_size = "bytes", 256
    end_of_text: int | None = 0

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8) for document in documents]

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not UTF-8, and ids above 255 (a model may have a larger vocabulary), become U+FFFD."""
        return b"".join(bytes([i]) if i < 256 else b"\xff" for i in ids).decode("utf-8", errors="replace")


@contextlib.contextmanager
def _errors(of: str) -> Iterator[None]:
    """Turn an error of the library, a bare Exception or a panic (a BaseException, from Rust), into a ValueError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{of} ({(str(error).splitlines() or ['no reason'])[0]}).") from None


class _HuggingFace:
    def __init__(self, spec: str, end_of_text: str | None):
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise ValueError(
                f"the tokenizer {spec!r} needs the package `tokenizers`: pip install tokenizers, or use --tokenizer bytes."
            ) from None
        path = Path(spec) / "tokenizer.json" if Path(spec).is_dir() else Path(spec)
        if not path.is_file() and spec.endswith(".json"):
            raise ValueError(f"there is no tokenizer file {spec!r}: use `bytes`, a tokenizer.json, or a name.")
        choices = "use `bytes`, the path of a tokenizer.json, a Hugging Face name, or tiktoken:NAME"
        with _errors(f"no tokenizer at {spec!r}: {choices}"):
            self.fast = Fast.from_file(str(path)) if path.is_file() else Fast.from_pretrained(spec)
        self.fast.no_truncation()  # a file may set these for another use; they would cut or pad documents
        self.fast.no_padding()
        ids = self.fast.get_vocab(with_added_tokens=True).values()
        self.spec, self.vocab_size = spec, max(ids, default=-1) + 1  # not the number of ids: there may be gaps
        self.end_of_text = self._find_end(end_of_text)

    def _find_end(self, name: str | None) -> int | None:
        for candidate in _ENDS if name is None else (name,):
            if (found := self.fast.token_to_id(candidate)) is not None:
                return found
        if name is not None:
            raise ValueError(f"the tokenizer {self.spec!r} has no token {name!r}: choose another --end-of-text.")
        return None

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8") for document in documents]
        with _errors(f"the tokenizer {self.spec!r} cannot encode this text: its file was damaged or edited"):
            return [np.asarray(e.ids, np.uint32) for e in self.fast.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        with _errors(f"the tokenizer {self.spec!r} cannot decode its ids: its file was damaged or edited"):
            return self.fast.decode([int(i) for i in ids], skip_special_tokens=False)


class _Tiktoken:
    def __init__(self, spec: str, offline: bool = False):
        try:
            import tiktoken
            import tiktoken.load
        except ImportError:
            raise ValueError(f"the tokenizer {spec!r} needs the package `tiktoken`: pip install tiktoken.") from None
        real, tiktoken.load.read_file = tiktoken.load.read_file, _no_network if offline else tiktoken.load.read_file
        try:
            self.encoding = tiktoken.get_encoding(spec.removeprefix("tiktoken:"))
        except ConnectionError:
            raise ValueError(
                f"the tokenizer {spec!r} is not in tiktoken's cache on this machine, and a name from a file is never looked up "
                f"online: pass --tokenizer {spec} once."
            ) from None
        except ValueError:
            raise ValueError(f"tiktoken has no encoding {spec!r}; it has {tiktoken.list_encoding_names()}.") from None
        finally:
            tiktoken.load.read_file = real
        self.spec, self.vocab_size, self.end_of_text = spec, self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8") for document in documents]
        return [np.asarray(ids, np.uint32) for ids in self.encoding.encode_ordinary_batch(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode([int(i) for i in ids])


def _no_network(path: str) -> bytes:
    """Replaces tiktoken's download."""
    raise ConnectionError(path)


def load_tokenizer(spec: str, end_of_text: str | None = None) -> Tokenizer:
    """``bytes``, ``tiktoken:NAME``, or a Hugging Face tokenizer by file, folder or name."""
    if end_of_text is not None and (spec == "bytes" or spec.startswith("tiktoken:")):
        raise ValueError(f"the tokenizer {spec!r} ends documents with its own token: leave out --end-of-text.")
    if spec == "bytes":
        return ByteTokenizer()
    return _Tiktoken(spec) if spec.startswith("tiktoken:") else _HuggingFace(spec, end_of_text)


def describe(tokenizer: Tokenizer, folder: Path | None = None) -> dict:
    """What a corpus records about its tokenizer. A Hugging Face one is copied into ``folder``: its name may change meaning."""
    description = {"spec": tokenizer.spec, "vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text}
    if isinstance(tokenizer, _HuggingFace):
        text = tokenizer.fast.to_str()
        if folder is not None:
            write_text(folder / "tokenizer.json", text)
        description["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return description


def check_description(description: object, where: Path) -> None:
    """ValueError that names the file unless this is a result of ``describe``."""
    kinds = {"spec": str, "vocab_size": int, "end_of_text": int | None, "sha256": str | None}
    if not isinstance(description, dict) or not all(isinstance(description.get(k), kind) for k, kind in kinds.items()):
        raise ValueError(f"{where} does not describe its tokenizer ({description}): it was damaged or edited; restore it.")


def content(description: dict) -> tuple:
    """What identifies a tokenizer: its content if that is known, because a name or a path does not determine it."""
    return description.get("sha256", description["spec"]), description["vocab_size"], description["end_of_text"]


def check_copy(description: dict, folder: Path) -> int:
    """``Damaged`` unless the copy of the tokenizer in ``folder`` is the one that ``describe`` recorded. Returns its size; 0 for
    a tokenizer that needs no file."""
    path = folder / "tokenizer.json"
    if "sha256" not in description:
        return 0
    if not path.is_file() or sha256(path) != description["sha256"]:
        raise Damaged(f"{path} is missing or is not the tokenizer that was recorded beside it: restore it.")
    return path.stat().st_size


def from_description(description: dict, folder: Path) -> Tokenizer:
    """The tokenizer that ``describe`` recorded, from the copy in ``folder`` if there is one. A name read from a file is never
    looked up online."""
    spec = description["spec"]
    if "sha256" not in description:
        if spec.startswith("tiktoken:"):
            return _Tiktoken(spec, offline=True)
        if spec != "bytes":
            raise ValueError(f"{folder} names the tokenizer {spec!r} but has no copy of it: pass it with --tokenizer.")
        return ByteTokenizer()
    check_copy(description, folder)
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    tokenizer.spec, tokenizer.end_of_text = description["spec"], description["end_of_text"]
    return tokenizer


def stream_text(tokenizer: Tokenizer, ids: Iterable[int], before: Iterable[int] = ()) -> Iterator[str]:
    """Text as it becomes complete: a character is held back until all of its bytes have arrived.

    ``before``: the ids of the prompt, which is decoded but not repeated. (A tokenizer may drop a space at the start of a text.)
    """
    seen = [int(i) for i in before]
    sent = len(tokenizer.decode(seen)) if seen else 0
    for i in ids:
        seen.append(int(i))
        text = tokenizer.decode(seen)
        if not text.endswith("�") and len(text) > sent:
            yield text[sent:]
            sent = len(text)
    if seen and len(text := tokenizer.decode(seen)) > sent:
        yield text[sent:]
