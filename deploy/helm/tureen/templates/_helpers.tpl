{{/* The name of all objects: the release's, with the chart's in it. */}}
{{- define "tureen.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "tureen" $name) -}}{{- $name = printf "%s-tureen" $name -}}{{- end -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "tureen.selector" -}}
app.kubernetes.io/name: tureen
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tureen.labels" -}}
{{ include "tureen.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The Secret of the keys; empty where there are none. */}}
{{- define "tureen.secret" -}}
{{- if .Values.keys.existingSecret -}}{{ .Values.keys.existingSecret }}
{{- else if or .Values.keys.clients .Values.keys.admin -}}{{ include "tureen.name" . }}-keys
{{- end -}}
{{- end }}

{{/* A value as TOML has it. JSON's strings, numbers and booleans are TOML's; its objects are not. */}}
{{- define "tureen.toml" -}}
{{- if kindIs "map" . -}}
{ {{- $first := true -}}
{{- range $key, $value := . -}}
{{- if not $first }}, {{ end }}{{ $key | toJson }} = {{ include "tureen.toml" $value }}{{- $first = false -}}
{{- end -}} }
{{- else if kindIs "slice" . -}}
[ {{- range $index, $value := . -}}{{- if $index }}, {{ end }}{{ include "tureen.toml" $value }}{{- end -}} ]
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end }}

{{/* The file of settings; empty where there are none. */}}
{{- define "tureen.settings" -}}
{{- with .Values.model }}
model-path = {{ toJson . }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ include "tureen.toml" $value }}
{{- end }}
{{- end }}
