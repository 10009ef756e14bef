#!/bin/bash
# Uploads the wheel, the bootstrap action and a program, and starts a cluster that runs the program
# and ends. Prints the cluster's id, as aws does.
#
#   create-cluster.sh emr-7|emr-spark-8 s3://BUCKET/FOLDER WHEEL PROGRAM.py [OPTIONS OF aws emr create-cluster]
#
# Such options are --ec2-attributes SubnetId=subnet-1,KeyName=me and --instance-fleets
# file://conf/emr/instance-fleets-spot.json: aws takes the last of what is given twice.
set -euo pipefail

fail() { echo "create-cluster.sh: $*" >&2; exit 2; }
[ $# -ge 4 ] || fail "wants a release (emr-7 or emr-spark-8), an S3 folder, the wheel, and a program"
release=$1 folder=${2%/} wheel=$3 program=$4
shift 4
case $release in
    emr-7) label=emr-7.13.0 python=python3.11 ;;   # Spark 3.5.6
    emr-spark-8) label=emr-spark-8.0.0 python=python3.12 ;;   # Spark 4.0.2
    *) fail "$release is neither emr-7 nor emr-spark-8" ;;
esac
[[ $folder == s3://* ]] || fail "$folder is not a folder of S3, such as s3://my-bucket/training"
for file in "$wheel" "$program"; do
    [ -f "$file" ] || fail "there is no file $file"
done

here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for name in bootstrap-actions steps; do
    sed -e "s|FOLDER|$folder|g" -e "s|WHEEL|${wheel##*/}|g" -e "s|PYTHON|$python|g" \
        -e "s|PROGRAM|${program##*/}|g" "$here/$name.json" >"$scratch/$name.json"
done

for file in "$here/bootstrap.sh" "$wheel" "$program"; do
    aws s3 cp --only-show-errors "$file" "$folder/${file##*/}"
done
aws emr create-cluster --name sparkstrom --release-label "$label" --applications Name=Spark \
    --configurations "file://$here/configurations.json" \
    --instance-fleets "file://$here/instance-fleets.json" \
    --bootstrap-actions "file://$scratch/bootstrap-actions.json" \
    --steps "file://$scratch/steps.json" \
    --log-uri "$folder/logs/" --use-default-roles --auto-terminate "$@"
