package main

// Faults: what goes wrong at the next event of a kind. Each is used up by the
// event it hits.

import (
	"errors"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fault says what to do at an event: sleep, exit, kill (SIGKILL to itself),
// disconnect (and answer into the void), refuse (return an error).
type fault struct {
	At    string `json:"at"`
	Do    string `json:"do"`
	Ms    int    `json:"ms"`
	Times int    `json:"times"`
	Text  string `json:"text"`
	// ReconnectMs, with disconnect: connect again after that many ms;
	// negative: not before told to.
	ReconnectMs int `json:"reconnect_ms"`
}

type faults struct {
	sync.Mutex
	next map[string][]*fault
}

func newFaults() *faults { return &faults{next: map[string][]*fault{}} }

func (f *faults) set(n fault) {
	if n.Times == 0 {
		n.Times = 1
	}
	f.Lock()
	defer f.Unlock()
	f.next[n.At] = append(f.next[n.At], &n)
}

func (f *faults) clear() {
	f.Lock()
	defer f.Unlock()
	f.next = map[string][]*fault{}
}

func (f *faults) take(at string) *fault {
	f.Lock()
	defer f.Unlock()
	queue := f.next[at]
	if len(queue) == 0 {
		return nil
	}
	n := *queue[0]
	if queue[0].Times--; queue[0].Times == 0 {
		f.next[at] = queue[1:]
	}
	return &n
}

// strike carries out the fault set for this event, if any.
func (p *plugin) strike(at string) error {
	n := p.faults.take(at)
	if n == nil {
		return nil
	}
	switch n.Do {
	case "sleep":
		time.Sleep(time.Duration(n.Ms) * time.Millisecond)
	case "exit":
		time.Sleep(time.Duration(n.Ms) * time.Millisecond)
		unix.Exit(1)
	case "kill":
		time.Sleep(time.Duration(n.Ms) * time.Millisecond)
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
		// The first process of a pid namespace is immune to its own SIGKILL;
		// exit_group leaves the same behind.
		unix.Exit(137)
	case "disconnect":
		p.link.disconnect(n.ReconnectMs)
	case "refuse":
		return errors.New(n.Text)
	}
	return nil
}
