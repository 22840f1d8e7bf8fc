{{/* (dict "root" $ "component" "trainer" "roles" (list "trainer") "lead" "trainer"): the StatefulSet of a component. It
has one pod, or one pod per inference server; an upgrade restarts the servers one after another. `lead`: the role whose
values say where and how the pod runs. */}}
{{- define "tandem.statefulset" -}}
{{- $root := .root -}}
{{- $lead := index .root.Values .lead -}}
{{- $podLabels := dict -}}
{{- $podAnnotations := dict "kubectl.kubernetes.io/default-container" .lead -}}
{{- range $role := .roles -}}
{{- $podLabels = mergeOverwrite $podLabels (index $root.Values $role).podLabels -}}
{{- if eq $role "trainer" -}}
{{- /* An autoscaler must not evict a pod in which a job runs. */ -}}
{{- $_ := set $podAnnotations "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" -}}
{{- $_ := set $podAnnotations "karpenter.sh/do-not-disrupt" "true" -}}
{{- end -}}
{{- $podAnnotations = mergeOverwrite $podAnnotations (index $root.Values $role).podAnnotations -}}
{{- end -}}
{{- $name := printf "%s-%s" (include "tandem.fullname" $root) .component -}}
{{- $spec := include "tandem.podSpec" . -}}
{{- $shape := include "tandem.kueueShape" (fromYaml $spec) -}}
{{- include "tandem.checkKueue" (dict "root" $root "name" $name "shape" $shape "kueue" $root.Values.kueue) -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
    {{- with $root.Values.kueue.queue }}
    kueue.x-k8s.io/queue-name: {{ . | quote }}
    {{- end }}
    {{- with $root.Values.kueue.priorityClass }}
    kueue.x-k8s.io/priority-class: {{ . | quote }}
    {{- end }}
  {{- if $root.Values.kueue.queue }}
  annotations:
    tandem/kueue-shape: {{ $shape | quote }}
  {{- end }}
spec:
  replicas: {{ int $lead.replicas }}
  serviceName: {{ include "tandem.fullname" $root }}-{{ ternary "inference-pods" .component (eq .component "inference") }}
  # With OrderedReady, an upgrade would not replace a pod that never becomes ready, although the upgrade may repair it.
  podManagementPolicy: Parallel
  # A StatefulSet starts no second pod beside the first, because there may be no free GPU.
  updateStrategy: {type: {{ $lead.updateStrategy }}}
  revisionHistoryLimit: 3
  selector:
    matchLabels:
      {{- include "tandem.selectorLabels" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "tandem.podLabels" (merge (dict "values" $podLabels) .) | nindent 8 }}
      annotations:
        {{- toYaml $podAnnotations | nindent 8 }}
    spec:
      {{- $spec | nindent 6 }}
{{- end -}}

{{- define "tandem.gpuClaimSpec" -}}
spec:
  devices:
    requests:
      - name: gpus
        exactly:
          deviceClassName: {{ .Values.shared.deviceClassName | quote }}
          allocationMode: ExactCount
          count: {{ int .Values.trainer.gpus }}
{{- end -}}

{{/* The name contains a digest of the template: templates are immutable, so a changed template needs another object.
*/}}
{{- define "tandem.gpuClaim" -}}
{{ include "tandem.fullname" . }}-gpus-{{ include "tandem.gpuClaimSpec" . | sha256sum | trunc 8 }}
{{- end -}}

{{/* (dict "root" $ "component" "trainer" "name" "trainer" "ports" (list ...)): a headless Service with the pods' own
addresses. It also has the addresses of pods that are not ready, for requests to a vLLM that sleeps or loads. */}}
{{- define "tandem.headless" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .name }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
    tandem-headless: "true"
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "tandem.selectorLabels" . | nindent 4 }}
  ports:
    {{- toYaml .ports | nindent 4 }}
{{- end -}}

{{/* (dict "root" $ "role" "inference" "component" "engine"): the Service of a public API. */}}
{{- define "tandem.publicService" -}}
{{- $service := (index .root.Values .role).service -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .role }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
  {{- with $service.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ $service.type }}
  {{- with $service.loadBalancerClass }}
  loadBalancerClass: {{ . | quote }}
  {{- end }}
  selector:
    {{- include "tandem.selectorLabels" (dict "root" .root "component" (include "tandem.frontOf" .)) | nindent 4 }}
  ports:
    - name: http
      port: {{ int $service.port }}
      targetPort: http
      {{- with $service.nodePort }}
      nodePort: {{ int . }}
      {{- end }}
      protocol: TCP
      appProtocol: http
{{- end -}}
