#!/usr/bin/env bash
# Prints the tag of images built from this checkout: VERSION at the release's tag vVERSION, and otherwise a tag that
# changes with every commit and every change, so that nodes do not keep an older image under the same name.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' midstream/__init__.py)
if ! commit=$(git rev-parse --short=12 HEAD 2> /dev/null); then
    echo "$version" # sources without a repository are those of a release
    exit
fi
changes=$(git status --porcelain --untracked-files=all)
if [ -n "$changes" ]; then
    changes=$( (git diff HEAD --binary; git ls-files --others --exclude-standard -z | xargs -0r sha256sum) | sha256sum | cut -c1-8)
    echo "$version-g$commit-$changes"
elif git describe --exact-match --match "v$version" HEAD > /dev/null 2>&1; then
    echo "$version"
else
    echo "$version-g$commit"
fi
