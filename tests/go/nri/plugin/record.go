package main

// The record: what the plugin completed, one JSON line per write(2), so that
// lines of several plugin processes and of killed ones never mix.

import (
	"encoding/json"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// entry is one line of the record. Times are CLOCK_BOOTTIME nanoseconds.
type entry struct {
	Event      string   `json:"event"`
	Pid        int      `json:"pid"`
	Connection int64    `json:"connection"`
	BeginNs    int64    `json:"begin_ns"`
	EndNs      int64    `json:"end_ns"`
	Late       bool     `json:"late,omitempty"`
	Error      string   `json:"error,omitempty"`
	Pod        string   `json:"pod,omitempty"`
	PodUID     string   `json:"pod_uid,omitempty"`
	PodName    string   `json:"pod_name,omitempty"`
	Namespace  string   `json:"namespace,omitempty"`
	Container  string   `json:"container,omitempty"`
	Name       string   `json:"name,omitempty"`
	Pods       []string `json:"pods,omitempty"`
	Containers []string `json:"containers,omitempty"`
	Plugins    []string `json:"plugins,omitempty"`
}

type recorder struct {
	file  *os.File
	count atomic.Int64
}

func openRecord(path string) (*recorder, error) {
	if path == "" {
		return &recorder{}, nil
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	return &recorder{file: f}, err
}

func (r *recorder) add(e entry) {
	e.Pid = os.Getpid()
	e.EndNs = boottimeNs()
	r.count.Add(1)
	if r.file == nil {
		return
	}
	line, err := json.Marshal(e)
	if err != nil {
		panic(err) // entry has only strings and numbers
	}
	if _, err := r.file.Write(append(line, '\n')); err != nil {
		panic(err) // a test with half a record would lie
	}
}

func boottimeNs() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}
