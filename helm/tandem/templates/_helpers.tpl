{{/* Templates of names, labels, images and quantities. Every template begins with `tandem.init` (_checks.tpl). */}}

{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The full name has at most 40 characters, because StatefulSets and their pods' labels append to it. The end of a
longer name is replaced by a digest, so that two releases with the same beginning get different names. */}}
{{- define "tandem.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name (include "tandem.name" .)) (contains (include "tandem.name" .) .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 40 }}{{ $name | trunc 31 | trimSuffix "-" }}-{{ sha256sum $name | trunc 8 }}{{ else }}{{ $name | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{/* Labels that every pod of the release has. Selectors use these labels. The labels never change, so they contain no
versions and no labels of users. */}}
{{- define "tandem.releaseLabels" -}}
app.kubernetes.io/name: {{ include "tandem.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* (dict "root" $ "component" "trainer"): labels by which selectors find the pods of a component. */}}
{{- define "tandem.selectorLabels" -}}
{{ include "tandem.releaseLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* (dict "root" $ "component" "trainer"): labels of an object. */}}
{{- define "tandem.labels" -}}
{{- $labels := omit .root.Values.commonLabels "tandem-headless" -}}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $labels "app.kubernetes.io/part-of" "tandem" -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- mergeOverwrite $labels (include "tandem.selectorLabels" . | fromYaml) | toYaml -}}
{{- end -}}

{{/* (dict "root" $ "component" "trainer" "values" podLabels): labels of a pod. They contain no version, so that a new
version of the chart alone restarts no pod. */}}
{{- define "tandem.podLabels" -}}
{{- $labels := mergeOverwrite (deepCopy .root.Values.commonLabels) .values (dict "app.kubernetes.io/part-of" "tandem") -}}
{{- mergeOverwrite $labels (include "tandem.selectorLabels" . | fromYaml) | toYaml -}}
{{- end -}}

{{- define "tandem.shared" -}}
{{- if eq .Values.gpuMode "shared" }}true{{ end -}}
{{- end -}}

{{/* Whether each attempt at a job is a Kubernetes Job. */}}
{{- define "tandem.jobs" -}}
{{- if and .Values.trainer.enabled (eq .Values.trainer.executor "kubernetes") }}true{{ end -}}
{{- end -}}

{{/* The number of a job's processes. */}}
{{- define "tandem.ranks" -}}
{{ mul (ternary .Values.trainer.gpus .Values.trainer.cpuRanks (eq .Values.device "cuda") | int) (int .Values.trainer.hosts) }}
{{- end -}}

{{/* Threads of each process of a Job's pod: the requested cores divided by the number of processes. */}}
{{- define "tandem.threads" -}}
{{- $cpu := toString (dig "requests" "cpu" "" .Values.trainer.resources) -}}
{{- $cores := ternary 0 (regexFind "^[0-9]+" $cpu | int) (hasSuffix "m" $cpu) -}}
{{- if hasSuffix "m" $cpu -}}{{- $cores = div (trimSuffix "m" $cpu | int) 1000 -}}{{- end -}}
{{ max 1 (div $cores (ternary .Values.trainer.gpus .Values.trainer.cpuRanks (eq .Values.device "cuda") | int)) }}
{{- end -}}

{{/* Whether several inference servers are behind one address. */}}
{{- define "tandem.several" -}}
{{- if gt (int .Values.inference.replicas) 1 }}true{{ end -}}
{{- end -}}

{{/* (dict "root" $ "role" "inference"): the component whose pods a role's public Service selects. */}}
{{- define "tandem.frontOf" -}}
{{- if and (eq .role "inference") (include "tandem.several" .root) }}proxy{{ else }}{{ include "tandem.componentOf" . }}{{ end -}}
{{- end -}}

{{/* Whether trainer and inference use the same GPUs by a ResourceClaim. */}}
{{- define "tandem.claimed" -}}
{{- if and (include "tandem.shared" .) (eq .Values.shared.via "claim") }}true{{ end -}}
{{- end -}}

{{/* Components of the pods with GPUs, as JSON. */}}
{{- define "tandem.gpuComponents" -}}
{{- if include "tandem.shared" . -}}
{{- list "engine" | toJson -}}
{{- else -}}
{{- $trainer := ternary "job" "trainer" (eq (include "tandem.jobs" .) "true") -}}
{{- ternary (list $trainer "inference") (list "inference") .Values.trainer.enabled | toJson -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): whether a role has a pod. */}}
{{- define "tandem.runs" -}}
{{- $role := index .root.Values .role -}}
{{- if and (ne $role.enabled false) (gt (int $role.replicas) 0) }}true{{ end -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): the component whose pod has a role's container. */}}
{{- define "tandem.componentOf" -}}
{{- if and (include "tandem.shared" .root) (ne .role "controller") }}engine{{ else }}{{ .role }}{{ end -}}
{{- end -}}

{{- define "tandem.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tandem.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tandem.secretName" -}}
{{- default (include "tandem.fullname" .) .Values.secret.name -}}
{{- end -}}

{{- define "tandem.dataClaim" -}}
{{- default (printf "%s-data" (include "tandem.fullname" .)) .Values.data.existingClaim -}}
{{- end -}}

{{- define "tandem.cacheClaim" -}}
{{- default (printf "%s-cache" (include "tandem.fullname" .)) .Values.cache.existingClaim -}}
{{- end -}}

{{/* Whether all pods must run on one node, because a volume is ReadWriteOnce. */}}
{{- define "tandem.oneNode" -}}
{{- if or (eq .Values.data.accessMode "ReadWriteOnce") (and (eq .Values.cache.type "claim") (eq .Values.cache.accessMode "ReadWriteOnce")) }}true{{ end -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): a role's image. A digest takes precedence over a tag. */}}
{{- define "tandem.image" -}}
{{- $all := .root.Values.image -}}
{{- $own := (index .root.Values .role).image -}}
{{- $registry := default $all.registry $own.registry -}}
{{- $repository := default (printf "%s-%s" $all.prefix .role) $own.repository -}}
{{- $name := ternary (printf "%s/%s" (trimSuffix "/" $registry) $repository) $repository (ne $registry "") -}}
{{- $suffix := ternary "-cpu" "" (and (eq .root.Values.device "cpu") (ne .role "controller")) -}}
{{- $tag := default (printf "%s%s" (default .root.Chart.AppVersion $all.tag) $suffix) $own.tag -}}
{{- if $own.digest }}{{ $name }}@{{ $own.digest }}{{ else }}{{ $name }}:{{ $tag }}{{ end -}}
{{- end -}}

{{/* A quantity of memory in MiB; "" is 0. */}}
{{- define "tandem.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | default "0" | int64 -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- if eq $unit "Mi" }}{{ $number }}{{ else if eq $unit "Gi" }}{{ mul $number 1024 }}{{ else if eq $unit "Ti" }}{{ mul $number 1048576 }}{{ else }}0{{ end -}}
{{- end -}}

{{/* The text of a value for an environment variable: integers have no point and no exponent. */}}
{{- define "tandem.string" -}}
{{- if and (kindIs "float64" .) (eq (floor .) (. | float64)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* (dict "root" $ "host" "x-inference"): a Service of this release, by its full name. */}}
{{- define "tandem.host" -}}
{{ include "tandem.fullname" .root }}-{{ .host }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{/* The public paths of a role, as JSON. Ingress and HTTPRoute do not route /metrics and vLLM's other paths. */}}
{{- define "tandem.publicPaths" -}}
{{ ternary (list "/v1" "/rollout") (list "/v1" "/api/v1") (eq . "inference") | toJson }}
{{- end -}}
