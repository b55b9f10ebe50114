#!/usr/bin/env bash
# Every published table and figure as a list of runs.
#
#   ./benchmark.sh GROUP... [--dry-run] [--budget F] [--seeds N] [--run-dir DIR]
#
#   GROUP        ffm: FFM trained and frozen, GRU, MLP and the six FFM ablations on the POPGym tasks with discrete actions
#                popgym: MLP, GRU and LRU, trained and frozen (FRN, Fig. 3 and A3)
#                reservoirs: DeepESN, SRC and ParalESN, trained and frozen (FRN, Fig. A2 and A4)
#                mixers: frozen GRU and LRU, with trained and with frozen mixers (FRN, Fig. 6)
#                table1: the parameter counts of FRN's Table 1, by one update of each agent
#                memorychain: PPO with MLP, GRU and LRU, trained and frozen, delays 4 to 2048 (FRN, Fig. 2)
#                playground: PPO with MLP, GRU and LRU, trained and frozen, positions or velocities hidden (FRN, Fig. 4)
#                arcade: PQN with a CNN, GRU and LRU, trained and frozen, on four pixel tasks (FRN, Fig. 5)
#   --dry-run    print the commands, run nothing
#   --budget F   train for F times the published steps; the runs' names say so (default 1)
#   --seeds N    seeds 1 to N, side by side in one program (default: as published)
#   --run-dir D  folder of all run folders (default runs/benchmark; relative to this script's folder)
#
# Started again, it skips what is finished, resumes what was interrupted, and runs the rest. What failed is named at the
# end, and the exit code is 1 then. PYTHON names the interpreter (default python).
set -u
shopt -s nullglob
cd "$(dirname "$0")" || exit 1
python=${PYTHON:-python}
dry_run=false budget=1 seeds="" run_dir=runs/benchmark groups=() failed=()

fail() { echo "benchmark.sh: error: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry_run=true ;;
    --budget | --seeds | --run-dir)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in --budget) budget=$2 ;; --seeds) seeds=$2 ;; --run-dir) run_dir=$2 ;; esac
      shift ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    ffm | popgym | reservoirs | mixers | table1 | memorychain | playground | arcade) groups+=("$1") ;;
    *) fail "$1: no such group or flag; groups: ffm, popgym, reservoirs, mixers, table1, memorychain, playground, arcade; see --help" ;;
  esac
  shift
