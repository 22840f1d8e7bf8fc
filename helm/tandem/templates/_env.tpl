{{/* The environment of each role's programs. docker-compose.yml has the same settings; tests/helm/test_drift.py
compares the two. */}}

{{/* A map of settings in camelCase as TANDEM_* variables; null and "" are left out. */}}
{{- define "tandem.settings" -}}
{{- range $key, $value := . -}}
{{- if and (not (kindIs "invalid" $value)) (ne (toString $value) "") }}
- name: TANDEM_{{ $key | snakecase | upper }}
  value: {{ include "tandem.string" $value | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "role" "trainer"): a role's variables. With "runner" true: the variables of the runner's own pod,
which has no GPU. */}}
{{- define "tandem.env" -}}
{{- $v := .root.Values -}}
- name: TANDEM_BASE_MODEL
  value: {{ ternary "models/tiny" $v.baseModel $v.tinyModel | quote }}
- name: TANDEM_DEVICE
  value: {{ $v.device }}
- name: TANDEM_GPU_MODE
  value: {{ $v.gpuMode }}
- name: TANDEM_API_KEY_FILE
  value: /etc/tandem/secrets/api_key
- name: HF_TOKEN_PATH
  value: /etc/tandem/secrets/hf_token
{{- with $v.huggingface.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if $v.huggingface.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if ne .role "inference" }}
- name: TANDEM_TRAINER_RANKS
  value: {{ include "tandem.ranks" .root | quote }}
{{- end }}
{{- if and (eq .role "trainer") (include "tandem.jobs" .root) }}
{{- $own := false -}}
{{- range $v.trainer.extraEnv -}}{{- if eq .name "OMP_NUM_THREADS" -}}{{- $own = true -}}{{- end -}}{{- end -}}
{{- if not $own }}
{{- /* The runner and all hosts have the same number of threads, because this number decides the order of floating-point
sums. */}}
- name: OMP_NUM_THREADS
  value: {{ include "tandem.threads" .root | quote }}
{{- end }}
- name: TANDEM_EXECUTOR
  value: kubernetes
- name: TANDEM_TRAINER_HOSTS
  value: {{ int $v.trainer.hosts | quote }}
{{- if .runner }}
- name: TANDEM_JOB_TEMPLATE
  value: /etc/tandem/job/job.json
- name: TANDEM_PARALLEL_JOBS
  value: {{ int $v.trainer.parallelJobs | quote }}
- name: TANDEM_ROLE
  value: trainer
{{- end }}
{{- end }}
{{- if eq .role "controller" }}
{{- /* The controller refuses runs and jobs that the trainer's topology can't compute. */}}
{{- include "tandem.settings" (pick $v.trainer.settings "topology" "tensorParallel" "sequenceParallel" "pipelineParallel" "contextParallel" "expertParallel" "expertTensorParallel") }}
- name: TANDEM_INFERENCE_URL
  value: http://{{ include "tandem.host" (dict "root" .root "host" "inference") }}:{{ $v.inference.service.port }}
{{- else if eq .role "inference" }}
- name: TANDEM_INFERENCE_URL
  value: http://127.0.0.1:8000
- name: TANDEM_INFERENCE_TENSOR_PARALLEL
  value: {{ ternary $v.inference.gpus 1 (eq $v.device "cuda") | int | quote }}
{{- if include "tandem.several" .root }}
- name: TANDEM_INFERENCE_REPLICAS
  value: {{ int $v.inference.replicas | quote }}
- name: TANDEM_REPLICA
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
- name: TANDEM_ADMIN_TOKEN_FILE
  value: /etc/tandem/secrets/admin_token
{{- end }}
{{- include "tandem.settings" $v.settings }}
{{- include "tandem.settings" (index $v .role).settings }}
{{- if or (eq .role "controller") (eq $v.device "cpu") .runner }}
- name: NVIDIA_VISIBLE_DEVICES
  value: void
{{- end }}
{{- end -}}
