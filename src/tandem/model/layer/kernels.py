"""The computations between a layer's matrix products, forward and backward. On CUDA, each decorated
function is one kernel of `triton_kernels.py`. The other functions, and all functions on the CPU,
consist of torch's operations.

The kernels and the CPU versions compute in fp32 and round only the result. Tensors are contiguous
unless noted; S is the number of slots.
"""

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import gelu, pad, silu

from tandem.model.layer.heads import Heads, HeadShape

ALPHA, LIMIT = 1.702, 7.0  # constants of `clamped_swiglu`


def _one_kernel_on_cuda[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Decorates `function`. For tensors on a GPU, the decorated function calls the function of the
    same name in `triton_kernels.py`."""

    @functools.cache
    def on_cuda() -> Callable[P, T]:
        from tandem.model.layer import triton_kernels  # CPU builds of torch come without Triton

        kernel: Callable[P, T] = getattr(triton_kernels, function.__name__)
        return kernel

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        tensor = next(argument for argument in args if isinstance(argument, torch.Tensor))
        shape = next((argument for argument in args if isinstance(argument, HeadShape)), None)
        if not tensor.is_cuda or (shape is not None and shape.partial_rope):
            return function(*args, **kwargs)
        return on_cuda()(*args, **kwargs)

    return call


@_one_kernel_on_cuda
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019, arXiv:1910.07467). The
    result is [S, features], in x's dtype.

    Args:
        x: the input, [S, features].
        weight: the norm's weight, [features].
    """
    return (_normalise(x.float(), eps)[0] * weight).to(x.dtype)


@_one_kernel_on_cuda
def rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, plus: torch.Tensor
) -> torch.Tensor:
    """The sum of `plus` and the gradient of x, [S, features], in x's dtype.

    Args:
        gradient: the gradient of the output, [S, features].
        x: the input, [S, features].
        weight: the norm's weight, [features].
        plus: the gradient of the residual connection, [S, features].
    """
    grad_x = _norm_gradient(gradient.float() * weight, *_normalise(x.float(), eps))
    return (plus + grad_x).to(x.dtype)


