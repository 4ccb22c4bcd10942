//go:build !nri_novalidate

package main

// Validation exists from NRI 0.10 on.

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/nri/pkg/api"
)

func (p *plugin) ValidateContainerAdjustment(ctx context.Context, req *api.ValidateContainerAdjustmentRequest) error {
	pod, c := req.GetPod(), req.GetContainer()
	e := entry{Event: "validate_container_adjustment", Pod: pod.GetId(), PodUID: pod.GetUid(), PodName: pod.GetName(), Namespace: pod.GetNamespace(), Container: c.GetId(), Name: c.GetName()}
	for _, consulted := range req.GetPlugins() {
		e.Plugins = append(e.Plugins, consulted.GetName())
	}
	if err := p.finish(ctx, e); err != nil {
		return err
	}
	for _, name := range p.require {
		if !slices.Contains(e.Plugins, name) {
			return fmt.Errorf("required plugin %q not present", name)
		}
	}
	return nil
}
