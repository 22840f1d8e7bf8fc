"""Volumes per access mode, and pods placed so that all of them get their volumes."""

from pathlib import PurePosixPath

import pytest

from helm import matrix
from helm.charts import CHART, merged
from helm.matrix import (
    CASES,
    COMPONENT,
    INSTANCE,
    NAME,
    ONE_NODE,
    ROLES,
    SHARED_BY_RESOURCE,
    VALUES,
)
from helm.pods import containers
from helm.renders import case, component, container_of, of, pod_of, templates, value, volume

HOSTNAME = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
OWN = {"key": "own", "operator": "Exists"}


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
            claim = (
                volume(rendered, role, f"/{kind}").get("persistentVolumeClaim", {}).get("claimName")
            )
            assert claim == claims.get(kind)
        mounts = {m["mountPath"]: m for m in container_of(rendered, role)["volumeMounts"]}
        assert "readOnly" not in mounts["/data"]
        assert ("/models" in mounts) == bool(value(name, "models.existingClaim"))
        assert "/models" not in mounts or mounts["/models"]["readOnly"] is True
    assert (value("defaults", "data.keep"), value("defaults", "cache.keep")) == (True, False)
    made = {o["metadata"]["name"]: o for o in rendered.all("PersistentVolumeClaim")}
    assert set(made) == {
        claim for kind, claim in claims.items() if not value(name, f"{kind}.existingClaim")
    }
    for claim, obj in made.items():
        kind = claim.removeprefix("a-tandem-")
        assert obj["spec"]["accessModes"] == [value(name, f"{kind}.accessMode")]
        assert obj["spec"]["resources"] == {"requests": {"storage": value(name, f"{kind}.size")}}
        policy = obj["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
        assert policy == ("keep" if value(name, f"{kind}.keep") else None)


@pytest.mark.parametrize("name", CASES)
def test_no_volume_is_mounted_inside_another(name):
    """The runtime would have to create the directory as the host's root, and root has no rights on
    NFS with root_squash."""
    for obj, pod in case(name).pods():
        for container in containers(pod):
            paths = [PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]]
            inside = [str(path) for path in paths if set(path.parents) & set(paths)]
            assert inside == [], (obj["metadata"]["name"], container["name"])


@pytest.mark.parametrize("name", CASES)
def test_images_of_trainer_and_inference_have_a_volume_for_their_own_files(name):
    """In test pods, too: the root file system is read-only, and inference's entrypoint makes its
    TMPDIR."""
    image = (CHART.parents[1] / "Dockerfile").read_text()
    assert " TMPDIR=/private-cache/tmp " in image
    assert " XDG_CACHE_HOME=/private-cache " in image
    for obj, pod in case(name).pods():
        for container in containers(pod):
            if "-controller" not in container["image"]:
                paths = {mount["mountPath"] for mount in container["volumeMounts"]}
                assert "/private-cache" in paths, (obj["metadata"]["name"], container["name"])


@pytest.mark.parametrize(("given", "expected"), [("", None), ("-", ""), ("fast", "fast")])
def test_storage_classes(given, expected):
    rendered = of(
        merged(matrix.BASE, {kind: {"storageClass": given} for kind in ("data", "cache")})
    )
    assert [c["spec"].get("storageClassName") for c in rendered.all("PersistentVolumeClaim")] == [
        expected
    ] * 2


def required(pod: dict) -> list[dict]:
    return pod["spec"].get("affinity", {}).get("podAffinity", {}).get(REQUIRED, [])


@pytest.mark.parametrize("name", CASES)
def test_pods_must_share_a_node_only_if_a_volume_is_read_write_once(name):
    modes = {value(name, "data.accessMode")}
    if value(name, "cache.type") == "claim":
        modes.add(value(name, "cache.accessMode"))
    together = "ReadWriteOnce" in modes
    for obj, pod in case(name).pods():
        assert [term["topologyKey"] for term in required(pod)] == [HOSTNAME] * together, obj[
            "metadata"
        ]["name"]
    strategy = case(name).one("Deployment", "-controller")["spec"]["strategy"]["type"]
    assert strategy == ("Recreate" if together else "RollingUpdate"), (
        "a second pod may not get the volume"
    )


