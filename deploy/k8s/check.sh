#!/usr/bin/env bash
# Renders every overlay and the Helm chart with each example values file, validates the output against the Kubernetes
# schemas (unknown fields are errors), and checks manifests and Containerfiles against checkov's policies. Exceptions are
# in checkov.yaml.
#
#   check.sh VENV [--record]   VENV contains kubernetes-validate, checkov and helm; --record validates against every
#                              version of Kubernetes that the chart accepts, and adds these to docs/compatibility.md
set -euo pipefail
bin=$(realpath "$1")/bin
record=${2:-}
cd "$(dirname "$0")"

# The versions that the chart accepts (kubeVersion) and whose schemas kubernetes-validate has.
versions=()
for folder in "$bin"/../lib/python3*/site-packages/kubernetes_validate/kubernetes-json-schema/v1.*-local-strict; do
    version=${folder##*/v}
    version=${version%.0-local-strict}
    [ "${version#1.}" -lt 30 ] || versions+=("$version")
done
[ "$record" = --record ] || versions=("${versions[-1]}")
validate() {
    # kubernetes-validate would warn about LeaderWorkerSet and ScaledObject, whose schemas are not part of Kubernetes.
    for version in "${versions[@]}"; do
        "$bin/kubernetes-validate" --kubernetes-version "$version" --strict --quiet --no-warn "$1"
    done
}

rendered=$(mktemp -d)
trap 'rm -r "$rendered"' EXIT
for overlay in overlays/*/; do
    name=$(basename "$overlay")
    kubectl kustomize "$overlay" > "$rendered/$name.yaml"
    validate "$rendered/$name.yaml"
done
cp examples/*.yaml "$rendered"
for example in examples/*.yaml; do
    validate "$example"
done
for values in ../helm/midstream/ci/*.yaml; do
    name=chart-$(basename "$values" .yaml)
    "$bin/helm" lint --strict --quiet ../helm/midstream --values "$values"
    "$bin/helm" template midstream ../helm/midstream --namespace midstream --values "$values" > "$rendered/$name.yaml"
    validate "$rendered/$name.yaml"
done
for file in ../containers/*.Containerfile; do
    cp "$file" "$rendered/$(basename "$file" .Containerfile).Dockerfile"
done
"$bin/checkov" --config-file checkov.yaml --skip-download --compact --quiet --framework kubernetes dockerfile --directory "$rendered"
if [ "$record" = --record ]; then
    (cd ../.. && python3 -m deploy.release.compatibility kubernetes "${versions[@]}")
fi
