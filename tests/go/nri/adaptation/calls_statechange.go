//go:build nri_statechange

package main

// Before NRI 0.12 most events are a StateChange.

import (
	"context"

	nri "github.com/containerd/nri/pkg/adaptation"
)

func runPod(ctx context.Context, a *nri.Adaptation, pod *nri.PodSandbox) error {
	return a.RunPodSandbox(ctx, &nri.StateChangeEvent{Pod: pod})
}

func stopPod(ctx context.Context, a *nri.Adaptation, pod *nri.PodSandbox) error {
	return a.StopPodSandbox(ctx, &nri.StateChangeEvent{Pod: pod})
}

func removePod(ctx context.Context, a *nri.Adaptation, pod *nri.PodSandbox) error {
	return a.RemovePodSandbox(ctx, &nri.StateChangeEvent{Pod: pod})
}

func removeContainer(ctx context.Context, a *nri.Adaptation, pod *nri.PodSandbox, c *nri.Container) error {
	return a.RemoveContainer(ctx, &nri.StateChangeEvent{Pod: pod, Container: c})
}
