#!/bin/bash
# Bootstrap action of EMR: gives a node a Python environment with sparkstrom and Aeron's library, and
# socket buffers of 4 MiB. Runs on every node as user hadoop, also on those that are added later.
#
#   bootstrap.sh --package s3://BUCKET/sparkstrom-0.1.0-py3-none-manylinux_2_28_x86_64.whl [--python python3.11]
#       [--home /opt/sparkstrom] [--wheels s3://BUCKET/wheels/] [-- WHAT PIP SHALL INSTALL AS WELL]
#
# --wheels is for nodes without a way to PyPI: a folder that `pip download` has filled, with
# pyaeron's wheel in it. What follows -- goes to pip, options among it.
set -euo pipefail

fail() { echo "bootstrap.sh: $*" >&2; exit 1; }
value() { [ $# -ge 2 ] || fail "$1 wants a value"; printf '%s' "$2"; }

package='' python=python3.11 home=/opt/sparkstrom wheels=''
while [ $# -gt 0 ]; do
    case $1 in
        --package) package=$(value "$@"); shift 2 ;;
        --python) python=$(value "$@"); shift 2 ;;
        --home) home=$(value "$@"); shift 2 ;;
        --wheels) wheels=$(value "$@"); shift 2 ;;
        --) shift; break ;;
        *) fail "$1 is not an option of this script; see its first lines" ;;
    esac
done
[ -n "$package" ] || fail "--package wants the wheel of sparkstrom, such as s3://BUCKET/sparkstrom-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
[ "$(uname -m)" = x86_64 ] || fail "this node is $(uname -m): Aeron's wheel is for x86_64; take instances that are not Graviton"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# fetched SOURCE: a path of this machine; what lies in S3 is copied first.
fetched() {
    case $1 in
        s3://*/) aws s3 sync --only-show-errors "$1" "$scratch/wheels" >&2; echo "$scratch/wheels" ;;
        s3://*) aws s3 cp --only-show-errors "$1" "$scratch/" >&2; echo "$scratch/${1##*/}" ;;
        *) echo "$1" ;;
    esac
}

# Linux gives a socket no more than these; Aeron asks for 4 MiB.
sudo tee /etc/sysctl.d/90-sparkstrom.conf >/dev/null <<END
net.core.rmem_max = 4194304
net.core.wmem_max = 4194304
END
sudo sysctl --quiet --load /etc/sysctl.d/90-sparkstrom.conf

command -v "$python" >/dev/null || sudo dnf install --quiet --assumeyes "$python"
sudo install -d -m 755 -o "$(id -un)" "$home"
umask 022   # containers run as another user
"$python" -m venv "$home"
pip=("$home/bin/python" -m pip --quiet --disable-pip-version-check install)
aeron=()
if [ -n "$wheels" ]; then
    wheels=$(fetched "$wheels")
    pip+=(--no-index --find-links "$wheels")
    for wheel in "$wheels"/pyaeron-*.whl; do aeron=(--wheel "$wheel"); done
fi
# pyspark is EMR's own, which spark-submit brings; pandas is for predictions on DataFrames.
package=$(fetched "$package")
"${pip[@]}" "$package" 'pandas>=2.0' "$@"

# On Python 3.11 the library does not come with pip.
has_aeron() { "$home/bin/python" -c 'from sparkstrom.transport.aeron.library import load_library; load_library()'; }
has_aeron 2>/dev/null || "$home/bin/sparkstrom" fetch-aeron "${aeron[@]}"
has_aeron
"$home/bin/sparkstrom" --version
