{{/* Names that several templates use. What each container is stands in containers.tpl. */}}

{{- define "teacher-logits.name" -}}
{{ printf "%s-teacher" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "teacher-logits.studentName" -}}
{{ printf "%s-student" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "teacher-logits.selector" -}}
app.kubernetes.io/name: teacher-logits
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "teacher-logits.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}

{{- define "teacher-logits.address" -}}
{{- if eq .Values.sharing "network" -}}
{{ printf "%s%s:%v" (ternary "tls://" "" (ne .Values.network.tls.secret "")) (include "teacher-logits.name" .) .Values.network.port }}
{{- else -}}
unix:/run/teacher-logits/teacher.sock
{{- end -}}
{{- end }}

{{/* The drain, and a margin in which the server stops; in one pod the student stops before it. */}}
{{- define "teacher-logits.graceSeconds" -}}
{{- $own := add .Values.teacher.drainGraceSeconds 15 -}}
{{- if eq .Values.sharing "pod" -}}{{ add $own .Values.student.stopSeconds }}{{- else -}}{{ $own }}{{- end -}}
{{- end }}

{{- define "teacher-logits.egressToNames" -}}
# The names of Services.
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
  ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end }}
