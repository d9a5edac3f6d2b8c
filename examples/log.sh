# Sourced by the scripts that train. `logged FILE COMMAND...` runs a command and appends all that it prints
# to FILE; the terminal shows what `training_lines` lets through. Where the command fails, the end of FILE
# is shown, too. The exit code is the command's.

training_lines() { # losses, validations, checkpoints, warnings, errors, and what megatron_dsa says
  grep -E --line-buffered \
    -e '^ *\[[^]]*\] *iteration +[0-9]+/' -e '^ validation loss' -e '(saving|saved|loading|loaded) checkpoint' \
    -e '(WARNING|ERROR|CRITICAL):' -e '^(\[rank [0-9]+\] )?error: ' \
    -e '^> (megatron_dsa|checkpoint|no |warning)' -e '^>   ' ||
    true # no line to show is no failure
}

logged() { # file, command
  local log=$1 status signalled shown training
  shift
  mkdir -p "$(dirname "$log")"
  # tee ignores Ctrl-C, to keep what is printed after it.
  exec 3> >(tee -ai "$log" | training_lines)
  shown=$!
  "$@" >&3 2>&1 &
  training=$!
  exec 3>&-
  # A signal to the script is passed on: Megatron may save a checkpoint (--exit-signal-handler).
  trap 'signalled=true; kill -TERM "$training" 2>/dev/null || true' INT TERM
  while true; do
    status=0 signalled=false
    wait "$training" || status=$?
    if ! $signalled; then break; fi # a signal ends `wait`, and not yet the command
  done
  trap - INT TERM
  wait "$shown" || true
  if [[ $status != 0 ]]; then
    echo "exit code $status; all of the log is in $log, its end:" >&2
    tail -n 20 "$log" >&2
  fi
  return "$status"
}
