package main

import (
	"time"

	"google.golang.org/grpc/backoff"
)

var quickBackoff = backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond}
