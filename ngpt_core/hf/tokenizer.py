"""How does a tokenizer of ours become one of transformers?

Bytes: ``NGPTByteTokenizer``, where a token's id is the byte itself. It is a byte-level BPE of 256 tokens without merges, so the
saved files load anywhere as a plain fast tokenizer, without this class and without ``trust_remote_code``. Byte 0, which no text
contains, ends a document and pads a batch, on the left. A Hugging Face tokenizer is passed on with its end-of-text token.
"""

import json
from typing import Any

from tokenizers import Tokenizer as Fast
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.tokenizers import ByteTokenizer

__all__ = ["NGPTByteTokenizer", "transformers_tokenizer"]


def _visible() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself if it is printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _bytes() -> Fast:
    vocabulary = {character: byte for byte, character in enumerate(_visible())}
    vocabulary = {"\0" if byte == 0 else character: byte for character, byte in vocabulary.items()}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {
        "id": 0,
        "content": "\0",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return Fast.from_str(
        json.dumps({"version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level, "model": model})
    )


class NGPTByteTokenizer(PreTrainedTokenizerFast):
    """A token is a byte: 256 tokens.

    >>> NGPTByteTokenizer()("né").input_ids
    [110, 195, 169]
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs = {"eos_token": "\0", "pad_token": "\0", "padding_side": "left", "clean_up_tokenization_spaces": False} | kwargs
        kwargs.setdefault("tokenizer_object", _bytes())
        super().__init__(model_input_names=["input_ids", "attention_mask"], **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, under the name of the plain fast class, so that it loads without ngpt_core."""
        plain = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, **self.init_kwargs)
        return plain.save_pretrained(*args, **kwargs)


def transformers_tokenizer(tokenizer: object) -> PreTrainedTokenizerBase:
    """A transformers tokenizer, from one of transformers, one of ours, or the name or folder of one."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if isinstance(tokenizer, ByteTokenizer) or tokenizer == "bytes":
        return NGPTByteTokenizer()
    if isinstance(fast := getattr(tokenizer, "fast", None), Fast):
        end = getattr(tokenizer, "end_of_text", None)
        special = {} if end is None else dict.fromkeys(("eos_token", "pad_token"), fast.id_to_token(end))
        return PreTrainedTokenizerFast(tokenizer_object=fast, padding_side="left", **special)
    if isinstance(tokenizer, str) and not tokenizer.startswith("tiktoken:"):
        return AutoTokenizer.from_pretrained(tokenizer)
    found = getattr(tokenizer, "spec", tokenizer)
    raise ValueError(
        f"The tokenizer {found!r} cannot be written for transformers: pass a transformers tokenizer, or the name of one."
    )
