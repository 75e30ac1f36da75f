#!/usr/bin/env bash
# `make test-containers`: builds the images, runs `make up`, one request, `make down`. Needs docker and a compose.
#
# On Debian, as root: apt-get install docker.io docker-compose debootstrap iproute2. Where no engine answers and this is
# root, dockerd is started for the time of the test. MOONPOOL_STACK_BASE names the base image; without it, and without
# the default image at hand, a debootstrap root is imported as one. Python packages are put into deploy/wheels by this
# machine's own pip, and the native kernels by its compiler, so that the builds need no network; WHEELS=0 leaves that to
# the builds.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
DEFAULT_BASE=python:3.11-slim-bookworm
ROOT_BASE=moonpool-base:bookworm
work=$(mktemp -d)
dockerd_pid=
export COMPOSE_PROJECT_NAME=moonpool-test MOONPOOL_STACK_PUBLISH=127.0.0.1:${PORT:-50951}

say() { echo "test-containers: $*"; }
need() { command -v "$1" >/dev/null || { say "needs $1 ($2)"; exit 1; }; }

finish() {
  status=$?
  set +e
  deploy/stack.sh compose down -v --timeout 60 >/dev/null 2>&1
  if [ -n "$dockerd_pid" ]; then kill "$dockerd_pid" && wait "$dockerd_pid"; fi
  rm -rf "$work"
  [ "$status" = 0 ] || say "failed with status $status"
  exit "$status"
}
trap finish EXIT

need docker "docker.io"
if ! docker version >/dev/null 2>&1; then
  need dockerd "docker.io"
  say "no engine answers: starting dockerd"
  dockerd --default-ulimit nofile=20000:20000 >"$work/dockerd.log" 2>&1 &
  dockerd_pid=$!
  for _ in $(seq 120); do
    docker version >/dev/null 2>&1 && break
    kill -0 "$dockerd_pid" 2>/dev/null || { tail -n 20 "$work/dockerd.log"; say "dockerd ended"; exit 1; }
    sleep 0.5
  done
  docker version >/dev/null || { tail -n 20 "$work/dockerd.log"; exit 1; }
fi

if [ -z "${MOONPOOL_STACK_BASE:-}" ]; then
  if docker image inspect "$DEFAULT_BASE" >/dev/null 2>&1; then
    MOONPOOL_STACK_BASE=$DEFAULT_BASE
  else
    MOONPOOL_STACK_BASE=$ROOT_BASE
    if ! docker image inspect "$ROOT_BASE" >/dev/null 2>&1; then
      need debootstrap "debootstrap"
      say "importing a debootstrap root as $ROOT_BASE"
      debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/root" >"$work/debootstrap.log" \
        || { tail -n 20 "$work/debootstrap.log"; exit 1; }
      tar -C "$work/root" -c . | docker import - "$ROOT_BASE"
    fi
  fi
fi
export MOONPOOL_STACK_BASE
say "base image: $MOONPOOL_STACK_BASE"

if [ "${WHEELS:-1}" = 1 ]; then
  say "packages into deploy/wheels"
  "$PYTHON" -m pip wheel --quiet --find-links deploy/wheels -c constraints.txt -w deploy/wheels \
    packages/moonpool-base '.[engine]' hatchling editables 2>"$work/wheels.log" || { tail -n 20 "$work/wheels.log"; exit 1; }
  rm -f deploy/wheels/moonpool-*.whl deploy/wheels/moonpool_base-*.whl  # the builds make their own
  rm -rf deploy/wheels/kernels
  { "$PYTHON" -m moonpool.base.native.build --all deploy/wheels/kernels \
    && "$PYTHON" -m moonpool.base.native.build --all deploy/wheels/kernels --sources kernels/kv; } >"$work/kernels.log" || say "the build makes the kernels"
  export PIP_NO_INDEX=1
fi

say "make up"
make --no-print-directory up

say "what is in the images"
stack() { deploy/stack.sh compose exec -T "$@"; }
for service in conductor kvstore prefill decode; do
  test "$(stack "$service" id -u)" != 0 || { say "$service runs as root"; exit 1; }
done
for service in conductor kvstore; do
  stack "$service" python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is not None)' \
    || { say "torch is in the image of $service"; exit 1; }
done
for service in conductor prefill; do
  stack "$service" python -c 'import json; json.load(open("/opt/moonpool/sbom.cdx.json"))["components"]' \
    || { say "$service has no bill of materials"; exit 1; }
done
for service in prefill decode; do
  stack "$service" python -c 'import sys; from moonpool.engine.kernels.native import library; sys.exit(library.get() is None)' \
    || { say "$service has no native kernels"; exit 1; }
done

say "every container gets healthy"
for service in conductor kvstore prefill decode; do
  id=$(deploy/stack.sh compose ps -a -q "$service")
  for _ in $(seq 180); do
    health=$(docker inspect --format '{{.State.Health.Status}}' "$id")
    [ "$health" != starting ] && break
    sleep 1
  done
  test "$health" = healthy || { docker inspect --format '{{json .State.Health}}' "$id"; say "$service: $health"; exit 1; }
done

say "one request, from this machine"
"$PYTHON" -m moonpool.cli.main generate --address "$MOONPOOL_STACK_PUBLISH" "import os" --max-tokens 16 --json
say "a health check of a port where nobody listens says no"
nobody=prefill:50054
if stack prefill moonpool health --address "$nobody"; then say "it said yes"; exit 1; fi
say "everything reserved has come back"
stack conductor moonpool check --address conductor:50051 --wait-s 30

say "make down"
ids=$(deploy/stack.sh compose ps -a -q)
# shellcheck disable=SC2086  # several ids
docker wait $ids >"$work/codes" &
waiting=$!
started=$SECONDS
make --no-print-directory down
say "stopped in $((SECONDS - started)) s"
wait "$waiting"
test "$(sort -u "$work/codes")" = 0 || { say "exit codes: $(xargs <"$work/codes")"; exit 1; }
test -z "$(deploy/stack.sh compose ps -a -q)" || { say "containers are left"; exit 1; }
say "passed"
