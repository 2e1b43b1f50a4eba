"""How does transformers run a model of ours? ``NGPTForCausalLM``: nGPT and its GPT twin, to transformers' conventions.

The mathematics is ours, imported from ``ngpt_core/nn``. This file and ``layers.py`` add what transformers asks for: its names
and layouts (PEFT finds ``q_proj``, ... as ``nn.Linear``), its caches and masks, ``labels``. ``single_file.py`` writes both, and
all that they import from us, as one file for exported folders, which needs only torch and transformers.

Shapes: B batch, T new tokens, d hidden_size, V vocabulary; mask [B, T], 1 for a token, 0 for padding.
"""

import os
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask, find_packed_sequence_indices
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..nn.head import PositiveScale, linear_cross_entropy, logit_scale, needs_positive
from ..nn.loss import wide
from ..nn.scale import Scale
from ..sphere import unit
from .configuration_ngpt import NGPTConfig
from .layers import NGPTAttention, NGPTBlock, NGPTMamba2, NGPTRouter, declare, linear

__all__ = ["NGPTForCausalLM", "NGPTModel", "NGPTPreTrainedModel"]


class NGPTPreTrainedModel(PreTrainedModel):
    """What transformers needs to know. Flags that are False have not been tested (flash attention, compiled generation)."""

    config: NGPTConfig
    config_class = NGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["NGPTBlock"]
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _supports_sdpa = True
    _is_stateful = True  # a state of Mamba-2 cannot be rolled back, so there is no assisted generation
    _keep_in_fp32_modules_strict: ClassVar = ["e_score_correction_bias"]
    _can_record_outputs: ClassVar = {
        "hidden_states": OutputRecorder(NGPTBlock, index=0),
        "attentions": OutputRecorder(NGPTAttention, index=1),
        "router_logits": OutputRecorder(NGPTRouter, index=0),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The initial values of ``ngpt_core.LanguageModel``, each set by the module that owns it: transformers skips others.

        ``init`` leaves every loaded tensor unchanged."""
        c = self.config
        for name, dim in getattr(module, "matrices", {}).items():
            self._init_rows(module.get_parameter(name), dim)
        if isinstance(module, Scale):
            init.constant_(module.weight, module.scale)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, NGPTRouter):
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, nn.Conv1d):
            init.uniform_(module.weight, -(c.conv_kernel**-0.5), c.conv_kernel**-0.5)
            init.uniform_(module.bias, -(c.conv_kernel**-0.5), c.conv_kernel**-0.5)
        elif isinstance(module, NGPTMamba2):
            init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(*c.A_range).log())
            low, high = torch.tensor(c.dt_range).log().tolist()
            dt = torch.empty_like(module.dt_bias).uniform_(low, high).exp()
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            init.ones_(module.D)

    def _init_rows(self, w: Tensor, dim: int) -> None:
        """nGPT: unit vectors along ``dim``. GPT: normal entries, smaller in matrices that write to the hidden state."""
        if self.config.normalized:
            init.copy_(w, unit(torch.randn_like(w), dim))
        else:
            output = dim != -1
            init.normal_(w, std=self.config.initializer_range / (self.config.num_hidden_layers**0.5 if output else 1.0))


class NGPTModel(NGPTPreTrainedModel):
    """The model without its head: tokens -> hidden states, which in nGPT are unit vectors."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        declare(self.embeddings, config, weight=-1)
        self.layers = nn.ModuleList(NGPTBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm_f = None if config.normalized else nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        h = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        documents = None
        if position_ids is not None and past_key_values is None and attention_mask is None and position_ids.shape[0] == len(h):
            documents = find_packed_sequence_indices(position_ids)  # as attention's mask: packed sequences start at 0
        if not isinstance(attention_mask, dict):
            position_ids = self._positions(h, attention_mask, position_ids, past_key_values)
            attention_mask = _masks(self.config, h, attention_mask, past_key_values, position_ids)
        real, balance, first = attention_mask.get("linear_attention"), [], None
        for layer in self.layers:
            h, b, values = layer(
                h,
                real=real,
                attention_mask=attention_mask.get(str(layer.kind)),
                position_ids=position_ids,
                documents=documents if layer.kind == "linear_attention" else None,
                past_key_values=past_key_values,
                first_values=first if self.config.value_residual else None,
                **kwargs,
            )
            first = values if first is None else first
            if b is not None:
                balance.append(b)
        h = h if self.norm_f is None else self.norm_f(h)
        out = MoeModelOutputWithPast(last_hidden_state=h, past_key_values=past_key_values if use_cache else None)
        out.balance = torch.stack(balance).sum() if balance else None  # an attribute, not an item: only the loss reads it
        return out

    def _positions(self, h: Tensor, mask: Tensor | None, given: Tensor | None, past: Cache | None) -> Tensor | None:
        """Position of every new token, [B or 1, T]: as given, or counted without padding. None if no layer needs them."""
        if given is not None or "full_attention" not in (self.config.layer_types or ()):
            return given
        if mask is not None and mask.ndim == 2:
            return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -h.shape[1] :]
        seen = past.get_seq_length() if past is not None else 0
        return torch.arange(seen, seen + h.shape[1], device=h.device)[None]


def _masks(
    config: NGPTConfig, h: Tensor, mask: Tensor | None, past: Cache | None, positions: Tensor | None
) -> dict[str, Tensor | None]:
    """The masks of the kinds of blocks that have one."""
    given = {"config": config, "inputs_embeds": h, "attention_mask": mask, "past_key_values": past, "position_ids": positions}
    masks = {"linear_attention": create_recurrent_attention_mask(**given)}
    if h.shape[1] == 1 and mask is not None and mask.ndim == 2:  # transformers takes a single token for a real one
        masks["linear_attention"] = mask[:, -1:].contiguous()
    if "full_attention" in (config.layer_types or ()):
        masks["full_attention"] = create_causal_mask(**given)
    return masks


class NGPTForCausalLM(NGPTPreTrainedModel, GenerationMixin):
    """The language model. With ``labels`` the loss is ours: LGP in its backward pass, never [tokens, V] in memory."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config)
        self.model = NGPTModel(config)
        self.lm_head = linear(config, config.hidden_size, config.vocab_size)
        self.s_z = None
        if config.normalized:
            positive = needs_positive(config.lgp_q) if config.positive_s_z is None else config.positive_s_z
            self.s_z = (PositiveScale if positive else Scale)(config.vocab_size, *config.scale_of("s_z"))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """``labels`` [B, T] are the tokens themselves, -100 where there is nothing to predict; they are shifted here.

        In train() mode with labels there are no logits in the output, and the routers' balance loss is part of the loss.
        Nothing moves the routers' biases: they have no gradient, and transformers' Trainer has no step for them.
        ``num_items_in_batch`` (transformers' Trainer passes it) divides the sum over tokens instead of their number here.
        """
        items, shifted = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        h, loss, logits, balance = out.last_hidden_state, None, None, getattr(out, "balance", None)
        if labels is not None or shifted is not None:
            targets = shifted if labels is None or shifted is not None else F.pad(labels, (0, 1), value=-100)[:, 1:]
            if isinstance(attention_mask, Tensor) and attention_mask.shape == targets.shape:
                targets = targets.masked_fill(attention_mask == 0, -100)  # padding predicts nothing
            loss = self._loss(h, targets.to(h.device), balance, items)
        if loss is None or not self.training:
            keep = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.logits(h[:, keep])
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=None if balance is None or loss is None else balance,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            router_logits=out.router_logits,
        )

    def logits(self, h: Tensor) -> Tensor:
        """[..., V], in float32 for the half precisions; LGP acts in their backward pass too."""
        u = self.lm_head(h)
        u = u.to(wide(u.dtype))
        c = self.config
        return u if self.s_z is None else logit_scale(u, self.s_z().to(u.dtype), c.lgp_q, c.lgp_form)

    def _loss(self, h: Tensor, targets: Tensor, balance: Tensor | None, items: int | Tensor | None) -> Tensor:
        c, count = self.config, (targets != -100).sum()
        if type(self.lm_head) is nn.Linear:
            s_z = None if self.s_z is None else self.s_z()
            h = h if torch.is_autocast_enabled(h.device.type) else h.to(self.lm_head.weight.dtype)
            loss = linear_cross_entropy(h, self.lm_head.weight, targets, s_z, c.lgp_q, form=c.lgp_form, reduction="sum")
        else:  # an adapter or a quantizer has replaced it
            loss = F.cross_entropy(self.logits(h).flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-100)
        items = count.clamp_min(1) if items is None else torch.as_tensor(items, device=h.device)
        loss = loss / items
        if balance is not None and self.training:
            loss = loss + balance * (c.balance_loss * (count.to(loss.dtype) / items))
        return loss

    # ngpt_core only: begin
    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with the code that loads the folder where ngpt_core is not installed."""
        from .export import AUTO_MAP, write_code

        self.config.auto_map = dict(AUTO_MAP)
        result = super().save_pretrained(save_directory, *args, **kwargs)
        write_code(save_directory)
        return result

    # ngpt_core only: end
    @torch.no_grad()
    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As in transformers; in nGPT the new rows are normalized, and their s_z is the mean of the others."""
        before = self.config.vocab_size
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if self.s_z is not None and self.config.vocab_size != before:
            old = self.s_z.weight
            new = old.mean().repeat(self.config.vocab_size)
            new[: min(len(new), before)] = old[: len(new)]
            self.s_z.weight = nn.Parameter(new, requires_grad=old.requires_grad)
            for w in (embeddings.weight, self.lm_head.weight):
                w[before:] = unit(w[before:])
        return embeddings

    @staticmethod
    def create_masks_for_generate(
        config: NGPTConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None, **kwargs: Any
    ) -> dict[str, Tensor | None]:
        """generate() calls it when it compiles: transformers' own does not know "moe" and "mlp"."""
        return _masks(config, inputs_embeds, attention_mask, past_key_values, kwargs.get("position_ids"))
