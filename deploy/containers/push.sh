#!/usr/bin/env bash
# Pushes the images of one build to a registry, and prints how to install them: push.sh REGISTRY, for example
# registry.example/team.
#
#   TAG           tag of the images [printed by tag.sh]
#   PARTS         images to push [all]
#   PUSH_FLAGS    flags of `podman push`, for example --creds USER:PASSWORD
set -euo pipefail
cd "$(dirname "$0")/../.."

registry=${1:?REGISTRY is needed, for example: make push REGISTRY=registry.example/team}
tag=${TAG:-$(deploy/containers/tag.sh)}
for part in ${PARTS:-router scheduler detokenizer gpu_worker}; do
    name=midstream-${part//_/-}
    podman image exists "localhost/$name:$tag" || {
        echo "localhost/$name:$tag does not exist: run make images TAG=$tag" >&2
        exit 1
    }
    # shellcheck disable=SC2086 # several flags
    podman push --quiet ${PUSH_FLAGS:-} "localhost/$name:$tag" "docker://$registry/$name:$tag"
    echo "$registry/$name:$tag"
done
echo "To install them: helm upgrade --install midstream deploy/helm/midstream --namespace midstream --create-namespace" \
    "--set images.registry=$registry --set-string images.tag=$tag"
