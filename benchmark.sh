#!/usr/bin/env bash
# Every table of FRN, every figure of its learning curves, and FFM's ablations as a list of runs. (The figures of what
# an untrained memory recalls and of FFM's interpretation are made by recall_curves.py and plot_results.py.)
#
#   ./benchmark.sh GROUP... [--dry-run] [--budget F] [--seeds N] [--run-dir DIR] [--workers N] [--slurm [-- FLAGS]]
#   ./benchmark.sh --once PYTHON SCRIPT FLAGS...
#
#   GROUP        ffm: FFM in FRN's agent, which neither paper has: trained and frozen, beside GRU, MLP and the six FFM
#                ablations, on the POPGym tasks with discrete actions
#                popgym: MLP, GRU and LRU, trained and frozen (FRN, Fig. 3 and A3)
#                reservoirs: DeepESN, SRC and ParalESN, trained and frozen (FRN, Fig. A2 and A4)
#                mixers: frozen GRU and LRU, with trained and with frozen mixers (FRN, Fig. 6)
#                table1: the parameter counts of FRN's Table 1, by one update of each agent
#                memorychain: PPO with MLP, GRU and LRU, trained and frozen, delays 4 to 2048 (FRN, Fig. 2)
#                playground: PPO with MLP, GRU and LRU, trained and frozen, positions or velocities hidden (FRN, Fig. 4)
#                arcade: PQN with a CNN, GRU and LRU, trained and frozen, on four pixel tasks (FRN, Fig. 5)
#                evidence: a few of all these at their published steps, the most telling first: docs/evidence.md
#   --dry-run    print the list, a command a line; on stderr how many runs, and the hours here by the SPS of finished
#                runs of the same script and memory
#   --budget F   train for F times the published steps; the runs' names say so (default 1)
#   --seeds N    seeds 1 to N, side by side in one program (default: as published)
#   --run-dir D  has a folder for each group (default runs/benchmark; relative to this script's folder)
#   --workers N  N programs at a time, each on cores of its own (by taskset, where there is one), their output in logs/
#   --slurm      submit the list as one job array; FLAGS go to sbatch; with --workers N, N tasks at a time
#   --once       skip, resume or start the run of this command, as its folder is finished, interrupted or missing. Each
#                line of the list begins with it, so it does no harm to run one twice; see docs/sweeps.md
#
# Started again, it skips what is finished, resumes what was interrupted, and runs the rest. Ctrl-C and SIGTERM, SIGHUP,
# SIGUSR1 are passed on to what runs, and waited for. What failed is named at the end, and the exit code is 1 then.
# PYTHON names the interpreter (default python).
set -u
shopt -s nullglob
cd "$(dirname "$0")" || exit 1
python=${PYTHON:-python}
dry_run=false slurm=false budget=1 seeds="" run_dir=runs/benchmark workers="" array_list="" groups=() sbatch_flags=()

fail() { echo "benchmark.sh: error: $*" >&2; exit 2; }

# look SETTING SEED: sets `folder`, the newest of that run or empty, and `finished`. SETTING is the path up to the seed.
look() {
  local candidate
  folder="" finished=false
  for candidate in "$1__$2__"*; do # their names end with the time
    [ -f "$candidate/config.json" ] && folder=$candidate # without one, it was killed before there was a run
    [ -f "$candidate/eval.json" ] && finished=true && return
  done
}

once() { # PYTHON SCRIPT FLAGS...: becomes that program, so that whatever is sent to this process reaches it
  local words=("$@") command=() env="" memory="" frozen="" name="" dir="" seed=1 count=1 end i
  for ((i = 0; i < $#; i++)); do
    case ${words[i]} in
      --env) env=${words[i + 1]:-} ;; --memory) memory=${words[i + 1]:-} ;; --exp-name) name=${words[i + 1]:-} ;;
      --run-dir) dir=${words[i + 1]:-} ;; --frozen) frozen=-frozen ;;
      --seed) seed=${words[i + 1]:-}; i=$((i + 1)); continue ;;
      --num-seeds) count=${words[i + 1]:-}; i=$((i + 1)); continue ;;
    esac
    command+=("${words[i]}")
  done
  [[ $env && $memory && $name && $dir ]] || fail "--once: needs --env, --memory, --exp-name and --run-dir"
  [[ $seed =~ ^[0-9]+$ && $count =~ ^[1-9][0-9]*$ ]] || fail "--once: --seed $seed --num-seeds $count: must be integers"
  for ((end = seed + count; seed < end; seed++)); do
    look "$dir/${env}__${name}__$memory$frozen" "$seed"
    $finished || break
    echo "# finished: $folder"
  done
  [ "$seed" -lt "$end" ] || exit 0
  command+=(--seed "$seed" --num-seeds $((end - seed)))
  [ -z "$folder" ] || command=("$1" "$2" --resume "$folder")
  echo "${command[*]}"
  exec "${command[@]}"
}

