#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, in one command, without a network and without a virtual
# environment: what Python packages there are is used (cuda-core, cuda-bindings, nvidia-ml-py, torch, pytest, …).
# Usage, from the project's root, as root:  tools/gpu-evidence.sh FOLDER [STAGE ...]
# FOLDER gets the results, a log of each stage, and programs.jsonl: one line for each program. Stages, in this order:
#   smoke       one program and the broker's own death: is anything broken?          (1 to 2 minutes)
#   checkpoint  bench.gpu_checkpoint at 32 GiB against the state of the art           (2 to 3 minutes)
#   overhead    bench.gpu_overhead                                                    (1 minute)
#   cold        bench.cold_start                                                      (2 minutes)
#   programs    tests/gpu: all programs, then the long kernel alone                   (4 to 6 minutes)
#   sizes       bench.gpu_checkpoint at 8 and 64 GiB, and with host memory            (3 to 4 minutes)
#   full        bench.gpu_checkpoint on a device that has no room for a copy          (1 to 2 minutes)
#   fill        bench.gpu_fill: ways from the store to the device                     (half a minute)
#   map         the GPU map: needs two GPUs                                           (1 minute)
#   keys        the program of memory protection keys (MOORAGE_STATE_BUILT: a folder that has it compiled)   (1 minute)
#   nccl-smoke  two ranks with NVIDIA's NCCL in one pod on one GPU                    (1 to 2 minutes)
#   nccl-cuts   2 and 4 ranks on one GPU lose their communicators and get new ones    (1 to 3 minutes)
#   nccl-bench  bench.gpu_nccl: what a cut takes, and what the proxy costs             (1 to 2 minutes)
#   nccl        programs of two ranks with NCCL: needs two GPUs                       (10 minutes)
#   two         jobs, shared memory and speed on two GPUs, in TWO_SECONDS              (10 minutes, twice:)
#               TWO_PARTS="two-ddp two-tensor two-fsdp", TWO_PARTS="two-pods two-memory two-bandwidth two-speed"
#   nccl-graphs CUDA graphs with NCCL's calls over a rebuild of communicators          (1 minute)
# Nothing is built when MOORAGE_LIBCUDA_PROXY, MOORAGE_LIBNCCL_PROXY and MOORAGE_INIT name what was built elsewhere.
# Each stage is bounded, and a stage that fails does not keep the next from running. MOORAGE_COMMIT names the commit.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
stages=${*:-smoke checkpoint overhead programs}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
commit=${MOORAGE_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
export PYTHONPATH=$root/src:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 MOORAGE_GPU_RESULTS=$out

build=$root/build/native
if [ -n "${MOORAGE_LIBCUDA_PROXY:-}" ]; then
  echo "built elsewhere: ${MOORAGE_LIBCUDA_PROXY} ${MOORAGE_LIBNCCL_PROXY:-} ${MOORAGE_INIT:-}"
elif ! { cmake -S . -B "$build" -DMOORAGE_INTERCEPT=ON && cmake --build "$build" -j; } >"$out/build.log" 2>&1; then
  tail -20 "$out/build.log"
  exit 1
fi
MOORAGE_LIBCUDA_PROXY=${MOORAGE_LIBCUDA_PROXY:-$(find "$build" -path '*moorage-cuda-dir/libcuda.so.1' | head -1)}
MOORAGE_LIBNCCL_PROXY=${MOORAGE_LIBNCCL_PROXY:-$(find "$build" -path '*moorage-nccl-dir/libnccl.so.2' | head -1)}
export MOORAGE_LIBCUDA_PROXY MOORAGE_LIBNCCL_PROXY

failed=
stage() { # name, seconds, command...
  local name=$1 seconds=$2 began=$SECONDS
  shift 2
  # In a session of its own: what a stage that is cut off leaves behind ends with it.
  timeout -s "${SIGNAL:-TERM}" -k 20 "$seconds" "$@" >"$out/$name.log" 2>&1
  local code=$?
  echo "== $name: code $code, $((SECONDS - began)) s"
  tail -"${LINES_SHOWN:-25}" "$out/$name.log" | cut -c1-400
  cp -f bench/results/gpu_*.json bench/results/cold_start.json "$out/" 2>/dev/null
  [ $code -eq 0 ] || failed="$failed $name"
}
tests() { "$python" -m pytest -p no:cacheprovider -p no:benchmark -q -rs -m gpu "$@"; }
export -f tests
export python

for name in $stages; do
  case $name in
    smoke)
      stage smoke 240 bash -c "tests -x tests/gpu/test_programs.py -k cupy && tests -x tests/gpu/test_faults.py -k broker"
      ;;
    checkpoint) stage checkpoint 300 "$python" -m bench.gpu_checkpoint --sizes 32 --baseline 32 --host 0 --commit "$commit" ;;
    overhead) stage overhead 150 "$python" -m bench.gpu_overhead --commit "$commit" ;;
    cold) stage cold 240 "$python" -m bench.cold_start --commit "$commit" ;;
    programs)
      stage programs 420 bash -c "tests -n 4 tests/gpu/test_programs.py -k 'not long_kernel'"
      stage long_kernel 200 bash -c "tests tests/gpu/test_programs.py -k long_kernel"
      stage faults 420 bash -c "tests -n 2 tests/gpu/test_faults.py"
      ;;
    sizes) stage sizes 400 "$python" -m bench.gpu_checkpoint --sizes 8,64 --baseline 8 --host 8 --commit "$commit" ;;
    full) stage full 180 "$python" -m bench.gpu_checkpoint --sizes "" --baseline "" --host 0 --full 24 --commit "$commit" ;;
    fill) stage fill 100 "$python" -m bench.gpu_fill --commit "$commit" ;;
    map) stage map 150 bash -c "tests tests/gpu/test_map.py" ;;
    keys)
      export MOORAGE_STATE_ONLY=memory_keys
      stage keys 120 "$python" -m pytest -p no:cacheprovider -p no:benchmark -n 0 -q -s tests/multinode/test_state.py -k each_kind
      ;;
    nccl-smoke) LINES_SHOWN=100 stage nccl-smoke 150 bash -c "tests -x -s tests/gpu/test_nccl.py -k two_ranks_of_one_pod" ;;
    # Nothing is restored, so several programs may share the GPU, with ranks that are processes of their own.
    nccl-cuts) LINES_SHOWN=150 stage nccl-cuts "${CUTS_SECONDS:-200}" bash -c "tests -n ${CUTS_JOBS:-2} -rA tests/gpu/test_nccl_cuts.py" ;;
    nccl-bench) stage nccl-bench 180 "$python" -m bench.gpu_nccl --seconds "${BENCH_SECONDS:-12}" \
      --tests "$out/nccl_cuts.jsonl" --commit "$commit" ;;
    nccl)
      # CRIU writes some GiB for each checkpoint: into memory. Not a share of it: a virtual machine may begin with little.
      fast=/var/tmp/moorage-nccl-evidence
      mkdir -p $fast && mount -t tmpfs -o size=${NCCL_ROOM:-80g},mode=755,huge=always tmpfs $fast && export MOORAGE_TEST_FOLDER=$fast
      # Ten programs of some 70 s each. For more of one: NCCL_ONLY='and fsdp' MOORAGE_NCCL_TIMES=20 MOORAGE_NCCL_WITHIN=400.
      export MOORAGE_NCCL_TIMES=${MOORAGE_NCCL_TIMES:-10} MOORAGE_NCCL_WITHIN=${MOORAGE_NCCL_WITHIN:-25}
      LINES_SHOWN=150 stage nccl "${NCCL_SECONDS:-600}" bash -c "tests -s tests/gpu/test_nccl.py -k 'a_program ${NCCL_ONLY:-}'"
      unset MOORAGE_TEST_FOLDER
      umount -l $fast
      ;;
    two)
      # Each part gets what the whole has left. SIGINT: it takes down what it has started, since the next one needs the
      # GPUs for itself.
      over=$((SECONDS + ${TWO_SECONDS:-580}))
      fast=/var/tmp/moorage-two-evidence
      mkdir -p $fast && mount -t tmpfs -o size=100g,mode=755,huge=always tmpfs $fast && export MOORAGE_TEST_FOLDER=$fast
      part() { # name, seconds, seconds that must stay for others, command...
        [[ " ${TWO_PARTS:-$1} " == *" $1 "* ]] || return 0
        local left=$((over - SECONDS - $3))
        local seconds=$(($2 < left ? $2 : left))
        [ $seconds -gt 20 ] || { echo "== $1: no time is left" && failed="$failed $1" && return; }
        LINES_SHOWN=40 SIGNAL=INT stage "$1" $seconds "${@:4}"
        for cluster in /run/moorage/dev/*/cluster.json; do # of a part that was killed
          [ ! -e "$cluster" ] || timeout 40 "$python" -c "import sys; from moorage.dev import cluster; cluster.down(sys.argv[1])" \
            "$(basename "$(dirname "$cluster")")"
        done
        "$python" -m bench.two_gpus --parts '' --tests "$out/two_gpus.jsonl" "$out/nccl.jsonl" --commit "$commit" >/dev/null 2>&1
        cp -f bench/results/two_gpus.json "$out/" 2>/dev/null
      }
      two=tests/gpu/test_two_gpus.py
      part two-ddp 210 0 bash -c "tests -s $two -k data_parallel"
      part two-tensor 210 0 bash -c "tests -s $two -k tensor_parallel"
      part two-fsdp 210 0 bash -c "tests -s $two -k fully_sharded"
      part two-pods 130 0 bash -c "tests -s $two -k pods_of_one_gpu"
      part two-memory 100 0 bash -c "tests -s $two -k shared_between"
      part two-bandwidth 100 0 "$python" -m bench.two_gpus --parts bandwidth --commit "$commit"
      part two-speed 130 0 "$python" -m bench.two_gpus --parts speed --commit "$commit"
      unset MOORAGE_TEST_FOLDER
      umount -l $fast
      ;;
    nccl-graphs) LINES_SHOWN=140 stage nccl-graphs 46 "$python" -m tests.gpu.nccl_graphs --seconds 40 ;;
    *) echo "no stage $name" >&2 && failed="$failed $name" ;;
  esac
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
