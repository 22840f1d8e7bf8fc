"""Changes that some families make to the rows of queries, keys and values before the kernels split
them into heads. The kernels implement only the operations that most families share."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn import Parameter

from tandem.model import gradients, parallel
from tandem.model.attention import TreeParams
from tandem.model.layer.heads import HeadShape


class HeadRows(Protocol):
    """A family's change of queries, keys and values. The rows of queries, keys and values have the
    layout of `HeadShape` and the activations' dtype. `forward` and `backward` return rows in the
    same layout and dtype."""

    def forward(self, rows: torch.Tensor, tree: TreeParams) -> torch.Tensor:
        """The changed rows, which are then split into heads. Both `rows` and the result are [S,
        groups * (queries + 2) * size]."""

    def backward(
        self, gradient: torch.Tensor, rows: torch.Tensor, tree: TreeParams
    ) -> torch.Tensor:
        """The gradient of `rows`, of the same shape. Also adds the weights' gradients to their
        buffers.

        Args:
            gradient: the gradient of `forward`'s output, [S, groups * (queries + 2) * size].
            rows: the input of `forward`, of the same shape.
            tree: the argument `tree` of `forward`.
        """


class GrowingQueries:
    """Multiplies queries by `TreeParams.query_scale` (Ministral 3)."""

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape

    def forward(self, rows: torch.Tensor, tree: TreeParams) -> torch.Tensor:
        assert tree.query_scale is not None
        queries, others = grouped(rows, self._shape).split([self._shape.queries, 2], 2)
        scaled = queries.float() * tree.query_scale[:, None, None, None]
        return torch.cat([scaled.to(rows.dtype), others], 2).flatten(1)

    def backward(
        self, gradient: torch.Tensor, _rows: torch.Tensor, tree: TreeParams
    ) -> torch.Tensor:
        return self.forward(gradient, tree)


class NormalisedValues:
    """Normalises values, without a weight (Gemma 4). In layers without v_proj, the keys are also
    used as values."""

    def __init__(self, shape: HeadShape, *, keys_are_values: bool) -> None:
        self._shape, self._keys_are_values = shape, keys_are_values

    def forward(self, rows: torch.Tensor, _tree: TreeParams) -> torch.Tensor:
        queries, keys, values = self._parts(rows)
        return torch.cat(
            [queries, keys, _normalised(values.float(), self._eps)[0].to(rows.dtype)], 2
        ).flatten(1)

    def backward(
        self, gradient: torch.Tensor, rows: torch.Tensor, _tree: TreeParams
    ) -> torch.Tensor:
        queries, keys, values = grouped(gradient, self._shape).split([self._shape.queries, 1, 1], 2)
        normalised, inverse = _normalised(self._parts(rows)[2].float(), self._eps)
        grad = values.float()
        grad = inverse * (grad - normalised * (grad * normalised).mean(-1, keepdim=True))
        parts = [queries, keys, grad.to(gradient.dtype)]
        if self._keys_are_values:
            parts = [queries, (keys.float() + grad).to(gradient.dtype)]
        return torch.cat(parts, 2).flatten(1)

    @property
    def _eps(self) -> float:
        return self._shape.eps

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys, and values before their norm."""
        shape, own = self._shape, 1 if self._keys_are_values else 2
        heads = rows.view(len(rows), shape.groups, shape.queries + own, shape.size)
        parts = list(heads.split([shape.queries, *[1] * own], 2))
        return parts + parts[1:] if self._keys_are_values else parts


class WideNorm:
    """RMSNorm over all queries of a token, and another RMSNorm over all keys of a token (OLMo 3).
    The means of the squares are computed over the heads of all ranks.

    Args:
        shape: the layout of this rank's rows.
        q_norm: the weight for this rank's queries, [groups * queries * size].
        k_norm: the weight for this rank's keys, [groups * size].
        group: the ranks that share the heads.
    """

    def __init__(
        self, shape: HeadShape, q_norm: Parameter, k_norm: Parameter, group: dist.ProcessGroup
    ) -> None:
        self._shape, self._weights, self._group = shape, (q_norm, k_norm), group

    def forward(self, rows: torch.Tensor, _tree: TreeParams) -> torch.Tensor:
        parts = self._parts(rows)
        inverses = self._inverses(parts)
        for index, weight in enumerate(self._weights):
            parts[index] = parts[index] * inverses[index] * weight.float()
        return self._join(parts, rows)

    def backward(
        self, gradient: torch.Tensor, rows: torch.Tensor, _tree: TreeParams
    ) -> torch.Tensor:
        grads, parts = self._parts(gradient), self._parts(rows)
        inverses = self._inverses(parts)
        normalised = [part * inverse for part, inverse in zip(parts[:2], inverses, strict=True)]
        for index, weight in enumerate(self._weights):
            if gradients.has_gradient_buffer(weight):
                gradients.add(weight, (grads[index] * normalised[index]).sum(0))
            grads[index] = grads[index] * weight.float()
        means = self._means([g * n for g, n in zip(grads[:2], normalised, strict=True)])
        for index, mean in enumerate(means):
            grads[index] = inverses[index] * (grads[index] - normalised[index] * mean)
        return self._join(grads, rows)

    def _inverses(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """1 / sqrt(mean(x^2) + eps) of queries and of keys, [2, S, 1]."""
        squares = self._means([part.square() for part in parts[:2]])
        return (squares + self._shape.eps).rsqrt()

    def _means(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Means over the features of all ranks, for queries and for keys, [2, S, 1]."""
        means = torch.stack([part.mean(-1, keepdim=True) for part in parts])
        parallel.all_reduce(means, group=self._group)
        return means / self._group.size()

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, fp32 [S, features] each."""
        parts = grouped(rows.float(), self._shape).split([self._shape.queries, 1, 1], 2)
        return [part.flatten(1) for part in parts]

    def _join(self, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The rows that `_parts` splits, joined again in the dtype of `like`."""
        shape = self._shape
        heads = [part.view(len(part), shape.groups, -1, shape.size) for part in parts]
        return torch.cat(heads, 2).to(like.dtype).flatten(1)


def _normalised(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x^2) + eps) over the last dimension, and 1 / sqrt(...)."""
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * inverse, inverse


def grouped(rows: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    """The rows as [S, groups, queries + key + value, size]."""
    return rows.view(len(rows), shape.groups, shape.queries + 2, shape.size)
