// Command adaptation is NRI's own runtime side (pkg/adaptation), as containerd
// embeds it, without containers: a test drives it with JSON lines on stdin and
// reads one JSON line per order on stdout. Orders run concurrently, as CRI
// requests do. It ends when stdin ends.
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

	nri "github.com/containerd/nri/pkg/adaptation"
	"github.com/sirupsen/logrus"
)

type runtime struct {
	nri *nri.Adaptation

	mu         sync.Mutex // guards what follows
	pods       map[string]*nri.PodSandbox
	containers map[string]*nri.Container
	block      *nri.PluginSyncBlock
}

// order is one line of stdin; answer one of stdout, with the same id.
type order struct {
	ID int64  `json:"id"`
	Op string `json:"op"`

	Pod       nri.PodSandbox `json:"pod"`       // run_pod_sandbox; otherwise only pod.id is used
	Container nri.Container  `json:"container"` // create_container, stop_container, remove_container

	Pods       int `json:"pods"`       // populate: so many pods,
	Containers int `json:"containers"` // so many containers over all of them
	Repeat     int `json:"repeat"`     // bench: create_container so often, without keeping them
}

type answer struct {
	ID    int64  `json:"id"`
	Error string `json:"error,omitempty"`
	Ns    int64  `json:"ns"` // how long the call into pkg/adaptation took
	// AllNs, for bench: every single call, in order.
	AllNs []int64 `json:"all_ns,omitempty"`
}

func main() {
	var (
		socket       = flag.String("socket", "", "where to listen for plugins")
		plugins      = flag.String("plugin-path", "/nonexistent", "pre-installed plugins")
		config       = flag.String("plugin-config-path", "/nonexistent", "configuration of pre-installed plugins")
		name         = flag.String("name", "containerd", "runtime name told to plugins")
		version      = flag.String("version", "v2.3.4", "runtime version told to plugins")
		request      = flag.Duration("request-timeout", 2*time.Second, "plugin request timeout")
		registration = flag.Duration("registration-timeout", 5*time.Second, "plugin registration timeout")
		required     = flag.String("default-validator", "", "plugins required by the built-in default validator, comma separated")
	)
	flag.Parse()
	logrus.SetOutput(os.Stderr)
	nri.SetPluginRequestTimeout(*request)
	nri.SetPluginRegistrationTimeout(*registration)

	r := &runtime{pods: map[string]*nri.PodSandbox{}, containers: map[string]*nri.Container{}}
	opts := []nri.Option{nri.WithSocketPath(*socket), nri.WithPluginPath(*plugins), nri.WithPluginConfigPath(*config)}
	opts = append(opts, validatorOptions(*required)...)
	a, err := nri.New(*name, *version, r.synchronize, r.update, opts...)
	if err != nil {
		log.Fatalf("adaptation: %v", err)
	}
	r.nri = a

	orders := bufio.NewScanner(os.Stdin)
	orders.Buffer(nil, 16<<20)
	var out sync.Mutex
	answers := json.NewEncoder(os.Stdout)
	reply := func(a answer) {
		out.Lock()
		defer out.Unlock()
		if err := answers.Encode(a); err != nil {
			log.Fatalf("stdout: %v", err)
		}
	}
	for orders.Scan() {
		o := &order{}
		if err := json.Unmarshal(orders.Bytes(), o); err != nil {
			reply(answer{Error: "order: " + err.Error()})
			continue
		}
		go func() {
			a := answer{ID: o.ID}
			begin := time.Now()
			if err := r.carryOut(o, &a); err != nil {
				a.Error = err.Error()
			}
			a.Ns = time.Since(begin).Nanoseconds()
			reply(a)
		}()
	}
}

func (r *runtime) carryOut(o *order, a *answer) error {
	ctx := context.Background()
	switch o.Op {
	case "start": // listen; populate first to have something to synchronise
		return r.nri.Start()
	case "stop":
		r.nri.Stop()
		return nil
	case "populate":
		r.populate(o.Pods, o.Containers)
		return nil
	case "block_plugin_sync":
		block := r.nri.BlockPluginSync()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.block = block
		return nil
	case "unblock_plugin_sync":
		r.mu.Lock()
		defer r.mu.Unlock()
		r.block.Unblock()
		return nil
	case "run_pod_sandbox":
		return r.runPod(ctx, &o.Pod)
	case "stop_pod_sandbox":
		return stopPod(ctx, r.nri, r.pod(o.Pod.Id))
	case "remove_pod_sandbox":
		pod := r.pod(o.Pod.Id)
		r.mu.Lock()
		delete(r.pods, o.Pod.Id)
		r.mu.Unlock()
		return removePod(ctx, r.nri, pod)
	case "create_container":
		return r.create(ctx, &o.Pod, &o.Container)
	case "stop_container":
		_, err := r.nri.StopContainer(ctx, &nri.StopContainerRequest{Pod: r.pod(o.Pod.Id), Container: r.container(o.Container.Id)})
		return err
	case "remove_container":
		c := r.container(o.Container.Id)
		r.mu.Lock()
		delete(r.containers, o.Container.Id)
		r.mu.Unlock()
		return removeContainer(ctx, r.nri, r.pod(o.Pod.Id), c)
	case "bench":
		return r.bench(ctx, o, a)
	}
	return fmt.Errorf("unknown op %q", o.Op)
}

// runPod blocks plugin synchronisation during the request, as containerd does.
func (r *runtime) runPod(ctx context.Context, pod *nri.PodSandbox) error {
	block := r.nri.BlockPluginSync()
	defer block.Unblock()
	if err := runPod(ctx, r.nri, pod); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pods[pod.Id] = pod
	return nil
}

func (r *runtime) create(ctx context.Context, pod *nri.PodSandbox, c *nri.Container) error {
	block := r.nri.BlockPluginSync()
	defer block.Unblock()
	if known := r.pod(pod.Id); known != nil {
		pod = known
	}
	c.PodSandboxId = pod.Id
	if _, err := r.nri.CreateContainer(ctx, &nri.CreateContainerRequest{Pod: pod, Container: c}); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.containers[c.Id] = c
	return nil
}

func (r *runtime) bench(ctx context.Context, o *order, a *answer) error {
	pod := &o.Pod
	if known := r.pod(pod.Id); known != nil {
		pod = known
	}
	for i := range o.Repeat {
		c := &nri.Container{Id: fmt.Sprintf("%s-%d", o.Container.Id, i), PodSandboxId: pod.Id, Name: o.Container.Name}
		begin := time.Now()
		_, err := r.nri.CreateContainer(ctx, &nri.CreateContainerRequest{Pod: pod, Container: c})
		a.AllNs = append(a.AllNs, time.Since(begin).Nanoseconds())
		if err != nil {
			return err
		}
	}
	return nil
}
