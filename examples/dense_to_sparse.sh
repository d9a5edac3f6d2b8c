#!/usr/bin/env bash
# A dense Hugging Face checkpoint becomes a sparse one, in one command, small enough for a CPU:
#   dense   trains a dense MLA model on Python's own documentation and exports it as a DeepSeek-V3:
#           in place of the checkpoint that you have
#   warmup  imports that; it gains fresh indexers, which learn while the model is frozen
#   sparse  trains all of it, every token attending to 48 keys (of up to 256), and exports the result
#           as a DeepSeek-V3.2
#   reload  imports that, and evaluates: the loss must be that of the model that was exported
# All flags of the model come from the two config.json. Arguments are appended to each stage's flags.
# Every call begins anew.
#   RUN_DIR  where data, checkpoints, log and report go   (runs/dense_to_sparse)
#   STEPS    optimizer steps of the three stages          ("100 50 50")
#   PYTHON   interpreter with everything installed        (sets up .venv and takes that)
set -euo pipefail
cd "$(dirname "$0")/.."
run=${RUN_DIR:-runs/dense_to_sparse}
read -r dense_steps warmup_steps sparse_steps <<<"${STEPS:-100 50 50}"
stages=4 again="the next call begins anew"
source examples/small_stages.sh
rm -rf "$run"/{checkpoints,events,dense,sparse,trained,train.log}

mkdir -p "$run/v3" "$run/v3.2"
shape='"vocab_size": 257, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
  "num_attention_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
  "qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "max_position_embeddings": 256, "hidden_act": "silu", "torch_dtype": "float32"'
echo "{\"model_type\": \"deepseek_v3\", $shape}" >"$run/v3/config.json"
echo "{\"model_type\": \"deepseek_v32\", $shape,
  \"index_n_heads\": 8, \"index_head_dim\": 32, \"index_topk\": 48}" >"$run/v3.2/config.json"

attention=(--attention-backend dsa_fused) # fused kernels where they can run, else torch
describe() { # model: its flags, from config.json
  read -ra model <<<"$("$python" -m megatron_dsa flags "$run/$1" 2>>"$run/train.log")"
  model+=(--init-method-std 0.05)
}
convert() { # model, folder for the result: what the last stage saved goes there and away from here
  "$python" -m megatron_dsa export-hf --input "$run/checkpoints" --config "$run/$1" \
    --output "$run/$2" 2>>"$run/train.log"
  rm -rf "$run/trained"
  mv "$run/checkpoints" "$run/trained"
}
validation() { # the last one in the log
  sed -nE 's/^ validation loss at .* on validation set \| lm loss value: ([^ ]+) .*/\1/p' \
    "$run/train.log" | tail -n 1
}

describe v3
training+=(--tensorboard-dir "$run/events/dense")
stage dense "$dense_steps" 3e-3 "$@"
dense=$(validation)
convert v3 dense

describe v3.2
model+=(--dsa-indexer-loss-coeff 1.0 --dsa-indexer-use-sparse-loss)
training+=(--tensorboard-dir "$run/events/sparse")
stage warmup "$warmup_steps" 3e-3 --dsa-load-hf "$run/dense" "$@"
stage sparse $((warmup_steps + sparse_steps)) 1e-3 "$@"
sparse=$(validation)
convert v3.2 sparse

number=4
echo "== stage 4/4, reload"
train sparse 1 1e-3 --dsa-load-hf "$run/sparse" --skip-train "$@"
reloaded=$(validation)
report
echo "validation loss: dense $dense, sparse $sparse, exported and reloaded $reloaded"
if [[ $reloaded != "$sparse" ]]; then
  echo "$run/sparse is not the model that was trained: see $run/train.log" >&2
  exit 1
fi
printf '%-11s %s\n' page "$run/report.html" checkpoint "$run/sparse" log "$log"
