"""How does a real program run on a machine that does not exist? Every operator is seen first, and its tensors are fake.

Three kinds of tensors appear in a rehearsal:
    of the device      fake tensors: shape, dtype, strides. All that the program makes, unless it is one of the other two.
    of the host        ordinary tensors: what the loader reads, ``torch.tensor([...])``, and what is explicitly made on the
                       device "cpu". They are computed for real.
    with known values  small fake tensors (router loads, splits of an all-to-all) that carry their values along (values.py)

``Machine`` is a dispatch mode: it sees every operator below autograd, in the forward pass, in backward and in the optimizer.
Our custom operators are opened, so that what they launch and allocate inside is seen as well (kernels.py). It notes where the
host waits for the device, and passes each operator on to the observers.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from ...optim import sharding
from ...train import parallel
from ...train.recompute import _is_product
from . import kernels
from .values import Values

__all__ = ["NOTE", "Call", "Machine", "here", "is_view", "tensors_in"]

NOTE = "ngpt"  # under this key, an autograd node has its (path:line, module)
PACKAGE = Path(__file__).parents[2]  # ngpt_core
_UNSEEN = (str(Path(__file__).parent), str(PACKAGE / "train" / "recompute.py"))
_PLAIN = (FakeTensor, Tensor, torch.nn.Parameter)
_FOLLOWED = 4096  # numbers: shorter constants from the host keep their values
_ASSUMED = 2.0  # stands for an unknown number that the program reads; above 1, so that a clipped gradient is clipped


class Call:
    """One operator that ran on the device."""

    __slots__ = ("args", "flops", "func", "kwargs", "launches", "out", "returned", "taken")

    def __init__(self, func: Any, args: tuple, kwargs: dict, out: Any, launches: int = 1, flops: int | None = None) -> None:
        self.func, self.args, self.kwargs, self.out, self.launches, self.flops = func, args, kwargs, out, launches, flops
        self.taken, self.returned = tensors_in((args, kwargs)), tensors_in(out)


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in an operator's arguments or results: nested lists, tuples and dicts."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return []
    found = []
    for one in x:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple, dict)) and one:
            found += tensors_in(one)
    return found


def is_view(func: Any) -> bool:
    """Whether an operator only gives its input another shape: nothing is computed."""
    found = _VIEWS.get(func)
    if found is None:
        aliases = [r.alias_info for r in func._schema.returns]
        found = any(a is not None and not a.is_write for a in aliases) or str(func).split(".")[1] in _LIKE_VIEWS
        _VIEWS[func] = found
    return found


_VIEWS: dict[Any, bool] = {}
_INSIDE = {
    torch.ops.ngpt_core.cross_entropy_sum.default: "loss",
    torch.ops.ngpt_core.expert_outer.default: "gathered",  # whole gradients
}
_LIKE_VIEWS = ("_unsafe_view", "detach", "alias", "lift_fresh", "_reshape_alias", "wait_tensor", "_wrap_tensor_autograd")


class Machine(TorchDispatchMode):
    """The device of one rank. ``observers`` are called with each ``Call``; ``waits`` counts host waits by place."""

    def __init__(self, kind: str, values: Values) -> None:
        super().__init__()
        self.kind, self.values = kind, values
        self.observers: list[Callable[[Call], None]] = []
        self.waits: Counter[str] = Counter()
        self.weight = 1  # how many times what runs now would run
        self.inside = ""  # the kind of memory that an opened operator makes, if its kind is known
        self.in_product = False  # what runs is a result that selective checkpointing keeps
        self.module: Callable[[], str] = str  # the name of the module that is running
        self.copied = 0  # bytes from the host to the device
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    @contextlib.contextmanager
    def running(self) -> Iterator["Machine"]:
        """Everything in the block runs on this machine."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_patched(FakeTensor, "tolist", lambda x: self._tolist(x)))
            from torch.distributed.fsdp._fully_shard import _fsdp_param

            stack.enter_context(_patched(_fsdp_param, "_chunk_with_empty", _first_chunk))
            for module, name in ((parallel, "make_meshes"), (sharding, "offsets")):
                stack.enter_context(_patched(module, name, _outside(getattr(module, name))))
            for name in ("__getitem__", "get_group", "get_local_rank", "get_coordinate", "size"):
                stack.enter_context(_patched(DeviceMesh, name, _outside(getattr(DeviceMesh, name))))
            stack.enter_context(self.fake)
            stack.enter_context(self)
            stack.enter_context(_Calls(self))
            yield self

    # ---- operators ---------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(t not in _PLAIN for t in types):
            return NotImplemented  # a DTensor or a pending collective unpacks itself first, and comes back
        tensors = tensors_in((args, kwargs))
        if tensors and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)  # of the host
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(args[0])
        before, self.in_product = self.in_product, self.in_product or _is_product(func)
        try:
            return self._run(func, args, kwargs, tensors)
        finally:
            self.in_product = before

    def _run(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        if (body := kernels.opened(func)) is not None:
            before, self.inside = self.inside, _INSIDE.get(func, self.inside)
            try:
                with self:
                    return body(*args, **kwargs)
            finally:
                self.inside = before
        if (shape := kernels.SHAPES.get(func)) is not None:
            return self._kernel(func, args, kwargs, shape)
        self._copies(func, args, kwargs)
        known = self.values.before(func, args, kwargs, tensors)
        try:
            # torch 2.12 fails at this product with beta on tensors without memory; its result is its ``out``
            out = kwargs["out"] if func is torch.ops.aten.addmm.dtype_out else func(*args, **kwargs)
        except DynamicOutputShapeException:
            if known is None:
                raise NotImplementedError(f"the shape of {func} depends on values that a rehearsal does not have") from None
            self.wait()
            out = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), known)
        if func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.wait()
        self.values.after(func, args, kwargs, out, known)
        self._ran(Call(func, args, kwargs, out))
        return out

    def _kernel(self, func: Any, args: tuple, kwargs: dict, shape: Any) -> Any:
        """A kernel whose inside has no operators: its workspace is allocated while it runs."""
        with self:
            held = shape.workspace(*args)
        out = func(*args, **kwargs)
        self._ran(Call(func, args, kwargs, out, shape.launches, shape.flops(*args)))
        del held
        return out

    def _ran(self, call: Call) -> None:
        for observe in self.observers:
            observe(call)

    # ---- the host ----------------------------------------------------------------------------------------------------
    def wait(self) -> None:
        """The host waits for the device here. (A CPU is its own host: nothing waits.)"""
        if self.kind == "cuda":
            self.waits[here()] += self.weight

    def _item(self, x: Tensor) -> Any:
        self.wait()
        with _disable_current_modes():
            return self._value(x).item()

    def _tolist(self, x: Tensor) -> Any:
        self.wait()  # one copy, whatever its length
        with _disable_current_modes():
            return self._value(x).tolist()

    def _value(self, x: Tensor) -> Tensor:
        """The known value of x, or an assumed one."""
        if (known := self.values.get(x)) is not None:
            return known
        return torch.full(x.shape, _ASSUMED if x.dtype.is_floating_point else 1, dtype=x.dtype)

    def _copies(self, func: Any, args: tuple, kwargs: dict) -> None:
        """A copy from the host waits unless it was asked not to."""
        if func is torch.ops.aten.copy_.default and not isinstance(args[1], FakeTensor):
            self.copied += args[1].nbytes
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                self.wait()

    def to_device(self, x: Tensor, non_blocking: bool) -> Tensor:
        """A tensor of the host, on the device."""
        self.copied += x.nbytes
        if not non_blocking:
            self.wait()
        with _disable_current_modes(), self.fake:
            found = torch.empty(x.shape, dtype=x.dtype)
        if x.numel() <= _FOLLOWED:
            self.values.set(found, x.clone())
        self._ran(Call(torch.ops.aten._to_copy.default, (x,), {}, found))
        return found


