{{/* Templates for `trainer.executor: kubernetes`: the runner's pod, and the template of the Jobs that the runner
creates. */}}

{{- define "tandem.jobConfig" -}}
{{ include "tandem.fullname" . }}-job
{{- end -}}

{{- define "tandem.runnerAccount" -}}
{{- default (printf "%s-runner" (include "tandem.fullname" .)) .Values.trainer.runner.serviceAccountName -}}
{{- end -}}

{{/* The StatefulSet of the runner, in the controller's image. The runner's pod may be replaced at any time: the Jobs
continue, and the next runner finds them. */}}
{{- define "tandem.runner" -}}
{{- $about := dict "root" . "component" "trainer" "role" "trainer" "runner" true -}}
{{- $spec := include "tandem.runnerSpec" . -}}
{{- include "tandem.checkPod" (dict "component" "trainer" "spec" (fromYaml $spec)) -}}
{{- $noQueue := dict "queue" "" "priorityClass" "" -}}
{{- include "tandem.checkKueue" (dict "root" . "name" (printf "%s-trainer" (include "tandem.fullname" .)) "shape" "" "kueue" $noQueue) -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "tandem.fullname" . }}-trainer
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- include "tandem.labels" $about | nindent 4 }}
spec:
  replicas: {{ int .Values.trainer.replicas }}
  serviceName: {{ include "tandem.fullname" . }}-trainer
  podManagementPolicy: Parallel
  updateStrategy: {type: RollingUpdate}
  revisionHistoryLimit: 3
  selector:
    matchLabels:
      {{- include "tandem.selectorLabels" $about | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "tandem.podLabels" (merge (dict "values" dict) $about) | nindent 8 }}
      annotations:
        kubectl.kubernetes.io/default-container: trainer
        # The runner reads the template at its start, so a changed template restarts the runner.
        tandem/job-template: {{ include "tandem.jobTemplate" . | sha256sum | trunc 16 | quote }}
    spec:
      {{- $spec | nindent 6 }}
{{- end -}}

{{- define "tandem.runnerSpec" -}}
{{- $about := dict "root" . "role" "trainer" "runner" true -}}
serviceAccountName: {{ include "tandem.runnerAccount" . | quote }}
automountServiceAccountToken: true
{{ include "tandem.podRest" . }}
{{- include "tandem.placement" (dict "root" . "role" "controller") | nindent 0 }}
terminationGracePeriodSeconds: {{ include "tandem.graceSeconds" (dict "root" . "role" "trainer") }}
initContainers:
  {{- include "tandem.initContainers" $about | nindent 2 }}
containers:
  {{- include "tandem.container" $about | nindent 2 }}
volumes:
  {{- include "tandem.sharedVolumes" . | nindent 2 }}
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
  - name: run
    emptyDir: {sizeLimit: 256Mi}
  - name: job
    projected:
      defaultMode: 0440
      sources: [{configMap: {name: {{ include "tandem.jobConfig" . | quote }}}}]
  - name: secrets
    {{- include "tandem.secretVolume" (dict "root" . "admin" false) | nindent 4 }}
  {{- with .Values.trainer.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The template of a Job. The runner adds the name, labels and annotations of the job, the agent's arguments, the
pod's deadline and the owner's uid (src/tandem/trainer/executor/manifest.py). */}}
{{- define "tandem.jobTemplate" -}}
{{- $v := .Values -}}
{{- $about := dict "root" . "component" "job" "role" "trainer" -}}
{{- $annotations := dict "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" "karpenter.sh/do-not-disrupt" "true" -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ include "tandem.fullname" . }}
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- include "tandem.podLabels" (merge (dict "values" dict) $about) | nindent 4 }}
    {{- with $v.kueue.queue }}
    kueue.x-k8s.io/queue-name: {{ . | quote }}
    {{- end }}
    {{- with $v.kueue.priorityClass }}
    kueue.x-k8s.io/priority-class: {{ . | quote }}
    {{- end }}
  # When `helm uninstall` deletes the StatefulSet, Kubernetes deletes the Jobs.
  ownerReferences:
    - {apiVersion: apps/v1, kind: StatefulSet, name: {{ include "tandem.fullname" . }}-trainer}
spec:
  completionMode: Indexed
  completions: {{ int $v.trainer.hosts }}
  parallelism: {{ int $v.trainer.hosts }}
  # The runner creates another Job for a job's next attempt.
  backoffLimit: 0
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
      - action: FailJob
        onPodConditions: [{type: DisruptionTarget, status: "True"}]
      - action: FailJob
        onExitCodes: {containerName: trainer, operator: NotIn, values: [0]}
  # The runner deletes an ended Job. This limit is for Jobs that no runner has seen.
  ttlSecondsAfterFinished: 3600
  template:
    metadata:
      labels:
        {{- include "tandem.podLabels" (merge (dict "values" $v.trainer.podLabels) $about) | nindent 8 }}
      annotations:
        {{- mergeOverwrite $annotations $v.trainer.podAnnotations | toYaml | nindent 8 }}
    spec:
      {{- include "tandem.jobPodSpec" . | nindent 6 }}
{{- end -}}

