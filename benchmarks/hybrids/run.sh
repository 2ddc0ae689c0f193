#!/bin/bash
# Makes the rows of the shipped comparison in FOLDER, trains its runs and its peer until TOKENS, and
# draws the page. Run it again, with the same or more TOKENS, to go on.
#
#   bash benchmarks/hybrids/run.sh FOLDER 2M
set -euo pipefail
folder=$1 tokens=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
steps=$(python -c "
from headrace.console.config import count
print(-(-int(count('$tokens')) // 1024))")
script() { (cd "$root" && python -m "benchmarks.hybrids.$1" "${@:2}"); }
mkdir -p "$folder"
cd "$folder"
here=$PWD
[ -f corpus/code.jsonl ] || { mkdir -p corpus && script corpus "$here/corpus"; }
[ -f tokenizer.json ] || tokenize train corpus/*.jsonl --vocab-size 2048 --sample 12Mi --out tokenizer.json
for name in text code; do
  tokenize build "corpus/$name.jsonl" --tokenizer tokenizer.json --dedup exact --split val=0.01 --out "data/$name"
done
[ -d data/recall ] || script recall_documents "$here/data/text/train" "$here/tokenizer.json" "$here/data/recall/train"
compare() {
  headrace compare-hybrids "$root/configs/runs/hybrids.yaml" --out comparison --seeds 3 \
    --mixture "$root/configs/mixtures/hybrids.yaml" "$@"
}
compare --tokens "$tokens" --slice 100K
PYTHONPATH=$root python -m benchmarks.hybrids.peer comparison --steps "$steps"
compare
