{{/* Parts of a pod that several pods have. */}}

{{- define "tandem.podSecurityContext" -}}
runAsNonRoot: true
{{- if not .Values.podSecurity.assignedUser }}
runAsUser: {{ int .Values.podSecurity.runAsUser }}
runAsGroup: 0
fsGroup: 0
# Without OnRootMismatch, Kubernetes would change the owner of every file of the volume at each start.
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tandem.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The part of the spec that every pod of the release has, also the pods of `helm test`. Service links are off: the
Service <x>-controller would give every pod a variable ..._CONTROLLER_PORT, which is the name of a setting. */}}
{{- define "tandem.podCommon" -}}
serviceAccountName: {{ include "tandem.serviceAccountName" . | quote }}
automountServiceAccountToken: false
{{ include "tandem.podRest" . }}
{{- end -}}

{{- define "tandem.podRest" -}}
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
securityContext:
  {{- include "tandem.podSecurityContext" . | nindent 2 }}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): where a role's pod may run. */}}
{{- define "tandem.placement" -}}
{{- $role := index .root.Values .role -}}
{{- with $role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $wanted := $role.tolerations -}}
{{- if include "tandem.oneNode" .root -}}
{{- /* The trainer's node may be tainted, and this pod must run on the same node. */ -}}
{{- $wanted = concat $wanted .root.Values.trainer.tolerations | uniq -}}
{{- end -}}
{{- $tolerations := list -}}
{{- $ofGpus := dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule" -}}
{{- range $wanted -}}
{{- if or (eq $.root.Values.device "cuda") (ne (toJson .) (toJson $ofGpus)) -}}
{{- $tolerations = append $tolerations . -}}
{{- end -}}
{{- end -}}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := include "tandem.affinity" . | fromYaml }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $role.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $role.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* With a ReadWriteOnce volume the trainer chooses the node, since it is the hardest to place, and the other pods
follow. A restarted trainer goes to the node on which the volume is in use. The trainer's label matches its own affinity
term, so that the first pod of all can be placed. If there is no trainer's pod, or if jobs have their own pods,
inference chooses the node. If there is no inference either, the controller chooses it. */}}
{{- define "tandem.affinity" -}}
{{- $affinity := deepCopy (index .root.Values .role).affinity -}}
{{- if include "tandem.oneNode" .root -}}
{{- $first := "controller" -}}
{{- range $role := ternary (list "inference") (list "inference" "trainer") (eq (include "tandem.jobs" $.root) "true") -}}
{{- if include "tandem.runs" (dict "root" $.root "role" $role) -}}{{- $first = $role -}}{{- end -}}
{{- end -}}
{{- $leader := include "tandem.componentOf" (dict "root" .root "role" $first) -}}
{{- $jobs := ternary (list "job") (list) (eq (include "tandem.jobs" .root) "true") -}}
{{- $components := ternary (concat (list "controller" "inference" "trainer" "engine") $jobs) (list $leader) (eq .role $first) -}}
{{- $match := dict "matchLabels" (include "tandem.releaseLabels" .root | fromYaml)
      "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "In" "values" $components)) -}}
{{- $term := dict "labelSelector" $match "topologyKey" "kubernetes.io/hostname" -}}
{{- $pod := default dict $affinity.podAffinity -}}
{{- $required := append (default list $pod.requiredDuringSchedulingIgnoredDuringExecution) $term -}}
{{- $_ := set $affinity "podAffinity" (set $pod "requiredDuringSchedulingIgnoredDuringExecution" $required) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* Requests and limits without the empty quantities. */}}
{{- define "tandem.amounts" -}}
{{- $result := dict -}}
{{- range $kind, $amounts := . -}}
{{- $part := dict -}}
{{- range $name, $value := $amounts -}}
{{- if ne (toString $value) "" -}}{{- $_ := set $part $name $value -}}{{- end -}}
{{- end -}}
{{- if $part -}}{{- $_ := set $result $kind $part -}}{{- end -}}
{{- end -}}
{{- toYaml $result -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): requests and limits. /dev/shm counts as memory of the container, so its size is
added. */}}
{{- define "tandem.resources" -}}
{{- $role := index .root.Values .role -}}
{{- $shm := include "tandem.mebibytes" (default "" $role.shmSize) | int64 -}}
{{- $amounts := include "tandem.amounts" $role.resources | fromYaml -}}
{{- $result := dict -}}
{{- range $kind := list "requests" "limits" -}}
{{- $part := dict -}}
{{- range $name, $value := default dict (get $amounts $kind) -}}
{{- if eq $name "memory" -}}
{{- $_ := set $part $name (printf "%dMi" (add (include "tandem.mebibytes" $value | int64) $shm)) -}}
{{- else -}}
{{- $_ := set $part $name (toString $value) -}}
{{- end -}}
{{- end -}}
{{- /* The requests contain the GPUs too, because Kueue reads only the requests of a StatefulSet. */ -}}
{{- if ne $.role "controller" -}}
{{- range $name, $value := $role.extendedResources -}}
{{- $_ := set $part $name (toString $value) -}}
{{- end -}}
{{- if and (eq $.root.Values.device "cuda") (not (include "tandem.claimed" $.root)) -}}
{{- $_ := set $part $role.gpuResource (int $role.gpus | toString) -}}
{{- end -}}
{{- end -}}
{{- if $part -}}{{- $_ := set $result $kind $part -}}{{- end -}}
{{- end -}}
{{- if and (ne .role "controller") (include "tandem.claimed" .root) -}}
{{- $_ := set $result "claims" (list (dict "name" "gpus")) -}}
{{- end -}}
{{- toYaml $result -}}
{{- end -}}

{{/* The seconds that a role's container may take to stop: supervision.stop_seconds of its programs. They do not depend
on the number of inference servers behind a proxy. Tests compare the numbers. */}}
{{- define "tandem.stopSeconds" -}}
{{- get (dict "controller" 15 "trainer" 87 "inference" 59) . -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): the sum of the seconds before SIGTERM, the seconds to stop, and a margin of 10.
*/}}
{{- define "tandem.graceSeconds" -}}
{{- add (include "tandem.stopSeconds" .role | int) (include "tandem.preStopSeconds" . | int) 10 -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): the longest time before SIGTERM, in seconds. */}}
{{- define "tandem.preStopSeconds" -}}
{{- if and (eq .role "inference") (include "tandem.several" .root) -}}
{{ int .root.Values.inference.drainSeconds }}
{{- else -}}
{{ int (default 0 (index .root.Values .role).preStopSeconds) }}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer" "name" "tmp"): the name of a role's volume; in a pod with two roles it begins with
the role. */}}
{{- define "tandem.own" -}}
{{- if and (include "tandem.shared" .root) (ne .role "controller") }}{{ .role }}-{{ .name }}{{ else }}{{ .name }}{{ end -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): a role's volumes. */}}
{{- define "tandem.ownVolumes" -}}
{{- $role := index .root.Values .role -}}
- name: {{ include "tandem.own" (merge (dict "name" "tmp") .) }}
  emptyDir: {sizeLimit: {{ $role.tmpSize }}}
- name: {{ include "tandem.own" (merge (dict "name" "run") .) }}
  emptyDir: {sizeLimit: 256Mi}
{{- if ne .role "controller" }}
- name: {{ include "tandem.own" (merge (dict "name" "shm") .) }}
  emptyDir: {medium: Memory, sizeLimit: {{ $role.shmSize }}}
{{- /* Kernels that the programs compile and load as code. Only the next Job's pods can write to the same volume. */}}
- name: {{ include "tandem.own" (merge (dict "name" "private-cache") .) }}
{{- with dig "kernels" "existingClaim" "" $role }}
  persistentVolumeClaim: {claimName: {{ . | quote }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .root.Values.cache.size }}}
{{- end }}
{{- end }}
- name: {{ include "tandem.own" (merge (dict "name" "secrets") .) }}
  {{- include "tandem.secretVolume" (dict "root" .root "admin" (eq .role "inference")) | nindent 2 }}
{{- with $role.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "admin" true): the secrets as files that the group may read. They are not below /run/secrets, where
clusters mount their own secrets. */}}
{{- define "tandem.secretVolume" -}}
{{- $secret := .root.Values.secret -}}
projected:
  defaultMode: 0440
  sources:
    - secret:
        name: {{ include "tandem.secretName" .root | quote }}
        items:
          - {key: {{ $secret.apiKey | quote }}, path: api_key}
          {{- if .admin }}
          - {key: {{ $secret.adminToken | quote }}, path: admin_token}
          {{- end }}
    - secret:
        name: {{ include "tandem.secretName" .root | quote }}
        optional: true
        items:
          - {key: {{ $secret.hfToken | quote }}, path: hf_token}
{{- end -}}

