#!/usr/bin/env bash
# Renders every overlay and the Helm chart with each example values file, validates the output against the Kubernetes
# schemas (unknown fields are errors), and checks manifests and Containerfiles against checkov's policies. Exceptions are
# in checkov.yaml.
#
#   check.sh VENV   VENV contains kubernetes-validate, checkov and helm
set -euo pipefail
bin=$(realpath "$1")/bin
cd "$(dirname "$0")"

rendered=$(mktemp -d)
trap 'rm -r "$rendered"' EXIT
for overlay in overlays/*/; do
    name=$(basename "$overlay")
    kubectl kustomize "$overlay" > "$rendered/$name.yaml"
    # kubernetes-validate warns about LeaderWorkerSet and ScaledObject, whose schemas are not part of Kubernetes.
    "$bin/kubernetes-validate" --strict --quiet "$rendered/$name.yaml"
done
for values in ../helm/midstream/ci/*.yaml; do
    name=chart-$(basename "$values" .yaml)
    "$bin/helm" lint --strict --quiet ../helm/midstream --values "$values"
    "$bin/helm" template midstream ../helm/midstream --namespace midstream --values "$values" > "$rendered/$name.yaml"
    "$bin/kubernetes-validate" --strict --quiet "$rendered/$name.yaml"
done
for file in ../containers/*.Containerfile; do
    cp "$file" "$rendered/$(basename "$file" .Containerfile).Dockerfile"
done
"$bin/checkov" --config-file checkov.yaml --skip-download --compact --quiet --framework kubernetes dockerfile --directory "$rendered"
