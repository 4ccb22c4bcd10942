//! What is in `packaging/`, and how the daemon gets along with systemd.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nri_lease::config::Config;

const LEASED: &str = env!("CARGO_BIN_EXE_nri-leased");
const PATIENCE: Duration = Duration::from_secs(10);

fn packaged(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("packaging")
        .join(name);
    std::fs::read_to_string(path).unwrap()
}

/// Whether a program of systemd is there; a skip is said, and in CI it is a failure.
fn installed(program: &str) -> bool {
    let found = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .any(|dir| dir.join(program).is_file());
    if !found {
        eprintln!("SKIPPED: {program} is not installed");
        assert!(std::env::var("CI").is_err(), "CI skips nothing");
    }
    found
}

/// The file as it is after the `#` in front of every default has been removed.
fn defaults_of(config: &str) -> String {
    config
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .filter(|line| !line.is_empty() && !line.starts_with(' '))
        .map(|line| format!("{line}\n"))
        .collect()
}

fn parse(text: &str) -> Config {
    Config::parse(text, Path::new("packaging/config.toml")).unwrap()
}

#[test]
fn configuration_file_changes_nothing_as_it_is_delivered() {
    let delivered = parse(&packaged("config.toml"));
    assert_eq!(format!("{delivered:?}"), format!("{:?}", Config::default()));
}

#[test]
fn configuration_file_tells_the_defaults() {
    let told = parse(&defaults_of(&packaged("config.toml")));
    assert_eq!(format!("{told:?}"), format!("{:?}", Config::default()));
}

/// The names that the parser itself gives when it meets a key it does not know.
fn known_keys(prefix: &str) -> Vec<String> {
    let error = Config::parse(&format!("{prefix}no_such_key = 1\n"), Path::new("x")).unwrap_err();
    let error = error.to_string();
    let (_, expected) = error.split_once("expected").unwrap();
    let names: Vec<_> = expected.split('`').skip(1).step_by(2).collect();
    assert!(!names.is_empty(), "{error}");
    names.into_iter().map(str::to_owned).collect()
}

#[test]
fn configuration_file_has_every_key() {
    let text = packaged("config.toml");
    let table: toml::Table = defaults_of(&text).parse().unwrap();
    for section in known_keys("") {
        if section == "registrar" {
            for key in known_keys("[[registrar]]\n") {
                assert!(text.contains(&format!("#   {key} = ")), "registrar.{key}");
            }
            continue;
        }
        let told = table[&section].as_table().unwrap();
        for key in known_keys(&format!("[{section}]\n")) {
            assert!(told.contains_key(&key), "{section}.{key} is not there");
        }
    }
}

#[test]
fn units_pass_systemd_analyze_verify() {
    if !installed("systemd-analyze") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut units = Vec::new();
    for name in [
        "nri-leased.service",
        "nri-leased-registry.socket",
        "nri-leased-admin.socket",
    ] {
        let unit = packaged(name).replace("/usr/bin/nri-leased", LEASED);
        units.push(dir.path().join(name));
        std::fs::write(units.last().unwrap(), unit).unwrap();
    }
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .args(&units)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // Unknown settings are warnings only.
    assert!(!said.contains("nri-lease"), "{said}");
}

#[test]
fn unit_starts_before_the_runtimes_and_waits_for_none() {
    let unit = packaged("nri-leased.service");
    assert!(unit.contains("\nBefore=containerd.service crio.service"));
    for line in unit.lines() {
        for forbidden in ["After=", "Requires=", "BindsTo=", "PartOf="] {
            assert!(!line.starts_with(forbidden), "{line}");
        }
    }
}

/// The demo goes through everything but network namespaces of plugins.
#[test]
fn capabilities_of_the_unit_are_enough() {
    if !installed("setpriv") {
        return;
    }
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: only root has capabilities to give up");
        return;
    }
    let unit = packaged("nri-leased.service");
    let granted = unit
        .lines()
        .find_map(|line| line.strip_prefix("CapabilityBoundingSet="))
        .unwrap()
        .to_lowercase()
        .replace("cap_", "+")
        .replace(' ', ",");
    let dir = tempfile::tempdir().unwrap();
    let demo = dir.path().join("nri-lease");
    std::fs::copy(env!("CARGO_BIN_EXE_nri-lease"), &demo).unwrap();
    // The demo starts the nri-leased beside it.
    let leased = dir.path().join("nri-leased");
    let restricted = format!(
        "#!/bin/sh\nexec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,{granted} \
         {LEASED} \"$@\"\n"
    );
    std::fs::write(&leased, restricted).unwrap();
    std::fs::set_permissions(&leased, PermissionsExt::from_mode(0o755)).unwrap();
    let output = Command::new(&demo).arg("demo").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
}

