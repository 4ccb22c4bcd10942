// Command mkimage writes a docker-archive with two images of one layer, a
// static busybox: localhost/pause:1 and localhost/busybox:1. No registry is
// needed to run pods with them. The same input gives the same bytes.
package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"log"
	"os"
	"runtime"
)

func main() {
	busybox := flag.String("busybox", "/bin/busybox", "a statically linked busybox")
	out := flag.String("o", "images.tar", "archive to write")
	flag.Parse()
	binary, err := os.ReadFile(*busybox)
	if err != nil {
		log.Fatalf("mkimage: %v", err)
	}

	layer := archive(func(w *tar.Writer) {
		for _, dir := range []string{"bin/", "dev/", "etc/", "proc/", "sys/", "tmp/"} {
			add(w, &tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
		}
		add(w, &tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, binary)
		for _, name := range []string{"sh", "sleep", "true"} {
			add(w, &tar.Header{Name: "bin/" + name, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil)
		}
	})
	layerName := hexSum(layer)[:12] + "/layer.tar"
	config := toJSON(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "created": "2026-01-01T00:00:00Z",
		"config": map[string]any{"Cmd": []string{"/bin/sleep", "2147483647"}, "Env": []string{"PATH=/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hexSum(layer)}},
	})
	configName := hexSum(config) + ".json"
	manifest := toJSON([]map[string]any{{
		"Config": configName, "Layers": []string{layerName},
		"RepoTags": []string{"localhost/pause:1", "localhost/busybox:1"},
	}})

	image := archive(func(w *tar.Writer) {
		add(w, &tar.Header{Name: configName, Typeflag: tar.TypeReg, Mode: 0o644}, config)
		add(w, &tar.Header{Name: layerName, Typeflag: tar.TypeReg, Mode: 0o644}, layer)
		add(w, &tar.Header{Name: "manifest.json", Typeflag: tar.TypeReg, Mode: 0o644}, manifest)
	})
	if err := os.WriteFile(*out, image, 0o644); err != nil {
		log.Fatalf("mkimage: %v", err)
	}
}

func archive(fill func(*tar.Writer)) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	fill(w)
	if err := w.Close(); err != nil {
		log.Fatalf("mkimage: %v", err)
	}
	return buf.Bytes()
}

func add(w *tar.Writer, h *tar.Header, data []byte) {
	h.Size = int64(len(data))
	if err := w.WriteHeader(h); err != nil {
		log.Fatalf("mkimage: %v", err)
	}
	if _, err := w.Write(data); err != nil {
		log.Fatalf("mkimage: %v", err)
	}
}

func toJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		log.Fatalf("mkimage: %v", err)
	}
	return b
}

func hexSum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
