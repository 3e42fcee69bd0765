"""What the library does with every layer, as plain rows for the record."""

from typing import Any

from torch import Tensor, nn

import proxprop


def layer_rows(model: nn.Module, example: Tensor) -> list[dict[str, Any]]:
    """One row per module that owns parameters: what it is, whether it is converted, what that costs.

    Args:
        model: prepared for training.
        example: one batch of inputs; the plan depends on its size.
    """
    return [
        {
            "name": row.name,
            "kind": row.kind,
            "parameters": row.parameters,
            "status": row.status,
            "reason": row.reason,
            "space": row.plan.space if row.plan else None,
            "flops": float(row.plan.flops) if row.plan else None,
            "backprop_flops": float(row.plan.backprop_flops) if row.plan else None,
            "bytes": int(row.plan.bytes) if row.plan else None,
        }
        for row in proxprop.summary(model, example).rows
    ]
