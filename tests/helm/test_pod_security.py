"""Every pod of every render, including test pods, complies with restricted Pod Security and with further rules."""

import copy

import pytest

from helm.matrix import CASES
from helm.pod_security import violations
from helm.pods import containers, quantity
from helm.renders import case, is_shared, with_values


@pytest.mark.parametrize("name", CASES)
def test_pods_are_restricted(name):
    pods = case(name).pods()
    assert len(pods) >= (6 if is_shared(name) else 7)
    for obj, pod in pods:
        assert list(violations(pod)) == [], obj["metadata"]["name"]


@pytest.mark.parametrize("name", CASES)
def test_pods_comply_with_further_rules(name):
    for _, pod in case(name).pods():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        user = spec["securityContext"].get("runAsUser"), spec["securityContext"].get("fsGroup")
        assert user == ((None, None) if name == "OpenShift" else (2000, 0))
        sources = [s for v in spec["volumes"] for s in v.get("projected", {}).get("sources", [])]
        assert not any("serviceAccountToken" in source for source in sources)
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, container["name"]
            for kind, resource in (("requests", "cpu"), ("requests", "memory"), ("limits", "memory")):
                assert quantity(container["resources"][kind][resource]) > 0, (container["name"], kind, resource)


@pytest.mark.parametrize("name", CASES)
def test_the_account_has_no_token(name):
    rendered = case(name)
    account = rendered.one("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    names = {pod["spec"]["serviceAccountName"] for _, pod in rendered.pods()}
    assert names == {account["metadata"]["name"]}
    kinds = {obj["kind"] for obj in rendered.objects}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "Secret"}


@pytest.mark.parametrize(("given", "expected"), [("mine", "mine"), ("", "default")])
def test_an_existing_account(given, expected):
    rendered = with_values(serviceAccount={"create": False, "name": given})
    assert rendered.all("ServiceAccount") == []
    assert {pod["spec"]["serviceAccountName"] for _, pod in rendered.pods()} == {expected}


CONTAINER, INIT = "spec.containers.0", "spec.initContainers.0"
BREACHES = [
    ("spec.hostNetwork", True),
    ("spec.hostPID", True),
    ("spec.hostIPC", True),
    ("spec.securityContext.windowsOptions", {"hostProcess": True}),
    ("spec.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    ("spec.securityContext.seccompProfile", {"type": "Unconfined"}),
    ("spec.securityContext.seccompProfile", None),
    ("spec.securityContext.runAsNonRoot", None),
    ("spec.securityContext.runAsUser", 0),
    ("spec.securityContext.appArmorProfile", {"type": "Unconfined"}),
    ("spec.securityContext.seLinuxOptions", {"type": "spc_t"}),
    ("spec.securityContext.seLinuxOptions", {"user": "system_u"}),
    ("spec.volumes", [{"name": "x", "hostPath": {"path": "/"}}]),
    ("spec.volumes", [{"name": "x", "nfs": {"server": "a", "path": "/"}}]),
    ("spec.ephemeralContainers", [{"name": "debug"}]),
    ("metadata.annotations", {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}),
    *((f"{CONTAINER}.{field}", value) for field, value in (
        ("ports", [{"containerPort": 1, "hostPort": 1}]),
        ("livenessProbe", {"httpGet": {"host": "10.0.0.1"}}),
        ("lifecycle", {"postStart": {"tcpSocket": {"host": "10.0.0.1"}}}),
    )),
    *((f"{where}.securityContext.{field}", value) for where in (CONTAINER, INIT) for field, value in (
        ("privileged", True),
        ("allowPrivilegeEscalation", None),
        ("allowPrivilegeEscalation", True),
        ("capabilities", None),
        ("capabilities", {"drop": ["NET_RAW"]}),
        ("capabilities", {"drop": ["ALL"], "add": ["SYS_PTRACE"]}),
        ("procMount", "Unmasked"),
        ("runAsNonRoot", False),
        ("runAsUser", 0),
        ("seccompProfile", {"type": "Unconfined"}),
        ("appArmorProfile", {"type": "Unconfined"}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), BREACHES, ids=[f"{path}={value}" for path, value in BREACHES])
def test_the_rules_find_a_violation(path, value):
    pod = copy.deepcopy(case("defaults").one("StatefulSet", "trainer")["spec"]["template"])
    *parents, last = path.split(".")
    node = pod
    for part in parents:
        node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
    node[last] = value
    if value is None:
        del node[last]
    assert list(violations(pod))
