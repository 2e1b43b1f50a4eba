#!/bin/bash
# One GPU: the laptop model "mini" on a packed corpus. Once, before it (it downloads):
#   ngpt data pack tinystories-train --out data/tinystories
# Run it again after any interruption: it goes on. What you add to its line comes
# on top: launch/one_gpu.sh --steps 100
set -euo pipefail
DATA=${DATA:-data/tinystories}
OUT=${OUT:-runs/mini}

torchrun --standalone --nproc-per-node 1 -m ngpt_core train --preset mini \
  --steps 20000 --batch-size 64 --seq-len 512 --micro-batch 16 \
  --data "$DATA" --out "$OUT" --resume "$@"