done
[ ${#groups[@]} -gt 0 ] || fail "name a group, such as ffm; see --help"
awk -v b="$budget" 'BEGIN { exit !(b ~ /^([0-9]+[.]?[0-9]*|[.][0-9]+)([eE]-?[0-9]+)?$/ && b > 0 && b <= 100) }' ||
  fail "--budget $budget: must be a positive number, at most 100"
[[ $seeds =~ ^([1-9][0-9]*)?$ ]] || fail "--seeds $seeds: must be a positive integer"

execute() {
  echo "$*"
  $dry_run && return
  "$@" || {
    code=$?
    [ $code -eq 130 ] || [ $code -eq 143 ] && exit $code # Ctrl-C stops the whole list
    failed+=("$*")
  }
}

# run SCRIPT TASK MEMORY STEPS VARIANT FLAGS...: all seeds of one setting. MEMORY is as in the run folder's name, such as
# gru-frozen; STEPS are the published ones; VARIANT names what else is special about the setting, if anything.
run() {
  local script=$1 task=$2 memory=$3 steps=$4 name=$1${5:+-$5} flags=("${@:6}") folders folder seed first="" last
  [[ $budget == 1 ]] || name+=-budget$budget # and never less than one rollout
  flags=(--env "$task" --memory "${memory%-frozen}" "${flags[@]}" --exp-name "$name" --run-dir "$run_dir")
  [[ $memory == *-frozen ]] && flags+=(--frozen)
  [[ $budget == 1 ]] || steps=$(awk -v s="$steps" -v b="$budget" -v r="${rollout:-2048}" 'BEGIN { n = int(s * b); printf "%d", n < r ? r : n }')
  flags+=(--total-timesteps "$steps")
  last=${seeds:-$default_seeds}
  for ((seed = 1; seed <= last + 1; seed++)); do
    folders=("$run_dir/${task}__${name}__${memory}__${seed}__"*)
    folder=${folders[*]: -1} # the newest; empty if there is none
    if [ -z "$folder" ] && [ "$seed" -le "$last" ]; then
      first=${first:-$seed}
      continue
    fi
    if [ -n "$first" ]; then # a gap of seeds without a run ends here
      execute "$python" "$script.py" "${flags[@]}" --seed "$first" --num-seeds $((seed - first))
      first=""
    fi
    [ "$seed" -le "$last" ] || break
    if [ -f "$folder/eval.json" ]; then
      echo "# finished: $folder"
    else
      execute "$python" "$script.py" --resume "$folder"
    fi
  done
}

tasks() { # every difficulty of the families
  for family in "$@"; do for level in Easy Medium Hard; do echo "$family$level"; done; done
}
discrete_families="Autoencode Battleship StatelessCartPole NoisyStatelessCartPole VelocityOnlyCartPole Concentration \
CountRecall HigherLower Minesweeper MultiArmedBandit RepeatFirst RepeatPrevious"

group_ffm() { # FFM in place of the RNN, and FFM without each of its parts (FFM, ablations); FRN's budget and seeds
  local default_seeds=10 task part
  for task in $(tasks $discrete_families); do
    for memory in ffm ffm-frozen gru mlp; do run pqn_ffm "$task" "$memory" 20000000 ""; done
    for part in decay oscillation learn-decay learn-oscillation input-gate output-gate; do
      run pqn_ffm "$task" ffm 20000000 "no-$part" "--no-$part"
    done
  done
}

# FRN counts six tasks with three difficulties each, and names five. The sixth is Battleship or HigherLower, the two others
# with discrete actions that are not among those it left out.
frn_families="Minesweeper NoisyStatelessCartPole RepeatFirst RepeatPrevious StatelessCartPole Battleship HigherLower"

frn_runs() { # MEMORY...
  local default_seeds=10 task memory
  for task in $(tasks $frn_families); do
    for memory in "$@"; do run pqn_frozen_rnn "$task" "$memory" 20000000 ""; done
  done
}
group_popgym() { frn_runs mlp gru gru-frozen lru lru-frozen; }
group_reservoirs() { frn_runs deepesn deepesn-frozen src src-frozen paralesn paralesn-frozen; }

group_mixers() {
  local default_seeds=10 task memory
  frn_runs gru-frozen lru-frozen
  for task in $(tasks $frn_families); do
    for memory in gru-frozen lru-frozen; do
      run pqn_frozen_rnn "$task" "$memory" 20000000 frozen-mixers --frozen-mixers
    done
  done
}

group_table1() {
  local default_seeds=1 run_dir=$run_dir/table1 memory
  for memory in gru gru-frozen lru lru-frozen; do run pqn_frozen_rnn StatelessCartPoleEasy "$memory" 2048 ""; done
  for memory in gru gru-frozen lru lru-frozen; do run ppo_playground BallInCup-positions "$memory" 2048 "" --observe positions; done
  execute "$python" plot_results.py --run-dir "$run_dir" --kind parameters --out "$run_dir/parameters.md"
}

group_memorychain() { # the paper's text has eight delays in one place, and these ten in another
  local default_seeds=5 rollout=65536 delay memory
  for ((delay = 4; delay <= 2048; delay *= 2)); do
    for memory in mlp gru gru-frozen lru lru-frozen; do
      run ppo_memorychain "MemoryChain-$delay" "$memory" 10000000 "" --delay "$delay"
    done
  done
}

group_playground() { # without ReacherHard's velocities: they do not tell where the target is
  local default_seeds=10 task memory
  for task in {BallInCup,CheetahRun,WalkerWalk}-{positions,velocities} ReacherHard-positions; do
    for memory in mlp gru gru-frozen lru lru-frozen; do
      run ppo_playground "$task" "$memory" 60000000 "" --observe "${task#*-}"
    done
  done
}

group_arcade() { # the paper names four tasks and no difficulty
  local default_seeds=5 task memory
  for task in BattleShipEasy CountRecallEasy MineSweeperEasy NavigatorEasy; do
    for memory in gru gru-frozen lru lru-frozen; do run pqn_arcade_cnn "$task" "$memory" 20000000 ""; done
  done
}

for group in "${groups[@]}"; do "group_$group"; done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed:" >&2
  printf '  %s\n' "${failed[@]}" >&2
  exit 1
fi
