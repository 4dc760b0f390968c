{{- /* Names of a release's objects begin with this: the release's name, with the chart's if it does not contain it. */ -}}
{{- define "midstream.fullname" -}}
{{- $name := .Release.Name }}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end }}
{{- $name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* Labels of all objects. */ -}}
{{- define "midstream.labels" -}}
app.kubernetes.io/name: midstream
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* Add the release's label wherever an object labels or selects Midstream's pods: `value` is any part of an object. */ -}}
{{- define "midstream.mark" -}}
{{- $instance := .instance }}
{{- if kindIs "map" .value }}
{{- range $key, $child := .value }}
{{- if and (has $key (list "matchLabels" "labels" "selector")) (kindIs "map" $child) }}
{{- if or (hasKey $child "app.kubernetes.io/component") (hasKey $child "midstream/role") (eq (get $child "app.kubernetes.io/name" | toString) "midstream") }}
{{- $_ := set $child "app.kubernetes.io/instance" $instance }}
{{- end }}
{{- end }}
{{- include "midstream.mark" (dict "value" $child "instance" $instance) }}
{{- end }}
{{- else if kindIs "slice" .value }}
{{- range .value }}{{ include "midstream.mark" (dict "value" . "instance" $instance) }}{{ end }}
{{- end }}
{{- end }}
