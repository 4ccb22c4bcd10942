package main

// The link: the one connection to the runtime, opened, lost and opened again.

import (
	"context"
	"errors"
	"log"
	"net"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/stub"
	"golang.org/x/sys/unix"
)

const retryEvery = 20 * time.Millisecond

type link struct {
	mu        sync.Mutex
	plugin    *plugin
	name, idx string
	socket    string
	reconnect bool

	conn        net.Conn // of the current connection, nil while there is none
	connections int64    // opened so far
	synced      bool
	trying      bool
	runtime     string
	lastErr     string
}

func newLink(p *plugin, name, idx, socket string, reconnect bool) *link {
	return &link{plugin: p, name: name, idx: idx, socket: socket, reconnect: reconnect}
}

func (l *link) count() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.connections
}

// isOpen says whether this connection, by number, is the current one.
func (l *link) isOpen(connection int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn != nil && l.connections == connection
}

func (l *link) configured(runtime, version string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runtime = runtime + " " + version
}

func (l *link) synchronized() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.synced = true
}

// connect keeps trying, in the background, until a connection is configured.
func (l *link) connect() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.trying || l.conn != nil {
		return
	}
	l.trying = true
	go func() {
		for {
			err := l.attempt()
			l.mu.Lock()
			// It can be lost again before this is noticed here.
			if err == nil && (l.conn != nil || !l.reconnect) {
				l.trying = false
				l.mu.Unlock()
				return
			}
			if err != nil {
				l.lastErr = err.Error()
			}
			l.mu.Unlock()
			time.Sleep(retryEvery)
		}
	}()
}

// attempt opens one connection with a stub of its own: stubs of older NRI
// versions cannot be started twice.
func (l *link) attempt() error {
	raw, err := net.Dial("unix", l.socket)
	if err != nil {
		return err
	}
	conn := &watched{Conn: raw, broken: make(chan struct{})}
	l.mu.Lock()
	l.connections++
	l.synced = false
	l.conn = conn
	l.mu.Unlock()

	s, err := stub.New(l.plugin,
		stub.WithPluginName(l.name), stub.WithPluginIdx(l.idx),
		stub.WithConnection(conn),
		stub.WithOnClose(func() { l.lost(conn) }))
	if err != nil {
		log.Fatalf("stub: %v", err) // a mistake in this program
	}
	started := make(chan error, 1)
	go func() { started <- s.Start(context.Background()) }()
	select {
	case err = <-started:
	case <-conn.broken:
		// Start hangs for ever when the runtime closes the connection between
		// Register and Configure: it waits for the configuration with the lock
		// that the close handler needs (pkg/stub, 0.8 to 0.12). Leave it behind.
		select {
		case err = <-started:
		case <-time.After(100 * time.Millisecond):
			err = errors.New("connection closed before it was configured")
		}
	}
	if err != nil {
		conn.Close()
		l.mu.Lock()
		if l.conn == conn {
			l.conn = nil
		}
		l.mu.Unlock()
		return err
	}
	return nil
}

// lost is called when a connection has ended, whoever ended it.
func (l *link) lost(conn net.Conn) {
	l.mu.Lock()
	again := l.conn == conn && l.reconnect
	if l.conn == conn {
		l.conn = nil
		l.synced = false
	}
	l.mu.Unlock()
	if again {
		l.connect()
	}
}

// disconnect closes the socket at once; reconnectMs ≥ 0 opens a new one that
// much later, negative leaves it closed until told otherwise.
func (l *link) disconnect(reconnectMs int) {
	l.mu.Lock()
	conn := l.conn
	l.conn = nil
	l.synced = false
	l.mu.Unlock()
	if conn != nil {
		conn.Close()
	}
	if reconnectMs >= 0 {
		time.AfterFunc(time.Duration(reconnectMs)*time.Millisecond, l.connect)
	}
}

// watched tells when a connection can no longer be read.
type watched struct {
	net.Conn
	once   sync.Once
	broken chan struct{}
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if err != nil {
		w.once.Do(func() { close(w.broken) })
	}
	return n, err
}

// share starts a child that inherits the current connection and does nothing.
// It outlives this process; who asked for it has to end it.
func (l *link) share() (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return 0, errors.New("no connection to share")
	}
	file, err := l.conn.(*watched).Conn.(*net.UnixConn).File()
	if err != nil {
		return 0, err
	}
	defer file.Close()
	child := exec.Command("sleep", "300")
	child.ExtraFiles = []*os.File{file}
	if err := child.Start(); err != nil {
		return 0, err
	}
	return child.Process.Pid, nil
}

// inode of the current connection's socket; 0 while there is none.
func (l *link) inode() uint64 {
	if l.conn == nil {
		return 0
	}
	raw, err := l.conn.(*watched).Conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	var stat unix.Stat_t
	_ = raw.Control(func(fd uintptr) { _ = unix.Fstat(int(fd), &stat) })
	return stat.Ino
}

// launched serves the connection that the runtime has made before it started
// this program, until that ends.
func launched(p *plugin) {
	l := newLink(p, "", "", "", false)
	p.link = l
	l.connections = 1
	ended := make(chan struct{})
	s, err := stub.New(p, stub.WithOnClose(func() { close(ended) }))
	if err != nil {
		log.Fatalf("stub: %v", err)
	}
	l.conn = &watched{} // only to say that there is one
	if err := s.Start(context.Background()); err != nil {
		log.Fatalf("launched: %v", err)
	}
	<-ended
}

type linkStatus struct {
	Connected    bool   `json:"connected"`
	Synchronized bool   `json:"synchronized"`
	Connections  int64  `json:"connections"`
	Runtime      string `json:"runtime"`
	LastError    string `json:"last_error"`
	Inode        uint64 `json:"inode"`
}

func (l *link) status() linkStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return linkStatus{l.conn != nil && !l.trying, l.synced, l.connections, l.runtime, l.lastErr, l.inode()}
}
