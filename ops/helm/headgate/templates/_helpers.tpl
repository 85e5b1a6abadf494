{{- define "headgate.labels" -}}
app.kubernetes.io/name: headgate
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* (dict "root" $ "part" "gateway") */}}
{{- define "headgate.selector" -}}
app.kubernetes.io/name: headgate
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "headgate.image" -}}
{{ .root.Values.image.registry }}/{{ .repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "headgate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "headgate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "headgate.secretEnv" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .root.Values.existingSecret }}, key: {{ .key }}}}
{{- end }}

{{- define "headgate.env" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "headgate.otlp" -}}
{{- with .Values.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "headgate.slot" -}}
- name: HEADGATE_SLOT
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
{{- end }}

{{- /* The home, without what a process has of its own: a directory that ends with the pod, secrets, /tmp. */}}
{{- define "headgate.mounts" -}}
- {name: home, mountPath: /var/lib/headgate}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "headgate.volumes" -}}
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "headgate.secretMount" -}}
- {name: secrets, mountPath: /var/lib/headgate/secrets, readOnly: true}
{{- end }}

{{- define "headgate.secretVolume" -}}
- name: secrets
  secret:
    secretName: {{ .Values.existingSecret }}
    defaultMode: 0440
    items: [{key: pepper, path: pepper}, {key: master.key, path: master.key}]
{{- end }}

{{- define "headgate.filesVolume" -}}
- name: files
  persistentVolumeClaim: {claimName: {{ .Values.files.existingClaim | default (printf "%s-files" .Release.Name) }}}
{{- end }}

{{- define "headgate.modelsVolume" -}}
{{- with .Values.modelsVolume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "headgate.modelsMount" -}}
{{- if .Values.modelsVolume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "headgate.stateClaim" -}}
- metadata:
    name: state
  spec:
    accessModes: [ReadWriteOncePod]
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{- /* Longer than the drain, and what follows it: settlements, journal, spans. */}}
{{- define "headgate.grace" -}}
{{ add .Values.drain.graceSeconds .Values.drain.seconds 25 }}
{{- end }}

{{- /* The settings of links, by the name of a secret, or none where the network policy guards them: (dict "root" $ "secret" ...) */}}
{{- define "headgate.linkEnv" -}}
{{- if .secret }}
- {name: HEADGATE_LINK_CA, value: /etc/headgate-links/ca.crt}
- {name: HEADGATE_LINK_CERT, value: /etc/headgate-links/tls.crt}
- {name: HEADGATE_LINK_KEY, value: /etc/headgate-links/tls.key}
{{- else if .root.Values.networkPolicy.enabled }}
- {name: HEADGATE_LINK_PLAIN, value: "1"}
{{- end }}
{{- end }}

{{- define "headgate.linkMount" -}}
{{- if . }}
- {name: links, mountPath: /etc/headgate-links, readOnly: true}
{{- end }}
{{- end }}

{{- define "headgate.linkVolume" -}}
{{- with . }}
- name: links
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}
