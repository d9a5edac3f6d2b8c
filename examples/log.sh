# Sourced by the scripts that train. `logged FILE COMMAND...` runs a command and appends its output to FILE;
# the terminal shows only lines that pass `training_lines`, and the end of FILE if the command fails. The
# exit code is the command's; `stopped` is true after a signal.
stopped=false

training_lines() { # losses, validations, checkpoints, warnings, errors, and what megatron_dsa says
  grep -E --line-buffered \
    -e '^ *\[[^]]*\] *iteration +[0-9]+/' -e '^ validation loss' -e '(saving|saved|loading|loaded) checkpoint' \
    -e '(WARNING|ERROR|CRITICAL):' -e '^(\[rank [0-9]+\] )?error: ' \
    -e '^> (megatron_dsa|checkpoint|no |warning)' -e '^>   ' ||
    true # no line to show is no failure
}

show_end() { # log, exit code
  echo "exit code $2; all of the log is in $1, its end:" >&2
  tail -n 20 "$1" >&2
}

logged() { # file, command
  local log=$1 status signalled shown training
  shift
  mkdir -p "$(dirname "$log")"
  # Leave signals to the training, so that its output after a signal is shown and logged.
  exec 3> >(trap '' INT TERM HUP && tee -a --output-error=warn-nopipe "$log" | training_lines)
  shown=$!
  "$@" >&3 2>&1 &
  training=$!
  exec 3>&-
  # A signal to the script is passed on: Megatron may save a checkpoint (--exit-signal-handler).
  trap 'signalled=true stopped=true; kill -TERM "$training" 2>/dev/null || true' INT TERM HUP
  while true; do
    status=0 signalled=false
    wait "$training" || status=$?
    if ! $signalled; then break; fi # a signal ends `wait`, and not yet the command
  done
  trap - INT TERM HUP
  wait "$shown" || true
  if ((status)) && ! { $stopped && ((status == 143)); }; then show_end "$log" "$status"; fi
  return "$status"
}

last_step() { # folder of checkpoints: step of the last one
  cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0
}

same_settings() { # folder of a run, settings: the first call sets them, others are refused
  local file=$1/settings.txt
  if [[ ! -f $file ]]; then
    mkdir -p "$1"
    echo "$2" >"$file"
  elif [[ $(<"$file") != "$2" ]]; then
    printf '%s was begun with other settings: choose another RUN_DIR, or remove it\n  there %s\n  now   %s\n' \
      "$1" "$(<"$file")" "$2" >&2
    return 2
  fi
}
