#!/usr/bin/env bash
# Writes a root file system of Debian 12 with Python for the images: base.sh ROOTFS.tar. Needs mmdebstrap. With
# SOURCE_DATE_EPOCH, the same Debian packages make the same archive.
set -euo pipefail

mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' bookworm "$1"
