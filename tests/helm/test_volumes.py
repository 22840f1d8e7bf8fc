"""Volumes per access mode, and pods placed so that all of them get their volumes."""

from itertools import combinations

import pytest

from helm import matrix
from helm.charts import merged
from helm.matrix import CASES, COMPONENT, ONE_NODE, ROLES, SHARED_BY_RESOURCE, VALUES
from helm.reachability import selects
from helm.renders import case, component, container_of, of, pod_of, templates, value, volume

HOSTNAME = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
OWN = {"key": "own", "operator": "Exists"}
NODES = {"n1": 0, "n2": 4, "n3": 4}
"""Node → its number of GPUs."""


@pytest.mark.parametrize("name", CASES)
def test_all_roles_mount_the_same_two_volumes(name):
    rendered = case(name)
    claims = {
        kind: value(name, f"{kind}.existingClaim") or f"a-tandem-{kind}"
        for kind in ("data", "cache")
        if kind == "data" or value(name, "cache.type") == "claim"
    }
    for role in ROLES:
        for kind in ("data", "cache"):
            claim = volume(rendered, role, f"/{kind}").get("persistentVolumeClaim", {}).get("claimName")
            assert claim == claims.get(kind)
        mounts = {m["mountPath"]: m for m in container_of(rendered, role)["volumeMounts"]}
        assert "readOnly" not in mounts["/data"]
        assert ("/models" in mounts) == bool(value(name, "models.existingClaim"))
        assert "/models" not in mounts or mounts["/models"]["readOnly"] is True
    assert (value("defaults", "data.keep"), value("defaults", "cache.keep")) == (True, False)
    made = {o["metadata"]["name"]: o for o in rendered.all("PersistentVolumeClaim")}
    assert set(made) == {claim for kind, claim in claims.items() if not value(name, f"{kind}.existingClaim")}
    for claim, obj in made.items():
        kind = claim.removeprefix("a-tandem-")
        assert obj["spec"]["accessModes"] == [value(name, f"{kind}.accessMode")]
        assert obj["spec"]["resources"] == {"requests": {"storage": value(name, f"{kind}.size")}}
        policy = obj["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
        assert policy == ("keep" if value(name, f"{kind}.keep") else None)


@pytest.mark.parametrize(("given", "expected"), [("", None), ("-", ""), ("fast", "fast")])
def test_storage_classes(given, expected):
    rendered = of(merged(matrix.BASE, {kind: {"storageClass": given} for kind in ("data", "cache")}))
    assert [c["spec"].get("storageClassName") for c in rendered.all("PersistentVolumeClaim")] == [expected] * 2


@pytest.mark.parametrize("name", CASES)
def test_pods_must_share_a_node_only_if_a_volume_is_read_write_once(name):
    modes = {value(name, "data.accessMode")}
    if value(name, "cache.type") == "claim":
        modes.add(value(name, "cache.accessMode"))
    together = "ReadWriteOnce" in modes
    for obj, pod in case(name).pods():
        assert [term["topologyKey"] for term in required(pod)] == [HOSTNAME] * together, obj["metadata"]["name"]
    strategy = case(name).one("Deployment")["spec"]["strategy"]["type"]
    assert strategy == ("Recreate" if together else "RollingUpdate"), "a second pod may not get the volume"


def required(pod: dict) -> list[dict]:
    return pod["spec"].get("affinity", {}).get("podAffinity", {}).get(REQUIRED, [])


def gpus(pod: dict) -> int:
    return sum(int(c["resources"].get("limits", {}).get("nvidia.com/gpu", 0)) for c in pod["spec"]["containers"])


def feasible(pod: dict, bound: dict[str, str], pods: dict[str, dict]) -> set[str]:
    """The nodes on which a scheduler may put a pod: those with enough free GPUs that satisfy its affinities to pods.

    An affinity that no bound pod matches is ignored if the pod matches it itself.
    """
    free = {n: NODES[n] - sum(gpus(pods[p]) for p, at in bound.items() if at == n) for n in NODES}
    nodes = {node for node in NODES if free[node] >= gpus(pod)}
    for term in required(pod):
        matching = {bound[p] for p in bound if selects(term["labelSelector"], pods[p]["metadata"]["labels"])}
        if matching or not selects(term["labelSelector"], pod["metadata"]["labels"]):
            nodes &= matching
    return nodes


def outcomes(pods: dict[str, dict], bound: dict[str, str]) -> list[dict[str, str]]:
    """Every final placement (pod → node), over all orders of the pods and all feasible nodes."""
    final, seen, todo = [], set(), [bound]
    while todo:
        state = todo.pop()
        if (key := frozenset(state.items())) in seen:
            continue
        seen.add(key)
        unbound = [name for name in pods if name not in state]
        moves = [{**state, name: node} for name in unbound for node in feasible(pods[name], state, pods)]
        todo += moves
        if not moves:
            final.append(state)
    return final


ONE_NODE_CASES = [name for name in CASES if "one node" in name] + ["2+2.yaml", "values-cpu.yaml"]


@pytest.mark.parametrize("off", [(), ("trainer",), ("inference",), ("trainer", "inference")], ids="+".join)
@pytest.mark.parametrize("name", ONE_NODE_CASES)
def test_all_pods_start_on_one_node_in_any_order_and_wait_for_no_paused_role(name, off):
    rendered = of(merged(VALUES[name], {role: {"replicas": 0} for role in off}))
    pods = {component(pod): pod for obj, pod in rendered.pods() if obj["spec"].get("replicas")}
    assert pods.keys() >= {"controller"}
    ends = outcomes(pods, {})
    assert len(ends) >= 2, "the scheduler can choose between nodes"
    for end in ends:
        assert set(end) == set(pods), f"pending forever: {set(pods) - set(end)}"
        (node,) = set(end.values())
        assert NODES[node] >= sum(map(gpus, pods.values()))


@pytest.mark.parametrize("name", ONE_NODE_CASES)
def test_pods_return_to_the_node_of_the_others(name):
    pods = templates(case(name))
    for gone in [g for size in range(1, len(pods)) for g in combinations(pods, size)]:
        for node in ("n2", "n3"):
            assert outcomes(pods, {pod: node for pod in pods if pod not in gone}) == [dict.fromkeys(pods, node)], gone
    for pod in (pod for obj, pod in case(name).pods() if obj["kind"] == "Pod"):
        assert feasible(pod, dict.fromkeys(pods, "n3"), pods) == {"n3"}, "a test pod mounts the volume too"
        # A test pod that is left on a node must not attract the trainer.
        for other in pods.values():
            assert not any(selects(term["labelSelector"], pod["metadata"]["labels"]) for term in required(other))


@pytest.mark.parametrize("name", [*ONE_NODE_CASES, "defaults"])
def test_pods_tolerate_the_trainers_node_if_they_follow_it(name):
    values = merged(VALUES[name], {"controller": {"tolerations": [OWN]}})
    trainers = pod_of(case(name), "trainer")["spec"].get("tolerations", [])
    assert bool(trainers) == (value(name, "device") == "cuda")
    for obj, pod in of(values).pods():
        found = pod["spec"].get("tolerations", [])
        assert len(found) == len({str(toleration) for toleration in found})
        if pod["metadata"]["labels"][COMPONENT] == "controller":
            assert found == [OWN, *(trainers if name != "defaults" else [])], obj["metadata"]["name"]
        else:
            assert all(toleration in found for toleration in trainers if name != "defaults"), obj["metadata"]["name"]


def test_two_releases_may_use_different_nodes():
    mine, other = templates(case("one node", "a")), templates(case("one node", "b"))
    pods = {f"a {c}": p for c, p in mine.items()} | {f"b {c}": p for c, p in other.items()}
    ends = outcomes(pods, {f"a {c}": "n2" for c in mine})
    assert {end["b trainer"] for end in ends} == {"n2", "n3"}
    assert all(set(end) == set(pods) for end in ends)
    assert all(len({end[f"b {c}"] for c in other}) == 1 for end in ends)


@pytest.mark.parametrize("more", [{}, SHARED_BY_RESOURCE], ids=["dedicated", "shared"])
def test_a_users_affinity_stays(more):
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "db"}}}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": term}]}
    own = {"podAffinity": {REQUIRED: [term], **preferred}, "podAntiAffinity": {REQUIRED: [term]}}
    values = merged(merged(matrix.BASE, ONE_NODE), merged(more, matrix.roles(affinity=own)))
    for pod in templates(of(values)).values():
        affinity = pod["spec"]["affinity"]
        assert affinity["podAntiAffinity"] == own["podAntiAffinity"]
        assert affinity["podAffinity"].items() >= preferred.items()
        assert len(required(pod)) == 2
        assert required(pod)[0] == term