{{- define "tandem.sharedVolumes" -}}
- name: data
  persistentVolumeClaim: {claimName: {{ include "tandem.dataClaim" . | quote }}}
- name: cache
{{- if eq .Values.cache.type "claim" }}
  persistentVolumeClaim: {claimName: {{ include "tandem.cacheClaim" . | quote }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.size }}}
{{- end }}
{{- with .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "role" "trainer" "shm" true) */}}
{{- define "tandem.mounts" -}}
- {name: data, mountPath: /data}
- {name: cache, mountPath: /cache}
{{- if .root.Values.models.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
- {name: {{ include "tandem.own" (merge (dict "name" "secrets") .) }}, mountPath: /etc/tandem/secrets, readOnly: true}
- {name: {{ include "tandem.own" (merge (dict "name" "tmp") .) }}, mountPath: /tmp}
- {name: {{ include "tandem.own" (merge (dict "name" "run") .) }}, mountPath: /run/tandem}
{{- if .shm }}
- {name: {{ include "tandem.own" (merge (dict "name" "shm") .) }}, mountPath: /dev/shm}
- {name: {{ include "tandem.own" (merge (dict "name" "private-cache") .) }}, mountPath: /private-cache}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): the containers that run before a role's programs, in the controller's image. */}}
{{- define "tandem.initContainers" -}}
{{- $controller := dict "root" .root "role" "controller" -}}
{{- if .root.Values.tinyModel }}
- name: {{ include "tandem.own" (merge (dict "name" "tiny-model") .) }}
  image: {{ include "tandem.image" $controller }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [python, /opt/tandem/examples/tiny_model.py, /data/models/tiny]
  env: [{name: NVIDIA_VISIBLE_DEVICES, value: void}]
  {{- include "tandem.initRest" . | nindent 2 }}
{{- end }}
- name: {{ include "tandem.own" (merge (dict "name" "preflight") .) }}
  image: {{ include "tandem.image" $controller }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [tandem, preflight, --role, {{ .role }}, --devices-granted]
  env:
    {{- include "tandem.env" . | nindent 4 }}
    {{- if and (ne .role "controller") (eq .root.Values.device "cuda") (not .runner) }}
    - name: NVIDIA_VISIBLE_DEVICES
      value: void
    {{- end }}
    {{- with (index .root.Values .role).extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "tandem.initRest" . | nindent 2 }}
    {{- /* The variables and the base model may name files on these mounts. */}}
    {{- with (index .root.Values .role).extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- with (index .root.Values .role).extraInitContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.initRest" -}}
securityContext:
  {{- include "tandem.securityContext" . | nindent 2 }}
resources:
  {{- include "tandem.amounts" .root.Values.initContainers.resources | nindent 2 }}
volumeMounts:
  {{- include "tandem.mounts" . | nindent 2 }}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): the container of a role's programs. With "runner" true: the container of the
runner alone. */}}
{{- define "tandem.container" -}}
{{- $role := index .root.Values .role -}}
{{- $health := list "python" "-m" "tandem.supervise.health" -}}
- name: {{ .role }}
  image: {{ include "tandem.image" (ternary (dict "root" .root "role" "controller") . (default false .runner)) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- if .runner }}
  args: [python, -m, tandem, up, --role, trainer]
  {{- end }}
  env:
    {{- include "tandem.env" . | nindent 4 }}
    {{- with $role.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- if ne .role "trainer" }}
    - {name: http, containerPort: {{ ternary 8080 8000 (eq .role "controller") }}}
    {{- end }}
    {{- if ne .role "controller" }}
    - {name: {{ include "tandem.metricsPort" . }}, containerPort: {{ ternary 9400 9401 (eq .role "trainer") }}}
    {{- end }}
  {{- if eq .role "controller" }}
  startupProbe:
    httpGet: {path: /healthz, port: http}
    periodSeconds: 2
    failureThreshold: 150
  # The probe does not use /readyz: the only endpoint must stay on a full, read-only or hanging volume. Reads and
  # deletes still work then, and the answers explain the errors.
  readinessProbe:
    httpGet: {path: /healthz, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
  livenessProbe:
    httpGet: {path: /healthz, port: http}
    periodSeconds: 15
    timeoutSeconds: 10
    failureThreshold: 4
  {{- else }}
  # The other probes begin when all programs have answered once, because the download of a model may take long.
  startupProbe:
    exec: {command: {{ toJson (append $health "--started") }}}
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: {{ ternary 60 (mul 6 (int (default 10 $role.startupMinutes))) (eq .role "trainer") }}
  readinessProbe:
    exec: {command: {{ toJson $health }}}
    periodSeconds: {{ ternary 5 15 (and (eq .role "inference") (eq (include "tandem.several" .root) "true")) }}
    timeoutSeconds: 10
    failureThreshold: 2
  # The probe checks that the programs run, and connects to no port: vLLM may be loading a model.
  livenessProbe:
    exec: {command: {{ toJson (append $health "--live") }}}
    periodSeconds: 30
    timeoutSeconds: 20
    failureThreshold: 4
  {{- end }}
  {{- if and (eq .role "inference") (include "tandem.several" .root) }}
  # Before SIGTERM the proxy stops sending requests to this server, and the running requests end.
  lifecycle:
    preStop: {exec: {command: [python, -m, tandem.supervise.drain, {{ int $role.drainSeconds | quote }}]}}
  {{- else if $role.preStopSeconds }}
  lifecycle:
    preStop: {exec: {command: [sleep, {{ int $role.preStopSeconds | quote }}]}}
  {{- end }}
  resources:
    {{- if .runner }}
    {{- include "tandem.amounts" $role.runner.resources | nindent 4 }}
    {{- else }}
    {{- include "tandem.resources" . | nindent 4 }}
    {{- end }}
  securityContext:
    {{- include "tandem.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "tandem.mounts" (merge (dict "shm" (and (ne .role "controller") (not .runner))) .) | nindent 4 }}
    {{- if .runner }}
    - {name: job, mountPath: /etc/tandem/job, readOnly: true}
    {{- end }}
    {{- with $role.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- with $role.extraContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The name of a role's metrics port; the ports of one pod need different names. */}}
{{- define "tandem.metricsPort" -}}
{{- if and (include "tandem.shared" .root) (eq .role "inference") }}metrics-vllm{{ else }}metrics{{ end -}}
{{- end -}}

{{/* (dict "root" $ "component" "engine" "roles" (list "trainer" "inference") "lead" "trainer"): the spec of a
component's pod. `lead`: the role whose values say where and how it runs. */}}
{{- define "tandem.podSpec" -}}
{{- $text := include "tandem.uncheckedPodSpec" . -}}
{{- include "tandem.checkPod" (dict "component" .component "spec" (fromYaml $text)) -}}
{{- $text -}}
{{- end -}}

{{- define "tandem.uncheckedPodSpec" -}}
{{- $root := .root -}}
{{- $grace := 0 -}}
{{- range $role := .roles -}}
{{- $grace = max $grace (include "tandem.graceSeconds" (dict "root" $root "role" $role) | int) -}}
{{- end -}}
{{ include "tandem.podCommon" $root }}
{{- include "tandem.placement" (dict "root" $root "role" .lead) | nindent 0 }}
{{- with (index $root.Values .lead).runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
terminationGracePeriodSeconds: {{ $grace }}
{{- if and (include "tandem.claimed" $root) (ne .lead "controller") }}
resourceClaims:
  - {name: gpus, resourceClaimTemplateName: {{ include "tandem.gpuClaim" $root }}}
{{- end }}
initContainers:
  {{- range $role := .roles }}
  {{- include "tandem.initContainers" (dict "root" $root "role" $role) | nindent 2 }}
  {{- end }}
containers:
  {{- range $role := .roles }}
  {{- include "tandem.container" (dict "root" $root "role" $role) | nindent 2 }}
  {{- end }}
volumes:
  {{- include "tandem.sharedVolumes" $root | nindent 2 }}
  {{- range $role := .roles }}
  {{- include "tandem.ownVolumes" (dict "root" $root "role" $role) | nindent 2 }}
  {{- end }}
{{- end -}}
