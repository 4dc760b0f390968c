#!/usr/bin/env bash
# Builds the images midstream-router, -scheduler, -detokenizer and -gpu-worker with buildah.
#
#   BASE_IMAGE     base image [a Debian with Python, built here with mmdebstrap, so that no registry is needed]
#   BASE_ARCHIVE   a root file system (.tar) from which the base image is made, instead of BASE_IMAGE
#   TAG            tag of the images [printed by tag.sh]
#   PARTS          images to build [all]
#   SOURCE_DATE_EPOCH   time of all files and images, in Unix seconds: the same sources and the same base then make the
#                       same images [unset: the current time]
#
# Arguments are passed to buildah: `--build-arg ACCELERATOR=cuda` builds a worker for GPUs if pip finds PyTorch with CUDA.
#
# The builds use pip's settings on this machine: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS (a folder),
# and the certificates that it trusts. Requires root, or buildah configured for the user.
set -euo pipefail
cd "$(dirname "$0")/../.."

tag=${TAG:-$(deploy/containers/tag.sh)}
base=${BASE_IMAGE:-}
times=(${SOURCE_DATE_EPOCH:+--timestamp "$SOURCE_DATE_EPOCH"})
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -n "${BASE_ARCHIVE:-}" ]; then
    base=localhost/midstream-base:$(sha256sum "$BASE_ARCHIVE" | cut -c1-16)${SOURCE_DATE_EPOCH:+-$SOURCE_DATE_EPOCH}
    ln "$BASE_ARCHIVE" "$folder/rootfs.tar" 2> /dev/null || cp "$BASE_ARCHIVE" "$folder/rootfs.tar"
elif [ -z "$base" ]; then
    base=localhost/midstream-base:bookworm
fi
if [ -z "${BASE_IMAGE:-}" ] && ! buildah inspect --type image "$base" > /dev/null 2>&1; then
    echo "$base: made from ${BASE_ARCHIVE:-Debian by mmdebstrap}"
    [ -e "$folder/rootfs.tar" ] || deploy/containers/base.sh "$folder/rootfs.tar"
    printf 'FROM scratch\nADD rootfs.tar /\n' > "$folder/Containerfile"
    buildah build --quiet "${times[@]}" --isolation chroot --tag "$base" "$folder" > /dev/null
fi

flags=(--quiet --layers "${times[@]}" --isolation "${BUILDAH_ISOLATION:-chroot}" --build-arg BASE_IMAGE="$base")
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

build midstream-model model.Containerfile ${SOURCE_DATE_EPOCH:+--build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH"} "$@"
for part in ${PARTS:-router scheduler detokenizer gpu_worker}; do
    build "midstream-${part//_/-}" "$part.Containerfile" --build-arg "MODEL_IMAGE=localhost/midstream-model:$tag" "$@"
done
echo "To push them: make push REGISTRY=registry.example/team TAG=$tag"
