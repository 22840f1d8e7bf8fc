"""values.schema.json: strict everywhere. A value has the type of its default, unless `SPECIAL`
describes the value.

Nothing is `required`: `helm upgrade --reuse-values` from an older chart checks values that lack
this chart's new keys. The templates then merge the values into the defaults
(templates/_checks.tpl).
"""

from typing import Any

import values

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
NAMED: Schema = {
    "type": "array",
    "items": {"type": "object", "required": ["name"], "properties": {"name": TEXT}},
}
MEMORY: Schema = {"type": "string", "pattern": "^[1-9][0-9]*(Mi|Gi|Ti)$"}
CPU: Schema = {"type": ["string", "number"], "pattern": "^([0-9]+m|[0-9]+([.][0-9]+)?)$"}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", "maxLength": 63}
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
HOST: Schema = {"type": "string", "pattern": f"^(([*][.])?{_LABEL}([.]{_LABEL})*)?$"}
KEY: Schema = {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}
COUNT: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
SECONDS: Schema = {"type": "integer", "minimum": 0}


def enum(*words: str) -> Schema:
    return {"enum": list(words)}


def closed(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def removable(schema: Schema) -> Schema:
    """`schema`, which then also allows "". The empty string removes the value. A null does not
    remove it, because the templates replace a null by the default."""
    return schema | {"pattern": f"^({schema['pattern'].removeprefix('^').removesuffix('$')})?$"}


def optional(schema: Schema) -> Schema:
    """`schema`, or null, which stands for the program's own default."""
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return schema | {"type": [*types, "null"]}


_QUANTITIES = closed(
    **{"cpu": removable(CPU), "memory": removable(MEMORY), "ephemeral-storage": removable(MEMORY)}
)
_ACCESS = enum("ReadWriteMany", "ReadWriteOnce")
_POSITIVE: Schema = {"type": "number", "exclusiveMinimum": 0}

# A key is the full name of a value, or "*." and the last part of a name. Such a last part has the
# same meaning in the whole file.
SPECIAL: dict[str, Schema] = {
    "device": enum("cuda", "cpu"),
    "gpuMode": enum("dedicated", "shared"),
    "settings.dtype": optional(enum("auto", "float32", "bfloat16")),
    "settings.freeGpuBytes": optional({"type": "integer", "minimum": 2**20}),
    "settings.logFormat": optional(enum("text", "json")),
    "settings.maxLoraRank": optional(COUNT),
    "settings.weights": optional(enum("adapter", "merged")),
    "trainer.executor": enum("local", "kubernetes"),
    "trainer.hosts": COUNT,
    "trainer.parallelJobs": COUNT,
    "trainer.runner.serviceAccountName": NAME,
    "trainer.settings.topology": optional(enum("given", "auto")),
    "settings.transport": optional(enum("auto", "merge", "nccl", "volume")),
    "settings.expertLora": optional({"type": "boolean"}),
    "controller.settings.maxRequestBytes": optional({"type": "integer", "minimum": 2**20}),
    "controller.settings.keepCheckpoints": optional(COUNT),
    "controller.settings.keepEvery": optional(COUNT),
    "controller.settings.keepDays": optional(_POSITIVE),
    "trainer.settings.launch": optional(enum("fork", "torchrun", "resident")),
    "trainer.settings.tensorParallel": optional(COUNT),
    "trainer.settings.sequenceParallel": optional({"type": "boolean"}),
    "trainer.settings.pipelineParallel": optional(COUNT),
    "trainer.settings.contextParallel": optional(COUNT),
    "trainer.settings.expertParallel": optional(COUNT),
    "trainer.settings.expertTensorParallel": optional(COUNT),
    "trainer.settings.recompute": optional(enum("auto", "none", "full")),
    "trainer.settings.basePrecision": optional(enum("same", "fp8")),
    "trainer.settings.exitAfterJob": optional({"type": "boolean"}),
    "trainer.settings.heartbeatSeconds": optional(_POSITIVE),
    "trainer.settings.leaseSeconds": optional(_POSITIVE),
    "trainer.settings.sessionIdleSeconds": optional({"type": "number", "minimum": 0}),
    "trainer.settings.startSeconds": optional(_POSITIVE),
    "trainer.settings.orphanSeconds": optional(_POSITIVE),
    "trainer.settings.lingerSeconds": optional({"type": "number", "minimum": 0}),
    "inference.settings.maxModelLen": optional({"type": "integer", "minimum": 66}),
    "inference.settings.maxLoras": optional(COUNT),
    "inference.settings.gpuMemoryUtilization": optional(_POSITIVE | {"exclusiveMaximum": 1}),
    "inference.settings.enforceEager": optional({"type": "boolean"}),
    "inference.settings.secondCopy": optional(enum("auto", "device", "host")),
    "inference.settings.swapRequests": optional(enum("keep", "wait")),
    "inference.settings.swapSeconds": optional(_POSITIVE),
    "inference.settings.vllmArgs": optional(TEXT),
    "inference.settings.vllmStallSeconds": optional(_POSITIVE),
    "inference.settings.verifyTolerance": optional(_POSITIVE),
    "inference.settings.keepServed": optional(COUNT),
    "inference.settings.publishSeconds": optional(_POSITIVE),
    "inference.startupMinutes": COUNT,
    "inference.replicas": optional({"type": "integer", "minimum": 0, "maximum": 64}),
    "inference.drainSeconds": COUNT,
    "inference.proxy.clusterDomain": {
        "type": "string",
        "pattern": "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$",
    },
    "podSecurity.runAsUser": {"type": "integer", "minimum": 1},
    "cache.type": enum("claim", "ephemeral"),
    "data.accessMode": _ACCESS,
    "cache.accessMode": _ACCESS,
    "shared.via": enum("claim", "resource"),
    "secret.apiKey": KEY,
    "secret.adminToken": KEY,
    "secret.hfToken": KEY,
    "image.pullPolicy": enum("Always", "IfNotPresent", "Never"),
    "image.pullSecrets": {"type": "array", "items": TEXT},
    "monitoring.monitors.kind": enum("none", "pod", "service"),
    "monitoring.monitors.interval": DURATION,
    "monitoring.monitors.gpuInterval": DURATION,
    "monitoring.monitors.scrapeTimeout": DURATION,
    "monitoring.rules.disabled": {"type": "array", "items": TEXT},
    "monitoring.rules.overrides": {
        "type": "object",
        "additionalProperties": closed(
            **{"for": DURATION, "severity": enum("critical", "warning", "info")}
        ),
    },
    "nameOverride": NAME,
    "fullnameOverride": NAME,
    "global": {"type": "object"},
    "*.image": closed(
        registry=TEXT,
        repository=TEXT,
        tag=TEXT,
        digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    ),
    "*.resources": closed(requests=_QUANTITIES, limits=_QUANTITIES),
    "*.extendedResources": {
        "type": "object",
        "additionalProperties": {"type": ["string", "integer"]},
    },
    "*.replicas": optional({"type": "integer", "minimum": 0, "maximum": 1}),
    "*.gpus": COUNT,
    "*.cpuRanks": COUNT,
    "*.gpuResource": {"type": "string", "pattern": "^[^/]+/[^/]+$"},
    "*.size": MEMORY,
    "*.shmSize": MEMORY,
    "*.tmpSize": MEMORY,
    "*.updateStrategy": enum("OnDelete", "RollingUpdate"),
    "*.type": enum("ClusterIP", "NodePort", "LoadBalancer"),
    "*.port": PORT,
    "*.nodePort": optional(PORT),
    "*.preStopSeconds": SECONDS,
    "*.jobTimeoutSeconds": COUNT,
    "*.nodeSelector": TEXTS,
    "*.podLabels": TEXTS,
    "*.podAnnotations": TEXTS,
    "*.annotations": TEXTS,
    "*.labels": TEXTS,
    "*.alertLabels": TEXTS,
    "commonLabels": TEXTS,
    "*.tolerations": {
        "type": "array",
        "items": closed(
            key=TEXT,
            operator=enum("Exists", "Equal"),
            value=TEXT,
            effect=enum("NoSchedule", "PreferNoSchedule", "NoExecute"),
            tolerationSeconds={"type": "integer"},
        ),
    },
    "*.affinity": closed(
        **{name: {"type": "object"} for name in ("nodeAffinity", "podAffinity", "podAntiAffinity")}
    ),
    "*.extraEnv": NAMED,
    "*.extraVolumes": NAMED,
    "*.extraVolumeMounts": NAMED,
    "*.extraContainers": NAMED,
    "*.extraInitContainers": NAMED,
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    "*.controllerHost": HOST,
    "*.inferenceHost": HOST,
}


def of(text: str) -> Schema:
    """The schema for a values.yaml. Raises KeyError if a default is null and `SPECIAL` does not
    describe the value."""
    root: Schema = closed()
    at: dict[tuple[str, ...], Schema] = {(): root}
    for value in values.read(text):
        parent = at.get(value.path[:-1])
        if parent is None:
            continue  # `SPECIAL` describes a key above this one, with all of its content
        schema = _schema(value)
        if schema is None:
            schema = closed()
            at[value.path] = schema
        if value.comment:
            schema = {"description": value.comment} | schema
            if value.path in at:
                at[value.path] = schema
        parent["properties"][value.path[-1]] = schema
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart tandem",
    } | root


def _schema(value: values.Value) -> Schema | None:
    """The schema of one value. Returns None for a mapping, because `of` makes the mapping's schema
    from its keys in values.yaml."""
    special = SPECIAL.get(value.name)
    if special is None and len(value.path) > 1:
        special = SPECIAL.get(f"*.{value.path[-1]}")
    if special is not None:
        return dict(special)
    default = value.default
    if default is None:
        raise KeyError(
            f"{value.name}: a null default says nothing of its type; describe it in SPECIAL"
        )
    if isinstance(default, dict):
        if not default:
            raise KeyError(
                f"{value.name}: an empty mapping says nothing of its keys; describe it in SPECIAL"
            )
        return None
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(default, kind):
            return {"type": name}
    return dict(OBJECTS)
