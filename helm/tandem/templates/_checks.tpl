{{/* Adds the chart's defaults to the values, because values stored by an older chart (--reuse-values) lack this chart's
new keys. Then refuses impossible values. */}}
{{- define "tandem.init" -}}
{{- include "tandem.default" (list .Values (.Files.Get "files/values.yaml" | fromYaml)) -}}
{{- include "tandem.setReplicas" . -}}
{{- include "tandem.checks" . -}}
{{- end -}}

{{/* Replaces `replicas: null` by the present number of the workload, which may have been set by `kubectl scale`. */}}
{{- define "tandem.setReplicas" -}}
{{- range $role := list "controller" "trainer" "inference" -}}
{{- $values := index $.Values $role -}}
{{- if kindIs "invalid" $values.replicas -}}
{{- $name := printf "%s-%s" (include "tandem.fullname" $) (include "tandem.componentOf" (dict "root" $ "role" $role)) -}}
{{- $kind := ternary "Deployment" "StatefulSet" (eq $role "controller") -}}
{{- $found := dig "spec" "replicas" 1 (lookup "apps/v1" $kind $.Release.Namespace $name) | int -}}
{{- if and (gt $found 1) (ne $role "inference") -}}
{{- fail (printf "%s %s has %d replicas, and each role is one pod: run `kubectl -n %s scale %s %s --replicas=1` and upgrade again" $kind $name $found $.Release.Namespace (lower $kind) $name) -}}
{{- end -}}
{{- $_ := set $values "replicas" $found -}}
{{- end -}}
{{- end -}}
{{- if include "tandem.shared" . -}}
{{- $_ := set .Values.inference "replicas" .Values.trainer.replicas -}}
{{- end -}}
{{- end -}}

