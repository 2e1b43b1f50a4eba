#!/bin/bash
# One node of eight 80 GB GPUs: the 1B rung of the ladder, 88B tokens. Once, before it,
# with a tokenizer of at most 131072 tokens:
#   ngpt data pack 'text/*.jsonl.gz' --tokenizer tokenizer.json --out data/corpus
set -euo pipefail
DATA=${DATA:-data/corpus}
OUT=${OUT:-runs/1B}

torchrun --standalone --nproc-per-node 8 -m ngpt_core train --preset 1B \
  --steps 20981 --batch-size 512 --seq-len 8192 --micro-batch 8 \
  --save-every 500 --keep 2 --async-save --data "$DATA" --out "$OUT" --resume "$@"
