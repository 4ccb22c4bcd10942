package main

// The plugin proper: every handler strikes its fault first, then does nothing
// useful, and records that it completed.

import (
	"context"
	"time"

	"github.com/containerd/nri/pkg/api"
)

type plugin struct {
	mask    api.EventMask
	record  *recorder
	faults  *faults
	link    *link
	require []string
}

func (p *plugin) Configure(_ context.Context, _, runtime, version string) (api.EventMask, error) {
	begin := boottimeNs()
	err := p.strike("configure")
	p.link.configured(runtime, version)
	p.record.add(entry{Event: "configure", BeginNs: begin, Connection: p.link.count(), Name: runtime + " " + version})
	return p.mask, err
}

func (p *plugin) Synchronize(ctx context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	e := entry{Event: "synchronize"}
	for _, pod := range pods {
		e.Pods = append(e.Pods, pod.GetId())
	}
	for _, c := range containers {
		e.Containers = append(e.Containers, c.GetId())
	}
	err := p.finish(ctx, e)
	if err == nil {
		p.link.synchronized()
	}
	return nil, err
}

// finish strikes the event's fault, then records the event as completed.
// "late" says that the answer will not count: the runtime had given up on the
// call by then, or the connection it came on was closed.
func (p *plugin) finish(ctx context.Context, e entry) error {
	e.BeginNs, e.Connection = boottimeNs(), p.link.count()
	if err := p.strike(e.Event); err != nil {
		e.Error = err.Error()
		p.record.add(e)
		return err
	}
	deadline, ok := ctx.Deadline()
	e.Late = ctx.Err() != nil || ok && time.Now().After(deadline) || !p.link.isOpen(e.Connection)
	p.record.add(e)
	return nil
}

func (p *plugin) pod(ctx context.Context, event string, pod *api.PodSandbox) error {
	return p.finish(ctx, entry{Event: event, Pod: pod.GetId(), PodUID: pod.GetUid(), PodName: pod.GetName(), Namespace: pod.GetNamespace()})
}

func (p *plugin) container(ctx context.Context, event string, pod *api.PodSandbox, c *api.Container) error {
	return p.finish(ctx, entry{Event: event, Pod: pod.GetId(), PodUID: pod.GetUid(), PodName: pod.GetName(), Namespace: pod.GetNamespace(), Container: c.GetId(), Name: c.GetName()})
}

func (p *plugin) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.pod(ctx, "run_pod_sandbox", pod)
}

func (p *plugin) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.pod(ctx, "stop_pod_sandbox", pod)
}

func (p *plugin) RemovePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.pod(ctx, "remove_pod_sandbox", pod)
}

func (p *plugin) CreateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	return nil, nil, p.container(ctx, "create_container", pod, c)
}

func (p *plugin) StartContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.container(ctx, "start_container", pod, c)
}

func (p *plugin) StopContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	return nil, p.container(ctx, "stop_container", pod, c)
}

func (p *plugin) RemoveContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.container(ctx, "remove_container", pod, c)
}
