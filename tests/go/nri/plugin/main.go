// Command plugin is a real NRI plugin, on NRI's own stub, for tests.
//
// It writes one JSON line for everything it completed to its record file, so
// that a test can tell which pods and containers it really processed, and takes
// orders (faults, disconnect, connect) as JSON lines on stdin. It ends when
// stdin ends, so it never outlives its test.
package main

import (
	"context"
	"flag"
	"io"
	"log"
	"os"
	"strings"

	"github.com/containerd/nri/pkg/api"
	"github.com/sirupsen/logrus"
)

func main() {
	var (
		name      = flag.String("name", "test", "plugin name")
		idx       = flag.String("idx", "10", "plugin index, two digits")
		socket    = flag.String("socket", "", "path of the runtime's NRI socket")
		events    = flag.String("events", "run_pod_sandbox,create_container", "events to subscribe to, comma separated")
		record    = flag.String("record", "", "file to append the record to")
		reconnect = flag.Bool("reconnect", false, "connect again, every 20 ms, when the runtime goes away")
		require   = flag.String("require", "", "as a validator, reject containers unless these plugins are listed (comma separated)")
		idle      = flag.Bool("idle", false, "do not connect before told to")
		second    = flag.String("second", "", "host a second plugin of this name in the same process; orders with second=true are for it")
		record2   = flag.String("second-record", "", "file to append the second plugin's record to")
	)
	flag.Parse()
	logrus.SetLevel(logrus.WarnLevel)

	mask, err := api.ParseEventMask(strings.ReplaceAll(*events, "_", ""))
	if err != nil {
		log.Fatalf("--events: %v", err)
	}
	rec, err := openRecord(*record)
	if err != nil {
		log.Fatalf("--record: %v", err)
	}
	p := &plugin{mask: mask, record: rec, faults: newFaults()}
	if *require != "" {
		p.require = strings.Split(*require, ",")
	}
	if os.Getenv(api.PluginSocketEnvVar) != "" {
		launched(p)
		return
	}
	hosted := []*plugin{p}
	p.link = newLink(p, *name, *idx, *socket, *reconnect)
	if *second != "" {
		rec, err := openRecord(*record2)
		if err != nil {
			log.Fatalf("--second-record: %v", err)
		}
		q := &plugin{mask: mask, record: rec, faults: newFaults()}
		q.link = newLink(q, *second, *idx, *socket, *reconnect)
		hosted = append(hosted, q)
	}
	if !*idle {
		for _, p := range hosted {
			p.link.connect()
		}
	}
	if err := serveControl(context.Background(), os.Stdin, os.Stdout, hosted); err != nil && err != io.EOF {
		log.Fatalf("control: %v", err)
	}
}
