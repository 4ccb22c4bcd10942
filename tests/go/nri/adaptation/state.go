package main

// The runtime's pods and containers: what a connecting plugin is synchronised with.

import (
	"context"
	"fmt"

	nri "github.com/containerd/nri/pkg/adaptation"
)

func (r *runtime) pod(id string) *nri.PodSandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pods[id]
}

func (r *runtime) container(id string) *nri.Container {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.containers[id]
}

func (r *runtime) synchronize(ctx context.Context, cb nri.SyncCB) error {
	r.mu.Lock()
	pods := make([]*nri.PodSandbox, 0, len(r.pods))
	for _, p := range r.pods {
		pods = append(pods, p)
	}
	containers := make([]*nri.Container, 0, len(r.containers))
	for _, c := range r.containers {
		containers = append(containers, c)
	}
	r.mu.Unlock()
	_, err := cb(ctx, pods, containers)
	return err
}

func (r *runtime) update(context.Context, []*nri.ContainerUpdate) ([]*nri.ContainerUpdate, error) {
	return nil, nil
}

// populate adds pods and containers of realistic size, without calling plugins.
func (r *runtime) populate(pods, containers int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range pods {
		id := fmt.Sprintf("%064x", i+1)
		r.pods[id] = &nri.PodSandbox{
			Id: id, Name: fmt.Sprintf("populated-%d", i), Namespace: "default", Uid: fmt.Sprintf("00000000-0000-4000-8000-%012x", i),
			Labels: map[string]string{
				"app.kubernetes.io/name": "populated", "pod-template-hash": "5d9c7b6f4d",
				"io.kubernetes.pod.name": fmt.Sprintf("populated-%d", i), "io.kubernetes.pod.namespace": "default",
			},
			Annotations: map[string]string{"kubernetes.io/config.source": "api", "kubernetes.io/config.seen": "2026-12-01T10:00:00.000000000Z"},
		}
	}
	for i := range containers {
		id := fmt.Sprintf("%064x", 1<<32+i)
		c := &nri.Container{
			Id: id, Name: fmt.Sprintf("c%d", i), State: nri.ContainerState_CONTAINER_RUNNING,
			Labels: map[string]string{"io.kubernetes.container.name": fmt.Sprintf("c%d", i)},
			Args:   []string{"/bin/server", "--listen=:8080", "--config=/etc/server/config.yaml"},
			Env:    []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "KUBERNETES_SERVICE_HOST=10.0.0.1", "HOSTNAME=populated"},
		}
		if pods > 0 {
			c.PodSandboxId = fmt.Sprintf("%064x", i%pods+1)
		}
		r.containers[id] = c
	}
}
