//! The command line as a person or a script sees it: the real binary against a daemon with canned
//! answers. What the daemon does with a request is for the whole-program tests.

// clippy.toml allows unwrap in test functions; this covers what they share.
#![allow(clippy::unwrap_used)]

mod fake;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use fake::{Answers, Fake, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

fn command(run_dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nri-lease"));
    command.arg("--run-dir").arg(run_dir).args(args);
    command.stdin(Stdio::null());
    command
}

fn run(run_dir: &Path, args: &[&str]) -> Output {
    command(run_dir, args).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs a command that must succeed, and returns what it printed.
fn printed(fake: &Fake, args: &[&str]) -> String {
    let output = run(fake.path(), args);
    assert_eq!(code(&output), 0, "{args:?}: {}", stderr(&output));
    stdout(&output)
}

fn json(fake: &Fake, args: &[&str]) -> Value {
    serde_json::from_str(&printed(fake, &[args, &["-o", "json"]].concat())).unwrap()
}

/// A command that runs until it is told to stop; killed when the test fails.
struct Running(Child);

impl Running {
    fn start(fake: &Fake, args: &[&str]) -> Running {
        let mut command = command(fake.path(), args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running(command.spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// Waits for the end: exit code, and what was printed to stdout and stderr.
    fn end(mut self) -> (i32, String, String) {
        until("the command ends", || self.0.try_wait().unwrap().is_some());
        let (mut out, mut err) = (String::new(), String::new());
        if let Some(mut stdout) = self.0.stdout.take() {
            stdout.read_to_string(&mut out).unwrap();
        }
        if let Some(mut stderr) = self.0.stderr.take() {
            stderr.read_to_string(&mut err).unwrap();
        }
        (self.0.wait().unwrap().code().unwrap(), out, err)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every command that asks the daemon once, with a piece of what it tells people.
const COMMANDS: &[(&[&str], &str)] = &[
    (&["list"], "PLUGIN"),
    (&["ls"], "dra.net"),
    (&["inspect", "dra.net"], "Last decisions"),
    (&["revoke", "dra.net"], "no longer required"),
    (
        &["revoke", "dra.net", "--ban", "10m", "--reason", "why"],
        "refused until 2027",
    ),
    (&["ban", "dra.net", "10m"], "is banned until 2027"),
    (&["unban", "dra.net"], "may be registered again"),
    (&["bans"], "broken release"),
    (&["renew", "dra.net"], "renewed dra.net until 2027"),
    (&["release", "dra.net"], "released dra.net"),
    (
        &["pin", "dra.net", "uid-9", "--ttl", "1h"],
        "pod uid-9 requires dra.net",
    ),
    (&["unpin", "dra.net", "uid-9"], "no longer requires"),
    (&["unpin", "dra.net", "uid-8"], "was not pinned"),
    (&["status"], "containerd v2.3.4"),
    (&["explain", "--pod", "uid-9"], "1. lease dra.net covers it"),
    (
        &["explain", "--pod", "prod/web-1", "--container", "app"],
        "container app",
    ),
    (&["audit"], "kube-system/web-1"),
    (
        &["pause", "--for", "10m", "--reason", "incident"],
        "paused until 2027",
    ),
    (&["resume"], "on again"),
    (&["doctor"], "Nothing is wrong"),
];

#[test]
fn every_command_answers_in_every_format() {
    let fake = Fake::start();
    for (args, expected) in COMMANDS {
        for format in ["table", "wide"] {
            let text = printed(&fake, &[args, &["-o", format][..]].concat());
            assert!(text.contains(expected), "{args:?} -o {format}: {text}");
            assert!(!text.contains('\u{1b}'), "colour in a pipe: {args:?}");
        }
        let from_json = json(&fake, args);
        assert!(from_json.is_object(), "{args:?}: {from_json}");
        let yaml = printed(&fake, &[args, &["-o", "yaml"][..]].concat());
        let from_yaml: Value = serde_yaml_ng::from_str(&yaml).unwrap();
        assert_eq!(from_yaml, from_json, "{args:?}");
        let names = printed(&fake, &[args, &["-o", "name"][..]].concat());
        assert!(!names.contains(' '), "{args:?} -o name: {names}");
    }
}

#[test]
fn list_has_the_documented_columns() {
    let fake = Fake::start();
    let table = printed(&fake, &["list"]);
    let mut lines = table.lines();
    let words = |line: &str| {
        line.split("  ")
            .map(str::trim)
            .filter(|w| !w.is_empty())
            .map(String::from)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        words(lines.next().unwrap()),
        [
            "PLUGIN",
            "STATE",
            "HOLDERS",
            "SCOPE",
            "MODE",
            "TTL",
            "EXPIRES IN"
        ]
    );
    assert_eq!(
        words(lines.next().unwrap()),
        [
            "dra.net",
            "present",
            "1",
            "namespaces=[prod-*] operations=[container]",
            "enforce",
            "1m",
            "41s"
        ]
    );
    let wide = printed(&fake, &["list", "-o", "wide"]);
    assert_eq!(
        words(wide.lines().next().unwrap())[7..],
        ["GENERATION", "INDEX", "PIDS", "PODS", "REASON"]
    );
    assert!(wide.contains("kube-system/dranet-x7f2p"), "{wide}");
    assert_eq!(printed(&fake, &["list", "-o", "name"]), "dra.net\n");
    let empty = Fake::with(Answers {
        empty: true,
        ..Default::default()
    });
    assert!(printed(&empty, &["list"]).contains("No leases"));
    assert_eq!(
        printed(&empty, &["list", "-o", "json"]),
        "{\n  \"leases\": []\n}\n"
    );
    assert_eq!(printed(&empty, &["list", "-o", "name"]), "");
}

#[test]
fn json_has_the_documented_fields() {
    let fake = Fake::start();
    let leases = json(&fake, &["list"]);
    let lease = &leases["leases"][0];
    assert_eq!(lease["plugin"], "dra.net");
    assert_eq!(lease["state"], "present");
    assert_eq!(lease["mode"], "enforce");
    assert_eq!(lease["generation"], 3);
    assert_eq!(lease["ttl_seconds"], 60);
    assert_eq!(lease["expires_at"], "2027-01-15T08:00:00.000Z");
    assert_eq!(lease["expires_in_seconds"], 41.234);
    assert_eq!(lease["registered_at"], "2027-01-15T07:43:20.000Z");
    assert_eq!(lease["renewed_at"], "2027-01-15T07:59:41.000Z");
    assert_eq!(
        lease["scope"],
        serde_json::json!([{"namespaces": ["prod-*"], "operations": ["container"]}])
    );
    let holder = &lease["holders"][0];
    assert_eq!(holder["pid"], 4711);
    assert_eq!(holder["uid"], 0);
    assert_eq!(holder["start_time"], 99);
    assert_eq!(holder["connected"], true);
    assert_eq!(
        holder["pod"],
        serde_json::json!({"namespace": "kube-system", "name": "dranet-x7f2p", "uid": "uid-1"})
    );
    assert_eq!(holder["registered_at"], "2027-01-15T07:43:20.000Z");
    assert_eq!(lease["pins"][0]["pod_uid"], "uid-9");
    assert_eq!(lease["pins"][0]["expires_at"], "2027-01-15T08:00:00.000Z");
    let inspected = json(&fake, &["inspect", "x"]);
    assert_eq!(inspected["state"], "missing");
    assert_eq!(inspected["decisions"][0]["verdict"], "reject");
}

#[test]
fn exit_codes_say_what_went_wrong() {
    let fake = Fake::start();
    for (args, expected) in [
        (&["inspect", "unknown"][..], 3),
        (&["revoke", "unknown"], 3),
        (&["renew", "unknown"], 3),
        (&["explain", "--pod", "unknown"], 3),
        (&["unban", "never-banned"], 3),
        (&["register", "denied"], 5),
        (&["release", "denied"], 5),
        (&["watch", "denied"], 5),
        (&["register", "invalid", "--ttl", "1s"], 2),
        (&["register", "exhausted"], 1),
        (&["register", "banned"], 1),
        (&["register", "full"], 1),
        (&["pin", "full", "uid-1"], 1),
    ] {
        let output = run(fake.path(), args);
        assert_eq!(code(&output), expected, "{args:?}: {}", stderr(&output));
        assert!(
            stderr(&output).starts_with("nri-lease: cannot "),
            "{args:?}"
        );
        assert_eq!(stdout(&output), "", "{args:?}");
    }
    let full = stderr(&run(fake.path(), &["register", "full"]));
    assert!(
        full.contains("cannot register full: the store cannot write"),
        "{full}"
    );
    assert!(full.contains("nri-lease doctor"), "{full}");
}

#[test]
fn wrong_usage_exits_with_2_before_anything_is_asked() {
    let nowhere = tempfile::tempdir().unwrap();
    let scope = nowhere.path().join("scope.yaml");
    std::fs::write(&scope, "rules:\n- namespace: [a]\n").unwrap();
    let empty = nowhere.path().join("empty.json");
    std::fs::write(&empty, "[]").unwrap();
    let (scope, empty) = (scope.to_str().unwrap(), empty.to_str().unwrap());
    for args in [
        &[][..],
        &["unknown-command"],
        &["list", "extra"],
        &["list", "-o", "xml"],
        &["list", "--timeout", "0s"],
        &["list", "--timeout", "soon"],
        &["inspect"],
        &["inspect", "not a name"],
        &["inspect", ""],
        &["revoke", "dra.net", "--ban", "0s"],
        &["ban", "dra.net"],
        &["ban", "dra.net", "0s"],
        &["pin", "dra.net"],
        &["pin", "dra.net", "a b"],
        &["pause", "--for", "10m"],
        &["pause", "--reason", "x"],
        &["pause", "--for", "10m", "--reason", ""],
        &["explain"],
        &["explain", "--pod", "a/"],
        &["explain", "--pod", "a", "--file", "b"],
        &["explain", "--file", "/does/not/exist"],
        &["explain", "--file", scope],
        &["register", "dra.net", "--once"],
        &["register", "dra.net", "--pid", "0"],
        &["register", "dra.net", "--index", "7"],
        &["register", "dra.net", "--mode", "maybe"],
        &["register", "dra.net", "--scope", scope],
        &["register", "dra.net", "--scope", empty],
        &["register", "dra.net", "--scope", "/does/not/exist"],
        &["completions", "tcsh"],
    ] {
        let output = run(nowhere.path(), args);
        assert_eq!(code(&output), 2, "{args:?}: {}", stderr(&output));
        assert_ne!(stderr(&output), "", "{args:?}");
        assert_eq!(stdout(&output), "", "{args:?}");
    }
    let wrong_field = stderr(&run(nowhere.path(), &["register", "p", "--scope", scope]));
    assert!(wrong_field.contains("`namespace`"), "{wrong_field}");
}

#[test]
fn an_unreachable_daemon_is_named_with_its_socket() {
    let nowhere = tempfile::tempdir().unwrap();
    let output = run(nowhere.path(), &["list"]);
    assert_eq!(code(&output), 4);
    let admin = nowhere.path().join("admin.sock");
    assert!(
        stderr(&output).contains(admin.to_str().unwrap()),
        "{}",
        stderr(&output)
    );
    assert!(
        stderr(&output).contains("nri-leased"),
        "{}",
        stderr(&output)
    );
    let output = run(nowhere.path(), &["register", "dra.net"]);
    assert_eq!(code(&output), 4);
    assert!(
        stderr(&output).contains("registry.sock"),
        "{}",
        stderr(&output)
    );
    // A daemon that was killed leaves its socket.
    drop(std::os::unix::net::UnixListener::bind(&admin).unwrap());
    let output = run(nowhere.path(), &["status"]);
    assert_eq!(code(&output), 4);
    assert!(
        stderr(&output).contains("nobody listens"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_daemon_that_does_not_answer_is_given_up_after_the_timeout() {
    let fake = Fake::start();
    let begin = Instant::now();
    let output = run(fake.path(), &["--timeout", "300ms", "inspect", "slow"]);
    assert_eq!(code(&output), 4, "{}", stderr(&output));
    assert!(
        stderr(&output).contains("within 300ms"),
        "{}",
        stderr(&output)
    );
    assert!(begin.elapsed() >= Duration::from_millis(300));
    assert!(
        begin.elapsed() < Duration::from_secs(8),
        "not the default of 10 s"
    );
}

#[test]
fn a_socket_that_may_not_be_opened_exits_with_5() {
    let fake = Fake::start();
    // Others may not enter the scratch directory (0700); root has to become another user first.
    let mut command = command(fake.path(), &["list"]);
    match nix::unistd::geteuid().is_root() {
        true => {
            command.uid(65_534).gid(65_534);
        }
        false => {
            let closed = std::os::unix::fs::PermissionsExt::from_mode(0o000);
            std::fs::set_permissions(fake.path().join("admin.sock"), closed).unwrap();
        }
    }
    let output = command.output().unwrap();
    assert_eq!(code(&output), 5, "{}", stderr(&output));
    assert!(
        stderr(&output).contains("permission denied"),
        "{}",
        stderr(&output)
    );
    assert!(stderr(&output).contains("root"), "{}", stderr(&output));
}

#[test]
fn an_older_daemon_is_not_taken_for_a_missing_lease() {
    let fake = Fake::with(Answers {
        older: true,
        ..Default::default()
    });
    let output = run(fake.path(), &["list"]);
    assert_eq!(code(&output), 1);
    assert!(stderr(&output).contains("older"), "{}", stderr(&output));
}

#[test]
fn text_of_others_cannot_move_the_cursor() {
    let fake = Fake::with(Answers {
        sick: true,
        ends_watch: true,
        ..Default::default()
    });
    let clean = |text: &str| text.chars().all(|c| c == '\n' || !c.is_control());
    for args in [
        &["list", "-o", "wide"][..],
        &["list", "-o", "json"],
        &["inspect", "dra.net"],
        &["inspect", "dra.net", "-o", "yaml"],
        &["explain", "--pod", "u"],
        &["watch"],
        &["watch", "-o", "json"],
        &["doctor"],
        &["inspect", "evil"],
    ] {
        let output = run(fake.path(), args);
        assert!(clean(&stdout(&output)), "{args:?}: {:?}", stdout(&output));
        assert!(clean(&stderr(&output)), "{args:?}: {:?}", stderr(&output));
    }
    let wide = printed(&fake, &["list", "-o", "wide"]);
    assert!(wide.contains("a\\u{1b}[2Jb\\nc\\u{9b}d"), "{wide}");
    // Escaped, not lost.
    assert_eq!(json(&fake, &["inspect", "x"])["state_reason"], fake::EVIL);
    let refused = stderr(&run(fake.path(), &["inspect", "evil"]));
    assert_eq!(
        refused.lines().count(),
        1,
        "a message forged a line: {refused}"
    );
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let fake = Fake::start();
    for args in [&["list"][..], &["man"], &["completions", "bash"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = command(fake.path(), args)
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(code(&output), 0, "{args:?}");
        assert_eq!(stderr(&output), "", "{args:?}");
    }
}

#[test]
fn watch_prints_one_event_a_line_until_the_daemon_ends_the_stream() {
    let fake = Fake::with(Answers {
        ends_watch: true,
        ..Default::default()
    });
    let output = run(fake.path(), &["watch", "-o", "json", "dra.net"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let events: Vec<Value> = stdout(&output)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(events.len(), 2);
    assert_eq!(events[0]["kind"], "registered");
    assert_eq!(events[0]["time"], "2027-01-15T07:59:50.000Z");
    assert_eq!(events[1]["kind"], "holder-lost");
    assert!(fake.answers.has("plugins: \"dra.net\""));
    let text = printed(&fake, &["watch"]);
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(
        text.contains("pod=kube-system/web-1  pid=4711  TTL 60s"),
        "{text}"
    );
    assert_eq!(
        printed(&fake, &["watch", "-o", "name"]),
        "dra.net\ndra.net\n"
    );
    assert_eq!(
        printed(&fake, &["watch", "-o", "yaml"])
            .matches("---\n")
            .count(),
        2
    );
}

#[test]
fn watch_ends_cleanly_when_interrupted() {
    let fake = Fake::start();
    let mut watch = Running::start(&fake, &["watch"]);
    let mut line = String::new();
    let mut out = BufReader::new(watch.0.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    assert!(line.contains("registered"), "{line}");
    watch.signal(Signal::SIGINT);
    let (code, _, err) = watch.end();
    assert_eq!((code, err.as_str()), (0, ""));
}

#[test]
fn watch_ends_cleanly_when_the_daemon_is_killed() {
    let mut fake = Fake::start();
    let watch = Running::start(&fake, &["watch"]);
    fake.answers.wait_for("watch", 1);
    fake.kill();
    let (code, _, err) = watch.end();
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("the daemon has ended the stream"), "{err}");
}

#[test]
fn watch_ends_when_its_reader_leaves_although_nothing_happens() {
    let fake = Fake::with(Answers {
        empty: true,
        ..Default::default()
    });
    let mut watch = Running::start(&fake, &["watch"]);
    fake.answers.wait_for("watch", 1);
    drop(watch.0.stdout.take());
    let (code, _, err) = watch.end();
    assert_eq!((code, err.as_str()), (0, ""));
}

#[test]
fn register_renews_until_it_is_stopped_and_does_not_release() {
    let fake = Fake::start();
    let mut register = Running::start(
        &fake,
        &[
            "register", "dra.net", "--ttl", "30s", "--index", "10", "--mode", "audit",
        ],
    );
    let mut line = String::new();
    let mut out = BufReader::new(register.0.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    assert!(
        line.starts_with("registered dra.net: required here with TTL 1m, generation 3"),
        "{line}"
    );
    fake.answers.wait_for("renew", 3);
    register.signal(Signal::SIGTERM);
    let (code, _, err) = register.end();
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("runs out by itself"), "{err}");
    assert_eq!(fake.answers.count("register"), 1);
    assert_eq!(fake.answers.count("release"), 0);
    for sent in ["ttl {seconds: 30}", "index: \"10\"", "mode: MODE_AUDIT"] {
        assert!(fake.answers.has(sent), "{sent}");
    }
}

#[test]
fn register_goes_on_when_nobody_reads_its_output() {
    let fake = Fake::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = command(fake.path(), &["register", "dra.net"]);
    command.stdout(writer).stderr(Stdio::piped());
    let register = Running(command.spawn().unwrap());
    fake.answers.wait_for("renew", 2);
    register.signal(Signal::SIGTERM);
    assert_eq!(register.end().0, 0);
}

#[test]
fn register_keeps_trying_while_the_daemon_is_away() {
    let mut first = Fake::start();
    let mut register = Running::start(&first, &["register", "dra.net"]);
    first.answers.wait_for("renew", 1);
    first.kill();
    let mut line = String::new();
    let mut err = BufReader::new(register.0.stderr.take().unwrap());
    while !line.contains("nobody listens") {
        assert_ne!(err.read_line(&mut line).unwrap(), 0, "gave up: {line}");
    }
    register.signal(Signal::SIGTERM);
    assert_eq!(register.end().0, 0);
}

#[test]
fn register_ends_when_it_is_no_longer_permitted() {
    let fake = Fake::with(Answers {
        forgets: true,
        denies_second: true,
        ..Default::default()
    });
    let (code, _, err) = Running::start(&fake, &["register", "dra.net"]).end();
    assert_eq!(code, 5, "{err}");
    assert_eq!(fake.answers.count("register"), 2);
}

#[test]
fn register_renews_a_lease_that_it_may_not_register_again() {
    let fake = Fake::with(Answers {
        forgets: true,
        full_second: true,
        ..Default::default()
    });
    let register = Running::start(&fake, &["register", "dra.net"]);
    fake.answers.wait_for("renew", 4);
    assert_eq!(fake.answers.count("register"), 2, "renewing was enough");
    register.signal(Signal::SIGTERM);
    assert_eq!(register.end().0, 0);
}

#[test]
fn register_releases_at_exit_only_when_told_to() {
    let fake = Fake::start();
    let register = Running::start(&fake, &["register", "dra.net", "--release-on-exit"]);
    fake.answers.wait_for("renew", 1);
    register.signal(Signal::SIGINT);
    let (code, _, err) = register.end();
    assert_eq!(code, 0, "{err}");
    assert_eq!(fake.answers.count("release"), 1);
}

#[test]
fn register_registers_again_when_the_lease_is_unknown() {
    let fake = Fake::with(Answers {
        forgets: true,
        ..Default::default()
    });
    let register = Running::start(&fake, &["register", "dra.net"]);
    fake.answers.wait_for("register", 2);
    fake.answers.wait_for("renew", 3);
    register.signal(Signal::SIGTERM);
    let (code, out, err) = register.end();
    assert_eq!(code, 0, "{err}");
    assert_eq!(out.lines().count(), 1, "one line on success: {out}");
    assert!(err.contains("is registered again"), "{err}");
}

#[test]
fn register_outlives_a_restart_of_the_daemon() {
    let mut first = Fake::start();
    let register = Running::start(&first, &["register", "dra.net"]);
    first.answers.wait_for("renew", 1);
    first.kill();
    let second = Fake::at(first.dir.clone(), Default::default());
    second.answers.wait_for("register", 1);
    second.answers.wait_for("renew", 2);
    register.signal(Signal::SIGTERM);
    let (code, _, err) = register.end();
    assert_eq!(code, 0, "{err}");
}

#[test]
fn register_ends_with_the_process_that_it_is_for() {
    let fake = Fake::start();
    let mut plugin = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = plugin.id().to_string();
    let register = Running::start(&fake, &["register", "dra.net", "--pid", &pid]);
    fake.answers.wait_for("renew", 1);
    plugin.kill().unwrap();
    plugin.wait().unwrap();
    let (code, _, err) = register.end();
    assert_eq!(code, 0, "{err}");
    assert!(
        err.contains(&format!("the process {pid} of dra.net has ended")),
        "{err}"
    );
    assert!(
        fake.answers
            .has(&format!("subject {{pid: {pid} start_time: "))
    );
    assert_eq!(fake.answers.count("release"), 0);
    let output = run(fake.path(), &["register", "dra.net", "--pid", &pid]);
    assert_eq!(self::code(&output), 3, "{}", stderr(&output));
}

#[test]
fn register_once_returns_after_the_registration() {
    let fake = Fake::start();
    let pid = std::process::id().to_string();
    let lease = json(&fake, &["register", "dra.net", "--pid", &pid, "--once"]);
    assert_eq!(lease["plugin"], "dra.net");
    assert_eq!(fake.answers.count("register"), 1);
    assert_eq!(fake.answers.count("renew"), 0);
}

#[test]
fn register_sends_the_scope_of_a_file() {
    let fake = Fake::start();
    let scope = fake.path().join("scope.toml");
    std::fs::write(&scope, "[[rules]]\npod_labels = 'app in (a,b)'\nruntime_handlers = ['kata*']\noperations = ['sandbox']\n").unwrap();
    let pid = std::process::id().to_string();
    printed(
        &fake,
        &[
            "register",
            "p",
            "--pid",
            &pid,
            "--once",
            "--scope",
            scope.to_str().unwrap(),
        ],
    );
    for sent in [
        "pod_labels: \"app in (a,b)\"",
        "runtime_handlers: \"kata*\"",
        "operations: OPERATION_SANDBOX",
    ] {
        assert!(fake.answers.has(sent), "{sent}");
    }
}

#[test]
fn explain_sends_a_pod_as_kubectl_prints_it() {
    let fake = Fake::start();
    let file = fake.path().join("pod.json");
    std::fs::write(
        &file,
        r#"{"kind": "Pod", "metadata": {"namespace": "prod", "name": "web", "uid": "u-1",
            "labels": {"app": "web"}, "annotations": {"cdi.k8s.io/x": "dra.net/nic=a, dra.net/nic=b"}},
            "spec": {"runtimeClassName": "kata", "initContainers": [{"name": "init"}],
            "containers": [{"name": "app", "image": "x"}]}}"#,
    )
    .unwrap();
    printed(
        &fake,
        &[
            "explain",
            "--file",
            file.to_str().unwrap(),
            "--container",
            "app",
        ],
    );
    for sent in [
        "namespace: \"prod\"",
        "name: \"web\"",
        "uid: \"u-1\"",
        "key: \"app\"",
        "runtime_handler: \"kata\"",
        "name: \"init\"",
        "cdi_devices: \"dra.net/nic=b\"",
        "container: \"app\"",
    ] {
        assert!(fake.answers.has(sent), "{sent}");
    }
}

#[test]
fn bans_and_pauses_are_sent_with_their_length_and_lifted_without() {
    let fake = Fake::start();
    printed(
        &fake,
        &["revoke", "p", "--ban", "1h 30m", "--reason", "bad release"],
    );
    assert!(
        fake.answers
            .has("ban {seconds: 5400} reason: \"bad release\"")
    );
    printed(&fake, &["unban", "p"]);
    assert_eq!(fake.answers.count("ban plugin: \"p\""), 1);
    assert!(!fake.answers.has("ban plugin: \"p\" duration"));
    printed(&fake, &["pause", "--for", "90s", "--reason", "incident"]);
    assert!(
        fake.answers
            .has("pause duration {seconds: 90} reason: \"incident\"")
    );
}

#[test]
fn doctor_exits_with_1_and_a_next_step_for_each_problem() {
    let sick = Fake::with(Answers {
        sick: true,
        ..Default::default()
    });
    let output = run(sick.path(), &["doctor"]);
    assert_eq!(code(&output), 1, "{}", stdout(&output));
    let text = stdout(&output);
    for problem in [
        "paused by uid 0 for 10m more: incident 12",
        "no space left",
        "is not connected: connection refused",
        "no unix_diag",
        "image-policy is required but missing",
        "nri-lease resume",
        "nri-lease revoke image-policy",
    ] {
        assert!(text.contains(problem), "{problem}: {text}");
    }
    let lines: Vec<&str> = text.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        if line.starts_with("FAIL") || line.starts_with("warn") {
            assert!(lines[number + 1].trim_start().starts_with("-> "), "{line}");
        }
    }
    let report: Value =
        serde_json::from_str(&stdout(&run(sick.path(), &["doctor", "-o", "json"]))).unwrap();
    assert_eq!(report["ok"], false);
    let nowhere = tempfile::tempdir().unwrap();
    let output = run(nowhere.path(), &["doctor"]);
    assert_eq!(code(&output), 1);
    assert!(
        stdout(&output).contains("systemctl restart nri-leased"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let nowhere = tempfile::tempdir().unwrap();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = run(nowhere.path(), &["completions", shell]);
        assert_eq!(code(&output), 0);
        assert!(stdout(&output).contains("release-on-exit"), "{shell}");
    }
    let page = stdout(&run(nowhere.path(), &["man"]));
    assert!(
        page.contains(".TH nri-lease 1") && page.contains("Exit codes"),
        "{page}"
    );
    let dir = nowhere.path().to_str().unwrap();
    assert_eq!(code(&run(nowhere.path(), &["man", "--dir", dir])), 0);
    for command in ["list", "inspect", "revoke", "register", "explain", "doctor"] {
        assert!(
            nowhere
                .path()
                .join(format!("nri-lease-{command}.1"))
                .exists(),
            "{command}"
        );
    }
    let output = run(nowhere.path(), &["--help"]);
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("Exit codes"));
    assert!(stdout(&run(nowhere.path(), &["--version"])).starts_with("nri-lease 0."));
}
