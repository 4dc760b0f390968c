#!/usr/bin/env bash
# Builds the images midstream-router, -scheduler, -detokenizer and -gpu-worker with buildah.
#
#   BASE_IMAGE   base image [a Debian with Python, built here with mmdebstrap, so that no registry is needed]
#   TAG          tag of the images [0.1.0]
#   PARTS        images to build [all]
#
# Arguments are passed to buildah: `--build-arg ACCELERATOR=cuda` builds a worker for GPUs if pip finds PyTorch with CUDA.
#
# The builds use pip's settings on this machine: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS (a folder),
# and the certificates that it trusts. Requires root, or buildah configured for the user.
set -euo pipefail
cd "$(dirname "$0")/../.."

tag=${TAG:-0.1.0}
base=${BASE_IMAGE:-}
if [ -z "$base" ]; then
    base=localhost/midstream-base:bookworm
    if ! buildah inspect --type image "$base" > /dev/null 2>&1; then
        echo "$base: made by mmdebstrap"
        rootfs=$(mktemp --suffix=.tar)
        trap 'rm -f "$rootfs"' EXIT
        mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
            --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
            --dpkgopt='path-exclude=/usr/share/locale/*' \
            --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' bookworm "$rootfs"
        podman import --quiet "$rootfs" "$base" > /dev/null
    fi
fi

flags=(--quiet --layers --isolation "${BUILDAH_ISOLATION:-chroot}" --build-arg BASE_IMAGE="$base")
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS; do
    flags+=(--build-arg "$name=${!name:-}")
done
[ ! -d "${PIP_FIND_LINKS:-}" ] || flags+=(--volume "$PIP_FIND_LINKS:$PIP_FIND_LINKS:ro")
# For a registry with its own certificate authority.
[ -z "${PIP_CERT:-}" ] || flags+=(--volume "$PIP_CERT:/etc/ssl/certs/ca-certificates.crt:ro")

build() {
    local name=$1 file=$2 started=$SECONDS
    shift 2
    nice -n 10 buildah build "${flags[@]}" --tag "localhost/$name:$tag" --file "deploy/containers/$file" "$@" . > /dev/null
    echo "$name:$tag: $(($(podman image inspect --format '{{.Size}}' "localhost/$name:$tag") / 1000000)) MB," \
        "built in $((SECONDS - started)) s"
}

build midstream-model model.Containerfile
for part in ${PARTS:-router scheduler detokenizer gpu_worker}; do
    build "midstream-${part//_/-}" "$part.Containerfile" --build-arg "MODEL_IMAGE=localhost/midstream-model:$tag" "$@"
done
