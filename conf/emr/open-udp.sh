#!/bin/bash
# Lets the members of a security group reach each other at the UDP ports of a fit. The groups that EMR
# manages let all UDP through already; this is for groups of your own.
#
#   open-udp.sh sg-0123456789abcdef0 [OPTIONS OF aws, such as --dry-run]
set -euo pipefail

[ $# -ge 1 ] || { echo "open-udp.sh: wants the id of a security group" >&2; exit 2; }
group=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
aws ec2 authorize-security-group-ingress --group-id "$group" \
    --ip-permissions "$(sed "s|GROUP|$group|g" "$here/udp-rule.json")" "$@"