/// A running daemon, with everything in a directory of its own. Killed on drop.
struct Daemon(Child);

impl Daemon {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().try_into().unwrap())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn daemon_arguments(dir: &Path) -> Vec<PathBuf> {
    std::fs::write(dir.join("config.toml"), "").unwrap();
    let mut arguments = Vec::new();
    for (option, value) in [
        ("--config", "config.toml"),
        ("--state-dir", "state"),
        ("--run-dir", "run"),
        ("--nri-socket", "nri.sock"),
    ] {
        arguments.extend([option.into(), dir.join(value)]);
    }
    arguments
}

fn receive(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 4096];
    let length = socket
        .recv(&mut buffer)
        .expect("a message to NOTIFY_SOCKET");
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

#[test]
fn tells_systemd_when_it_is_ready_and_when_it_stops() {
    let dir = tempfile::tempdir().unwrap();
    let notify = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let child = Command::new(LEASED)
        .args(daemon_arguments(dir.path()))
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut daemon = Daemon(child);
    assert_eq!(receive(&notify).trim(), "READY=1");
    // Without a runtime too: it must not wait for one that waits for it.
    for (socket, mode) in [("registry.sock", 0o660), ("admin.sock", 0o600)] {
        let path = dir.path().join("run").join(socket);
        UnixStream::connect(&path).unwrap();
        let found = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{socket}");
    }
    kill(daemon.pid(), Signal::SIGTERM).unwrap();
    assert_eq!(receive(&notify).trim(), "STOPPING=1");
    assert!(daemon.0.wait().unwrap().success());
}

#[test]
fn reload_takes_a_good_configuration_and_refuses_a_bad_one() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let notify = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let child = Command::new(LEASED)
        .args(daemon_arguments(dir.path()))
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stdin(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let daemon = Daemon(child);
    receive(&notify);
    for (config, answer) in [
        ("[enforcement]\nmod = \"audit\"\n", "stays as it was"),
        ("[enforcement]\nmode = \"audit\"\n", "is reloaded"),
    ] {
        std::fs::write(dir.path().join("config.toml"), config).unwrap();
        kill(daemon.pid(), Signal::SIGHUP).unwrap();
        wait_until(answer, || {
            std::fs::read_to_string(&log).unwrap().contains(answer)
        });
    }
    let output = Command::new(env!("CARGO_BIN_EXE_nri-lease"))
        .arg("--run-dir")
        .arg(dir.path().join("run"))
        .args(["-o", "json", "status"])
        .output()
        .unwrap();
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status["mode"], "audit", "{status}");
}

#[test]
fn takes_its_sockets_from_systemd() {
    if !installed("systemd-socket-activate") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (registry, admin) = (dir.path().join("r.sock"), dir.path().join("a.sock"));
    let child = Command::new("systemd-socket-activate")
        .arg("-l")
        .arg(&registry)
        .arg("-l")
        .arg(&admin)
        .arg("--fdname=registry:admin")
        .arg(LEASED)
        .args(daemon_arguments(dir.path()))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _daemon = Daemon(child);
    // The first call starts it.
    wait_until("the sockets", || registry.exists() && admin.exists());
    let run = dir.path().join("links");
    std::fs::create_dir(&run).unwrap();
    std::os::unix::fs::symlink(&registry, run.join("registry.sock")).unwrap();
    std::os::unix::fs::symlink(&admin, run.join("admin.sock")).unwrap();
    for command in [&["list"][..], &["release", "nobody"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_nri-lease"))
            .arg("--run-dir")
            .arg(&run)
            .args(command)
            .output()
            .unwrap();
        let said = format!("{output:?}");
        assert!(
            said.contains("No lease") || output.status.code() == Some(3),
            "{said}"
        );
    }
    assert!(
        !dir.path().join("run").exists(),
        "it made sockets of its own"
    );
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
