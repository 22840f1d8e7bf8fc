"""Every topology computes what one rank computes, and two runs have the same bits.

`tests/oracle` injects the bugs that a comparison with one rank must find.
"""

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import SEED
from cut_rank import lora
from policies import write_random_adapter
from ranks import run_program
from tandem.families.adapter import WEIGHTS_FILE
from tandem.families.registry import read_arch, weight_rules
from tiny import write_random_model

pytestmark = pytest.mark.slow  # Ranks compute all selected topologies before the first test.

SCRIPT = Path(__file__).parent.parent / "cut_rank.py"
SP: dict[str, Any] = {"tensor": 2, "sequence": True}
CP: dict[str, Any] = {"context": 2}
PP: dict[str, Any] = {"pipeline": 2}
DENSE = {1: [{}], 2: [SP, SP, CP, CP, PP, PP, {"tensor": 2}], 4: [{**SP, **PP}, PP]}
MIXTURE = {
    1: [{}],
    4: [
        {},
        {"expert": 4},
        {"expert": 2, "expert_tensor": 2},
        SP,
        {**SP, "expert": 2},
        {**SP, "expert": 2, "expert_tensor": 2},
        {**SP, "expert": 2, "expert_tensor": 2},
        {"expert_tensor": 2},
        {"context": 4},
        {**CP, "expert": 4},
        {**SP, **CP, "expert": 2},
        CP,
        {**PP, "expert": 2},
        {**SP, **PP},
        {**CP, **PP},
    ],
}
BIASED = {1: [{}], 2: [{**SP, "expert": 2}, {**SP, "expert_tensor": 2}, CP, PP]}
UNEVEN = {1: [{}], 4: [{"pipeline": 4}]}
SMALL = ("qwen3_5", "gemma4", "smollm3")
MORE: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "gemma4_text": {"num_global_key_value_heads": 2},
    # A head of a delta net may read almost nothing from its state. The normalisation of such small
    # values would enlarge rounding errors.
    "qwen3_5_text": {"rms_norm_eps": 1e-3},
    "qwen3_5_moe_text": {"rms_norm_eps": 1e-3},
}
TOPOLOGIES: dict[str, dict[int, list[dict[str, Any]]]] = {
    "qwen3": DENSE,
    "qwen3_moe": MIXTURE,
    "glm4_moe": BIASED,
    "gpt_oss": BIASED,
    "glm4_moe_lite": {1: [{}], 2: [SP, {**SP, "expert": 2}, {"expert_tensor": 2}, PP]},
    "llama": UNEVEN,
    "gemma4_text": {1: [{}], 2: [SP, {"tensor": 2}, CP, PP]},
    "smollm3": {1: [{}], 2: [CP, PP]},
    "qwen3_vl_moe": {1: [{}], 2: [{**SP, "expert": 2}, {"expert_tensor": 2}]},
    "qwen3_5_text": {1: [{}], 2: [SP, {"tensor": 2}, PP]},
    "qwen3_5_moe_text": {1: [{}], 2: [SP, {**SP, "expert": 2}, {"expert_tensor": 2}, PP]},
}
CASES = [
    (family, world, number)
    for family, topologies in TOPOLOGIES.items()
    for world in list(topologies)[1:]
    for number in range(len(topologies[world]))
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each test the same sample of the topologies. With --all-cases, each test gets all
    topologies."""
    if {"family", "world", "number"} <= set(metafunc.fixturenames):
        every = metafunc.config.option.all_cases
        cases = CASES if every else random.Random(f"{SEED} topologies").sample(CASES, 4)
        metafunc.parametrize(("family", "world", "number"), cases)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """(family, world) -> number of the topology -> the results of each rank, for the topologies
    that the selected tests need. The fixture also maps each family to the directory of the family's
    model."""
    found: dict[Any, Any] = {}
    orders: dict[str, Any] = {}
    asked = _asked(
        [item.callspec.params for item in request.session.items if item.path == request.path]
    )
    for family in dict.fromkeys(family for family, _ in asked):
        topologies = TOPOLOGIES[family]
        directory = found[family] = tmp_path_factory.mktemp(family)
        # Large biases, many products, and the normalisation of small values from a state enlarge
        # rounding errors. So models with these features have smaller weights.
        small = topologies is BIASED or family == "glm4_moe_lite"
        spread = 0.5 if family.startswith(SMALL) else 1.0 if small else 2.5
        more = MORE.get(family, {})
        model = write_random_model(
            directory / "model", family=family, seed=9, spread=spread, **more
        )
        write_random_adapter(directory / "adapter", model, lora(family), seed=9)
        orders[str(directory)] = {
            world: {number: some[number] for number in sorted(asked.get((family, world), ()))}
            for world, some in topologies.items()
        }
    (file := tmp_path_factory.mktemp("orders") / "orders.json").write_text(json.dumps(orders))
    run_program(str(SCRIPT), str(file), seconds=500)
    for family, world in asked:
        all_sizes = {}
        for number in asked[family, world]:
            paths = [found[family] / f"{world}.{number}.{rank}.pt" for rank in range(world)]
            all_sizes[number] = [torch.load(path, weights_only=False) for path in paths]
        found[family, world] = all_sizes
    return found


def _asked(parameters: list[dict[str, Any]]) -> dict[tuple[str, int], set[int]]:
    """(family, world) -> the numbers of the topologies that tests with these parameters need."""
    asked: dict[tuple[str, int], set[int]] = defaultdict(set)
    for of_test in parameters:
        if "world" in of_test:
            key = of_test["family"], of_test["world"]
            asked[key] |= {
                of_test[name] for name in ("number", "first", "second") if name in of_test
            }
            asked[key[0], 1] = {0}
    return asked


def difference(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest relative difference in norm between `got` and `wanted`, over the losses, the
    gradients and the gradient norms of two optimizer steps."""
    pairs = [(got[f"loss{step}"], wanted[f"loss{step}"]) for step in range(2)]
    pairs += [
        (torch.tensor(got[f"norm{step}"]), torch.tensor(wanted[f"norm{step}"])) for step in range(2)
    ]
    for step in range(2):
        assert got[f"gradients{step}"].keys() == wanted[f"gradients{step}"].keys()
        pairs += [
            (got[f"gradients{step}"][name], value)
            for name, value in wanted[f"gradients{step}"].items()
        ]
    assert all(value.norm() > 0 for _, value in pairs)
    return max(
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in pairs
    )


def test_a_topology_computes_what_one_rank_computes(results, family, world, number):
    (alone,) = results[family, 1][0]
    for rank in results[family, world][number]:
        # A different order of sums changes the gradients of these two families by up to 1.5e-5 of
        # the norm.
        assert difference(rank, alone) <= (3e-5 if family in ("gpt_oss", "smollm3") else 1e-5)
        for name, value in alone["adapter"].items():
            assert (rank["adapter"][name] - value).norm() <= 1e-4 * value.norm(), name


def test_a_checkpoint_goes_from_any_topology_to_any_other(results, family, world, number):
    """Each topology reads the same adapter file and gathers the file's bits again. After training,
    all ranks of a topology have the same adapter."""
    saved = load_file(results[family] / "adapter" / WEIGHTS_FILE)
    first, *others = results[family, world][number]
    for rank in (first, *others):
        assert rank["loaded"].keys() == saved.keys()
        assert all(torch.equal(rank["loaded"][name], value) for name, value in saved.items())
        assert all(
            torch.equal(rank["adapter"][name], value) for name, value in first["adapter"].items()
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "world", "first", "second"),
    [("qwen3", 2, 0, 1), ("qwen3", 2, 2, 3), ("qwen3", 2, 4, 5), ("qwen3_moe", 4, 5, 6)],
)
def test_two_runs_have_the_same_bits(results, family, world, first, second):
    for one, other in zip(
        results[family, world][first], results[family, world][second], strict=True
    ):
        for name in ("gradients0", "gradients1", "adapter"):
            assert all(torch.equal(one[name][key], value) for key, value in other[name].items())


def test_whole_weights_are_sent_once(results, family, world, number):
    if family in ("gpt_oss", "qwen3_vl_moe"):
        pytest.skip("its merged weights are refused")
    arch = read_arch(str(results[family] / "model"))
    shapes = {name: shape for rule in weight_rules(arch) for name, shape in rule.sources.items()}

    def put_together(ranks):
        # The weight of a convolution, [features, 1, tokens], is sent as a matrix.
        whole = {
            name: torch.full(shape, torch.nan).flatten(1 if len(shape) > 1 else 0)
            for name, shape in shapes.items()
        }
        for name, of, values in (part for rank in ranks for part in rank["sent"]):
            several = [(name, of, values)]
            if len(of) == 3:
                experts = range(of[0].start, of[0].stop)
                several = [
                    (name.replace("*", str(e)), of[1:], v)
                    for e, v in zip(experts, values, strict=True)
                ]
            for one, box, value in several:
                assert whole[one][box].isnan().all(), f"{one} was sent twice"
                whole[one][box] = value
        return whole

    wanted = put_together(results[family, 1][0])
    for name, value in put_together(results[family, world][number]).items():
        torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=1e-6)
