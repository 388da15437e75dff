#!/bin/sh
# Remakes every committed model: tests/data/families, tools/demo/coupon, tools/demo/criteo.
# usage: tools/trainer/remake.sh in-vehicle-coupon-recommendation.csv
# Uses Debian's python3-torch (1.13.1), which made the committed files; installs it where it is missing.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 COUPON_CSV" >&2; exit 2; }
csv=$(realpath "$1")
cd "$(dirname "$0")"
python=/usr/bin/python3

if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "remake: python3-torch is missing, installing it with apt-get" >&2
    root=; [ "$(id -u)" -eq 0 ] || root=sudo
    $root apt-get install --yes --no-install-recommends python3-torch
fi

trainer() { PYTHONDONTWRITEBYTECODE=1 "$python" -m hatchback_trainer "$@"; }
trainer families --out ../../tests/data/families
trainer coupon --data "$csv" --out ../demo/coupon
trainer criteo --out ../demo/criteo
