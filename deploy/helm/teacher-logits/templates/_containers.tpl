{{/* Every pod: nobody is root, nothing is gained, and nobody asks the API server anything. */}}
{{- define "teacher-logits.podSettings" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.user.uid }}
  runAsGroup: {{ .Values.user.gid }}
  fsGroup: {{ .Values.user.gid }}
  seccompProfile:
    type: RuntimeDefault
  {{- if and (eq .Values.sharing "node") .Values.node.seLinuxLevel }}
  seLinuxOptions:
    level: {{ .Values.node.seLinuxLevel | quote }}
  {{- end }}
{{- end }}

{{- define "teacher-logits.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "teacher-logits.teacher" -}}
name: teacher
image: {{ include "teacher-logits.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - serve
  {{- if .Values.teacher.model.claim }}
  - --model=/model
  {{- end }}
  # The Unix socket is there for the probes too, whatever else it listens at.
  - --listen=unix:/run/teacher-logits/teacher.sock
  {{- if eq .Values.sharing "network" }}
  - --listen=0.0.0.0:{{ .Values.network.port }}
  {{- if .Values.network.tls.secret }}
  - --tls-cert=/tls/tls.crt
  - --tls-key=/tls/tls.key
  {{- if .Values.network.tls.clientCa }}
  - --tls-client-ca=/tls/ca.crt
  {{- end }}
  {{- else if .Values.network.insecure }}
  - --insecure
  {{- else }}
  {{- fail "sharing: network takes network.tls.secret, or network.insecure: true if whoever reaches the port may use the teacher" }}
  {{- end }}
  {{- if .Values.network.tokensSecret }}
  - --token-file=/access/tokens
  {{- end }}
  {{- end }}
  {{- if .Values.metrics.enabled }}
  # Plain HTTP, as Prometheus asks pods; the NetworkPolicy lets it alone there. Calls stay as they are.
  - --metrics=0.0.0.0:{{ .Values.metrics.port }}
  - --insecure-metrics
  {{- end }}
  - --pool-size={{ .Values.teacher.poolSize }}
  - --drain-grace={{ .Values.teacher.drainGraceSeconds }}s
  - --log-format=json
  {{- range .Values.teacher.args }}
  - {{ . | quote }}
  {{- end }}
{{- with .Values.teacher.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or (eq .Values.sharing "network") .Values.metrics.enabled }}
ports:
  {{- if eq .Values.sharing "network" }}
  - name: grpc
    containerPort: {{ .Values.network.port }}
  {{- end }}
  {{- if .Values.metrics.enabled }}
  - name: metrics
    containerPort: {{ .Values.metrics.port }}
  {{- end }}
{{- end }}
# The gRPC health protocol over the Unix socket: a probe of kind `grpc` knows plain TCP alone, and a
# certificate that is out of date is no reason to end who lives.
startupProbe:
  exec:
    command: [python, /opt/teacher-logits/health.py, "unix:/run/teacher-logits/teacher.sock"]
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .Values.teacher.loadSeconds 4) 5 }}
readinessProbe:
  exec:
    {{- if and (eq .Values.sharing "network") .Values.network.tls.secret (not .Values.network.tls.clientCa) }}
    # As students come: ready is whose port takes them, by a certificate that is in time and has the name.
    command: [python, /opt/teacher-logits/health.py, --tls-ca=/tls/tls.crt, "--tls-server-name={{ include "teacher-logits.name" . }}", "tls://127.0.0.1:{{ .Values.network.port }}"]
    {{- else }}
    command: [python, /opt/teacher-logits/health.py, "unix:/run/teacher-logits/teacher.sock"]
    {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
# Alive is who answers, or every drain would be cut short.
livenessProbe:
  exec:
    command: [python, /opt/teacher-logits/health.py, --alive, "unix:/run/teacher-logits/teacher.sock"]
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
# The pool counts here: slabs are memfds of this container, which no /dev/shm bounds.
resources:
  {{- toYaml .Values.teacher.resources | nindent 2 }}
{{ include "teacher-logits.containerSecurity" . }}
volumeMounts:
  - name: sockets
    mountPath: /run/teacher-logits
  - name: teacher-tmp
    mountPath: /tmp
  {{- if .Values.teacher.model.claim }}
  - name: model
    mountPath: /model
    readOnly: true
    {{- with .Values.teacher.model.subPath }}
    subPath: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- if eq .Values.sharing "network" }}
  {{- if .Values.network.tls.secret }}
  - name: tls
    mountPath: /tls
    readOnly: true
  {{- end }}
  {{- if .Values.network.tokensSecret }}
  - name: tokens
    mountPath: /access
    readOnly: true
  {{- end }}
  {{- end }}
  {{- with .Values.teacher.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* What a student shows the teacher and knows it by, where there is such: all that connects reads it. */}}
{{- define "teacher-logits.credentials" -}}
{{- with .Values.network.student.caSecret }}
- {name: TEACHER_LOGITS_TLS_CA, value: /credentials/ca.crt}
{{- end }}
{{- with .Values.network.student.certSecret }}
- {name: TEACHER_LOGITS_TLS_CERT, value: /credentials/tls.crt}
- {name: TEACHER_LOGITS_TLS_KEY, value: /credentials/tls.key}
{{- end }}
{{- with .Values.network.student.tokenSecret }}
- {name: TEACHER_LOGITS_TOKEN_FILE, value: /credentials/token}
{{- end }}
{{- end }}

