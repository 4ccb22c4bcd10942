// NRI 0.8; see go.mod. Not for `go mod tidy`, which ignores build tags and
// would raise NRI to a version with a default validator:
//	go build -mod=mod -modfile=0.8.mod -tags nri_no_wasm,nri_statechange,nri_novalidate ./...
module nri-lease.test/nri

go 1.26.0

require (
	github.com/containerd/nri v0.8.0
	github.com/sirupsen/logrus v1.9.3
	golang.org/x/sys v0.39.0
)

require (
	github.com/containerd/log v0.1.0 // indirect
	github.com/containerd/ttrpc v1.2.6-0.20240827082320-b5cd6e4b3287 // indirect
	github.com/gogo/protobuf v1.3.2 // indirect
	github.com/golang/protobuf v1.5.3 // indirect
	github.com/opencontainers/runtime-spec v1.0.3-0.20220825212826-86290f6a00fb // indirect
	golang.org/x/net v0.25.0 // indirect
	golang.org/x/text v0.15.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20230731190214-cbb8c96f2d6d // indirect
	google.golang.org/grpc v1.57.1 // indirect
	google.golang.org/protobuf v1.34.1 // indirect
	k8s.io/cri-api v0.25.3 // indirect
)
