"""The ranks of the oracle: python oracle_rank.py DIRECTORY '{"<world>": [[seed, break or null],
...]}'.

A break is a mistake of `breaks.py`. The model and adapter of a case are in DIRECTORY/<seed>. Rank 0
writes the ranks' results to DIRECTORY/<seed>.<break>.pt. The results are the loss, the gradients
and the gradient norm of the first of three optimizer steps, and the trained tensors after the
steps."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import batched
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.append(str(Path(__file__).parents[1]))
from full import make_full, tensors, without_buffers
from oracle.breaks import BREAKS
from oracle.cases import Case, draw
from policies import make_policy
from ranks import fork_ranks
from tandem.model import device, parallel
from tandem.model.layer.sublayers import SaveLevel
from tandem.model.policy import Policy
from tandem.spool.schema import OptimizerSettings
from tandem.topology.sizes import Sizes
from tandem.training.optimizer import AdapterOptimizer
from tandem.training.sharded_adam import ShardedAdam

SETTINGS = OptimizerSettings(
    learning_rate=2e-3, weight_decay=0.1, max_grad_norm=1.0, eps=1e-5, beta2=0.95
)
ENTROPY = 0.1
STEPS = 3


def accumulate(case: Case, policy: Policy) -> torch.Tensor:
    """Adds the gradients of this rank's rows to the parameters' gradients. Returns the rank's part
    of the loss."""
    place, sizes, loss = (
        policy.topology.place,
        policy.topology.sizes,
        torch.zeros((), dtype=torch.float64),
    )

    def losses() -> Iterator[torch.Tensor]:
        for row in case.rows()[place.data :: sizes.data]:
            outputs = policy(row.tensors, temperature=case.temperature)
            of_row = (row.weights * (outputs.logprobs + ENTROPY * outputs.entropy)).sum()
            if place.context == 0 and policy.stage.last:
                loss.add_(of_row.item())
            yield of_row

    policy.stage.backward(losses())
    return loss


def train(
    case: Case,
    policy: Policy,
    optimizer: AdapterOptimizer | ShardedAdam,
    gradients: Callable[[], dict[str, torch.Tensor]],
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = accumulate(case, policy)
        optimizer.reduce_gradients()
        if step == 0:
            for group in (policy.topology.data, policy.topology.pipeline):
                parallel.all_reduce(loss, group=group)
            result = {
                "loss": float(loss),
                "norm": optimizer.gradient_norm(),
                "gradients": gradients(),
            }
        optimizer.step(optimizer.gradient_norm(), SETTINGS.learning_rate)
    return result


def compute(case: Case, directory: Path) -> dict[str, Any]:
    if case.lora is not None:
        policy = make_policy(directory / "model", case.lora, directory / "adapter")
        _keep(case, policy)
        adapter = AdapterOptimizer(policy, SETTINGS)

        def gathered() -> dict[str, torch.Tensor]:
            return policy.adapter.whole(
                {name: p.grad for name, p in policy.lora_parameters().items()}
            )

        return train(case, policy, adapter, gathered) | {"after": policy.adapter_tensors()}
    full = make_full(directory / "model", SETTINGS)
    _keep(case, full.policy)
    made = iter(range(2))

    def files(of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        path = directory / f"made-{os.environ['ORACLE_RUN']}-{next(made)}"
        return without_buffers(tensors(full.write(path, of)))

    def whole() -> dict[str, torch.Tensor]:
        full.optimizer._gather(full.optimizer._gradients)
        return files(full.gradients())

    result = train(case, full.policy, full.optimizer, whole) | {
        "after": files(dict(full.policy.base()))
    }
    return result | {"made": directory / f"made-{os.environ['ORACLE_RUN']}-1"}


def _keep(case: Case, policy: Policy) -> None:
    for layer in policy.gpt.decoder.layers:
        layer.save_level = SaveLevel(case.keep)


def run(
    rank: int,
    world: int,
    port: int,
    directory: Path,
    orders: list[tuple[int, str | None]],
    start: int,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device.activate("cpu")
    for number, (seed, mistake) in enumerate(orders):
        case = draw(seed)
        os.environ["ORACLE_RUN"] = f"{start}-{number}"
        with ExitStack() as broken:
            if mistake is not None:
                broken.enter_context(mock.patch.object(*BREAKS[mistake].patch, create=True))
            parallel.init_parallel(Sizes(**case.sizes), timeout_seconds=300)
            result = compute(case, directory / str(seed))
        if rank == 0:
            torch.save(result, directory / f"{seed}.{mistake}.pt")
        parallel.gather_objects(None)
        parallel.parallel_state.destroy_model_parallel()
    parallel.destroy()


def main(directory: Path, by_world: dict[str, list[tuple[int, str | None]]]) -> None:
    """Starts a new set of ranks after every few cases, because Gloo's threads of each case stay
    until the process ends."""
    starts = [
        (world, list(orders))
        for world, several in by_world.items()
        for orders in batched(several, 6)
    ]
    for number, (world, orders) in enumerate(starts):
        fork_ranks(int(world), run, directory, orders, number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
