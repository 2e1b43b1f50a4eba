"""Which parameters live on the sphere, along which axis, and how do they get there?

Modules declare it: ``unit_dims`` maps the names of a module's own parameters to the axis along which they have norm 1. The axis
is always -1 in this model, because every matrix has d_model last (*a row is a point*); the GPT baseline declares nothing. The
declaration is on the module because sharded training replaces the Parameter objects and would lose a tag on a tensor.

This file builds matrices, collects the declarations, and puts a model back on the sphere. During training, the optimizer keeps
it there: that must happen on the parameters that the optimizer holds (section 3.1).
"""

import torch
from torch import Tensor, nn

from .. import sphere
from ..config import ModelConfig

__all__ = ["init_rows_", "normalize_", "rows", "unit_axes"]


def rows(*shape: int) -> nn.Parameter:
    """An empty matrix, or a stack of matrices, with vectors of the model as rows: the last dimension is d_model."""
    return nn.Parameter(torch.empty(shape))


@torch.no_grad()
def init_rows_(w: Tensor, config: ModelConfig, output: bool = False) -> Tensor:
    """Fill w in place: nGPT draws rows uniformly from the sphere, GPT draws every entry from N(0, init_std^2).

    ``output`` marks matrices that write to the residual stream (o_proj, out_proj, down). GPT divides their std by sqrt(number
    of blocks), so that the sum of all blocks starts at the size of one. nGPT does not need that: blocks are normalized.
    """
    if config.normalized:
        return w.copy_(sphere.unit(w.normal_()))  # uniform on the sphere: Gaussian, then Norm
    return w.normal_(std=config.init_std / (len(config.pattern) ** 0.5 if output else 1.0))


def unit_axes(model: nn.Module) -> dict[str, int]:
    """Qualified parameter name -> the axis along which it has norm 1, for every unit parameter, module by module.

    A module declares its own: ``self.unit_dims = {"weight": -1}`` means that the rows of its ``weight`` are unit vectors.
    """
    return {
        f"{prefix}.{name}" if prefix else name: dim
        for prefix, module in model.named_modules()
        for name, dim in getattr(module, "unit_dims", {}).items()
    }


@torch.no_grad()
def normalize_(model: nn.Module) -> None:
    """Normalize every unit parameter in place, e.g. after loading foreign weights or rounding to a lower precision."""
    for name, dim in unit_axes(model).items():
        w = model.get_parameter(name)
        w.copy_(sphere.unit(w, dim))
