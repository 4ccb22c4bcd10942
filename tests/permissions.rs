//! Who may do what: by uid, by name, by kinship, by namespace, by the mode of a socket. Needs root,
//! to be somebody else.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod node;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Output;

use node::{LIMIT, Node, limit, refusal, registration};
use nri_lease_proto::lease::registry::{ReleaseRequest, RenewRequest};
use nri_lease_proto::ttrpc::Code;

/// A uid that is nobody's, in the group that registry.sock is for when there is no other: root's.
const SOMEBODY: [&str; 6] = [
    "setpriv",
    "--reuid",
    "61234",
    "--regid",
    "0",
    "--clear-groups",
];
const FAILED: i32 = 1;
const NOT_PERMITTED: i32 = 5;

/// Registers for a child of its own, or for `$1`.
const FOR_A_CHILD: &str =
    r#"sleep 20 & exec "$0" --run-dir "$2" register "$3" --once --pid "${1:-$!}""#;

fn refused(output: &Output, code: i32, says: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    for part in says {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

fn done(output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}");
}

/// `wrapper` runs a shell that registers `plugin` for its child, or for `pid`.
fn register(node: &Node, wrapper: &[&str], pid: Option<u32>, plugin: &str) -> Output {
    let pid = pid.map(|pid| pid.to_string()).unwrap_or_default();
    let run_dir = node.run_dir();
    let mut line = wrapper.to_vec();
    line.extend(["sh", "-c", FOR_A_CHILD, env!("CARGO_BIN_EXE_nri-lease")]);
    line.extend([&*pid, run_dir.to_str().unwrap(), plugin]);
    let mut command = std::process::Command::new(line[0]);
    // The child would keep a pipe open.
    let errors = node.dir.join("stderr");
    command.stdout(std::process::Stdio::null());
    command.stderr(std::fs::File::create(&errors).unwrap());
    let status = command.args(&line[1..]).status().unwrap();
    Output {
        status,
        stdout: Vec::new(),
        stderr: std::fs::read(errors).unwrap(),
    }
}

#[tokio::test]
async fn without_registrars_only_root_may_register() {
    let node = Node::start("").await;
    let output = register(&node, &SOMEBODY, None, "dra.net");
    refused(
        &output,
        NOT_PERMITTED,
        &["uid 61234", "only uid 0", "[[registrar]]"],
    );
    // To pin is to require, too.
    let pin = node.cli(&SOMEBODY, &["pin", "dra.net", "u-1"]);
    refused(&pin, NOT_PERMITTED, &["uid 61234"]);
    assert!(node.leases().await.is_empty());
    done(&register(&node, &[], None, "dra.net"));
    let lease = &node.leases().await[0];
    assert_eq!(
        (lease.plugin.as_str(), lease.holders[0].uid),
        ("dra.net", 0)
    );
}

#[tokio::test]
async fn a_registrar_allows_its_uids_its_names_and_nothing_else() {
    let node = Node::start("[[registrar]]\nplugin = \"dra.*\"\nuids = [61234]\n").await;
    done(&register(&node, &SOMEBODY, None, "dra.net"));
    let lease = &node.leases().await[0];
    assert_eq!(lease.holders[0].uid, 61234);
    assert_ne!(lease.holders[0].pid, lease.holders[0].registered_by_pid);

    let says = ["uid 61234 on the host", "\"cpu\"", "no [[registrar]] entry"];
    refused(
        &register(&node, &SOMEBODY, None, "cpu"),
        NOT_PERMITTED,
        &says,
    );
    // Root is not named.
    refused(
        &register(&node, &[], None, "dra.cpu"),
        NOT_PERMITTED,
        &["uid 0 on the host"],
    );
    // Nor is a namespace that a process of the host could be in.
    let mut node = Node::start("").await;
    node.write_config("[[registrar]]\nplugin = \"*\"\nuids = [0]\nnamespaces = [\"dra\"]\n");
    node.hang_up();
    node.logs("the configuration is reloaded").await;
    refused(
        &register(&node, &[], None, "p"),
        NOT_PERMITTED,
        &["uid 0 on the host"],
    );
}

#[tokio::test]
async fn a_second_uid_does_not_join_a_name_that_has_a_live_holder() {
    let node = Node::start("[[registrar]]\nplugin = \"*\"\nuids = [0, 61234]\n").await;
    done(&register(&node, &SOMEBODY, None, "p"));
    let holder = node.leases().await[0].holders[0].pid;
    let output = register(&node, &[], None, "p");
    let pid = format!("held by pid {holder} with uid 61234");
    refused(
        &output,
        FAILED,
        &[&pid, "uid 0 and no pod", "nri-lease revoke p"],
    );

    // Its holder gone, the name is free for the other.
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(holder as i32),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    node::until("the holder to be dropped", async || {
        node.leases().await[0].holders.is_empty()
    })
    .await;
    done(&register(&node, &[], None, "p"));
    assert_eq!(node.leases().await[0].holders[0].uid, 0);
}

#[tokio::test]
async fn only_root_of_the_host_speaks_for_processes_that_are_not_its_own() {
    let node = Node::start("[[registrar]]\nplugin = \"*\"\nuids = [0, 61234]\n").await;
    let stranger = node.idle.pid();
    let says = [
        &format!("may not speak for pid {stranger}") as &str,
        "descendant",
    ];
    let output = register(&node, &SOMEBODY, Some(stranger), "p");
    refused(&output, NOT_PERMITTED, &says);
    // Root, but only of a user namespace of its own.
    let contained = ["unshare", "--user", "--map-root-user"];
    let output = register(&node, &contained, Some(stranger), "p");
    refused(&output, NOT_PERMITTED, &says);
    assert!(node.leases().await.is_empty());
    done(&register(&node, &[], Some(stranger), "p"));

    // Neither may anyone else renew or release what it holds.
    for command in ["renew", "release"] {
        let output = node.cli(&SOMEBODY, &[command, "p"]);
        refused(&output, NOT_PERMITTED, &["may not speak for any holder"]);
    }
    let registry = node.registry().await;
    let renew = RenewRequest {
        plugin: "p".into(),
        ..Default::default()
    };
    registry.renew(limit(), &renew).await.unwrap();
    let release = ReleaseRequest {
        plugin: "p".into(),
        ..Default::default()
    };
    assert!(
        registry
            .release(limit(), &release)
            .await
            .unwrap()
            .lease_ended
    );
}

#[tokio::test]
async fn a_caller_in_its_own_pid_namespace_is_known_by_the_hosts_pid() {
    let node = Node::start("").await;
    let wrapper = nri_lease_sim::story::CommandLine::new("unshare")
        .args(["--pid", "--fork", "--kill-child"])
        .arg(env!("CARGO_BIN_EXE_nri-lease"))
        .arg("--run-dir")
        .arg(node.run_dir())
        .args(["register", "p"]);
    let wrapper = wrapper.start().unwrap();
    node::until("the lease", async || !node.leases().await.is_empty()).await;
    let holder = node.leases().await[0].holders[0].pid;
    let parent = std::fs::read_to_string(format!("/proc/{holder}/status")).unwrap();
    let parent = parent.lines().find_map(|line| line.strip_prefix("PPid:"));
    assert_eq!(parent.unwrap().trim(), wrapper.pid().to_string());
    // It dies with its namespace, and is seen to.
    drop(wrapper);
    node::until("the holder to be dropped", async || {
        node.leases().await[0].holders.is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_daemon_that_cannot_see_its_callers_says_what_it_needs() {
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let node = Node::start_with("", &["nri.sock"], &wrapper).await;
    let registry = node.registry().await;
    let (code, text) = refusal(registry.register(limit(), &registration("p", 60)).await);
    assert_eq!(code, Code::PERMISSION_DENIED, "{text}");
    assert!(text.contains("hostPID"), "{text}");
    let output = node.cli(&[], &["list"]);
    refused(&output, NOT_PERMITTED, &["hostPID"]);
}

#[tokio::test]
async fn the_sockets_have_the_modes_that_keep_others_out() {
    let mut node = Node::start("").await;
    let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(node.registry_socket()), 0o660);
    assert_eq!(mode(node.admin_socket()), 0o600);
    let output = node.cli(&SOMEBODY, &["list"]);
    refused(&output, NOT_PERMITTED, &["permission denied", "root"]);
    let nobody = [
        "setpriv",
        "--reuid",
        "61234",
        "--regid",
        "61234",
        "--clear-groups",
    ];
    let output = node.cli(&nobody, &["renew", "p"]);
    refused(&output, NOT_PERMITTED, &["permission denied"]);

    // A daemon that was killed leaves its sockets; the next one replaces them.
    node.kill();
    node.start_again().await;
    assert_eq!(mode(node.admin_socket()), 0o600);
    node.registers("p").await;
}

/// A cgroup as the kubelet makes one for a pod, in a v1 hierarchy or in v2. Removed on drop.
struct PodCgroup(PathBuf);

impl PodCgroup {
    fn new(uid: &str) -> PodCgroup {
        let v1 = PathBuf::from("/sys/fs/cgroup/pids");
        let base = if v1.is_dir() {
            v1
        } else {
            PathBuf::from("/sys/fs/cgroup")
        };
        let path = base.join(format!("kubepods/besteffort/pod{uid}"));
        std::fs::create_dir_all(&path).unwrap();
        PodCgroup(path)
    }
}

impl Drop for PodCgroup {
    fn drop(&mut self) {
        // Parents too, unless others use them.
        for path in self.0.ancestors().take(3) {
            let _ = std::fs::remove_dir(path);
        }
    }
}

#[tokio::test]
async fn a_process_of_a_pod_may_register_and_not_administer() {
    let pod = "5f1c7a54-0d6e-4c7b-9a53-1f2e3d4c5b6a";
    let node = Node::start("").await;
    let cgroup = PodCgroup::new(pod);
    let enter = format!(
        "echo $$ > {}/cgroup.procs && exec \"$@\"",
        cgroup.0.display()
    );
    let inside = ["sh", "-c", &enter, "sh"];
    let output = node.cli(&inside, &["list"]);
    refused(
        &output,
        NOT_PERMITTED,
        &[&format!("runs in pod {pod}"), "processes of the host"],
    );
    let output = node.cli(&inside, &["revoke", "p"]);
    refused(&output, NOT_PERMITTED, &["processes of the host"]);

    let mut holder = nri_lease_sim::story::CommandLine::new("sh")
        .args([
            "-c",
            &enter,
            "sh",
            env!("CARGO_BIN_EXE_nri-lease"),
            "--run-dir",
        ])
        .arg(node.run_dir())
        .args(["register", "p"])
        .start()
        .unwrap();
    node::until("the lease", async || !node.leases().await.is_empty()).await;
    assert_eq!(node.leases().await[0].holders[0].pod.uid, pod);
    // A process of the host does not join a name that a pod holds.
    refused(
        &register(&node, &[], None, "p"),
        FAILED,
        &["held by", "no pod"],
    );
    holder.terminate(LIMIT).await.unwrap();
}