{{- define "tandem.default" -}}
{{- $values := index . 0 -}}
{{- range $key, $default := index . 1 -}}
{{- if not (hasKey $values $key) -}}
{{- $_ := set $values $key $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $values $key)) -}}
{{- include "tandem.default" (list (get $values $key) $default) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checks" -}}
{{- $v := .Values -}}
{{- if not (or $v.baseModel $v.tinyModel) -}}
{{- fail "baseModel is empty: name a Hugging Face model or a directory of models (or set tinyModel: true to try things out)" -}}
{{- end -}}
{{- if and $v.tinyModel $v.baseModel -}}
{{- fail "tinyModel writes a model of its own: leave baseModel empty, or set tinyModel: false" -}}
{{- end -}}
{{- $ranks := ternary "gpus" "cpuRanks" (eq $v.device "cuda") -}}
{{- $parallel := int (default 1 $v.trainer.settings.tensorParallel) -}}
{{- if ne (mod (include "tandem.ranks" . | int) $parallel) 0 -}}
{{- fail (printf "trainer.%s=%d%s is not a multiple of trainer.settings.tensorParallel=%d" $ranks (int (get $v.trainer $ranks)) (ternary (printf " times trainer.hosts=%d" (int $v.trainer.hosts)) "" (gt (int $v.trainer.hosts) 1)) $parallel) -}}
{{- end -}}
{{- include "tandem.checkExecutor" . -}}
{{- if eq $v.gpuMode "shared" -}}
{{- if ne $v.device "cuda" -}}
{{- fail "gpuMode=shared needs device=cuda: without a GPU there is nothing to share" -}}
{{- end -}}
{{- if not $v.trainer.enabled -}}
{{- fail "gpuMode=shared and trainer.enabled=false: without a trainer there is nothing to share; set gpuMode=dedicated" -}}
{{- end -}}
{{- if ne (int $v.trainer.gpus) (int $v.inference.gpus) -}}
{{- fail (printf "gpuMode=shared: trainer.gpus=%d and inference.gpus=%d are the same GPUs, so the numbers must be equal" (int $v.trainer.gpus) (int $v.inference.gpus)) -}}
{{- end -}}
{{- if and (eq $v.shared.via "claim") (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "shared.via=claim needs Kubernetes 1.34 (ResourceClaims), this is %s: set shared.via=resource" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- if include "tandem.several" . -}}
{{- if include "tandem.oneNode" . -}}
{{- fail (printf "inference.replicas=%d and accessMode ReadWriteOnce: that volume holds all pods on one node, and its loss ends every server; use ReadWriteMany for data and cache, or inference.replicas=1" (int $v.inference.replicas)) -}}
{{- end -}}
{{- if and $v.trainer.enabled (eq $v.gpuMode "shared") -}}
{{- fail (printf "gpuMode=shared and inference.replicas=%d: each inference server needs GPUs of its own; set gpuMode=dedicated" (int $v.inference.replicas)) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "trainer" "inference" -}}
{{- $resource := (index $v $role).gpuResource -}}
{{- if hasKey (index $v $role).extendedResources $resource -}}
{{- fail (printf "%s.extendedResources has %s, which the chart sets from %s.gpus" $role $resource $role) -}}
{{- end -}}
{{- end -}}
{{- if include "tandem.oneNode" . -}}
{{- $other := $v.trainer.nodeSelector -}}
{{- range $role := list "controller" "inference" -}}
{{- range $key, $value := (index $v $role).nodeSelector -}}
{{- if and (hasKey $other $key) (ne (toString $value) (toString (get $other $key))) -}}
{{- fail (printf "accessMode ReadWriteOnce holds all pods on one node, but %s.nodeSelector and trainer.nodeSelector have different values of %s: use ReadWriteMany, or one node" $role $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "tandem.fullname" .)) -}}
{{- fail (printf "%q can't be the name of a Service, which begins with a letter and has letters, digits and '-': set fullnameOverride" (include "tandem.fullname" .)) -}}
{{- end -}}
{{- if and $v.cache.existingClaim (ne $v.cache.type "claim") -}}
{{- fail (printf "cache.existingClaim=%s is not used with cache.type=%s: set cache.type=claim, or leave it empty" $v.cache.existingClaim $v.cache.type) -}}
{{- end -}}
{{- if and $v.data.existingClaim (eq $v.data.existingClaim $v.cache.existingClaim) -}}
{{- fail (printf "data.existingClaim and cache.existingClaim are both %s: checkpoints and caches need volumes of their own" $v.data.existingClaim) -}}
{{- end -}}
{{- range $kind := list "ingress" "gateway" -}}
{{- $hosts := index $v $kind -}}
{{- if and $hosts.enabled (not (or $hosts.controllerHost $hosts.inferenceHost)) -}}
{{- fail (printf "%s.enabled, but neither %s.controllerHost nor %s.inferenceHost is set" $kind $kind $kind) -}}
{{- end -}}
{{- if and $hosts.enabled (eq $hosts.controllerHost $hosts.inferenceHost) -}}
{{- fail (printf "%s.controllerHost and %s.inferenceHost are the same: both APIs have paths below /v1, so each needs a host of its own" $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "controller" "inference" -}}
{{- $service := (index $v $role).service -}}
{{- if and $service.nodePort (eq $service.type "ClusterIP") -}}
{{- fail (printf "%s.service.nodePort=%d has no use with type ClusterIP: set type NodePort or LoadBalancer" $role (int $service.nodePort)) -}}
{{- end -}}
{{- if and $service.loadBalancerClass (ne $service.type "LoadBalancer") -}}
{{- fail (printf "%s.service.loadBalancerClass=%s has no use with type %s: set type LoadBalancer" $role $service.loadBalancerClass $service.type) -}}
{{- end -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.parentRefs) -}}
{{- fail "gateway.enabled, but gateway.parentRefs names no Gateway" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkExecutor" -}}
{{- $v := .Values -}}
{{- $t := $v.trainer -}}
{{- if ne $t.executor "kubernetes" -}}
{{- if gt (int $t.hosts) 1 -}}
{{- fail (printf "trainer.hosts=%d needs trainer.executor=kubernetes: with executor=local all processes are in the trainer's one pod" (int $t.hosts)) -}}
{{- end -}}
{{- if gt (int $t.parallelJobs) 1 -}}
{{- fail (printf "trainer.parallelJobs=%d needs trainer.executor=kubernetes: with executor=local all jobs take turns on the trainer's GPUs" (int $t.parallelJobs)) -}}
{{- end -}}
{{- if $t.warmup.enabled -}}
{{- fail "trainer.warmup.enabled needs trainer.executor=kubernetes: with executor=local the trainer's pod stays on its node" -}}
{{- end -}}
{{- if $t.kernels.existingClaim -}}
{{- fail "trainer.kernels.existingClaim needs trainer.executor=kubernetes: with executor=local the trainer's pod stays, and so do its kernels" -}}
{{- end -}}
{{- if $t.settings.lingerSeconds -}}
{{- fail "trainer.settings.lingerSeconds needs trainer.executor=kubernetes: with executor=local the trainer's pod stays anyway" -}}
{{- end -}}
{{- else -}}
{{- if eq $v.gpuMode "shared" -}}
{{- fail "trainer.executor=kubernetes and gpuMode=shared: a Job's pods have GPUs of their own, on any node; set gpuMode=dedicated" -}}
{{- end -}}
{{- if and (gt (int $t.hosts) 1) (include "tandem.oneNode" .) -}}
{{- fail (printf "trainer.hosts=%d and accessMode ReadWriteOnce: that volume holds all pods on one node; use ReadWriteMany for data and cache, or trainer.hosts=1 with more trainer.gpus" (int $t.hosts)) -}}
{{- end -}}
{{- if and $t.kernels.existingClaim (has $t.kernels.existingClaim (list $v.data.existingClaim $v.cache.existingClaim $v.models.existingClaim)) -}}
{{- fail (printf "trainer.kernels.existingClaim=%s is mounted elsewhere too: ranks run what is in it, so it needs a claim of its own" $t.kernels.existingClaim) -}}
{{- end -}}
{{- if and $t.warmup.enabled (include "tandem.oneNode" .) -}}
{{- fail "trainer.warmup.enabled and accessMode ReadWriteOnce: the DaemonSet's pods mount that volume on every node; use ReadWriteMany for data and cache" -}}
{{- end -}}
{{- if or (has (default "" $t.settings.launch) (list "resident" "torchrun")) (eq (toString $t.settings.exitAfterJob) "false") -}}
{{- fail "trainer.executor=kubernetes starts ranks by fork and ends their pods with the job: leave trainer.settings.launch and exitAfterJob out" -}}
{{- end -}}
{{- if eq (default "" $t.settings.topology) "auto" -}}
{{- fail "trainer.settings.topology=auto needs the GPUs' memory, and with trainer.executor=kubernetes the runner has no GPU: set the sizes, which `tandem plan` proposes" -}}
{{- end -}}
{{- if $t.extraContainers -}}
{{- fail "trainer.extraContainers: a Job's pod would not end before they do; use trainer.extraInitContainers with restartPolicy: Always" -}}
{{- end -}}
{{- range $annotations := list $t.podAnnotations $t.podLabels -}}
{{- if hasKey $annotations "kueue.x-k8s.io/job-min-parallelism" -}}
{{- fail "kueue.x-k8s.io/job-min-parallelism: a job has all its ranks or none, so Kueue can't admit a part of its pods; leave it out" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "component" "trainer" "spec" spec): refuses a pod in which two items of a list have the same name. An API
server would refuse the pod too, but would not name the value of the chart or the container. */}}
{{- define "tandem.checkPod" -}}
{{- $containers := concat .spec.initContainers .spec.containers -}}
{{- $lists := list
    (list "volume" "name" "extraVolumes" .component .spec.volumes)
    (list "container" "name" "extraContainers or extraInitContainers" .component $containers) -}}
{{- range $container := $containers -}}
{{- $where := printf "%s: container %s" $.component $container.name -}}
{{- $lists = append $lists (list "variable" "name" "extraEnv" $where (default list $container.env)) -}}
{{- $lists = append $lists (list "mount" "mountPath" "extraVolumeMounts" $where (default list $container.volumeMounts)) -}}
{{- end -}}
{{- range $list := $lists -}}
{{- $seen := dict -}}
{{- range $item := index $list 4 -}}
{{- $name := toString (get $item (index $list 1)) -}}
{{- if hasKey $seen $name -}}
{{- fail (printf "%s: the %s %s is there twice: remove it from %s, or rename it; the README of the chart has the values for what the chart sets itself" (index $list 3) (index $list 0) $name (index $list 2)) -}}
{{- end -}}
{{- $_ := set $seen $name true -}}
{{- end -}}
{{- end -}}
{{- end -}}