while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry_run=true ;;
    --slurm) slurm=true ;;
    --budget | --seeds | --run-dir | --workers | --array-task)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in
        --budget) budget=$2 ;; --seeds) seeds=$2 ;; --run-dir) run_dir=$2 ;; --workers) workers=$2 ;;
        --array-task) array_list=$2 ;; # a task of --slurm: run the line SLURM_ARRAY_TASK_ID of this file, from 0
      esac
      shift ;;
    --once) once "${@:2}" ;;
    --) sbatch_flags=("${@:2}"); break ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    ffm | popgym | reservoirs | mixers | table1 | memorychain | playground | arcade | evidence) groups+=("$1") ;;
    *) fail "$1: no such group or flag; groups: ffm, popgym, reservoirs, mixers, table1, memorychain, playground," \
      "arcade, evidence; see --help" ;;
  esac
  shift
done
[ ${#groups[@]} -gt 0 ] || [ -n "$array_list" ] || fail "name a group, such as ffm; see --help"
awk -v b="$budget" 'BEGIN { exit !(b ~ /^([0-9]+[.]?[0-9]*|[.][0-9]+)([eE]-?[0-9]+)?$/ && b > 0 && b <= 100) }' ||
  fail "--budget $budget: must be a positive number, at most 100"
[[ $seeds =~ ^([1-9][0-9]*)?$ ]] || fail "--seeds $seeds: must be a positive integer"
[[ $workers =~ ^([1-9][0-9]*)?$ ]] || fail "--workers $workers: must be a positive integer"
$slurm || [ ${#sbatch_flags[@]} -eq 0 ] || fail "${sbatch_flags[*]}: flags after -- are for sbatch, and need --slurm"
$dry_run || ! $slurm || command -v sbatch >/dev/null || fail "--slurm: there is no sbatch on this machine"

# --- The list. For each program: its command, its log, "SCRIPT MEMORY STEPS". And commands for when all have ended.
lines=() logs=() work=() afterwards=() num_finished=0 num_resumed=0 num_new=0

# run SCRIPT TASK MEMORY STEPS VARIANT FLAGS...: all seeds of one setting. MEMORY is as in the run folder's name, such
# as gru-frozen; STEPS are the published ones; VARIANT names what else is special about the setting, if anything.
run() {
  local script=$1 task=$2 memory=$3 steps=$4 name=$1${5:+-$5} flags=("${@:6}")
  local setting seed first=1 state previous="" leader=""
  [[ $budget == 1 ]] || name+=-budget$budget # and never less than one rollout
  flags=(--env "$task" --memory "${memory%-frozen}" "${flags[@]}" --exp-name "$name" --run-dir "$run_dir")
  [[ $memory == *-frozen ]] && flags+=(--frozen)
  [[ $budget == 1 ]] ||
    steps=$(awk -v s="$steps" -v b="$budget" -v r="${rollout:-2048}" 'BEGIN { s *= b; printf "%d", s < r ? r : s }')
  flags+=(--total-timesteps "$steps")
  setting=${task}__${name}__$memory
  for ((seed = 1; seed <= ${seeds:-$default_seeds}; seed++)); do
    look "$run_dir/$setting" "$seed"
    if $finished; then
      state=finished
    elif [ -z "$folder" ]; then
      state=new
    elif [ -z "$leader" ] || ! grep -qF "\"${leader##*/}\"" "$folder/config.json"; then # among the program's "runs"
      state=$folder leader=$folder
    else
      state=$leader
    fi
    if [ "$state" != "$previous" ]; then # the seeds before this one are one program
      list "$previous" "$first" $((seed - first))
      first=$seed previous=$state
    fi
  done
  list "$previous" "$first" $((seed - first))
}

list() { # STATE SEED COUNT, of the setting in run
  case $1 in
    "") return ;;
    finished) num_finished=$((num_finished + $3)); return ;;
    new) num_new=$((num_new + $3)) ;;
    *) num_resumed=$((num_resumed + $3)) ;;
  esac
  lines+=("$(printf '%q ' ./benchmark.sh --once "$python" "$script.py" "${flags[@]}" --seed "$2")--num-seeds $3")
  logs+=("$run_dir/logs/${setting}__$2.log")
  work+=("$script $memory $((steps * $3))")
}

tasks() { # every difficulty of the families
  for family in "$@"; do for level in Easy Medium Hard; do echo "$family$level"; done; done
}
discrete_families="Autoencode Battleship StatelessCartPole NoisyStatelessCartPole VelocityOnlyCartPole Concentration \
CountRecall HigherLower Minesweeper MultiArmedBandit RepeatFirst RepeatPrevious"

