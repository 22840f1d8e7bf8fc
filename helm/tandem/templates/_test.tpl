{{/* (dict "root" $ "name" "reach" "role" "controller" "weight" 1 "args" (list ...) "env" (list ...) "data" true): one
pod of `helm test`, in a role's image, placed like the role's pods. No selector matches its component. */}}
{{- define "tandem.test" -}}
{{- $root := .root -}}
{{- $component := printf "test-%s" .name -}}
{{- $about := dict "root" $root "role" .role "component" $component -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "tandem.fullname" $root }}-test-{{ .name }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "tandem.labels" $about | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-weight: {{ .weight | quote }}
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  {{- include "tandem.podCommon" $root | nindent 2 }}
  {{- include "tandem.placement" $about | nindent 2 }}
  containers:
    - name: test
      image: {{ include "tandem.image" $about }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        {{- toYaml .args | nindent 8 }}
      env:
        - name: NVIDIA_VISIBLE_DEVICES
          value: void
        - name: TANDEM_API_KEY_FILE
          value: /etc/tandem/secrets/api_key
        - name: TANDEM_URL
          value: http://{{ include "tandem.host" (dict "root" $root "host" "controller") }}:{{ int $root.Values.controller.service.port }}
        - name: TANDEM_INFERENCE_URL
          value: http://{{ include "tandem.host" (dict "root" $root "host" "inference") }}:{{ int $root.Values.inference.service.port }}
      securityContext:
        {{- include "tandem.securityContext" $root | nindent 8 }}
      resources:
        {{- include "tandem.amounts" $root.Values.tests.resources | nindent 8 }}
      volumeMounts:
        {{- if .data }}
        - {name: data, mountPath: /data}
        {{- end }}
        - {name: secrets, mountPath: /etc/tandem/secrets, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /cache}
        # The directory in which the images of trainer and inference write their caches.
        - {name: cache, mountPath: /private-cache}
  volumes:
    {{- if .data }}
    - name: data
      persistentVolumeClaim: {claimName: {{ include "tandem.dataClaim" $root | quote }}}
    {{- end }}
    - name: secrets
      {{- include "tandem.secretVolume" (dict "root" $root "admin" false) | nindent 6 }}
    - name: tmp
      emptyDir: {sizeLimit: 256Mi}
    - name: cache
      emptyDir: {sizeLimit: 256Mi}
{{- end -}}
