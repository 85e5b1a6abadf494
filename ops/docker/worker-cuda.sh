#!/bin/sh
# Triton's cache must be writable, so the part of it that the image has is copied where it is missing.
set -eu
mkdir -p "$TRITON_CACHE_DIR"
cp -rn /opt/headgate/triton/. "$TRITON_CACHE_DIR"
exec headgate "$@"
