#!/bin/bash
# Uploads the offline W&B runs below a folder, from a login node: compute nodes often have no way out.
# usage: slurm/sync_wandb.sh [FOLDER]     (default: runs)
# WANDB names the program, if it is not wandb. What was uploaded before is left out; run it as often as you like.
set -euo pipefail
folder=${1:-runs}
wandb=${WANDB:-wandb}

if [ ! -d "$folder" ]; then
    echo "$folder is not a folder. HINT: slurm/sync_wandb.sh runs" >&2
    exit 2
fi

# Sorted by name, which begins with the time: the parts of a requeued run share one id and go up in their order.
mapfile -d '' -t parts < <(find "$folder" -type d -name 'offline-run-*' -print0 | sort -z)
if [ "${#parts[@]}" -eq 0 ]; then
    echo "no offline runs in $folder"
    exit 0
fi
"$wandb" sync --no-include-synced "${parts[@]}"