def norm_weight_gradient(gradient: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
    """The gradient of `rms_norm`'s weight, fp32 [features].

    Args:
        gradient: the gradient of the output, [S, features].
        x: the input, [S, features].
    """
    return (gradient.float() * _normalise(x.float(), eps)[0]).sum(0)


@_one_kernel_on_cuda
def split_heads(
    qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor, length: int
) -> Heads:
    """The heads of a row: normalised and rotated queries and keys, and values, in the dtype of
    `qkv`.

    Args:
        qkv: the fused rows, [S, groups * (queries + 2) * size], in the layout of `HeadShape`.
        cos, sin: the cosines and sines of RoPE, [S, size / 2] (Su et al., 2021, arXiv:2104.09864).
            Dimension i is paired with dimension i + size / 2. With `partial_rope`, cos and sin have
            n columns, n < size / 2, and dimension i is paired with dimension i + n.
        length: the number of slots of the result, at least S; slots from S on are zero.
    """
    parts = list(_group_heads(qkv.float(), shape).split([shape.queries, 1, 1], 2))
    for index, weight in enumerate((shape.q_norm, shape.k_norm)):
        if weight is not None:
            parts[index] = _normalise(parts[index], shape.eps)[0] * weight
        parts[index] = _rotate(parts[index], cos, sin)
    q, k, v = (
        pad(part.flatten(1, 2).to(qkv.dtype), (0, 0, 0, 0, 0, length - len(qkv))) for part in parts
    )
    return q, k, v


@_one_kernel_on_cuda
def split_heads_backward(
    gradients: Heads, qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The gradient of `qkv`, in `qkv`'s shape and dtype.

    Args:
        gradients: the gradients of `split_heads`' results, [length, heads, size]. The strides of
            slots and heads may have any value.
        qkv: the input of `split_heads`, [S, groups * (queries + 2) * size].
        cos, sin: as in `split_heads`.
    """
    inputs = _group_heads(qkv.float(), shape).split([shape.queries, 1, 1], 2)
    parts = [
        gradient[: len(qkv)].float().unflatten(1, (shape.groups, -1)) for gradient in gradients
    ]
    for index, weight in enumerate((shape.q_norm, shape.k_norm)):
        parts[index] = _rotate(parts[index], cos, -sin)
        if weight is not None:
            parts[index] = _norm_gradient(
                parts[index] * weight, *_normalise(inputs[index], shape.eps)
            )
    return torch.cat([part.to(qkv.dtype) for part in parts], 2).flatten(1)


def head_norm_gradients(
    gradients: Heads, qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor
) -> list[torch.Tensor]:
    """The gradients of the weights that normalise queries and keys, fp32 [size] each. The arguments
    are those of `split_heads_backward`."""
    inputs, weight_gradients = _group_heads(qkv, shape).split([shape.queries, 1, 1], 2), []
    for gradient, heads in zip(gradients[:2], inputs[:2], strict=True):
        grad_normalised = gradient[: len(qkv)].float().unflatten(1, (shape.groups, -1))
        grad_normalised = _rotate(grad_normalised, cos.float(), -sin.float())
        weight_gradients.append(
            (grad_normalised * _normalise(heads.float(), shape.eps)[0]).sum((0, 1, 2))
        )
    return weight_gradients


@_one_kernel_on_cuda
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer, 2020, arXiv:2002.05202), [S, features]. `gate_up` is [S, 2 *
    features], gate first."""
    gate, up = gate_up.float().chunk(2, -1)
    return (silu(gate) * up).to(gate_up.dtype)


@_one_kernel_on_cuda
def swiglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors: the gradient of `gate_up`, and `swiglu(gate_up)`. On CUDA, the gradient
    overwrites `gate_up`. `gradient`: [S, features]; `gate_up`: [S, 2 * features]."""
    gate, up = gate_up.float().chunk(2, -1)
    sigmoid, gradient = gate.sigmoid(), gradient.float()
    activated = gate * sigmoid
    grad_gate = gradient * up * (sigmoid + activated * (1 - sigmoid))
    grad_gate_up = torch.cat((grad_gate, gradient * activated), -1)
    return grad_gate_up.to(gate_up.dtype), (activated * up).to(gate_up.dtype)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`swiglu` with GELU's tanh approximation in place of SiLU (Hendrycks and Gimpel, 2016,
    arXiv:1606.08415). `gate_up` [S, 2 * features] -> [S, features]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def geglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors: the gradient of `gate_up`, and `geglu(gate_up)`. `gradient`: [S,
    features]; `gate_up`: [S, 2 * features]."""
    gate, up = gate_up.float().chunk(2, -1)
    activated, gradient = gelu(gate, approximate="tanh"), gradient.float()
    grad_gate = torch.ops.aten.gelu_backward(gradient * up, gate, approximate="tanh")
    grad_gate_up = torch.cat((grad_gate, gradient * activated), -1)
    return grad_gate_up.to(gate_up.dtype), (activated * up).to(gate_up.dtype)


@_one_kernel_on_cuda
def expert_swiglu(gate_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """`swiglu` times each assignment's probability (`probs`, fp32 [N]). The result is [N,
    features]."""
    return (swiglu(gate_up.float()) * probs[:, None]).to(gate_up.dtype)


@_one_kernel_on_cuda
def expert_swiglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns three tensors: the gradient of `gate_up`; `expert_swiglu(gate_up, probs)`; the
    gradient of `probs`. On CUDA, the gradient of `gate_up` overwrites `gate_up`.

    Args:
        gradient: the gradient of the output, [N, features].
        gate_up: the features of gate and up, [N, 2 * features], gate first.
        probs: fp32 [N], each assignment's probability.
    """
    grad_gate_up, activated = swiglu_backward(gradient * probs[:, None], gate_up.float())
    return (
        grad_gate_up.to(gate_up.dtype),
        (activated * probs[:, None]).to(gate_up.dtype),
        (gradient.float() * activated).sum(-1),
    )


def expert_geglu(gate_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """`geglu` times each assignment's probability (`probs`, fp32 [N]). The result is [N,
    features]."""
    return (geglu(gate_up.float()) * probs[:, None]).to(gate_up.dtype)


def expert_geglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns three tensors: the gradient of `gate_up`; `expert_geglu(gate_up, probs)`; the
    gradient of `probs`.

    Args:
        gradient: the gradient of the output, [N, features].
        gate_up: the features of gate and up, [N, 2 * features], gate first.
        probs: fp32 [N], each assignment's probability.
    """
    grad_gate_up, activated = geglu_backward(gradient * probs[:, None], gate_up.float())
    return (
        grad_gate_up.to(gate_up.dtype),
        (activated * probs[:, None]).to(gate_up.dtype),
        (gradient.float() * activated).sum(-1),
    )


def clamped_swiglu(gate_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's (up + 1) * gate * sigmoid(1.702 * gate), times each assignment's probability
    (`probs`, fp32 [N]). The result is [N, features]. Before the product, gate is clamped to at most
    7, and up is clamped to the range from -7 to 7 (`GptOssExperts` in transformers)."""
    gate, up = _clamp(gate_up)
    return (gate * torch.sigmoid(ALPHA * gate) * (up + 1) * probs[:, None]).to(gate_up.dtype)


def clamped_swiglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns three tensors: the gradient of `gate_up`; `clamped_swiglu(gate_up, probs)`; the
    gradient of `probs`.

    Args:
        gradient: the gradient of the output, [N, features].
        gate_up: the features of gate and up, [N, 2 * features], gate first.
        probs: fp32 [N], each assignment's probability.
    """
    gate, up = _clamp(gate_up)
    sigmoid, gradient = torch.sigmoid(ALPHA * gate), gradient.float()
    glu = gate * sigmoid
    activated = glu * (up + 1)
    scaled = gradient * probs[:, None]
    grad_gate = scaled * (up + 1) * (sigmoid + ALPHA * glu * (1 - sigmoid))
    inside = torch.cat(
        (gate_up.chunk(2, -1)[0] <= LIMIT, gate_up.chunk(2, -1)[1].abs() <= LIMIT), -1
    )
    grad_gate_up = torch.cat((grad_gate, scaled * glu), -1).mul_(inside)
    return (
        grad_gate_up.to(gate_up.dtype),
        (activated * probs[:, None]).to(gate_up.dtype),
        (gradient * activated).sum(-1),
    )


@_one_kernel_on_cuda
def sum_assignments(
    values: torch.Tensor, assignments: torch.Tensor, plus: torch.Tensor
) -> torch.Tensor:
    """For each token, the sum of `plus` [S, features] and the values of the token's assignments.

    Args:
        values: one row per assignment of a token to an expert, [N, features].
        assignments: int64 [S, k], the indices of each token's assignments.
    """
    return (plus.float() + values[assignments].float().sum(1)).to(plus.dtype)


def _clamp(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gate_up.float().chunk(2, -1)
    return gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)


def _group_heads(qkv: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    return qkv.view(len(qkv), shape.groups, shape.queries + 2, shape.size)


def _normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x^2) + eps) over the last dimension, and the factor 1 / sqrt(mean(x^2) +
    eps)."""
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * inverse, inverse


def _norm_gradient(
    gradient: torch.Tensor, normalised: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """The gradient of the input of `_normalise`, from the gradient of its first result."""
    return inverse * (gradient - normalised * (gradient * normalised).mean(-1, keepdim=True))


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The heads, rotated by RoPE. `heads` and the result: [S, groups, heads, size]."""
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cos, sin = cos[:, None, None], sin[:, None, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
