# Sourced by v4_launch.sh for a plan: what is not set is left out, or gets a value that the plan does not
# depend on. All of it is printed.
stand_ins=()
for entry in "${rope[@]}"; do
  name=${entry%% *}
  [[ -z ${!name:-} ]] || continue
  case $name in
    YARN_FACTOR) printf -v "$name" 1 ;;
    YARN_ORIGINAL_LENGTH) printf -v "$name" 4096 ;;
    *) printf -v "$name" 10000 ;;
  esac
  stand_ins+=("$name=${!name}")
done
if ((${#stand_ins[@]})); then
  echo "stand-ins that change no figure of the plan, for rope: ${stand_ins[*]}"
fi

unset_experts=()
for entry in "${experts[@]}"; do
  name=${entry%% *}
  if [[ -z ${!name:-} ]]; then unset_experts+=("$name"); fi
done
if ((${#unset_experts[@]})); then
  # The least that tensor-parallel ranks can share; experts cannot be spread where there are none.
  mlp=(--ffn-hidden-size "${TP:-8}")
  EP=1
  needed_by_model=("${rope[@]}")
  echo "left out: experts, their memory, traffic and operations (not set: ${unset_experts[*]});" \
    "instead of them every layer has an MLP of ${TP:-8} hidden dims"
fi

if [[ $words != *"-vocab-size"[\ =]* ]]; then
  vocabulary=(--padded-vocab-size "${TP:-8}")
  echo "left out: embedding, output layer and logits, in favour of a vocabulary of ${TP:-8}" \
    "(--vocab-size N adds them)"
fi
