//go:build nri_novalidate

package main

import nri "github.com/containerd/nri/pkg/adaptation"

func validatorOptions(string) []nri.Option { return nil }