group_ffm() { # FRN's agent, budget and seeds, with FFM in place of the RNN, and with FFM without each of its parts
  local default_seeds=10 task part
  for task in $(tasks $discrete_families); do
    for memory in ffm ffm-frozen gru mlp; do run pqn_ffm "$task" "$memory" 20000000 ""; done
    for part in decay oscillation learn-decay learn-oscillation input-gate output-gate; do
      run pqn_ffm "$task" ffm 20000000 "no-$part" "--no-$part"
    done
  done
}

# FRN counts six tasks with three difficulties each, and names five. The sixth is Battleship or HigherLower, the two
# others with discrete actions that are not among those it left out.
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
  local default_seeds=1 memory
  for memory in gru gru-frozen lru lru-frozen; do run pqn_frozen_rnn StatelessCartPoleEasy "$memory" 2048 ""; done
  for memory in gru gru-frozen lru lru-frozen; do
    run ppo_playground BallInCup-positions "$memory" 2048 "" --observe positions
  done
  local table=(--kind parameters --out "$run_dir/parameters.md")
  afterwards+=("$(printf '%q ' "$python" plot_results.py --run-dir "$run_dir" "${table[@]}")")
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

group_evidence() { # the command of the README without its shortcuts; FRN's agents on two tasks; their mixers
  local default_seeds=1 task memory
  for memory in ffm-frozen mlp ffm; do run pqn_ffm RepeatPreviousEasy "$memory" 20000000 ""; done
  default_seeds=2
  for task in StatelessCartPoleEasy RepeatFirstEasy; do
    for memory in mlp lru-frozen lru gru-frozen gru; do run pqn_frozen_rnn "$task" "$memory" 20000000 ""; done
  done
  for task in StatelessCartPoleEasy RepeatFirstEasy; do
    for memory in lru-frozen gru-frozen; do
      run pqn_frozen_rnn "$task" "$memory" 20000000 frozen-mixers --frozen-mixers
    done
  done
}

