{{/* Names, labels, images, quantities. Every template begins with `tandem.init` (_checks.tpl). */}}

{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters: StatefulSets and their pods' labels append to it. Of a longer name the end is a digest, so that
two releases with one beginning don't meet. */}}
{{- define "tandem.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name (include "tandem.name" .)) (contains (include "tandem.name" .) .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 40 }}{{ $name | trunc 31 | trimSuffix "-" }}-{{ sha256sum $name | trunc 8 }}{{ else }}{{ $name | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{/* What every pod of the release has, and selects them. It never changes: neither versions nor users' labels. */}}
{{- define "tandem.releaseLabels" -}}
app.kubernetes.io/name: {{ include "tandem.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* (dict "root" $ "component" "trainer"): the same for the pods of a component. */}}
{{- define "tandem.selectorLabels" -}}
{{ include "tandem.releaseLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* (dict "root" $ "component" "trainer"): of objects. */}}
{{- define "tandem.labels" -}}
{{- $labels := omit .root.Values.commonLabels "tandem-headless" -}}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $labels "app.kubernetes.io/part-of" "tandem" -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- mergeOverwrite $labels (include "tandem.selectorLabels" . | fromYaml) | toYaml -}}
{{- end -}}

{{/* (dict "root" $ "component" "trainer" "values" podLabels): of pods. Without versions: a new chart alone restarts nothing. */}}
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

{{/* Processes of a job. */}}
{{- define "tandem.ranks" -}}
{{ mul (ternary .Values.trainer.gpus .Values.trainer.cpuRanks (eq .Values.device "cuda") | int) (int .Values.trainer.hosts) }}
{{- end -}}

{{/* Threads of each process of a Job's pod: the cores that the pod requests, divided. */}}
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

{{/* Whether the GPUs come by a ResourceClaim that two containers use. */}}
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

{{/* (dict "root" $ "role" "trainer"): whether it has a pod. */}}
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

{{/* Whether a volume holds all pods on one node. */}}
{{- define "tandem.oneNode" -}}
{{- if or (eq .Values.data.accessMode "ReadWriteOnce") (and (eq .Values.cache.type "claim") (eq .Values.cache.accessMode "ReadWriteOnce")) }}true{{ end -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"). A digest wins over a tag. */}}
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

{{/* A value as an environment variable has it: integers without a point or an exponent. */}}
{{- define "tandem.string" -}}
{{- if and (kindIs "float64" .) (eq (floor .) (. | float64)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* (dict "root" $ "host" "x-inference"): a Service of this release, by its full name. */}}
{{- define "tandem.host" -}}
{{ include "tandem.fullname" .root }}-{{ .host }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{/* A role's paths that Ingress and HTTPRoute let in, as JSON: not /metrics, and none of vLLM's other routes. */}}
{{- define "tandem.publicPaths" -}}
{{ ternary (list "/v1" "/rollout") (list "/v1" "/api/v1") (eq . "inference") | toJson }}
{{- end -}}
