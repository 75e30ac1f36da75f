#!/usr/bin/env bash
# `make up` and `make down`: the compose stack where a container engine answers, else a local stack. Says which.
#
#   deploy/stack.sh up       compose: build, start, wait until all have joined; else `make up-local` (foreground)
#   deploy/stack.sh down     stop what runs, of either kind; volumes stay
#   deploy/stack.sh compose ...   the compose command of this machine, for this stack (ps, logs, exec, ...)
set -euo pipefail
cd "$(dirname "$0")/.."
PROJECT=${COMPOSE_PROJECT_NAME:-moonpool}
JOIN_S=${JOIN_S:-240}
INSTANCES=3  # kvstore, prefill, decode

compose=()
find_compose() {  # fails when no engine answers or nothing can read compose.yaml; $why says so
  command -v docker >/dev/null || { why="no docker command"; return 1; }
  timeout 20 docker version --format '{{.Server.Version}}' >/dev/null 2>&1 || { why="no container engine answers"; return 1; }
  if timeout 20 docker compose version >/dev/null 2>&1; then compose=(docker compose)
  elif command -v docker-compose >/dev/null; then compose=(docker-compose)
  else why="a container engine, but no docker compose"; return 1; fi
  compose+=(--project-name "$PROJECT")
}

not_ready() {
  "${compose[@]}" ps
  "${compose[@]}" logs --tail=30
  "${compose[@]}" ps -a -q conductor | xargs -r docker inspect --format '{{json .State.Health}}'
  echo "up: not ready; \`make down\` stops what is there" >&2
  exit 1
}

case "${1:-}" in
  up)
    if ! find_compose; then
      echo "up: $why, so: local processes in the foreground (make up-local), until Ctrl-C"
      exec "${MAKE:-make}" --no-print-directory up-local
    fi
    # MODEL=<folder, GGUF file, hub id or smollm2>, as for make up-local.
    if [ -d "${MODEL:-}" ]; then
      folder=$(cd "$MODEL" && pwd -P)
      export MOONPOOL_STACK_MODELS=${folder%/*} MOONPOOL_MODEL=/var/lib/moonpool/models/${folder##*/}
    elif [ -f "${MODEL:-}" ]; then
      folder=$(cd "$(dirname "$MODEL")" && pwd -P)
      export MOONPOOL_STACK_MODELS=$folder MOONPOOL_MODEL=/var/lib/moonpool/models/${MODEL##*/}
    elif [ -n "${MODEL:-}" ]; then
      export MOONPOOL_MODEL=$MODEL
    fi
    echo "up: containers (${compose[*]}); local processes instead: make up-local"
    "${compose[@]}" build
    if [ "${MOONPOOL_MODEL:-}" = smollm2 ]; then
      # A name of the command line's: fetched within the image, once, into the volume `hub` that all of them see.
      MOONPOOL_MODEL=$("${compose[@]}" run --rm --no-deps -T -e XDG_CACHE_HOME=/var/lib/moonpool/hub \
        -e PIP_INDEX_URL -e PIP_EXTRA_INDEX_URL -e PIP_TRUSTED_HOST conductor pull smollm2 | tail -n 1)
    fi
    "${compose[@]}" up -d || not_ready
    # Asked inside, where the services' names mean something.
    "${compose[@]}" exec -T conductor \
      moonpool health --address conductor:50051 --joined "$INSTANCES" --wait-s "$JOIN_S" || not_ready
    "${compose[@]}" exec -T gateway moonpool health --address http://gateway:8000 --wait-s "$JOIN_S" || not_ready
    echo "ready: $("${compose[@]}" port conductor 50051), http://$("${compose[@]}" port gateway 8000)"
    ;;
  down)
    if find_compose && [ -n "$("${compose[@]}" ps -a -q 2>/dev/null)" ]; then
      echo "down: containers; the volumes stay"
      "${compose[@]}" down
    else
      exec "${MAKE:-make}" --no-print-directory down-local
    fi
    ;;
  compose)
    find_compose || { echo "$why" >&2; exit 1; }
    shift
    exec "${compose[@]}" "$@"
    ;;
  *)
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
