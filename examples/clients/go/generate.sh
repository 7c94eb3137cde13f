#!/bin/sh
# Writes the stubs to scheduler/. The contracts name no Go package, so it is said here.
set -eu
cd "$(dirname "$0")"
package=example.com/tokasaurus-client/scheduler
set -- --go_opt=module=example.com/tokasaurus-client --go-grpc_opt=module=example.com/tokasaurus-client
for name in common/v1/sampling scheduler/v1/generate scheduler/v1/observe scheduler/v1/session scheduler/v1/scheduler; do
    set -- "$@" "--go_opt=Mtokasaurus/$name.proto=$package"
    set -- "$@" "--go-grpc_opt=Mtokasaurus/$name.proto=$package"
done
protoc -I../../../protos -I.. --go_out=. --go-grpc_out=. "$@" tokasaurus/common/v1/sampling.proto \
    tokasaurus/scheduler/v1/generate.proto tokasaurus/scheduler/v1/observe.proto tokasaurus/scheduler/v1/session.proto tokasaurus/scheduler/v1/scheduler.proto
