# Sourced by the scripts of the large models (v3_2.sh, glm_5.sh, glm_5_3_flash.sh, ...), which set the
# array `model` before: --dsa-model, with all flags of the model. One call per node; slurm.sbatch makes these calls.
#
#   what is trained on what
#     DATA_PATH      --data-path: a data set of prepare-data, or a blend "0.3 A 0.7 B" (no default)
#     TOKENIZER      folder or name of the Hugging Face tokenizer                  (no default)
#     CHECKPOINTS    folder to load from, if it holds a checkpoint, and to save to (no default)
#     TRAIN_STEPS, GLOBAL_BATCH, LR   steps, sequences per step, learning rate     (no default)
#     STAGE          dense, warmup or sparse, see docs/guide/flags.md                    (sparse)
#     INDEXER_LOSS_COEFF  weight of the indexers' loss                             (1.0)
#     SEQ_LENGTH     tokens of a sequence                                          (4096)
#     SAVE_INTERVAL  steps from checkpoint to checkpoint                           (500)
#     SAVE_RETAIN_INTERVAL  of older checkpoints keep those of multiples of this   (all)
#   how it is watched
#     SPLIT          shares of DATA_PATH for training, validation and test         (100,0,0)
#     VALID_DATA_PATH  data set, or blend, of the validation, in place of SPLIT    (none)
#     EVAL_STEPS, EVAL_INTERVAL  steps of a validation, and from one to the next   (0: none; 1000)
#     TENSORBOARD_DIR  folder of TensorBoard's files, for megatron_dsa report      (CHECKPOINTS/events)
#     WANDB_PROJECT, WANDB_NAME  project and run of Weights & Biases               (none; name of CHECKPOINTS)
#   how it is spread
#     NODES, GPUS_PER_NODE, NODE_RANK, MASTER_ADDR, MASTER_PORT   as torchrun's    (one node of 8)
#     TP, PP, CP, EP ranks that share heads, layers, sequences, experts
#     PIPELINE_LAYOUT  Megatron's notation; needed where PP does not divide the layers
#     RECOMPUTE      selective (attention and its up projections), full or none    (selective)
#                    In stage warmup it is none: a frozen model keeps nothing, and selective would
#                    run its backward. Name another one with --dsa-warmup-train-all.
#   MORE_FLAGS       any other flags; so are the script's arguments, and the last word wins
#   PYTHON           interpreter with everything installed      (sets up .venv and takes that)
#
# All that is printed is appended to CHECKPOINTS/train.log, of several nodes to train.node0.log and so on;
# the terminal shows the training lines, and the end of the log where the training fails.
#
# With --dsa-dry-run among the arguments nothing is launched: one process, on any machine, builds and
# checks the configuration of all ranks and prints the plan. It reads no data and no tokenizer, and needs
# no variables.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nodes=${NODES:-1} gpus=${GPUS_PER_NODE:-8} stage=${STAGE:-sparse}
read -rd '' -a more <<<"${MORE_FLAGS:-}" || true # of any number of lines
dry_run=false
for argument in "${more[@]}" "$@"; do
  if [[ $argument == --dsa-dry-run ]]; then dry_run=true; fi
done
if $dry_run; then
  : "${DATA_PATH:=none}" "${TOKENIZER:=none}" "${CHECKPOINTS:=none}"
  : "${TRAIN_STEPS:=1000}" "${GLOBAL_BATCH:=$((nodes * gpus))}" "${LR:=1e-5}"
fi
unset=()
for entry in "DATA_PATH --data-path: a data set of prepare-data, or a blend" \
  "TOKENIZER folder or name of the Hugging Face tokenizer" \
  "CHECKPOINTS folder to load from, if it holds a checkpoint, and to save to" \
  "TRAIN_STEPS optimizer steps" "GLOBAL_BATCH sequences per step" "LR learning rate"; do
  name=${entry%% *}
  if [[ -z ${!name:-} ]]; then unset+=("  $name: ${entry#* }"); fi
