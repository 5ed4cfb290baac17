#!/usr/bin/env bash
# Start or stop a Ray cluster. This machine is the head, the others are reached by ssh.
#
#   configs/ray/cluster.sh start node1 node2
#   configs/ray/cluster.sh stop node1 node2
#
# All machines need the same environment at the same path, and this folder at the same path (such as
# on a shared file system). The environment's `ray` must be on the PATH here.
# RAY_HEAD_IP and RAY_PORT replace the address of the head.
set -euo pipefail

usage="usage: $0 start|stop [HOST ...]"
action="${1:?$usage}"
shift
ray="$(command -v ray)"
# The cores that a process may use. nproc would also obey OMP_NUM_THREADS.
cores="env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc"
address="${RAY_HEAD_IP:-$(hostname -I | cut -d' ' -f1)}:${RAY_PORT:-6379}"

# Whoever reaches a port of Ray can run code, unless there is a token.
token="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
settings=(RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token "RAY_AUTH_TOKEN_PATH=$token")
export "${settings[@]}"

case "$action" in
start)
    if [ ! -s "$token" ]; then
        mkdir -p "$(dirname "$token")"
        (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$token")
    fi
    # Ray alone would take all cores of the machine.
    "$ray" start --head --node-ip-address="${address%:*}" --port="${address##*:}" \
        --num-cpus="$($cores)" --include-dashboard=false --disable-usage-stats
    # The home folder may be shared: the token is read before it is written, and renamed into place.
    content="$(cat "$token")"
    for host in "$@"; do
        ssh "$host" "umask 077 && mkdir -p '$(dirname "$token")' && cat > '$token.new' &&
            mv '$token.new' '$token'" <<< "$content"
        ssh "$host" "cd '$PWD' && env ${settings[*]@Q} '$ray' start --address='$address' \
            --num-cpus=\$($cores) --disable-usage-stats" < /dev/null
    done
    echo
    echo "The cluster is up. Run on it from this machine:"
    echo "  export ${settings[*]}"
    echo "  flsuite fit --config configs/ray/quickstart.yaml --trainer.engine.address $address"
    ;;
stop)
    for host in "$@"; do
        ssh "$host" "env ${settings[*]@Q} '$ray' stop"
    done
    "$ray" stop
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
