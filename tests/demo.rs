//! `nri-lease demo`, as a person runs it.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

const NOBODY: u32 = 65534;
const AT_MOST: Duration = Duration::from_secs(15);

/// Both programs where everybody can start them, and a place for the demo's own directory.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        for program in [
            env!("CARGO_BIN_EXE_nri-lease"),
            env!("CARGO_BIN_EXE_nri-leased"),
        ] {
            let program = Path::new(program);
            let here = place.0.path().join(program.file_name().unwrap());
            // Debug builds are large; a link does where it is the same file system.
            if std::fs::hard_link(program, &here).is_err() {
                std::fs::copy(program, &here).unwrap();
            }
        }
        std::fs::create_dir(place.scratch()).unwrap();
        for (path, mode) in [(place.0.path(), 0o755), (&place.scratch(), 0o777)] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        }
        place
    }

    fn scratch(&self) -> PathBuf {
        self.0.path().join("t")
    }

    fn demo(&self) -> Command {
        let mut command = Command::new(self.0.path().join("nri-lease"));
        command.arg("demo").current_dir("/");
        command.env("TMPDIR", self.scratch()).stdin(Stdio::null());
        command
    }

    /// No file, and no process that has this place in its command line.
    fn assert_nothing_left(&self) {
        let left: Vec<_> = std::fs::read_dir(self.scratch()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
        let place = self.0.path().to_str().unwrap();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            assert!(!line.contains(place), "{entry:?} still runs: {line}");
        }
    }
}

fn told(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{:?}\n{text}\n{errors}",
        output.status
    );
    text
}

fn assert_whole_story(place: &Place, mut demo: Command) {
    let began = Instant::now();
    let text = told(&demo.output().unwrap());
    let took = began.elapsed();
    let refusal = "required NRI plugin \"demo\" is not connected to the runtime (lease expires in ";
    assert_eq!(text.matches(refusal).count(), 3, "{text}");
    assert!(text.contains("NRI RunPodSandbox failed: "), "{text}");
    assert!(text.contains("rejected container adjustment"), "{text}");
    for part in [
        "demo     present",
        "demo     missing",
        "accepted: sandbox and container of pod web",
        " ms after its end",
        "the lease is still there, and enforced",
        "accepted: sandbox and container of pod cache",
        "all files removed",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    place.assert_nothing_left();
    assert!(took < AT_MOST, "took {took:?}");
}

#[test]
fn tells_the_whole_story_to_whoever_runs_it() {
    let place = Place::new();
    assert_whole_story(&place, place.demo());
}

#[test]
fn needs_no_root() {
    if !nix::unistd::geteuid().is_root() {
        return; // Then the test above has shown it.
    }
    let place = Place::new();
    let mut demo = place.demo();
    demo.uid(NOBODY).gid(NOBODY);
    assert_whole_story(&place, demo);
}

#[test]
fn fails_when_the_daemon_does_not_start() {
    let place = Place::new();
    let leased = place.0.path().join("nri-leased");
    std::fs::remove_file(&leased).unwrap();
    let output = place.demo().output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("nri-lease: cannot find the daemon"),
        "{errors}"
    );

    std::fs::write(&leased, "#!/bin/sh\necho 'my disk is gone' >&2\nexit 3\n").unwrap();
    std::fs::set_permissions(&leased, PermissionsExt::from_mode(0o755)).unwrap();
    let output = place.demo().output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("cannot start nri-leased"), "{errors}");
    assert!(errors.contains("my disk is gone"), "{errors}");
    place.assert_nothing_left();
}

#[test]
fn leaves_nothing_behind_when_it_is_interrupted() {
    let place = Place::new();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let mut demo = place.demo();
        let mut child = demo
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // In the middle: the daemon runs, and a lease.
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("demo     missing")));
        let pid = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(signal.as_str()), "{errors}");
        place.assert_nothing_left();
    }
}

#[test]
fn is_in_the_help() {
    let output = Command::new(env!("CARGO_BIN_EXE_nri-lease"))
        .arg("--help")
        .output()
        .unwrap();
    let help = told(&output);
    assert!(help.contains("\n  demo "), "{help}");
    assert!(!help.contains("sim-plugin"), "{help}");
}
