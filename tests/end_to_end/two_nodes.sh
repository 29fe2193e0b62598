#!/usr/bin/env bash
# Two nodes of one machine: two network namespaces with their own addresses and host names, joined by a cable.
#   unshare --net --uts --mount [--map-root-user] bash two_nodes.sh HOSTS COMMAND [ARGUMENT …]
# runs the command on both, with RANK and what says where node 0 is. HOSTS becomes their /etc/hosts.
set -euo pipefail
hosts=$1
shift

printf '127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n' >"$hosts"
mount --bind "$hosts" /etc/hosts
unshare --net --uts sleep 3600 &
other=$!
trap 'kill "$other"' EXIT
until [[ $(readlink "/proc/$other/ns/net") != $(readlink /proc/self/ns/net) ]]; do sleep 0.1; done
on_other() { nsenter --target "$other" --net --uts "$@"; }

ip link add cable type veth peer name far_end
ip link set far_end netns "$other"
hostname node0
ip address add 10.77.0.1/24 dev cable
on_other hostname node1
on_other ip address add 10.77.0.2/24 dev far_end
for up in lo cable; do ip link set "$up" up; done
for up in lo far_end; do on_other ip link set "$up" up; done

export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 WORLD_SIZE=2
status=0
RANK=1 on_other "$@" &
second=$!
RANK=0 "$@" || status=$?
wait "$second" || status=$?
exit "$status"
