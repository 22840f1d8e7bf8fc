"""Chooses how many tensors each layer saves for its backward pass, so that a row fits into the
device's memory. Each layer gets a `SaveLevel`.

Save levels affect only memory and time. Results have the same bits at each level.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tandem.families.adapter import sums_experts_apart
from tandem.model import device, parallel
from tandem.model.device import memory
from tandem.model.layer.sublayers import SaveLevel
from tandem.model.logprobs import working_bytes
from tandem.model.policy import Policy
from tandem.model.rows import RowTensors
from tandem.planning.memory import HEADROOM, SavedBytes, choose_levels

LEAST_HEADROOM = 2**29
"""The number of bytes that at least stay free, even if HEADROOM gives fewer. If ranks share layers,
`lower` can't help after memory runs out. If ranks share layers, twice the memory of a layer's
passes stays free, because the gaps that the allocator leaves grow with the tensors."""


def fit(policy: Policy, row: RowTensors) -> list[SaveLevel]:
    """Set every layer's `save_level` to the highest level that fits into memory for rows as long as
    `row`. Returns the level of each layer.

    The function measures one layer of each kind at each level on the device. The measurement takes
    as long as a few layers of a training step. On the CPU all layers save everything. The call is a
    collective operation of all ranks. The ranks of a pipeline stage choose the same levels.
    """
    layers = policy.gpt.decoder.layers
    levels = [SaveLevel.ALL] * len(layers)
    if device.is_cuda():
        try:
            levels = _fitting_levels(policy, row)
        except torch.OutOfMemoryError:  # Even one layer that saves all tensors does not fit.
            # The other ranks wait in the layer's collectives, so this rank must end.
            if policy.topology.sizes.layers_shared:
                raise
            levels = [SaveLevel.INPUT] * len(layers)  # the other ranks wait for this rank's levels
    stage = policy.topology.place.pipeline
    stage_levels = [
        theirs for number, theirs in parallel.gather_objects((stage, levels)) if number == stage
    ]
    levels = [min(layer_levels) for layer_levels in zip(*stage_levels, strict=True)]
    for layer, level in zip(layers, levels, strict=True):
        layer.save_level = level
    return levels


def _fitting_levels(policy: Policy, row: RowTensors) -> list[SaveLevel]:
    """The levels that fit into the memory of this rank's device."""
    parallel.connect_gradients(
        experts=sums_experts_apart(policy.arch, policy.lora, policy.topology.sizes)
    )
    kinds = [_measure(policy, row, layer) for layer in _kinds(policy)]
    most = memory.obtainable()
    head = working_bytes(len(row.item_token), policy.head) if policy.stage.last else 0
    if policy.topology.sizes.layers_shared:
        transient = 2 * max(max(kind.working.values()) for kind in kinds)
    else:
        transient = max(
            kind.saved[level] + kind.working[level] - kind.saved[SaveLevel.ALL]
            for kind in kinds
            for level in SaveLevel
        )
    budget = (
        most
        - max(HEADROOM * most, LEAST_HEADROOM)
        - torch.cuda.memory_allocated()
        - max(transient, head)
    )
    in_flight, layers = 1 + policy.stage.ahead, len(policy.gpt.decoder.layers)
    # The bytes are averages over all layers, because layers of several kinds alternate.
    saved = (
        sum(kind.layers * kind.saved[level] for kind in kinds) // layers for level in SaveLevel
    )
    everything, attention = choose_levels(
        SavedBytes(*(in_flight * size for size in saved)), layers, budget
    )
    least = layers - everything - attention
    counts = {SaveLevel.ALL: everything, SaveLevel.ATTENTION: attention, SaveLevel.INPUT: least}
    return [level for level, count in counts.items() for _ in range(count)]


def lower(policy: Policy) -> bool:
    """Makes layers save fewer tensors. Call this function after memory ran out. If layers have the
    level `ALL`, half of these layers get the level `ATTENTION`. If no layer has the level `ALL`,
    half of the layers with the level `ATTENTION` get the level `INPUT`. Returns False if all layers
    have the level `INPUT`, or if other ranks share this rank's layers. Ranks that share layers
    would wait for this rank in a collective operation.
    """
    layers = policy.gpt.decoder.layers
    if parallel.current().sizes.layers_shared:
        return False
    for level in (SaveLevel.ALL, SaveLevel.ATTENTION):
        if candidates := [layer for layer in layers if layer.save_level == level]:
            for layer in candidates[len(candidates) // 2 :]:
                layer.save_level = SaveLevel(level - 1)
            return True
    return False


@dataclass(frozen=True)
class _Kind:
    """Layers whose attention has the same shape. One layer of the kind was measured."""

    layers: int
    saved: dict[SaveLevel, int]  # Bytes that a layer saves.
    # Bytes that a layer's passes take in addition to the saved tensors. The number is largest at
    # the level `INPUT`, because the backward pass recomputes the tensors that other levels save.
    working: dict[SaveLevel, int]


def _kinds(policy: Policy) -> list[Any]:
    """The last layer of each kind of attention. The last layer is chosen, because the first layers
    of a mixture of experts may be dense."""
    return list({layer.kind: layer for layer in policy.gpt.decoder.layers}.values())


def _measure(policy: Policy, row: RowTensors, layer: Any) -> _Kind:
    row = policy.lay_out(row)
    # The hidden states are random, because a router would send equal hidden states to the same
    # experts. All ranks have the same hidden states.
    hidden = policy.no_hidden(row)
    hidden.normal_(generator=torch.Generator(hidden.device).manual_seed(0))
    inputs, hidden = policy.decoder_inputs(row), hidden.requires_grad_()

    def passes(level: SaveLevel) -> tuple[int, int]:
        memory.reset_peaks()
        layer.save_level, before = level, torch.cuda.memory_allocated()
        output, _ = layer(hidden, **inputs)
        saved = torch.cuda.memory_allocated() - before
        torch.autograd.grad(output, hidden, torch.zeros_like(output))
        return saved, memory.stats()["allocated_peak"] - before - saved

    # The first run only allocates cuBLAS's workspaces, which belong to no layer.
    passes(SaveLevel.INPUT)
    sizes = {level: passes(level) for level in SaveLevel}
    return _Kind(
        sum(other.kind == layer.kind for other in policy.gpt.decoder.layers),
        {level: size for level, (size, _) in sizes.items()},
        {level: size for level, (_, size) in sizes.items()},
    )
