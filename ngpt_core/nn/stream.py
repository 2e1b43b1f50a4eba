"""How are tensors written to a safetensors file without having all of them at once?

The file begins with a header that says where each tensor will be, which follows from names, dtypes and shapes alone. Then
the tensors are written one after the other, as they come, and hashed on the way. Every byte is as safetensors writes it.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..seal import Entry

__all__ = ["DTYPES", "NAMES", "ordered", "write"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def ordered(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order of the file: the widest numbers first, then by name. (Of the tensors only the dtypes are read.)"""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write(
    path: Path,
    about: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Entry:
    """Write ``tensors``, which come in the order of ``about``: name -> (dtype, shape). Returns the file's size and sha256."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in about.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:

        def put(block: object) -> None:
            view = memoryview(block).cast("B")  # type: ignore[arg-type]  # bytes, or a numpy array
            digest.update(view)
            while len(view):
                view = view[file.write(view) :]

        put(len(text).to_bytes(8, "little"))
        put(text)
        for (name, (dtype, shape)), x in zip(about.items(), tensors, strict=True):
            assert x.dtype == dtype and tuple(x.shape) == tuple(shape), name
            put(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}
