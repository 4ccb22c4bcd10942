// Command cridrv speaks CRI for tests: JSON lines on stdin, each carried out
// concurrently, one JSON line on stdout per request. It ends when stdin ends.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// request is one line of stdin. Which fields count depends on op.
type request struct {
	ID        int64  `json:"id"`
	Op        string `json:"op"`
	TimeoutMs int64  `json:"timeout_ms"` // default 30 s

	Pod         string            `json:"pod"`       // sandbox id
	Container   string            `json:"container"` // container id
	Name        string            `json:"name"`
	Namespace   string            `json:"namespace"`
	UID         string            `json:"uid"`
	Attempt     uint32            `json:"attempt"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	Handler     string            `json:"runtime_handler"`
	Image       string            `json:"image"`
	Command     []string          `json:"command"`
	GraceS      int64             `json:"grace_s"`
	CgroupRoot  string            `json:"cgroup_parent"`
	LogDir      string            `json:"log_dir"`
}

type item struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Namespace string `json:"namespace,omitempty"`
	UID       string `json:"uid,omitempty"`
	Pod       string `json:"pod,omitempty"`
	State     string `json:"state"`
}

type response struct {
	ID    int64  `json:"id"`
	Code  string `json:"code,omitempty"`  // gRPC status code, when not OK
	Error string `json:"error,omitempty"` // its message
	Ns    int64  `json:"ns"`
	Value string `json:"value,omitempty"` // an id, a version
	Items []item `json:"items,omitempty"`
	// BoottimeNs, of wait_ready.
	BoottimeNs int64 `json:"boottime_ns,omitempty"`
}

type driver struct {
	rt cri.RuntimeServiceClient

	mu   sync.Mutex
	pods map[string]*cri.PodSandboxConfig // by sandbox id: CreateContainer must repeat it
}

func main() {
	socket := flag.String("socket", "", "CRI socket of the runtime")
	flag.Parse()
	conn, err := grpc.NewClient("unix://"+*socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		// A restarted runtime must be found again at once, not after gRPC's backoff.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: quickBackoff, MinConnectTimeout: 200 * time.Millisecond}))
	if err != nil {
		log.Fatalf("cridrv: %v", err)
	}
	d := &driver{rt: cri.NewRuntimeServiceClient(conn), pods: map[string]*cri.PodSandboxConfig{}}

	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 4<<20)
	var out sync.Mutex
	enc := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		r := &request{TimeoutMs: 30_000}
		if err := json.Unmarshal(lines.Bytes(), r); err != nil {
			log.Fatalf("cridrv: request: %v", err)
		}
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.TimeoutMs)*time.Millisecond)
			defer cancel()
			resp := response{ID: r.ID}
			begin := time.Now()
			if err := d.do(ctx, r, &resp); err != nil {
				resp.Code, resp.Error = status.Code(err).String(), status.Convert(err).Message()
			}
			resp.Ns = time.Since(begin).Nanoseconds()
			out.Lock()
			defer out.Unlock()
			if err := enc.Encode(resp); err != nil {
				log.Fatalf("cridrv: stdout: %v", err)
			}
		}()
	}
}

func (d *driver) do(ctx context.Context, r *request, resp *response) error {
	switch r.Op {
	case "version":
		v, err := d.rt.Version(ctx, &cri.VersionRequest{})
		resp.Value = v.GetRuntimeName() + " " + v.GetRuntimeVersion()
		return err
	case "wait_ready":
		return d.waitReady(ctx, resp)
	case "run_pod":
		return d.runPod(ctx, r, resp)
	case "stop_pod":
		_, err := d.rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: r.Pod})
		return err
	case "remove_pod":
		_, err := d.rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: r.Pod})
		return err
	case "create_container":
		return d.createContainer(ctx, r, resp)
	case "start_container":
		_, err := d.rt.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: r.Container})
		return err
	case "stop_container":
		_, err := d.rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: r.Container, Timeout: r.GraceS})
		return err
	case "remove_container":
		_, err := d.rt.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: r.Container})
		return err
	case "list_pods":
		l, err := d.rt.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		for _, p := range l.GetItems() {
			resp.Items = append(resp.Items, item{ID: p.Id, Name: p.GetMetadata().GetName(), Namespace: p.GetMetadata().GetNamespace(),
				UID: p.GetMetadata().GetUid(), State: p.State.String()})
		}
		return err
	case "list_containers":
		l, err := d.rt.ListContainers(ctx, &cri.ListContainersRequest{})
		for _, c := range l.GetContainers() {
			resp.Items = append(resp.Items, item{ID: c.Id, Name: c.GetMetadata().GetName(), Pod: c.PodSandboxId, State: c.State.String()})
		}
		return err
	}
	return fmt.Errorf("unknown op %q", r.Op)
}

// waitReady asks until the runtime answers and says when it did, on
// CLOCK_BOOTTIME, which plugins and the daemon can be compared on.
func (d *driver) waitReady(ctx context.Context, resp *response) error {
	for {
		v, err := d.rt.Version(ctx, &cri.VersionRequest{})
		if err == nil {
			var now unix.Timespec
			if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
				return err
			}
			resp.BoottimeNs = now.Nano()
			resp.Value = v.GetRuntimeName() + " " + v.GetRuntimeVersion()
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// runPod starts a pod on the host's network: no CNI is needed for it.
func (d *driver) runPod(ctx context.Context, r *request, resp *response) error {
	config := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: r.Name, Namespace: r.Namespace, Uid: r.UID, Attempt: r.Attempt},
		Labels:       map[string]string{"io.kubernetes.pod.name": r.Name, "io.kubernetes.pod.namespace": r.Namespace, "io.kubernetes.pod.uid": r.UID},
		Annotations:  r.Annotations,
		LogDirectory: r.LogDir,
		Linux: &cri.LinuxPodSandboxConfig{
			CgroupParent: r.CgroupRoot,
			SecurityContext: &cri.LinuxSandboxSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER, Ipc: cri.NamespaceMode_POD},
			},
		},
	}
	for k, v := range r.Labels {
		config.Labels[k] = v
	}
	p, err := d.rt.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: r.Handler})
	if err != nil {
		return err
	}
	resp.Value = p.PodSandboxId
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pods[p.PodSandboxId] = config
	return nil
}

func (d *driver) createContainer(ctx context.Context, r *request, resp *response) error {
	d.mu.Lock()
	pod := d.pods[r.Pod]
	d.mu.Unlock()
	if pod == nil {
		return fmt.Errorf("sandbox %q was not started by this driver", r.Pod)
	}
	config := &cri.ContainerConfig{
		Metadata:    &cri.ContainerMetadata{Name: r.Name, Attempt: r.Attempt},
		Image:       &cri.ImageSpec{Image: r.Image},
		Command:     r.Command,
		Labels:      map[string]string{"io.kubernetes.container.name": r.Name, "io.kubernetes.pod.uid": pod.Metadata.Uid},
		Annotations: r.Annotations,
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: pod.Linux.SecurityContext.NamespaceOptions,
		}},
	}
	c, err := d.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: r.Pod, Config: config, SandboxConfig: pod})
	resp.Value = c.GetContainerId()
	return err
}