{{- define "tandem.jobPodSpec" -}}
{{- $v := .Values.trainer -}}
{{- $about := dict "root" . "role" "trainer" -}}
restartPolicy: Never
{{ include "tandem.podCommon" . }}
{{- include "tandem.placement" $about | nindent 0 }}
{{- with $v.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
terminationGracePeriodSeconds: {{ include "tandem.graceSeconds" $about }}
{{- with $v.extraInitContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: trainer
    image: {{ include "tandem.image" $about }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: [tandem, rank-agent]
    env:
      {{- include "tandem.env" $about | nindent 6 }}
      {{- with $v.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    resources:
      {{- include "tandem.resources" $about | nindent 6 }}
    securityContext:
      {{- include "tandem.securityContext" . | nindent 6 }}
    volumeMounts:
      {{- include "tandem.mounts" (merge (dict "shm" true) $about) | nindent 6 }}
      {{- with $v.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  {{- include "tandem.sharedVolumes" . | nindent 2 }}
  {{- include "tandem.ownVolumes" $about | nindent 2 }}
{{- end -}}

{{- define "tandem.jobObjects" -}}
{{- $labels := include "tandem.labels" (dict "root" . "component" "job") -}}
{{- $name := printf "%s-runner" (include "tandem.fullname" .) -}}
{{- $template := include "tandem.jobTemplate" . | fromYaml -}}
{{- include "tandem.checkPod" (dict "component" "trainer (Job)" "spec" (merge (dict "initContainers" (default list $template.spec.template.spec.initContainers)) $template.spec.template.spec)) -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "tandem.jobConfig" . }}
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- $labels | nindent 4 }}
data:
  job.json: {{ toPrettyJson $template | quote }}
{{- if not .Values.trainer.runner.serviceAccountName }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- $labels | nindent 4 }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- $labels | nindent 4 }}
rules:
  - {apiGroups: [batch], resources: [jobs], verbs: [create, get, list, delete]}
  - {apiGroups: [""], resources: [pods, events], verbs: [list]}
  - {apiGroups: [apps], resources: [statefulsets], resourceNames: [{{ include "tandem.fullname" . }}-trainer], verbs: [get]}
  {{- if .Values.kueue.queue }}
  - {apiGroups: [kueue.x-k8s.io], resources: [workloads], verbs: [list]}
  {{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- $labels | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects: [{kind: ServiceAccount, name: {{ $name }}, namespace: {{ .Release.Namespace | quote }}}]
{{- end }}
{{- if .Values.trainer.runner.admissionPolicy }}
{{ include "tandem.jobPolicy" (dict "root" . "template" $template "labels" $labels) }}
{{- end }}
{{- end -}}

{{/* An account that may create Jobs may run any program as any account of the namespace. So this policy allows the
runner's Jobs only the template's image, account and volumes. */}}
{{- define "tandem.jobPolicy" -}}
{{- /* With `helm lint` the release has no namespace, and the name must not begin with "-". */ -}}
{{- $name := trimPrefix "-" (printf "%s-%s-jobs" .root.Release.Namespace (include "tandem.fullname" .root)) -}}
{{- $spec := .template.spec.template.spec -}}
{{- $images := list -}}
{{- range concat (default list $spec.initContainers) $spec.containers -}}{{- $images = append $images .image -}}{{- end -}}
{{- $volumes := list -}}
{{- $claims := list -}}
{{- $kinds := list -}}
{{- range $spec.volumes -}}
{{- $volumes = append $volumes .name -}}
{{- with .persistentVolumeClaim -}}{{- $claims = append $claims .claimName -}}{{- end -}}
{{- range $kind, $_ := omit . "name" -}}{{- $kinds = append $kinds $kind -}}{{- end -}}
{{- end -}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ $name }}
  labels:
    {{- .labels | nindent 4 }}
spec:
  failurePolicy: Fail
  matchConstraints:
    namespaceSelector:
      matchLabels: {kubernetes.io/metadata.name: {{ .root.Release.Namespace | quote }}}
    resourceRules:
      - {apiGroups: [batch], apiVersions: [v1], operations: [CREATE], resources: [jobs]}
  matchConditions:
    - name: by-the-runner
      expression: request.userInfo.username == "system:serviceaccount:{{ .root.Release.Namespace }}:{{ include "tandem.runnerAccount" .root }}"
  variables:
    - name: pod
      expression: object.spec.template.spec
    - name: containers
      expression: "variables.pod.containers + (has(variables.pod.initContainers) ? variables.pod.initContainers : [])"
  validations:
    - expression: variables.containers.all(c, c.image in {{ toJson $images }})
      message: a Job of the runner has the images of the release's template
    - expression: has(variables.pod.serviceAccountName) && variables.pod.serviceAccountName == {{ $spec.serviceAccountName | toJson }} && has(variables.pod.automountServiceAccountToken) && !variables.pod.automountServiceAccountToken
      message: a Job of the runner has the release's service account, without a token
    - expression: variables.pod.volumes.all(v, v.name in {{ toJson $volumes }} && (!has(v.persistentVolumeClaim) || v.persistentVolumeClaim.claimName in {{ toJson $claims }}))
      message: a Job of the runner has the volumes of the release's template
    {{- range $kind := list "hostPath" "csi" "nfs" "iscsi" "secret" "configMap" }}
    {{- if not (has $kind $kinds) }}
    - expression: variables.pod.volumes.all(v, !has(v.{{ $kind }}))
      message: a Job of the runner has no volume {{ $kind }}
    {{- end }}
    {{- end }}
    {{- range $field := list "hostNetwork" "hostPID" "hostIPC" }}
    - expression: "!has(variables.pod.{{ $field }}) || !variables.pod.{{ $field }}"
      message: a Job of the runner has no {{ $field }}
    {{- end }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ $name }}
  labels:
    {{- .labels | nindent 4 }}
spec:
  policyName: {{ $name }}
  validationActions: [Deny]
{{- end -}}
