package main

// Control: orders as JSON lines on stdin, each answered by one line on stdout.

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os"
)

type order struct {
	ID    int64  `json:"id"`
	Cmd   string `json:"cmd"` // status, fault, clear, connect, disconnect, share, quit
	Fault fault  `json:"fault"`
	// ReconnectMs, with disconnect, as in fault.
	ReconnectMs int `json:"reconnect_ms"`
	// Second: for the second plugin of this process.
	Second bool `json:"second"`
}

type answer struct {
	ID    int64  `json:"id"`
	Error string `json:"error,omitempty"`
	linkStatus
	Pid      int   `json:"pid"`
	Recorded int64 `json:"recorded"`
	// Child, with share: who has the connection, too.
	Child int `json:"child,omitempty"`
}

func serveControl(_ context.Context, in io.Reader, out io.Writer, hosted []*plugin) error {
	orders := bufio.NewScanner(in)
	answers := json.NewEncoder(out)
	for orders.Scan() {
		var o order
		a := answer{Pid: os.Getpid()}
		if err := json.Unmarshal(orders.Bytes(), &o); err != nil {
			a.Error = err.Error()
		}
		a.ID = o.ID
		p := hosted[0]
		if o.Second {
			p = hosted[len(hosted)-1]
		}
		switch o.Cmd {
		case "status":
		case "fault":
			p.faults.set(o.Fault)
		case "clear":
			p.faults.clear()
		case "connect":
			p.link.connect()
		case "disconnect":
			p.link.disconnect(o.ReconnectMs)
		case "share":
			child, err := p.link.share()
			if err != nil {
				a.Error = err.Error()
			}
			a.Child = child
		case "quit":
			os.Exit(0)
		default:
			a.Error = "unknown cmd " + o.Cmd
		}
		a.linkStatus = p.link.status()
		a.Recorded = p.record.count.Load()
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
	return orders.Err()
}
