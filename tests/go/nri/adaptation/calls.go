//go:build !nri_statechange

package main

// From NRI 0.12 on every event has a request of its own.

import (
	"context"

	nri "github.com/containerd/nri/pkg/adaptation"
)

func runPod(ctx context.Context, a *nri.Adaptation, pod *nri.PodSandbox) error {
	return a.RunPodSandbox(ctx, &nri.RunPodSandboxRequest{Pod: pod})
}

func stopPod(ctx context.Context, a *nri.Adaptation, pod *nri.PodSandbox) error {
	return a.StopPodSandbox(ctx, &nri.StopPodSandboxRequest{Pod: pod})
}

func removePod(ctx context.Context, a *nri.Adaptation, pod *nri.PodSandbox) error {
	return a.RemovePodSandbox(ctx, &nri.RemovePodSandboxRequest{Pod: pod})
}

func removeContainer(ctx context.Context, a *nri.Adaptation, pod *nri.PodSandbox, c *nri.Container) error {
	return a.RemoveContainer(ctx, &nri.RemoveContainerRequest{Pod: pod, Container: c})
}
