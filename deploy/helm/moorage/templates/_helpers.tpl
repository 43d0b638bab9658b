{{- define "moorage.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "moorage.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "moorage.labels" -}}
{{ include "moorage.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "moorage.hosts" -}}
{{- $name := include "moorage.name" . }}
{{- $space := .Release.Namespace }}
{{- $hosts := list $name (printf "%s.%s" $name $space) (printf "%s.%s.svc" $name $space) }}
{{- $hosts = append $hosts (printf "%s.%s.svc.cluster.local" $name $space) }}
{{- if .Values.ingress.enabled }}{{ $hosts = append $hosts .Values.ingress.host }}{{ end }}
{{- concat $hosts .Values.allowedHosts | uniq | join "," }}
{{- end }}

{{/* Ports of settings.storage, as JSON: forgotten in networkPolicy.toPorts, no pod ever gets ready. */}}
{{- define "moorage.databasePorts" -}}
{{- $ports := list -}}
{{- $storage := .Values.settings.storage | default "" -}}
{{- if regexMatch "^postgres(ql)?://" $storage -}}
{{- range splitList "," (regexReplaceAll "^[a-z]+://([^/@?]*@)?([^/?]*).*$" $storage "${2}") -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default "5432") -}}
{{- end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end }}

{{- define "moorage.probe" -}}
{{- if .context.Values.tls.clientCa -}}
tcpSocket:
  port: http
{{- else -}}
httpGet:
  path: {{ .path }}
  port: http
  {{- if .context.Values.tls.secret }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- end }}

{{/* A setting as text. Helm reads whole numbers of files as floating-point ones: 4.194304e+06. */}}
{{- define "moorage.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}
