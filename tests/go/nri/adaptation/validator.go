//go:build !nri_novalidate

package main

// NRI's built-in default validator, from 0.10 on.

import (
	"strings"

	nri "github.com/containerd/nri/pkg/adaptation"
	validator "github.com/containerd/nri/plugins/default-validator/builtin"
)

func validatorOptions(required string) []nri.Option {
	if required == "" {
		return nil
	}
	return []nri.Option{nri.WithDefaultValidator(&validator.DefaultValidatorConfig{
		Enable: true, RequiredPlugins: strings.Split(required, ","),
	})}
}
