{{- define "speccompile.name" -}}
{{- printf "%s-triton" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "speccompile.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "speccompile.labels" -}}
{{ include "speccompile.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "speccompile.claim" -}}
{{- default (printf "%s-models" (include "speccompile.name" .)) .Values.models.existingClaim -}}
{{- end -}}