done
if ((${#unset[@]})); then
  echo "$(basename "$0"): set these variables, which have no default:" >&2
  printf '%s\n' "${unset[@]}" >&2
  exit 2
fi

read -rd '' -a data <<<"$DATA_PATH" || true # a blend has several words
read -rd '' -a validation <<<"${VALID_DATA_PATH:-}" || true
if ((${#validation[@]})); then
  if [[ -n ${SPLIT:-} ]]; then echo "SPLIT must be unset with VALID_DATA_PATH: unset one of them" >&2 && exit 2; fi
  if ((${EVAL_STEPS:-0} == 0)); then echo "EVAL_STEPS must be set with VALID_DATA_PATH: give the steps of a validation" >&2 && exit 2; fi
  data=(--train-data-path "${data[@]}" --valid-data-path "${validation[@]}")
else
  data=(--data-path "${data[@]}" --split "${SPLIT:-100,0,0}")
fi
if [[ $stage == warmup ]]; then : "${RECOMPUTE:=none}"; fi
case ${RECOMPUTE:=selective} in
  # Recompute attention and the projections from its latents in the backward.
  selective) recompute=(--recompute-granularity selective --recompute-modules core_attn mla_up_proj) ;;
  # Recompute every layer: least memory, a third more time.
  full) recompute=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
  none) recompute=() ;;
  *) echo "RECOMPUTE must be selective, full or none, got $RECOMPUTE" >&2 && exit 2 ;;
esac
parallel=(
  # TP ranks share heads in attention, and the tokens of the sequence outside attention and experts.
  --tensor-model-parallel-size "${TP:-8}" --sequence-parallel
  # Layers.
  --pipeline-model-parallel-size "${PP:-1}"
  # Sequences, for long ones.
  --context-parallel-size "${CP:-1}"
  # Experts, whole ones.
  --expert-model-parallel-size "${EP:-8}" --expert-tensor-parallel-size 1
  # Shard optimizer state over data-parallel ranks, with communication overlapped. Its checkpoints
  # fit any number of these ranks; with --dist-ckpt-optim-fully-reshardable any layout.
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
if [[ -n ${PIPELINE_LAYOUT:-} ]]; then
  parallel+=(--pipeline-model-parallel-layout "$PIPELINE_LAYOUT")
fi
training=(
  # Sparse attention, with fused kernels where they can run (--dsa-strict: only fused kernels).
  --attention-backend dsa_fused --dsa-stage "$stage"
  # Weight of the indexers' loss: over selected keys in stage sparse, over all keys in stage warmup.
  --dsa-indexer-loss-coeff "${INDEXER_LOSS_COEFF:-1.0}"
  # All experts of a rank in one GEMM; tokens travel all to all.
  --moe-grouped-gemm --moe-token-dispatcher-type alltoall
  # bf16 weights and arithmetic; gradients are summed and weights are kept in fp32.
  --bf16
  --seq-length "${SEQ_LENGTH:-4096}"
  # Sequences per microbatch and per step.
  --micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH" --train-iters "$TRAIN_STEPS"
  # Schedule: MORE_FLAGS (--lr-decay-style, --lr-warmup-iters, --min-lr), Megatron's default is linear.
  # A later stage has other steps and rates than the checkpoint says.
  --lr "$LR" --override-opt_param-scheduler
  "${data[@]}"
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
  --load "$CHECKPOINTS" --save "$CHECKPOINTS" --save-interval "${SAVE_INTERVAL:-500}"
  # A line with losses and TFLOP/s every tenth step.
  --log-interval 10 --log-throughput
  --eval-iters "${EVAL_STEPS:-0}" --eval-interval "${EVAL_INTERVAL:-1000}"
  --tensorboard-dir "${TENSORBOARD_DIR:-$CHECKPOINTS/events}"
  --log-timers-to-tensorboard --log-memory-to-tensorboard
)
if [[ -n ${SAVE_RETAIN_INTERVAL:-} ]]; then training+=(--save-retain-interval "$SAVE_RETAIN_INTERVAL"); fi
if [[ -n ${WANDB_PROJECT:-} ]]; then
  training+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "${WANDB_NAME:-$(basename "$CHECKPOINTS")}")
fi
flags=(
  "${model[@]}" "${parallel[@]}" "${recompute[@]}" "${training[@]}" "${more[@]}" "$@"
)
# Megatron's overlap of communication and computation needs one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=1
python=${PYTHON:-$(scripts/environment.sh)}
if $dry_run; then
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((nodes * gpus))
  exec "$python" -m megatron_dsa.pretrain "${flags[@]}"
fi
# The last node prints the training lines.
log=$CHECKPOINTS/train.log
if ((nodes > 1)); then log=$CHECKPOINTS/train.node${NODE_RANK:-0}.log; fi
source examples/log.sh
logged "$log" "$python" -m torch.distributed.run \
  --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$gpus" \
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
  -m megatron_dsa.pretrain "${flags[@]}"
