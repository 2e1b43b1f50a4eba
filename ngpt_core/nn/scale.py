"""How can a trained scale learn faster or slower than the rest without a separate learning rate?

Through its units (section 3.1): a scale s_a is stored in units of s_scale and used in units of s_init,

    s_eff = s_a * s_init / s_scale,      s_a starts at s_scale, so s_eff starts at s_init,

and a step of size lr on s_a is a step of size lr * s_init / s_scale on s_eff. The paper's recipe sets every s_scale to 1 and
gives the rates explicitly (item 11 of the summary); the original nGPT had s_scale = 1/sqrt(d_model) and one rate for all.
"""

import torch
from torch import Tensor, nn

__all__ = ["Scale"]


class Scale(nn.Module):
    """A trainable scaling vector (s_qk, s_u, s_z, s_mamba, s_moe) or eigen learning rate (alpha). Calling it returns its value.

    shape: the parameter's shape; (1,) for a scalar, since fully sharded training does not support 0-dimensional parameters.
    init: s_init, the initial value.
    scale: s_scale, the unit of storage: a step of lr changes the value by lr * init / scale (section 3.1).

    >>> s = Scale(2, init=0.25, scale=0.5)
    >>> s.weight.tolist(), s().tolist()
    ([0.5, 0.5], [0.25, 0.25])
    """

    def __init__(self, shape: int | tuple[int, ...], init: float, scale: float = 1.0) -> None:
        super().__init__()
        self.init, self.scale = init, scale
        self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(self.scale)

    def forward(self) -> Tensor:
        """s_eff, the value used in the forward pass."""
        if self.init == self.scale:
            return self.weight
        return self.weight * (self.init / self.scale)  # sec. 3.1, s_eff

    def extra_repr(self) -> str:
        return f"shape={tuple(self.weight.shape)}, init={self.init}, scale={self.scale}"