hours() { # of the list, by the SPS of what has finished in any group's folder
  local evals=("$run_dir"/*/*__*/eval.json)
  {
    # …/TASK__SCRIPT[-VARIANT]__MEMORY__SEED__TIME/eval.json:"SPS": N
    [ ${#evals[@]} -eq 0 ] || grep -oH '"SPS": *[0-9.e+]*' "${evals[@]}"
    [ ${#work[@]} -eq 0 ] || printf '%s\n' "${work[@]}"
  } | awk -v workers="${workers:-1}" '
    /"SPS":/ { n = split($0, part, "__"); split(part[n - 3], script, "-"); kind = script[1] " " part[n - 2]
               sub(/.*"SPS": */, ""); if ($0 > 0) { seconds[kind] += 1 / $0; count[kind]++ }; next }
    { kind = $1 " " $2; if (kind in count) { known++; sum += $3 * seconds[kind] / count[kind] } else unknown++ }
    END { if (known) printf "# %.1f hours for %d programs, %d at a time\n", sum / 3600 / workers, known, workers
          if (unknown) printf "# hours unknown for %d programs: none of their kind has finished\n", unknown }' >&2
}

submit() {
  local name list command
  name=$(IFS=-; echo "${groups[*]}")
  list=$run_dir/slurm/$name-$(date +%Y%m%d-%H%M%S)
  command=(sbatch --job-name="$name" --array="0-$((${#lines[@]} - 1))${workers:+%$workers}" --output="$list-%a.log"
    --open-mode=append --requeue --signal="${SBATCH_SIGNAL:-B:USR1@300}" "${sbatch_flags[@]}"
    --wrap "exec ./benchmark.sh --array-task $(printf %q "$list.txt")")
  echo "# ${command[*]}" >&2
  $dry_run && return
  mkdir -p "$run_dir/slurm" && printf '%s\n' "${lines[@]}" >"$list.txt" && "${command[@]}"
}

# --- The runner: some lines at a time, until all have ended, or until a signal, which the running ones get too.
cores=() pids=() index_of=() told=false stop_code=0 nap="" failed=() num_done=0

spread() { # cores[SLOT], such as 0,4: all that this process may use, divided. Hyperthreads of a core stay together.
  local range cpu cpus=() i slot
  command -v taskset >/dev/null || return
  for range in $(taskset -cp $$ | sed 's/.*: //; s/,/ /g'); do # such as 0-3
    for ((cpu = ${range%-*}; cpu <= ${range#*-}; cpu++)); do
      cpus+=("$(cat "/sys/devices/system/cpu/cpu$cpu/topology/thread_siblings_list" 2>/dev/null) $cpu")
    done
  done
  [ "$workers" -le ${#cpus[@]} ] || fail "--workers $workers: there are ${#cpus[@]} cores"
  mapfile -t cpus < <(printf '%s\n' "${cpus[@]}" | sort -V | sed 's/.* //')
  for ((i = 0; i < ${#cpus[@]}; i++)); do
    slot=$((i * workers / ${#cpus[@]}))
    cores[slot]+=${cores[slot]:+,}${cpus[i]}
  done
}

tell() { # SIGNAL: to each run, and to each task of Slurm's once, as the second ends a script without a checkpoint
  local pid again=$told
  told=true
  [ $stop_code -gt 0 ] || stop_code=$((128 + $(kill -l "$1")))
  if [ -n "$array_list" ] && { $again || [ "$1" = TERM ]; }; then
    return # Slurm repeats signals to the tasks of an array, and sends SIGTERM to all processes of a task itself
  fi
  for pid in $(jobs -p); do # and not `pids`, where the newest may not be yet
    [ "$pid" = "$nap" ] || kill -s "$1" "$pid" 2>/dev/null
  done
}

launch() { # SLOT INDEX
  set -m # a process group of its own: Ctrl-C reaches it by `tell` alone
  {
    if [ -n "$workers" ]; then
      mkdir -p "${logs[$2]%/*}" && exec >>"${logs[$2]}" 2>&1 || exit 1
    fi
    eval "exec ${cores[$1]:+taskset -c ${cores[$1]}} ${lines[$2]}"
  } </dev/null &
  pids[$1]=$! index_of[$1]=$2
  set +m
}

await() { # sets `slot` and `code` of a run that has ended
  while :; do
    for slot in "${!pids[@]}"; do
      kill -0 "${pids[slot]}" 2>/dev/null && continue
      wait "${pids[slot]}"
      code=$?
      unset "pids[slot]"
      return
    done
    if [ ${#pids[@]} -eq 1 ]; then
      wait "${pids[@]}" # ended by a signal, too
    else
      sleep 0.2 & nap=$!
      wait $nap
    fi
  done
}

execute() {
  local slot code next=0 ended minutes signal
  # shellcheck disable=SC2064 # the name is known now
  for signal in HUP INT TERM USR1; do trap "tell $signal" $signal; done
  trap : PIPE # Ctrl-C ends a `| tee` before us
  SECONDS=0
  while :; do
    for ((slot = 0; slot < ${workers:-1}; slot++)); do
      if [ -z "${pids[slot]:-}" ] && [ $next -lt ${#lines[@]} ] && ! $told; then
        launch $slot $next
        next=$((next + 1))
      fi
    done
    [ ${#pids[@]} -gt 0 ] || return
    await
    case $code in
      0) num_done=$((num_done + 1)) ;;
      129 | 130 | 138 | 143) $told || { stop_code=$code; tell TERM; }; continue ;; # if it was not us, we stop as well
      *) failed+=("${lines[index_of[slot]]} # exit code $code${workers:+, ${logs[index_of[slot]]}}") ;;
    esac
    ended=$((num_done + ${#failed[@]}))
    minutes=$((SECONDS * (${#lines[@]} - ended) / ended / 60))
    printf '# %d of %d finished, %d running, %d failed, about %d h %02d min left\n' \
      $num_done ${#lines[@]} ${#pids[@]} ${#failed[@]} $((minutes / 60)) $((minutes % 60))
  done
}

if [ -n "$array_list" ]; then
  lines=("$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$array_list")")
else
  for group in "${groups[@]}"; do
    run_dir=$run_dir/$group
    "group_$group"
    run_dir=${run_dir%/*}
  done
  state="$num_finished finished, $num_resumed to resume, $num_new to start"
  echo "# $((num_finished + num_resumed + num_new)) runs: $state, in ${#lines[@]} programs" >&2
fi
if $dry_run; then
  hours
  [ ${#lines[@]} -eq 0 ] || printf '%s\n' "${lines[@]}"
fi
if $slurm && [ ${#lines[@]} -gt 0 ]; then
  submit || exit 1
fi
if $dry_run || $slurm; then
  [ ${#afterwards[@]} -eq 0 ] || printf '# when all have ended: %s\n' "${afterwards[@]}" >&2
  exit 0
fi

[ -z "$workers" ] || spread
execute
if [ $((num_done + ${#failed[@]})) -eq ${#lines[@]} ]; then
  stop_code=0 # it came too late
elif [ $stop_code -gt 0 ]; then
  echo "# stopped: $num_done of ${#lines[@]} finished; the same command goes on" >&2
fi
# Slurm starts a pre-empted task again by itself, and one near its time limit if it asks for it.
[[ $array_list && $stop_code == 138 ]] && scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
if [ $stop_code -eq 0 ]; then
  for command in "${afterwards[@]}"; do
    echo "$command"
    eval "$command" || failed+=("$command # exit code $?")
  done
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed:" >&2
  printf '  %s\n' "${failed[@]}" >&2
  [ $stop_code -gt 0 ] || stop_code=1
fi
exit $stop_code