ONE_NODE_CASES = [name for name in CASES if "one node" in name] + ["2+2.yaml", "values-cpu.yaml"]


@pytest.mark.parametrize(
    "off", [(), ("trainer",), ("inference",), ("trainer", "inference")], ids="+".join
)
@pytest.mark.parametrize("name", ONE_NODE_CASES)
def test_one_pod_of_the_release_chooses_the_node_and_the_others_follow(name, off):
    """The first pod is the one that is hardest to place and not paused. Its affinity term names
    itself, so that it can be placed first, and the other pods, so that it returns to their node. No
    affinity term names a test pod: a test pod must not attract other pods.
    """
    rendered = of(merged(VALUES[name], {role: {"replicas": 0} for role in off}))
    running = {component(pod) for obj, pod in rendered.pods() if obj["spec"].get("replicas")}
    leader = next(one for one in ("trainer", "engine", "inference", "controller") if one in running)
    everybody = {"controller", "inference", "trainer", "engine"}
    for obj, pod in rendered.pods():
        (term,) = required(pod)
        assert term["labelSelector"]["matchLabels"] == {NAME: "tandem", INSTANCE: "a"}
        (among,) = term["labelSelector"]["matchExpressions"]
        assert (among["key"], among["operator"]) == (COMPONENT, "In")
        if obj["kind"] == "Pod":
            assert {leader} <= set(among["values"]) <= everybody
        elif component(pod) in running:
            assert set(among["values"]) == (everybody if component(pod) == leader else {leader}), (
                component(pod)
            )


@pytest.mark.parametrize("name", [*ONE_NODE_CASES, "defaults"])
def test_pods_tolerate_the_trainers_node_if_they_follow_it(name):
    values = merged(VALUES[name], {"controller": {"tolerations": [OWN]}})
    trainers = pod_of(case(name), "trainer")["spec"].get("tolerations", [])
    assert bool(trainers) == (value(name, "device") == "cuda")
    for obj, pod in of(values).pods():
        found = pod["spec"].get("tolerations", [])
        assert len(found) == len({str(toleration) for toleration in found})
        if pod["metadata"]["labels"][COMPONENT] == "controller":
            assert found == [OWN, *(trainers if name != "defaults" else [])], obj["metadata"][
                "name"
            ]
        else:
            assert all(toleration in found for toleration in trainers if name != "defaults"), obj[
                "metadata"
            ]["name"]


def test_a_users_tolerations_stay_without_gpus():
    roles = ("controller", "trainer", "inference")
    default = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    own = {role: {"tolerations": [OWN, default]} for role in roles}
    for obj, pod in of(merged(VALUES["values-cpu.yaml"], own)).pods():
        assert pod["spec"]["tolerations"] == [OWN], obj["metadata"]["name"]


@pytest.mark.parametrize("more", [{}, SHARED_BY_RESOURCE], ids=["dedicated", "shared"])
def test_a_users_affinity_stays(more):
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "db"}}}
    preferred = {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": term}]
    }
    own = {"podAffinity": {REQUIRED: [term], **preferred}, "podAntiAffinity": {REQUIRED: [term]}}
    values = merged(merged(matrix.BASE, ONE_NODE), merged(more, matrix.roles(affinity=own)))
    for pod in templates(of(values)).values():
        affinity = pod["spec"]["affinity"]
        assert affinity["podAntiAffinity"] == own["podAntiAffinity"]
        assert affinity["podAffinity"].items() >= preferred.items()
        assert len(required(pod)) == 2
        assert required(pod)[0] == term
