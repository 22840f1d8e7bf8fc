{{/* The parts of a pod that are the same for several. */}}

{{- define "tandem.podSecurityContext" -}}
runAsNonRoot: true
{{- if not .Values.podSecurity.assignedUser }}
runAsUser: {{ int .Values.podSecurity.runAsUser }}
runAsGroup: 0
fsGroup: 0
# A recursive change of owner of a large volume would take hours.
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tandem.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What every pod of the release has, tests too. A Service called <x>-controller would otherwise give every pod a
variable ..._CONTROLLER_PORT, which is a setting's name. */}}
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
{{- /* The trainer's node may be tainted, and this pod has to follow it. */ -}}
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

{{/* A ReadWriteOnce volume: the others go where the trainer is, which has the choice since it is the hardest to place;
and the trainer, when it comes back, to where the volume is in use. Its own label matches its term, so that the first
pod of all can be placed. Without a trainer's pod, and where jobs have pods of their own, the choice is inference's, and
then the controller's. */}}
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

{{/* Requests and limits without the empty ones. */}}
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

{{/* (dict "root" $ "role" "trainer"): requests and limits. /dev/shm is memory of the container, so it is added. */}}
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
{{- /* Among the requests too: they are all that Kueue reads of a StatefulSet. */ -}}
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

{{/* Seconds a role's container may take to stop: supervision.stop_seconds of its programs, which are the same for any
number of inference servers behind a proxy; tests compare. */}}
{{- define "tandem.stopSeconds" -}}
{{- get (dict "controller" 15 "trainer" 87 "inference" 59) . -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): with what comes before SIGTERM, and a margin. */}}
{{- define "tandem.graceSeconds" -}}
{{- add (include "tandem.stopSeconds" .role | int) (include "tandem.preStopSeconds" . | int) 10 -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): the longest time before SIGTERM. */}}
{{- define "tandem.preStopSeconds" -}}
{{- if and (eq .role "inference") (include "tandem.several" .root) -}}
{{ int .root.Values.inference.drainSeconds }}
{{- else -}}
{{ int (default 0 (index .root.Values .role).preStopSeconds) }}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer" "name" "tmp"): volumes' names in a pod with two roles. */}}
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
{{- /* What its programs compile, and load as code: no other pod can write it, but for the next Job's pods. */}}
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

{{/* (dict "root" $ "admin" true): as files, readable for the group. Not below /run/secrets, where clusters put theirs. */}}
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

{{/* (dict "root" $ "role" "trainer"): what runs before a role's programs, from the small image. */}}
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
    {{- /* What these variables and the base model name may be below a mount. */}}
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

{{/* (dict "root" $ "role" "trainer"): the container of a role's programs; "runner" true: of the runner alone. */}}
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
  # Not /readyz: on a full, read-only or hanging volume the only endpoint has to stay, because reads and deletes go on,
  # and answers say what is wrong.
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
  # Until everything answers for the first time, nothing else is asked: a model may take long to arrive.
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
  # Whether its programs go on, not whether a port answers. vLLM may load a model meanwhile, and a job may train.
  livenessProbe:
    exec: {command: {{ toJson (append $health "--live") }}}
    periodSeconds: 30
    timeoutSeconds: 20
    failureThreshold: 4
  {{- end }}
  {{- if and (eq .role "inference") (include "tandem.several" .root) }}
  # The proxy takes the server out, and running requests end.
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

{{/* Ports of one pod have different names. */}}
{{- define "tandem.metricsPort" -}}
{{- if and (include "tandem.shared" .root) (eq .role "inference") }}metrics-vllm{{ else }}metrics{{ end -}}
{{- end -}}

{{/* (dict "root" $ "component" "engine" "roles" (list "trainer" "inference") "lead" "trainer"): a component's pod. `lead`:
the role whose values say where and how it runs. */}}
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
