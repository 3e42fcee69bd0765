"""Multi-head attention: its input and output projections are linear layers."""

from collections.abc import Iterator
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.nn.layer import Part, ProximalLayer, under_autocast
from proxprop.torch_internals import is_batched_attention
from proxprop.transfer import LayerCall, LinearTransfer


class MultiheadAttention(ProximalLayer, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose projections receive their proximal directions.

    Each projection of each distinct input is a system of its own: one for self-attention's packed
    `in_proj_weight`, one for each slice of it where query, key and value differ, and one for `out_proj`.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as torch's forward defines it; torch's own where there is nothing to train."""
        if not self._solves() and not self._observed():
            options = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return super().forward(query, key, value, *options)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = is_batched_attention((query, key, value), (key_padding_mask, attn_mask), self.num_heads)
        hinted = is_causal and key_padding_mask is None and not need_weights  # torch then trusts the hint
        q, k, v = (self._heads(x, batched) for x in self._project(query, key, value))
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        mask = self._merged_mask(q, k, key_padding_mask, None if hinted else attn_mask)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q * sqrt(1.0 / self.head_dim)) @ k.mT
            weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = functional.dropout(weights, dropout)
            mixed = weights @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=hinted)
        mixed, out = self._joined(mixed, batched), self.out_proj
        if "weight" not in out._parameters or "bias" not in out._parameters:
            self._refuse_computed()
        output = self._linear(mixed, out.weight, out.bias, "out", owner=out)
        if not need_weights:
            return output, None
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return output, weights if batched else weights[0]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """Query, key and value projected; one product for as many as share input and weight."""
        if not self._packs():
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            for x, weight, bias, part in zip((query, key, value), weights, biases, "qkv", strict=True):
                yield self._linear(x, weight, bias, part)
            return
        parts, inputs = ["q", "k", "v"], [query, key, value]
        if query is key and key is value:
            parts, inputs = ["qkv"], [query]
        elif key is value:
            parts, inputs = ["q", "kv"], [query, key]
        rows = [len(part) * self.embed_dim for part in parts]
        biases = [None] * len(rows) if self.in_proj_bias is None else self.in_proj_bias.split(rows)
        for x, weight, bias, part in zip(inputs, self.in_proj_weight.split(rows), biases, parts, strict=True):
            yield from self._linear(x, weight, bias, part).chunk(len(part), dim=-1)

    def _packs(self) -> bool:
        """Whether query, key and value share one weight."""
        return cast(Tensor | None, self.q_proj_weight) is None

    def _linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, part: str, owner: nn.Module | None = None
    ) -> Tensor:
        """`x Wᵀ + b` with the direction attached, or S where that is deferred."""
        x = under_autocast(x)
        if not self._solves():
            return self._tap(functional.linear(x, weight, bias), (x,), part)
        return self._product(functional.linear, LayerCall(LinearTransfer), [x], weight, bias, owner)

    def _parts(self) -> dict[str, Part]:
        """Query, key and value, alone or together as inputs are shared, and the output projection."""
        whole, width = slice(None), self.embed_dim
        packed, bias = self._packs(), self.in_proj_bias is not None
        out = ("out_proj.weight", whole), ("out_proj.bias", whole) if self.out_proj.bias is not None else None
        parts = {"out": Part(out, LayerCall(LinearTransfer))}
        for part in ("q", "k", "v", "kv", "qkv") if packed else ("q", "k", "v"):
            start = "qkv".index(part) * width
            rows = slice(start, start + len(part) * width)
            weight = ("in_proj_weight", rows) if packed else (f"{part}_proj_weight", whole)
            usual = part == "qkv" or not packed
            blocks = weight, ("in_proj_bias", rows) if bias else None
            parts[part] = Part(blocks, LayerCall(LinearTransfer), usual)
        return parts

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """A projected input as `[batch, heads, length, head_dim]`."""
        if not batched:
            x = x[None]
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _joined(self, mixed: Tensor, batched: bool) -> Tensor:
        """The inverse of `_heads`."""
        x = mixed.transpose(1, 2).flatten(-2)
        if not batched:
            return x[0]
        return x if self.batch_first else x.transpose(0, 1)

    def _merged_mask(
        self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Both masks as one to be added to the scores `[batch, heads, length, source]`."""
        batch, heads, length, source = *q.shape[:3], k.shape[2]
        if k.shape[0] != batch:
            raise RuntimeError(f"key should have the query's batch of {batch} but has {k.shape[0]}")
        merged = None
        if mask is not None:
            allowed = [(length, source), (batch * heads, length, source)]
            if mask.shape not in allowed:
                raise RuntimeError(
                    f"attn_mask should have shape {allowed[0]} or {allowed[1]} but has {tuple(mask.shape)}"
                )
            merged = _additive("attn_mask", mask, q.dtype)
            merged = merged if merged.dim() == 2 else merged.view(batch, heads, length, source)
        if padding is not None:
            if padding.shape != (batch, source):
                raise RuntimeError(
                    f"key_padding_mask should have shape {(batch, source)} but has {tuple(padding.shape)}"
                )
            added = _additive("key_padding_mask", padding, q.dtype)[:, None, None, :]
            merged = added if merged is None else merged + added
        return merged

    @classmethod
    def refusal(cls, module: Any) -> str:
        """Layers with one of two rarely used options are refused."""
        if module.bias_k is not None or module.add_zero_attn:
            return "add_bias_kv and add_zero_attn are not supported"
        return ""


def _additive(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: not allowed) as zeros and minus infinities; a floating one as it is."""
    if mask.is_floating_point():
        return mask.to(dtype)
    if mask.dtype != torch.bool:
        raise AssertionError(f"only bool and floating types of {name} are supported but it is {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
