"""Invalid values are refused with a message that names them."""

from typing import Any

import helm_sdkpy
import pytest

from helm import charts, matrix
from helm.charts import merged
from helm.kubernetes_api import KUEUE
from helm.matrix import HOSTS, JOBS, ONE_NODE, SHARED, at

FREE_KEYS = ("resources.requests", "resources.limits", "monitoring.dashboards.labels")
"""Mappings that accept any key."""

ONE_HOST = {"controllerHost": "a.b", "inferenceHost": "a.b"}
BAD: list[tuple[dict[str, Any], str]] = [
    # Required values and combinations.
    ({"cache": {"type": "ephemeral", "existingClaim": "c"}}, r"cache\.existingClaim=c is not used"),
    ({"fullnameOverride": "1a"}, "set fullnameOverride"),
    ({"secret": {"apiKey": ""}}, "/secret/apiKey"),
    ({"baseModel": ""}, "baseModel is empty"),
    ({"tinyModel": True}, "tinyModel writes a model of its own"),
    ({"gpuMode": "shared", "device": "cpu"}, "gpuMode=shared needs device=cuda"),
    (
        {"gpuMode": "shared", "trainer": {"enabled": False}},
        r"gpuMode=shared and trainer\.enabled=false",
    ),
    ({"trainer": {"replicas": 2}}, "'/trainer/replicas': maximum: got 2, want 1"),
    (
        merged(ONE_NODE, {"inference": {"replicas": 2}}),
        r"inference\.replicas=2 and accessMode ReadWriteOnce: .* use ReadWriteMany",
    ),
    ({"gpuMode": "shared", "trainer": {"gpus": 2}}, r"trainer\.gpus=2 and inference\.gpus=1"),
    (
        {"trainer": {"gpus": 3, "settings": {"tensorParallel": 2}}},
        r"trainer\.gpus=3 .*tensorParallel=2",
    ),
    (
        {"device": "cpu", "trainer": {"cpuRanks": 3, "settings": {"tensorParallel": 2}}},
        r"cpuRanks=3 .*tensorParallel=2",
    ),
    (
        {"trainer": {"extendedResources": {"nvidia.com/gpu": 1}}},
        r"trainer\.extendedResources has nvidia\.com/gpu",
    ),
    (
        {"inference": {"extendedResources": {"nvidia.com/gpu": 1}}},
        r"inference\.extendedResources has nvidia\.com/gpu",
    ),
    (
        merged(
            ONE_NODE,
            {
                "trainer": {"nodeSelector": {"pool": "a"}},
                "controller": {"nodeSelector": {"pool": "b"}},
            },
        ),
        r"controller\.nodeSelector and trainer\.nodeSelector have different values of pool",
    ),
    (
        {kind: {"existingClaim": "x"} for kind in ("data", "cache")},
        r"data\.existingClaim and cache\.existingClaim",
    ),
    ({"ingress": {"enabled": True}}, r"neither ingress\.controllerHost nor ingress\.inferenceHost"),
    (
        {"ingress": {"enabled": True, **ONE_HOST}},
        r"ingress\.controllerHost and ingress\.inferenceHost are the same",
    ),
    (
        {"gateway": {"enabled": True, "parentRefs": [{"name": "g"}]}},
        r"neither gateway\.controllerHost nor gateway\.",
    ),
    ({"gateway": {"enabled": True, **HOSTS}}, r"gateway\.parentRefs names no Gateway"),
    (
        {"gateway": {"enabled": True, "parentRefs": [{"name": "g"}], **ONE_HOST}},
        r"gateway\.controllerHost and gateway\.inferenceHost are the same",
    ),
    # Jobs.
    (at("trainer.parallelJobs", 2), r"parallelJobs=2 needs trainer\.executor=kubernetes"),
    (at("trainer.warmup.enabled", True), r"warmup\.enabled needs trainer\.executor=kubernetes"),
    (
        merged(
            ONE_NODE,
            {"trainer": {"executor": "kubernetes", "warmup": {"enabled": True}}},
        ),
        r"warmup\.enabled and accessMode ReadWriteOnce",
    ),
    (at("trainer.kernels.existingClaim", "k"), r"kernels\.existingClaim needs trainer\.executor"),
    (
        {
            "data": {"existingClaim": "d"},
            "trainer": {"executor": "kubernetes", "kernels": {"existingClaim": "d"}},
        },
        r"kernels\.existingClaim=d is mounted elsewhere",
    ),
    (at("trainer.settings.lingerSeconds", 9), r"lingerSeconds needs trainer\.executor=kubernetes"),
    (at("trainer.hosts", 2), r"trainer\.hosts=2 needs trainer\.executor=kubernetes"),
    (
        merged(SHARED, at("trainer.executor", "kubernetes")),
        "executor=kubernetes and gpuMode=shared",
    ),
    (
        merged(ONE_NODE, JOBS),
        r"trainer\.hosts=2 and accessMode ReadWriteOnce: .* use ReadWriteMany",
    ),
    (
        merged(JOBS, at("trainer.settings.launch", "resident")),
        "starts ranks by fork and ends their pods with the job",
    ),
    (
        merged(JOBS, at("trainer.settings.exitAfterJob", False)),
        "starts ranks by fork and ends their pods with the job",
    ),
    (merged(JOBS, at("trainer.settings.topology", "auto")), "the runner has no GPU: set the sizes"),
    (
        merged(JOBS, at("trainer.extraContainers", [{"name": "x"}])),
        r"trainer\.extraContainers: a Job's pod would not end",
    ),
    (
        merged(JOBS, {"trainer": {"podAnnotations": {f"{KUEUE}/job-min-parallelism": "1"}}}),
        "a job has all its ranks or none",
    ),
    (
        merged(JOBS, at("trainer.settings.tensorParallel", 16)),
        r"trainer\.gpus=4 times trainer\.hosts=2 is not a multiple of .*=16",
    ),
    (
        merged(JOBS, at("trainer.extraEnv", [{"name": "TANDEM_DEVICE"}])),
        "the variable TANDEM_DEVICE is there twice",
    ),
    (
        merged(JOBS, at("trainer.extraVolumes", [{"name": "shm"}])),
        r"trainer \(Job\): the volume shm is there twice",
    ),
    # Two items with one name in a pod; one of the items comes from the chart.
    (
        at("trainer.extraEnv", [{"name": "TANDEM_DEVICE"}]),
        "trainer: .* preflight: the variable TANDEM_DEVICE .*extraEnv",
    ),
    (
        at("inference.extraEnv", [{"name": "NVIDIA_VISIBLE_DEVICES"}]),
        "the variable NVIDIA_VISIBLE_DEVICES is there twice",
    ),
    (
        at("controller.extraEnv", [{"name": "A"}, {"name": "A"}]),
        "controller: .*the variable A is there twice",
    ),
    (
        merged(SHARED, at("inference.extraVolumes", [{"name": "data"}])),
        "engine: the volume data .*extraVolumes",
    ),
    (
        at("trainer.extraVolumeMounts", [{"name": "x", "mountPath": "/tmp"}]),
        "trainer: .* preflight: the mount /tmp .*extraVolumeMounts",
    ),
    (
        at("controller.extraContainers", [{"name": "preflight"}]),
        "controller: the container preflight .*extraContainers",
    ),
    (
        at("controller.service.nodePort", 30000),
        r"controller\.service\.nodePort=30000 has no use with type ClusterIP",
    ),
    (
        at("inference.service", {"type": "NodePort", "loadBalancerClass": "a.b/c"}),
        r"inference\.service\.loadBalancerClass=a\.b/c has no use with type NodePort",
    ),
    ({"monitoring": {"rules": {"enabled": True, "disabled": ["Nope"]}}}, "there is no alert Nope"),
    (
        {"monitoring": {"rules": {"enabled": True, "overrides": {"Nope": {"for": "1m"}}}}},
        "there is no alert Nope",
    ),
    # Single values; the schema refuses them.
    ({"device": "tpu"}, "'/device': value must be one of 'cuda', 'cpu'"),
    ({"data": {"size": "200"}}, "'/data/size': '200' does not match"),
    (
        {"trainer": {"resources": {"limits": {"memory": "64G B"}}}},
        "'/trainer/resources/limits/memory': '64G B'",
    ),
    (
        {"controller": {"service": {"port": 70000}}},
        "'/controller/service/port': maximum: got 70,000",
    ),
    ({"podSecurity": {"runAsUser": 0}}, "'/podSecurity/runAsUser': minimum: got 0"),
    ({"gateway": {"inferenceHost": "*."}}, r"'/gateway/inferenceHost': '\*\.' does not match"),
    ({"commonLabels": {"cost": 42}}, "'/commonLabels/cost': got number, want string"),
    # Typos inside lists.
    (
        {"trainer": {"tolerations": [{"keyy": "x"}]}},
        r"'/trainer/tolerations/0': additional properties 'keyy'",
    ),
    (
        {"trainer": {"affinity": {"nodeAffinitty": {}}}},
        r"'/trainer/affinity': additional properties 'nodeAffinitty'",
    ),
    (
        {"controller": {"extraEnv": [{"value": "x"}]}},
        r"'/controller/extraEnv/0': missing property 'name'",
    ),
]
"""Values in addition to the required ones, and a part of Helm's message."""


