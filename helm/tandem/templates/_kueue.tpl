{{/* Checks for changes of a StatefulSet that Kueue 0.19 refuses. Without these checks, Helm would already have changed
other objects when Kueue refuses. */}}

{{- define "tandem.kueueIsThere" -}}
{{- range .Capabilities.APIVersions -}}
{{- if hasPrefix "kueue.x-k8s.io/" . }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* A digest of the parts of a pod's spec that Kueue does not allow to change. */}}
{{- define "tandem.kueueShape" -}}
{{- $shape := pick . "nodeSelector" "affinity" "tolerations" "runtimeClassName" "topologySpreadConstraints" "resourceClaims" -}}
{{- range $kind := list "initContainers" "containers" -}}
{{- $containers := list -}}
{{- range get $ $kind -}}
{{- $containers = append $containers (list (dig "resources" "requests" dict .) (get . "ports")) -}}
{{- end -}}
{{- $_ := set $shape $kind $containers -}}
{{- end -}}
{{- toJson $shape | sha256sum | trunc 16 -}}
{{- end -}}

{{/* (dict "root" $ "name" "x-trainer" "shape" digest "kueue" values): compares the values with the existing
StatefulSet. */}}
{{- define "tandem.checkKueue" -}}
{{- $new := .kueue -}}
{{- if include "tandem.kueueIsThere" .root -}}
{{- with lookup "apps/v1" "StatefulSet" .root.Release.Namespace .name -}}
{{- $queue := get (default dict .metadata.labels) "kueue.x-k8s.io/queue-name" -}}
{{- $class := get (default dict .metadata.labels) "kueue.x-k8s.io/priority-class" -}}
{{- $shape := get (default dict .metadata.annotations) "tandem/kueue-shape" -}}
{{- $ready := gt (int (dig "status" "readyReplicas" 0 .)) 0 -}}
{{- $changed := "" -}}
{{- if and (ne $queue $new.queue) (or $ready (not $new.queue)) -}}
{{- $changed = "kueue.queue" -}}
{{- else if or (and $class (not $new.priorityClass)) (and $ready $new.priorityClass (not $class)) -}}
{{- $changed = "kueue.priorityClass" -}}
{{- else if and $new.queue $shape (ne $shape $.shape) -}}
{{- $changed = "requests, gpus, nodeSelector, affinity, tolerations, topologySpreadConstraints, runtimeClassName or the number of containers" -}}
{{- end -}}
{{- if $changed -}}
{{- fail (printf "Kueue refuses to change %s of StatefulSet %s: run `kubectl -n %s delete statefulset %s` and upgrade again; a running job returns to the queue, and the volumes stay" $changed $.name $.root.Release.Namespace $.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
