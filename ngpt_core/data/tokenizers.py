"""How does text become integers, and integers text?

Three tokenizers behind one small interface: ``bytes`` (built in: a token is a byte, 256 of them, nothing to download), a
Hugging Face ``tokenizers`` file or name, and ``tiktoken:NAME``. The last two are imported only when asked for.

A tokenizer takes documents as UTF-8 bytes and has
    spec            the text that names it, as given to ``--tokenizer`` and written to a corpus's manifest
    vocab_size      V: ids lie in [0, V)
    end_of_text     the id appended to each document, by which a model says that it is done, or None. For bytes it is byte 0,
                    which no text contains. Where documents begin and end is known from the corpus's index in any case.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from ..files import write_text

__all__ = ["ByteTokenizer", "Tokenizer", "check_description", "content", "describe", "from_description", "load_tokenizer",
           "stream_text"]  # fmt: skip

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[EOS]")  # looked for in this order


class Tokenizer(Protocol):
    """What the rest asks of a tokenizer: its name, the size of its vocabulary, the token that ends a document, both ways."""

    spec: str
    vocab_size: int
    end_of_text: int | None

    def encode(self, documents: list[bytes]) -> list[np.ndarray]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """A token is a byte.

    >>> ByteTokenizer().encode(["né".encode()])[0].tolist()
    [110, 195, 169]
    """

    spec, vocab_size = "bytes", 256
    end_of_text: int | None = 0

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8) for document in documents]

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8, and ids above 255 (a model may have a larger vocabulary), become U+FFFD."""
        return b"".join(bytes([i]) if i < 256 else b"\xff" for i in ids).decode("utf-8", errors="replace")


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
            raise ValueError(f"there is no tokenizer file {spec!r}: give `bytes`, a tokenizer.json, or a name.")
        try:
            self.fast = Fast.from_file(str(path)) if path.is_file() else Fast.from_pretrained(spec)
        except Exception as error:  # the library raises bare Exception for a file it cannot read and a name it cannot find
            raise ValueError(
                f"no tokenizer at {spec!r}: give `bytes`, the path of a tokenizer.json, a Hugging Face name, or tiktoken:NAME "
                f"({str(error).splitlines()[0]})."
            ) from None
        self.fast.no_truncation()  # a file may hold both, made for another use: they would cut documents, or fill them up
        self.fast.no_padding()
        ids = self.fast.get_vocab(with_added_tokens=True).values()
        self.spec, self.vocab_size = spec, max(ids, default=-1) + 1  # not their number: there may be gaps
        self.end_of_text = self._find_end(end_of_text)

    def _find_end(self, name: str | None) -> int | None:
        for candidate in _ENDS if name is None else (name,):
            if (found := self.fast.token_to_id(candidate)) is not None:
                return found
        if name is not None:
            raise ValueError(f"the tokenizer {self.spec!r} has no token {name!r} to end a document with.")
        return None

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8") for document in documents]
        return [np.asarray(e.ids, np.uint32) for e in self.fast.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.fast.decode([int(i) for i in ids], skip_special_tokens=False)


class _Tiktoken:
    def __init__(self, spec: str):
        try:
            import tiktoken
        except ImportError:
            raise ValueError(f"the tokenizer {spec!r} needs the package `tiktoken`: pip install tiktoken.") from None
        try:
            self.encoding = tiktoken.get_encoding(spec.removeprefix("tiktoken:"))
        except ValueError:
            raise ValueError(f"tiktoken has no encoding {spec!r}; it has {tiktoken.list_encoding_names()}.") from None
        self.spec, self.vocab_size, self.end_of_text = spec, self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8") for document in documents]
        return [np.asarray(ids, np.uint32) for ids in self.encoding.encode_ordinary_batch(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode([int(i) for i in ids])


def load_tokenizer(spec: str, end_of_text: str | None = None) -> Tokenizer:
    """``bytes``, ``tiktoken:NAME``, or a Hugging Face tokenizer by file, folder or name."""
    if end_of_text is not None and (spec == "bytes" or spec.startswith("tiktoken:")):
        raise ValueError(f"the tokenizer {spec!r} ends documents with a token of its own: leave out --end-of-text.")
    if spec == "bytes":
        return ByteTokenizer()
    return _Tiktoken(spec) if spec.startswith("tiktoken:") else _HuggingFace(spec, end_of_text)


def describe(tokenizer: Tokenizer, folder: Path) -> dict:
    """What a corpus remembers of its tokenizer. A Hugging Face one is copied into ``folder``: its name alone could change."""
    description = {"spec": tokenizer.spec, "vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text}
    if isinstance(tokenizer, _HuggingFace):
        text = tokenizer.fast.to_str()
        write_text(folder / "tokenizer.json", text)
        description["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return description


def check_description(description: object, where: Path) -> None:
    """A ValueError that names the file if this is nothing that ``describe`` gives."""
    kinds = {"spec": str, "vocab_size": int, "end_of_text": int | None, "sha256": str | None}
    if not isinstance(description, dict) or not all(isinstance(description.get(k), kind) for k, kind in kinds.items()):
        raise ValueError(f"{where} does not describe its tokenizer ({description}): it was damaged or edited; restore it.")


def content(description: dict) -> tuple:
    """What makes a tokenizer the same as another: its content where that is known, for a name or a path says little."""
    return description.get("sha256", description["spec"]), description["vocab_size"], description["end_of_text"]


def from_description(description: dict, folder: Path) -> Tokenizer:
    """The tokenizer that ``describe`` wrote down, from the copy in ``folder`` where there is one."""
    if "sha256" not in description:
        return load_tokenizer(description["spec"])
    path = folder / "tokenizer.json"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != description["sha256"]:
        raise ValueError(f"{path} is missing or is not the tokenizer of this corpus: restore it, or pack again.")
    tokenizer = load_tokenizer(str(path))
    tokenizer.spec, tokenizer.end_of_text = description["spec"], description["end_of_text"]
    return tokenizer


def stream_text(tokenizer: Tokenizer, ids: Iterable[int], before: Iterable[int] = ()) -> Iterator[str]:
    """Text as it becomes certain: a character whose bytes are not all there yet is held back until they are.

    ``before``: the ids of the prompt, whose text is not repeated. A tokenizer may drop the space before what it decodes first.
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