{{- define "teacher-logits.meetingMounts" -}}
{{- if ne .Values.sharing "network" }}
# Read-only: it connects to the sockets, and can put none in their place.
- name: sockets
  mountPath: /run/teacher-logits
  readOnly: true
{{- else if include "teacher-logits.credentials" . }}
- name: credentials
  mountPath: /credentials
  readOnly: true
{{- end }}
{{- end }}

{{- define "teacher-logits.teacherServes" -}}
name: teacher-serves
image: {{ include "teacher-logits.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [python, /opt/teacher-logits/health.py, --wait={{ .Values.teacher.loadSeconds }}, {{ include "teacher-logits.address" . | quote }}]
{{- with include "teacher-logits.credentials" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
resources:
  requests: {cpu: 50m, memory: 128Mi}
  limits: {memory: 256Mi}
{{ include "teacher-logits.containerSecurity" . }}
{{- with include "teacher-logits.meetingMounts" . | trim }}
volumeMounts:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "teacher-logits.student" -}}
name: student
image: {{ .Values.student.image | default (include "teacher-logits.image" .) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command:
  {{- toYaml .Values.student.command | nindent 2 }}
args:
  {{- range .Values.student.args }}
  - {{ . | quote }}
  {{- end }}
  - {{ include "teacher-logits.address" . | quote }}
{{- $credentials := include "teacher-logits.credentials" . | trim }}
{{- if or $credentials .Values.student.env }}
env:
  {{- with $credentials }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .Values.student.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
resources:
  {{- toYaml .Values.student.resources | nindent 2 }}
{{ include "teacher-logits.containerSecurity" . }}
volumeMounts:
  {{- with include "teacher-logits.meetingMounts" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  - name: student-tmp
    mountPath: /tmp
  - name: dev-shm
    mountPath: /dev/shm
  {{- with .Values.student.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "teacher-logits.sockets" -}}
- name: sockets
{{- if eq .Values.sharing "node" }}
  # One folder of the node, which its owner has made: never of root's making by accident.
  hostPath:
    path: {{ .Values.node.socketFolder }}
    type: Directory
{{- else }}
  emptyDir:
    sizeLimit: 1Mi
{{- end }}
{{- end }}

{{- define "teacher-logits.teacherVolumes" -}}
{{ include "teacher-logits.sockets" . }}
- name: teacher-tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if .Values.teacher.model.claim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.teacher.model.claim }}
    readOnly: true
{{- end }}
{{- if eq .Values.sharing "network" }}
# Whole folders, and not a subPath: the server reads them anew when they change.
{{- with .Values.network.tls.secret }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.network.tokensSecret }}
- name: tokens
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- with .Values.teacher.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "teacher-logits.studentVolumes" -}}
- name: student-tmp
  emptyDir:
    sizeLimit: 1Gi
# For a trainer's DataLoader workers; counts as the student's memory.
- name: dev-shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.student.devShm }}
{{- if include "teacher-logits.credentials" . }}
# The files that are named, and no other of a Secret: of the teacher's own, its key stays there.
- name: credentials
  projected:
    # A key or token that other users can read is refused; fsGroup is who may.
    defaultMode: 0440
    sources:
      {{- with .Values.network.student.caSecret }}
      - secret:
          name: {{ . }}
          items: [{key: ca.crt, path: ca.crt}]
      {{- end }}
      {{- with .Values.network.student.certSecret }}
      - secret:
          name: {{ . }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
      {{- end }}
      {{- with .Values.network.student.tokenSecret }}
      - secret:
          name: {{ . }}
          items: [{key: token, path: token}]
      {{- end }}
{{- end }}
{{- with .Values.student.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
