"""Pods, test pods too, have the security contexts and no other fields than those of `helm.pods`, which comply with
the profile restricted of Kubernetes' Pod Security Standards; their account has no rights."""

import copy

import pytest

from helm.matrix import CASES
from helm.pods import FIELDS, breaches, containers, quantity
from helm.renders import case, is_shared, with_values


@pytest.mark.parametrize("name", CASES)
def test_pods_are_restricted(name):
    rendered = case(name)
    account = rendered.one("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert len(rendered.pods()) >= (6 if is_shared(name) else 7)
    for obj, pod in rendered.pods():
        assert breaches(pod, assigned_user=name == "OpenShift") == [], obj["metadata"]["name"]
        assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
        for container in containers(pod):
            for kind, resource in (("requests", "cpu"), ("requests", "memory"), ("limits", "memory")):
                assert quantity(container["resources"][kind][resource]) > 0, (container["name"], kind, resource)
    kinds = {obj["kind"] for obj in rendered.objects}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "Secret"}


@pytest.mark.parametrize(("given", "expected"), [("mine", "mine"), ("", "default")])
def test_an_existing_account(given, expected):
    rendered = with_values(serviceAccount={"create": False, "name": given})
    assert rendered.all("ServiceAccount") == []
    assert {pod["spec"]["serviceAccountName"] for _, pod in rendered.pods()} == {expected}


@pytest.mark.parametrize("kind", [*FIELDS, "context", "token"])
def test_a_breach_is_seen(kind):
    pod = copy.deepcopy(case("defaults").one("StatefulSet", "trainer")["spec"]["template"])
    spec, container = pod["spec"], pod["spec"]["initContainers"][0]
    node = {
        "pod": spec, "container": container, "volume": spec["volumes"][0], "mount": container["volumeMounts"][0],
        "port": spec["containers"][0]["ports"][0], "probe": spec["containers"][0]["livenessProbe"],
        "source": spec["volumes"][-1]["projected"]["sources"][0], "context": container["securityContext"],
        "token": spec,
    }[kind]  # fmt: skip
    node["automountServiceAccountToken" if kind == "token" else "privileged"] = True
    assert breaches(pod)
