"""What happens when memory runs out? The user reads what to change, instead of a traceback from deep inside torch.

There is no single error for it: torch raises ``torch.OutOfMemoryError`` on a GPU and a plain RuntimeError on a CPU; Python
raises MemoryError.
"""

import contextlib
from collections.abc import Iterator

__all__ = ["OutOfMemory", "ran_out", "room_for"]

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "ALLOC_FAILED")


class OutOfMemory(ValueError):
    """Memory ran out; the message says when, and what to change."""


def ran_out(error: BaseException) -> bool:
    """Whether the error means that memory ran out."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS))


@contextlib.contextmanager
def room_for(what: str, advice: str) -> Iterator[None]:
    """Turn an out-of-memory error in the block into ``OutOfMemory`` with the advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        error.__traceback__ = None  # its frames hold the tensors that filled the memory
        reason = (str(error).splitlines() or ["no room"])[0].rpartition("DefaultCPUAllocator: ")[2]
        raise OutOfMemory(f"{what}: out of memory ({reason}). {advice}") from None