@pytest.mark.parametrize(("values", "named"), BAD, ids=[named for _, named in BAD])
def test_a_bad_value_is_refused_by_name(values, named):
    with pytest.raises(helm_sdkpy.InstallError, match=named):
        charts.render(merged(matrix.BASE, values))


def test_a_kubernetes_that_is_too_old_is_refused():
    with pytest.raises(
        helm_sdkpy.InstallError, match=r"requires kubeVersion: >=1\.30\.0-0 .* v1\.29\.9"
    ):
        charts.render(matrix.BASE, version="1.29.9")
    with pytest.raises(helm_sdkpy.InstallError, match=r"shared\.via=claim needs Kubernetes 1\.34"):
        charts.render({**matrix.BASE, "gpuMode": "shared"}, version="1.33.4")


def test_a_misspelt_key_in_any_mapping_is_refused_by_name():
    """One render with a misspelt key in every mapping: Helm's message names them all."""
    values, messages = matrix.BASE, []
    for section, key in {
        path[:-1]: f"{path[-1]}x" for path in matrix.keys(matrix.defaults())
    }.items():
        if not ".".join(section).endswith(FREE_KEYS):
            values = merged(values, at(".".join((*section, key)), 1))
            place = "".join(f"/{part}" for part in section)
            messages.append(f"at '{place}': additional properties '{key}' not allowed")
    with pytest.raises(helm_sdkpy.InstallError) as caught:
        charts.render(values)
    assert len(messages) > 30
    assert [message for message in messages if message not in str(caught.value)] == []
