"""Volumes per access mode, and where pods are placed so that all of them get theirs."""

from __future__ import annotations

from itertools import permutations

import pytest

from helm import charts, matrix
from helm.charts import merged
from helm.reachability import selects
from helm.renders import CASES, ONE_NODE, ROLES, SHARED, case, component, container_of, of, pod_of, value, volume

HOSTNAME = "kubernetes.io/hostname"
NODES = {"n1": 0, "n2": 4, "n3": 4}
"""Nodes and their GPUs."""


def claim_of(name: str, role: str, path: str) -> str | None:
    rendered = case(name)
    found = volume(pod_of(rendered, role), container_of(rendered, role), path)
    return found.get("persistentVolumeClaim", {}).get("claimName")


@pytest.mark.parametrize("name", CASES)
def test_all_roles_mount_the_same_two_volumes(name):
    ephemeral = value(name, "cache.type") == "ephemeral"
    data = value(name, "data.existingClaim") or "a-tandem-data"
    cache = None if ephemeral else value(name, "cache.existingClaim") or "a-tandem-cache"
    for role in ROLES:
        assert claim_of(name, role, "/data") == data
        assert claim_of(name, role, "/cache") == cache
        mounts = {m["mountPath"]: m for m in container_of(case(name), role)["volumeMounts"]}
        assert "readOnly" not in mounts["/data"]
        assert ("/models" in mounts) == bool(value(name, "models.existingClaim"))
        assert "/models" not in mounts or mounts["/models"]["readOnly"] is True
    made = {o["metadata"]["name"]: o for o in case(name).all("PersistentVolumeClaim")}
    own = {"a-tandem-data", None if ephemeral else "a-tandem-cache"} & {data, cache}
    assert set(made) == own - {None}
    for claim, kind in (("a-tandem-data", "data"), ("a-tandem-cache", "cache")):
        if claim in made:
            assert made[claim]["spec"]["accessModes"] == [value(name, f"{kind}.accessMode")]
            assert made[claim]["spec"]["resources"] == {"requests": {"storage": value(name, f"{kind}.size")}}
            policy = made[claim]["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
            assert policy == ("keep" if value(name, f"{kind}.keep") else None)


def test_the_data_is_kept_unless_told_otherwise_and_the_cache_is_not():
    assert value("defaults", "data.keep") is True
    assert value("defaults", "cache.keep") is False


@pytest.mark.parametrize(("given", "expected"), [("", None), ("-", ""), ("fast", "fast")])
def test_storage_classes(given, expected):
    rendered = of(merged(matrix.BASE, {kind: {"storageClass": given} for kind in ("data", "cache")}))
    assert [c["spec"].get("storageClassName") for c in rendered.all("PersistentVolumeClaim")] == [expected] * 2


@pytest.mark.parametrize("name", CASES)
def test_pods_are_held_together_only_where_a_volume_demands_it(name):
    modes = {value(name, "data.accessMode")}
    if value(name, "cache.type") == "claim":
        modes.add(value(name, "cache.accessMode"))
    together = "ReadWriteOnce" in modes
    for obj, pod in case(name).pods():
        terms = required(pod)
        assert len(terms) == together, obj["metadata"]["name"]
        assert all(term["topologyKey"] == HOSTNAME for term in terms)
    strategy = case(name).one("Deployment")["spec"]["strategy"]["type"]
    assert strategy == ("Recreate" if together else "RollingUpdate"), "a second pod may not get the volume"


def required(pod: dict) -> list[dict]:
    return (
        pod["spec"].get("affinity", {}).get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    )


def gpus(pod: dict) -> int:
    return sum(int(c["resources"].get("limits", {}).get("nvidia.com/gpu", 0)) for c in pod["spec"]["containers"])


def feasible(pod: dict, bound: dict[str, str], pods: dict[str, dict]) -> set[str]:
    """The nodes where a scheduler may put a pod: GPUs that are free, and Kubernetes' rule for affinities to pods, with
    its exception for the first of a kind that matches itself."""
    free = {n: NODES[n] - sum(gpus(pods[p]) for p, at in bound.items() if at == n) for n in NODES}
    nodes = {node for node in NODES if free[node] >= gpus(pod)}
    for term in required(pod):
        matching = {bound[p] for p in bound if selects(term["labelSelector"], pods[p]["metadata"]["labels"])}
        if matching or not selects(term["labelSelector"], pod["metadata"]["labels"]):
            nodes &= matching
    return nodes


def endings(pods: dict[str, dict], bound: dict[str, str]) -> list[dict[str, str]]:
    """Every way in which a scheduler may end, whatever it takes first and chooses where it has a choice."""
    found: dict[frozenset, dict[str, str]] = {}
    seen, todo = set(), [bound]
    while todo:
        state = todo.pop()
        moves = [
            {**state, name: node} for name in pods if name not in state for node in feasible(pods[name], state, pods)
        ]
        if not moves:
            found[frozenset(state.items())] = state
        for move in moves:
            if (key := frozenset(move.items())) not in seen:
                seen.add(key)
                todo.append(move)
    return list(found.values())


def workers(rendered: charts.Rendered) -> dict[str, dict]:
    return {component(pod): pod for obj, pod in rendered.pods() if obj["kind"] != "Pod"}


ONE_NODE_CASES = [name for name in CASES if "one node" in name] + ["2+2.yaml", "values-cpu.yaml"]


@pytest.mark.parametrize("name", ONE_NODE_CASES)
def test_everything_starts_on_one_node_whoever_is_first(name):
    pods = workers(case(name))
    ends = endings(pods, {})
    assert len(ends) >= 2, "the scheduler has a choice of nodes"
    for end in ends:
        assert set(end) == set(pods), f"waits for ever: {set(pods) - set(end)}"
        assert len(set(end.values())) == 1
    assert all(NODES[node] >= sum(map(gpus, pods.values())) for end in ends for node in end.values())


@pytest.mark.parametrize("name", ONE_NODE_CASES)
def test_whoever_comes_back_goes_where_the_others_are(name):
    pods = workers(case(name))
    tests = {component(pod): pod for obj, pod in case(name).pods() if obj["kind"] == "Pod"}
    for gone in [g for size in range(1, len(pods)) for g in permutations(pods, size)]:
        for node in ("n2", "n3"):
            staying = {one: node for one in pods if one not in gone}
            ends = endings(pods, staying)
            assert ends == [dict.fromkeys(pods, node)] or [set(e.items()) for e in ends] == [
                {(one, node) for one in pods}
            ], gone
    for test, pod in tests.items():
        assert feasible(pod, dict.fromkeys(pods, "n3"), pods) == {"n3"}, f"{test} mounts the volume too"
        # It pulls nobody: a test that is left over somewhere must not decide where the trainer goes.
        for other in pods.values():
            assert not any(selects(term["labelSelector"], pod["metadata"]["labels"]) for term in required(other))


def test_two_releases_don_t_hold_each_other():
    mine, other = workers(case("one node", "a")), workers(case("one node", "b"))
    everybody = {f"a {c}": p for c, p in mine.items()} | {f"b {c}": p for c, p in other.items()}
    bound = {f"a {c}": "n2" for c in mine}
    ends = endings(everybody, bound)
    assert {end["b trainer"] for end in ends} == {"n2", "n3"}
    assert all(set(end) == set(everybody) for end in ends)
    assert all(len({end[f"b {c}"] for c in other}) == 1 for end in ends)


@pytest.mark.parametrize("more", [{}, {**SHARED, "shared": {"via": "resource"}}], ids=["dedicated", "shared"])
def test_a_user_s_affinity_stays(more):
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "db"}}}
    preferred = [{"weight": 1, "podAffinityTerm": term}]
    own = {
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [term],
            "preferredDuringSchedulingIgnoredDuringExecution": preferred,
        },
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
    }
    values = merged(merged(matrix.BASE, ONE_NODE), merged(more, {role: {"affinity": own} for role in ROLES}))
    for pod in workers(of(values)).values():
        affinity = pod["spec"]["affinity"]
        assert affinity["podAntiAffinity"] == own["podAntiAffinity"]
        assert affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == preferred
        assert len(required(pod)) == 2
        assert required(pod)[0] == term