class _Calls(TorchFunctionMode):
    """Sees calls above autograd: where the program crosses between host and device, and which attention CUDA would choose."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and (kwargs.get("device") == "cpu" or (func is torch.tensor and kwargs.get("device") is None)):
            if isinstance(kwargs.get("device"), str) or func is torch.tensor:
                with _disable_current_modes():
                    return func(*args, **kwargs)
        if func is Tensor.to and type(args[0]) is Tensor and _is_device(args[1:], kwargs):
            return self.machine.to_device(args[0], kwargs.get("non_blocking", False))
        if func is Tensor.backward:
            with self:  # a block that is computed again in the backward pass makes the same calls; torch would switch this off
                ones = torch.ones_like(args[0])
                return _engine_run_backward(args[:1], (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        if func is torch.nn.functional.scaled_dot_product_attention and self.machine.kind == "cuda":
            out = kernels.attention(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.grad_fn is not None:
            metadata: dict = out.grad_fn.metadata  # type: ignore[assignment]  # torch types a method
            if NOTE not in metadata:
                metadata[NOTE] = here(), self.machine.module()
        return out


_FACTORIES = {torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full}


def _is_device(args: tuple, kwargs: dict) -> bool:
    return isinstance(kwargs.get("device", args[0] if args else None), torch.device)


def here() -> str:
    """path:line of the innermost line of ngpt_core that is running, leaving out the simulator and the recomputing."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_UNSEEN):
            return f"{name[_ROOT:]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return "?"


_PACKAGE, _ROOT = str(PACKAGE), len(str(PACKAGE.parent)) + 1


@contextlib.contextmanager
def _patched(owner: Any, name: str, function: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _first_chunk(x: Tensor, chunks: int, dim: int) -> list[Tensor]:
    """The part of the first rank. FSDP makes those of all ranks, 4,096 tensors for each parameter, and takes its own."""
    return [x.narrow(dim, 0, -(-x.shape[dim] // chunks))]


def _outside(method: Callable) -> Callable:
    """A function that computes with small real tensors: those of meshes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return run
